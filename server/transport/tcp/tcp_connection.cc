// Reading: header, then what it announces: a notify into a small buffer, a reply's payload piece by
// piece into one that stays in the cache, and from there to the spans of its Get. Writing: one
// gather write at a time, made of all waiting requests and notifies and of one reply, whose payload
// is sent straight from the exported pieces. The kernel takes at most IOV_MAX pieces at once; Asio
// cuts longer lists.
//
// No side ever stops to read, so that two sides that send each other replies cannot block each
// other. What a peer can make us queue is bounded by kTcpRequestsMax.
#include "server/transport/tcp/tcp_connection.h"

#include <boost/asio/post.hpp>
#include <boost/asio/read.hpp>
#include <boost/asio/write.hpp>
#include <span>
#include <utility>

#include "server/base/failpoint.h"
#include "server/transport/tcp/tcp_buffers.h"
#include "server/transport/tcp/tcp_endpoint.h"

namespace weightwire::transport {
namespace {

using boost::system::error_code;

}  // namespace

TcpConnection::TcpConnection(TcpCore& core, IoLoop& loop, TcpStream stream,
                             std::optional<FrameMacs> macs)
    : core_(core), loop_(loop), stream_(std::move(stream)), macs_(std::move(macs)) {}

void TcpConnection::Bind(std::shared_ptr<TcpEndpoint> endpoint, size_t index) {
  endpoint_ = std::move(endpoint);
  index_ = index;
}

void TcpConnection::Start() {
  if (!shut_) ReadHeader();
}

void TcpConnection::StartGet(GetOperation operation) {
  WW_CHECK(!shut_);
  const uint64_t request = next_request_++;
  TcpOutgoing outgoing{};
  outgoing.SetFrame({.type = FrameType::kGet,
                     .request = request,
                     .key = operation.key,
                     .offset = operation.offset,
                     .length = operation.bytes});
  gets_.emplace(request, std::move(operation));
  control_.push_back(std::move(outgoing));
  WriteNext();
}

void TcpConnection::SendNotify(std::vector<std::byte> message, bool bounded) {
  WW_CHECK(!shut_);
  TcpOutgoing outgoing{};
  outgoing.SetFrame({.type = FrameType::kNotify, .length = message.size()});
  outgoing.small = std::move(message);
  outgoing.bounded_notify = bounded;
  control_.push_back(std::move(outgoing));
  WriteNext();
}

void TcpConnection::Shut() {
  if (std::exchange(shut_, true)) return;
  // Pending operations end without touching a buffer: they only run on this thread.
  stream_.Close();
  control_.clear();
  replies_.clear();
  writing_.clear();
  for (auto& [request, operation] : std::exchange(gets_, {})) {
    Status status = endpoint_->EndOf(operation);
    endpoint_->Finish(index_, std::move(operation), std::move(status));
  }
  std::exchange(endpoint_, nullptr)->ConnectionShut();
}

void TcpConnection::ReadHeader() {
  boost::asio::async_read(stream_, boost::asio::buffer(header_in_, kFrameBytes + tag_bytes()),
                          [self = shared_from_this()](const error_code& error, size_t) {
                            if (self->shut_) return;
                            if (error) return self->Broken(error);
                            self->OnHeader();
                          });
}

void TcpConnection::OnHeader() {
  const auto bytes = std::span(header_in_).first<kFrameBytes>();
  if (macs_) {
    macs_->in.Add(bytes);
    if (!macs_->in.Fits(std::span(header_in_).last<kTagBytes>())) return Forged();
  }
  auto frame = DecodeFrame(bytes);
  if (!frame.has_value()) return Garbage(frame.error().message());
  switch (frame->type) {
    case FrameType::kGet:
      return OnGet(*frame);
    case FrameType::kGetReply:
      return OnGetReply(*frame);
    case FrameType::kNotify:
      if (index_ != 0 || frame->length > core_.options.notify_bytes_max) {
        return Garbage("a misplaced notify");
      }
      return ReadNotify(frame->length);
    default:
      return Garbage("a frame of another transport");
  }
}

void TcpConnection::OnGet(const Frame& frame) {
  WW_FAILPOINT("transport.before_a_read_is_answered");
  if (replies_.size() >= kTcpRequestsMax) return Garbage("too many requests");
  Frame reply{.type = FrameType::kGetReply, .request = frame.request};
  TcpOutgoing outgoing{};
  auto refuse = [&reply](const Status& why) {
    reply.code = why.code();
    reply.reason = why.reason();
  };
  if (frame.length > core_.options.chunk_bytes_max) {
    refuse(Status(Code::kInvalidArgument, Reason::kMessageTooLarge, ""));
  } else if (auto exported = core_.exports.Use(frame.key); !exported.has_value()) {
    refuse(exported.error());
  } else if (auto ranges = (*exported)->Slice(frame.offset, frame.length); !ranges.has_value()) {
    refuse(ranges.error());
  } else {
    reply.length = frame.length;
    outgoing.exported = std::move(*exported);
    outgoing.offset = frame.offset;
    outgoing.bytes = frame.length;
    outgoing.ranges = std::move(*ranges);
  }
  outgoing.SetFrame(reply);
  replies_.push_back(std::move(outgoing));
  WriteNext();
  ReadHeader();
}

void TcpConnection::OnGetReply(const Frame& frame) {
  auto get = gets_.find(frame.request);
  if (get == gets_.end()) return Garbage("a reply to nothing");
  if (frame.code != Code::kOk) {
    if (frame.length != 0) return Garbage("a refusal with payload");
    FinishGet(frame.request, StatusOf(frame));
    if (!shut_) ReadHeader();
    return;
  }
  if (frame.length != get->second.bytes) return Garbage("a reply of another length");
  ReadPayload(frame.request);
}

void TcpConnection::ReadPayload(uint64_t request) {
  const GetOperation& get = gets_.at(request);
  arriving_ = request;
  arriving_bytes_ = get.bytes;
  place_ = SpanWriter(get.into);
  ReadPieces();
}

// One buffer for all sockets of the loop: what is read is brought on before anything else happens.
void TcpConnection::ReadPieces() {
  thread_local const auto buffer = std::make_unique_for_overwrite<std::byte[]>(kPieceBytes);
  for (int piece = 0; arriving_bytes_ > 0; ++piece) {
    const auto again = [self = shared_from_this()](const error_code& failed = {}) {
      if (self->shut_) return;
      if (failed) return self->Broken(failed);
      self->ReadPieces();
    };
    if (piece == kPiecesAtOnce) return boost::asio::post(stream_.get_executor(), again);
    const std::span wanted(buffer.get(), std::min<uint64_t>(kPieceBytes, arriving_bytes_));
    error_code error;
    const auto came = wanted.first(stream_.ReadNow(wanted, &error));
    if (macs_) macs_->in.Add(came);
    const GetOperation& get = gets_.at(arriving_);
    if (!get.take) place_.Write(came);
    if (get.take && !came.empty()) get.take(came);
    arriving_bytes_ -= came.size();
    if (error) return Broken(error);
    if (came.size() < wanted.size()) return stream_.AsyncReadable(again);
  }
  if (macs_ && gets_.at(arriving_).bytes > 0) return ReadTag();
  FinishGet(arriving_, OkStatus());
  if (!shut_) ReadHeader();
}

void TcpConnection::ReadTag() {
  boost::asio::async_read(stream_, boost::asio::buffer(tag_in_),
                          [self = shared_from_this()](const error_code& error, size_t) {
                            if (self->shut_) return;
                            if (error) return self->Broken(error);
                            if (!self->macs_->in.Fits(self->tag_in_)) return self->Forged();
                            self->FinishGet(self->arriving_, OkStatus());
                            if (!self->shut_) self->ReadHeader();
                          });
}

void TcpConnection::FinishGet(uint64_t request, Status status) {
  auto get = gets_.find(request);
  GetOperation operation = std::move(get->second);
  gets_.erase(get);
  endpoint_->Finish(index_, std::move(operation), std::move(status));
}

void TcpConnection::ReadNotify(size_t bytes) {
  const size_t tag = bytes == 0 ? 0 : tag_bytes();  // no payload, no unit
  boost::asio::async_read(stream_, boost::asio::buffer(notify_in_, bytes + tag),
                          [self = shared_from_this(), bytes, tag](const error_code& error, size_t) {
                            if (self->shut_) return;
                            if (error) return self->Broken(error);
                            const auto message = std::span(self->notify_in_).first(bytes);
                            if (tag > 0) {
                              self->macs_->in.Add(message);
                              const auto sealed = std::span(self->notify_in_).subspan(bytes);
                              if (!self->macs_->in.Fits(sealed.first<kTagBytes>()))
                                return self->Forged();
                            }
                            self->endpoint_->DeliverNotify(message);
                            if (!self->shut_) self->ReadHeader();
                          });
}

void TcpConnection::WriteNext() {
  if (!writing_.empty() || (control_.empty() && replies_.empty())) return;
  for (TcpOutgoing& outgoing : control_) writing_.push_back(std::move(outgoing));
  control_.clear();
  if (!replies_.empty()) {
    writing_.push_back(std::move(replies_.front()));
    replies_.pop_front();
  }
  payload_out_.clear();
  for (TcpOutgoing& outgoing : writing_) {
    outgoing.Tell();
    if (macs_) outgoing.Seal(macs_->out);
    outgoing.AppendTo(&payload_out_);
  }
  boost::asio::async_write(stream_, BufferView{payload_out_}, LargeCalls{},
                           [self = shared_from_this()](const error_code& error, size_t) {
                             if (self->shut_) return;
                             if (error) return self->Broken(error);
                             for (const TcpOutgoing& sent : std::exchange(self->writing_, {})) {
                               if (sent.bounded_notify) self->endpoint_->NotifySent();
                             }
                             self->WriteNext();
                           });
}

void TcpConnection::Broken(const error_code& error) {
  if (TlsSocket::IsForgery(error)) return Forged();
  const bool ended = error == boost::asio::error::eof;
  endpoint_->FailSession(TransportFailed(ended ? "the peer closed the session"
                                               : "the connection broke: " + error.message()),
                         ended ? "peer_closed" : "broken");
}

void TcpConnection::Forged() {
  const Hello& hello = endpoint_->hello();
  const Incarnation peer = hello.caller == core_.self ? hello.callee : hello.caller;
  core_.options.metrics->Add("auth_failures_total", 1, {{"reason", "mac"}});
  endpoint_->FailSession(
      TransportFailed("what agent incarnation " + std::to_string(peer.value) +
                      " sent was changed, left out or repeated on the way: its MAC does not fit"),
      "mac");
}

void TcpConnection::Garbage(const std::string& what) {
  endpoint_->FailSession(TransportFailed("the peer sent garbage: " + what), "garbage");
}

}  // namespace weightwire::transport
