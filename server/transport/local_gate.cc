#include "server/transport/local_gate.h"

#include <sys/random.h>
#include <unistd.h>

#include <boost/asio/io_context.hpp>
#include <cstring>
#include <utility>
#include <vector>

#include "server/transport/local_endpoint.h"
#include "server/transport/operation.h"

namespace weightwire::transport {
namespace {

using boost::asio::local::stream_protocol;
using boost::system::error_code;

constexpr auto kAcceptRetry = std::chrono::milliseconds(100);
constexpr size_t kAddressBytesMax = 100;  // sockaddr_un has 108

std::string RandomAddress() {
  uint64_t number = 0;
  WW_CHECK(getrandom(&number, sizeof(number), 0) == sizeof(number));
  return "@weightwire-" + std::to_string(getpid()) + "-" + std::to_string(number);
}

/// "@name" is written with a leading zero byte in the kernel's form.
Result<stream_protocol::endpoint> EndpointOf(const std::string& address) {
  if (address.size() < 2 || address.size() > kAddressBytesMax) {
    return Fail(Code::kInvalidArgument, Reason::kConfigInvalid,
                "\"" + address + "\" is no Unix socket address of at most 100 bytes");
  }
  if (address.front() != '@') return stream_protocol::endpoint(address);
  return stream_protocol::endpoint(std::string(1, '\0') + address.substr(1));
}

/// A socket file that nobody listens on is left from a process that was killed.
void RemoveStale(const stream_protocol::endpoint& endpoint, boost::asio::io_context& context) {
  error_code error;
  stream_protocol::socket probe(context);
  probe.connect(endpoint, error);
  if (error == boost::asio::error::connection_refused) unlink(endpoint.path().c_str());
}

template <size_t N>
std::vector<std::byte> ToVector(const std::array<std::byte, N>& bytes) {
  return {bytes.begin(), bytes.end()};
}

}  // namespace

LocalGate::Visitor::Visitor(std::shared_ptr<LocalStream> the_stream,
                            boost::asio::io_context& context)
    : stream(std::move(the_stream)), timer(context) {}

LocalGate::LocalGate(std::shared_ptr<LocalCore> core)
    : core_(std::move(core)), acceptor_(core_->loop.context()), retry_(core_->loop.context()) {}

Status LocalGate::Open() {
  address_ = core_->options.address.empty() ? RandomAddress() : core_->options.address;
  WW_ASSIGN_OR_STATUS(const auto endpoint, EndpointOf(address_));
  error_code error;
  if (address_.front() != '@') RemoveStale(endpoint, core_->loop.context());
  acceptor_.open(endpoint.protocol(), error);
  if (!error) acceptor_.bind(endpoint, error);
  if (!error) acceptor_.listen(stream_protocol::acceptor::max_listen_connections, error);
  if (error) {
    return Status(Code::kUnavailable, Reason::kIoError,
                  "cannot listen on " + address_ + ": " + error.message());
  }
  owns_path_ = address_.front() != '@';
  core_->loop.Post([self = shared_from_this()] { self->Accept(); });
  return OkStatus();
}

void LocalGate::Accept() {
  if (stopped_ || accepting_) return;
  if (visitors_.size() >= core_->options.inbound_handshakes_max) {
    // Further callers wait in the kernel's backlog until a visitor has left.
    core_->CountFull();
    return;
  }
  accepting_ = true;
  acceptor_.async_accept([self = shared_from_this()](const error_code& error, Socket socket) {
    self->accepting_ = false;
    if (self->stopped_) return;
    if (error) return self->OnAcceptError(error.value());
    self->Welcome(std::move(socket));
  });
}

void LocalGate::OnAcceptError(int error) {
  const char* name = strerrorname_np(error);
  core_->options.metrics->Add("accept_errors_total", 1,
                              {{"errno", name != nullptr ? name : "other"}});
  // Without file descriptors the next accept fails as well: wait instead of spinning.
  retry_.expires_after(kAcceptRetry);
  retry_.async_wait([self = shared_from_this()](const error_code& cancelled) {
    if (!cancelled) self->Accept();
  });
}

void LocalGate::Welcome(Socket socket) {
  auto visitor = std::make_shared<Visitor>(std::make_shared<LocalStream>(std::move(socket)),
                                           core_->loop.context());
  visitors_.insert(visitor);
  VisitorsChanged();
  if (Status same_user = visitor->stream->CheckPeer(); !same_user.ok()) {
    const HelloReply refusal{0, 0, same_user.code(), same_user.reason()};
    visitor->stream->Send(ToVector(EncodeHelloReply(refusal)));
    return Drop(visitor, same_user, "refused");
  }
  visitor->timer.expires_after(core_->options.handshake_timeout);
  visitor->timer.async_wait([self = shared_from_this(), visitor](const error_code& cancelled) {
    if (!cancelled) self->Drop(visitor, OkStatus(), "handshake_timeout");
  });
  visitor->stream->Read({[self = shared_from_this(), visitor](std::span<const std::byte> unread) {
                           return visitor->handshake ? self->OnProof(visitor, unread)
                                                     : self->OnIntroduction(visitor, unread);
                         },
                         [self = shared_from_this(), visitor](Status why, const char* cause) {
                           self->Drop(visitor, std::move(why), cause);
                         }});
}

Result<size_t> LocalGate::OnIntroduction(const std::shared_ptr<Visitor>& visitor,
                                         std::span<const std::byte> unread) {
  if (unread.size() < kIntroductionBytes) return 0;
  const auto first = unread.first(kIntroductionBytes);
  WW_ASSIGN(const Introduction introduction, DecodeIntroduction(first));
  const CalleeHandshake& handshake =
      visitor->handshake.emplace(introduction, first, core_->self, *core_->handler);
  if (handshake.awaits_proof()) {
    visitor->stream->Send(ToVector(handshake.challenge()));
  } else {
    Conclude(visitor, handshake.reply(), "ticket");
  }
  return kIntroductionBytes;
}

Result<size_t> LocalGate::OnProof(const std::shared_ptr<Visitor>& visitor,
                                  std::span<const std::byte> unread) {
  if (unread.size() < kProofBytes) return 0;
  WW_ASSIGN(const HelloReply verdict, visitor->handshake->OnProof(unread.first(kProofBytes)));
  Conclude(visitor, verdict, "proof");
  return kProofBytes;
}

void LocalGate::Conclude(const std::shared_ptr<Visitor>& visitor, HelloReply reply,
                         const char* check) {
  if (reply.code == Code::kOk && core_->open_count() >= core_->options.inbound_sessions_max) {
    reply = {0, 0, Code::kResourceExhausted, Reason::kLimitExceeded};
  }
  visitor->stream->Send(ToVector(EncodeHelloReply(reply)));
  visitors_.erase(visitor);
  visitor->timer.cancel();
  VisitorsChanged();
  if (reply.code != Code::kOk) {
    visitor->stream->Close();
    return CountRefused(*core_->options.metrics, core_->name, reply, check);
  }
  auto endpoint = std::make_shared<LocalEndpoint>(
      core_, visitor->handshake->hello(), visitor->handshake->hello().caller, visitor->stream);
  endpoint->Start([this, &endpoint] { core_->handler->OnAccepted(endpoint); });
}

void LocalGate::Call(const std::string& address, const Hello& hello, Nanos deadline,
                     Transport::ConnectDone done) {
  if (stopped_) return done(Fail(ClosedHere()));
  Socket socket(core_->loop.context());
  auto endpoint = EndpointOf(address);
  if (!endpoint.has_value()) return done(Fail(endpoint.error()));
  error_code error;
  // A Unix socket connects or fails at once; a callee that does not accept is a full backlog.
  socket.open(stream_protocol(), error);
  if (!error) socket.non_blocking(true, error);
  if (!error) socket.connect(*endpoint, error);
  if (error) {
    return done(Fail(TransportFailed("no session with " + address + ": " + error.message())));
  }
  auto visitor = std::make_shared<Visitor>(std::make_shared<LocalStream>(std::move(socket)),
                                           core_->loop.context());
  if (Status same_user = visitor->stream->CheckPeer(); !same_user.ok()) {
    return done(Fail(same_user));
  }
  visitor->done = std::move(done);
  calls_.insert(visitor);
  visitor->timer.expires_at(std::chrono::steady_clock::time_point(deadline));
  visitor->timer.async_wait([self = shared_from_this(), visitor](const error_code& cancelled) {
    if (cancelled) return;
    self->Drop(visitor,
               Status(Code::kDeadlineExceeded, Reason::kDeadlineExceeded, "no session in time"),
               "handshake_timeout");
  });
  const CallerHandshake& calling = visitor->calling.emplace(hello);
  visitor->challenged = !calling.awaits_challenge();
  visitor->stream->Send(ToVector(EncodeIntroduction(calling.introduction())));
  visitor->stream->Read({[self = shared_from_this(), visitor](std::span<const std::byte> unread) {
                           return visitor->challenged ? self->OnHelloReply(visitor, unread)
                                                      : self->OnChallenge(visitor, unread);
                         },
                         [self = shared_from_this(), visitor](Status why, const char* cause) {
                           self->Drop(visitor, std::move(why), cause);
                         }});
}

Result<size_t> LocalGate::OnChallenge(const std::shared_ptr<Visitor>& visitor,
                                      std::span<const std::byte> unread) {
  if (unread.size() < kHelloReplyBytes) return 0;
  WW_ASSIGN(const HelloReply reply, DecodeHelloReply(unread.first(kHelloReplyBytes)));
  if (reply.code != Code::kOk) return OnHelloReply(visitor, unread);  // no challenge behind it
  if (unread.size() < kChallengedReplyBytes) return 0;
  const auto first = EncodeIntroduction(visitor->calling->introduction());
  auto proof = visitor->calling->OnChallenge(first, unread.first(kChallengedReplyBytes));
  if (!proof.has_value()) {
    Drop(visitor, proof.error(), "refused");
    return kChallengedReplyBytes;
  }
  visitor->challenged = true;
  visitor->stream->Send(ToVector(*proof));
  return kChallengedReplyBytes;
}

Result<size_t> LocalGate::OnHelloReply(const std::shared_ptr<Visitor>& visitor,
                                       std::span<const std::byte> unread) {
  if (unread.size() < kHelloReplyBytes) return 0;
  WW_ASSIGN(const HelloReply reply, DecodeHelloReply(unread.first(kHelloReplyBytes)));
  if (Status verdict = StatusOf(reply); !verdict.ok()) {
    Drop(visitor, verdict, "refused");
    return kHelloReplyBytes;
  }
  calls_.erase(visitor);
  visitor->timer.cancel();
  auto endpoint = std::make_shared<LocalEndpoint>(
      core_, visitor->calling->hello(), visitor->calling->hello().callee, visitor->stream);
  endpoint->Start([&] { std::exchange(visitor->done, nullptr)(endpoint); });
  return kHelloReplyBytes;
}

void LocalGate::Drop(const std::shared_ptr<Visitor>& visitor, Status why, const char* cause) {
  if (visitors_.erase(visitor) + calls_.erase(visitor) == 0) return;
  visitor->timer.cancel();
  visitor->stream->Close();
  if (visitor->done) return std::exchange(visitor->done, nullptr)(Fail(std::move(why)));
  core_->CountClose(cause);
  VisitorsChanged();
}

void LocalGate::VisitorsChanged() {
  Accept();
  core_->options.metrics->Set("connections", static_cast<double>(visitors_.size()),
                              {{"transport", core_->name}, {"state", "handshaking"}});
}

void LocalGate::Stop() {
  stopped_ = true;
  error_code ignored;
  acceptor_.close(ignored);
  retry_.cancel();
  if (owns_path_) unlink(address_.c_str());
  for (const auto& visitor : std::set(visitors_)) Drop(visitor, ClosedHere(), "closed_here");
  for (const auto& visitor : std::set(calls_)) Drop(visitor, ClosedHere(), "closed_here");
}

}  // namespace weightwire::transport
