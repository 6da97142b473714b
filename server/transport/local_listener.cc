#include "server/transport/local_listener.h"

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

LocalListener::PendingConnection::PendingConnection(std::shared_ptr<LocalStream> the_stream,
                                                    boost::asio::io_context& context)
    : stream(std::move(the_stream)), timer(context) {}

LocalListener::LocalListener(std::shared_ptr<LocalCore> core)
    : core_(std::move(core)), acceptor_(core_->loop.context()), retry_(core_->loop.context()) {}

Status LocalListener::Open() {
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

void LocalListener::Accept() {
  if (stopped_ || accepting_) return;
  if (pending_.size() >= core_->options.inbound_handshakes_max) {
    // Further callers wait in the kernel's backlog until a pending connection has left.
    core_->CountFull();
    return;
  }
  accepting_ = true;
  acceptor_.async_accept([self = shared_from_this()](const error_code& error, Socket socket) {
    self->accepting_ = false;
    if (self->stopped_) return;
    if (error) return self->OnAcceptError(error.value());
    self->Accept(std::move(socket));
  });
}

void LocalListener::OnAcceptError(int error) {
  const char* name = strerrorname_np(error);
  core_->options.metrics->Add("accept_errors_total", 1,
                              {{"errno", name != nullptr ? name : "other"}});
  // Without file descriptors the next accept fails as well: wait instead of spinning.
  retry_.expires_after(kAcceptRetry);
  retry_.async_wait([self = shared_from_this()](const error_code& cancelled) {
    if (!cancelled) self->Accept();
  });
}

void LocalListener::Accept(Socket socket) {
  auto pending = std::make_shared<PendingConnection>(
      std::make_shared<LocalStream>(std::move(socket)), core_->loop.context());
  pending_.insert(pending);
  VisitorsChanged();
  if (Status same_user = pending->stream->CheckPeer(); !same_user.ok()) {
    const CalleeReply refusal{0, 0, same_user.code(), same_user.reason()};
    pending->stream->Send(ToVector(EncodeCalleeReply(refusal)));
    return Drop(pending, same_user, "refused");
  }
  pending->timer.expires_after(core_->options.handshake_timeout);
  pending->timer.async_wait([self = shared_from_this(), pending](const error_code& cancelled) {
    if (!cancelled) self->Drop(pending, OkStatus(), "handshake_timeout");
  });
  pending->stream->Read({[self = shared_from_this(), pending](std::span<const std::byte> unread) {
                           return pending->handshake ? self->OnProof(pending, unread)
                                                     : self->OnCallerHello(pending, unread);
                         },
                         [self = shared_from_this(), pending](Status why, const char* cause) {
                           self->Drop(pending, std::move(why), cause);
                         }});
}

Result<size_t> LocalListener::OnCallerHello(const std::shared_ptr<PendingConnection>& pending,
                                            std::span<const std::byte> unread) {
  if (unread.size() < kCallerHelloBytes) return 0;
  const auto first = unread.first(kCallerHelloBytes);
  WW_ASSIGN(const CallerHello hello, DecodeCallerHello(first));
  const CalleeHandshake& handshake =
      pending->handshake.emplace(hello, first, core_->self, *core_->handler);
  if (handshake.awaits_proof()) {
    pending->stream->Send(ToVector(handshake.callee_proof()));
  } else {
    Conclude(pending, handshake.reply(), "ticket");
  }
  return kCallerHelloBytes;
}

Result<size_t> LocalListener::OnProof(const std::shared_ptr<PendingConnection>& pending,
                                      std::span<const std::byte> unread) {
  if (unread.size() < kCallerProofBytes) return 0;
  WW_ASSIGN(const CalleeReply verdict,
            pending->handshake->OnProof(unread.first(kCallerProofBytes)));
  Conclude(pending, verdict, "proof");
  return kCallerProofBytes;
}

void LocalListener::Conclude(const std::shared_ptr<PendingConnection>& pending, CalleeReply reply,
                             const char* check) {
  if (reply.code == Code::kOk && core_->open_count() >= core_->options.inbound_sessions_max) {
    reply = {0, 0, Code::kResourceExhausted, Reason::kLimitExceeded};
  }
  pending->stream->Send(ToVector(EncodeCalleeReply(reply)));
  pending_.erase(pending);
  pending->timer.cancel();
  VisitorsChanged();
  if (reply.code != Code::kOk) {
    pending->stream->Close();
    return CountRefused(*core_->options.metrics, core_->name, reply, check);
  }
  auto endpoint = std::make_shared<LocalEndpoint>(
      core_, pending->handshake->hello(), pending->handshake->hello().caller, pending->stream);
  endpoint->Start([this, &endpoint] { core_->handler->OnAccepted(endpoint); });
}

void LocalListener::Call(const std::string& address, const Hello& hello, Nanos deadline,
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
  auto pending = std::make_shared<PendingConnection>(
      std::make_shared<LocalStream>(std::move(socket)), core_->loop.context());
  if (Status same_user = pending->stream->CheckPeer(); !same_user.ok()) {
    return done(Fail(same_user));
  }
  pending->done = std::move(done);
  calls_.insert(pending);
  pending->timer.expires_at(std::chrono::steady_clock::time_point(deadline));
  pending->timer.async_wait([self = shared_from_this(), pending](const error_code& cancelled) {
    if (cancelled) return;
    self->Drop(pending,
               Status(Code::kDeadlineExceeded, Reason::kDeadlineExceeded, "no session in time"),
               "handshake_timeout");
  });
  const CallerHandshake& calling = pending->calling.emplace(hello);
  pending->proved = !calling.awaits_proof();
  pending->stream->Send(ToVector(EncodeCallerHello(calling.caller_hello())));
  pending->stream->Read({[self = shared_from_this(), pending](std::span<const std::byte> unread) {
                           return pending->proved ? self->OnCalleeReply(pending, unread)
                                                  : self->OnCalleeProof(pending, unread);
                         },
                         [self = shared_from_this(), pending](Status why, const char* cause) {
                           self->Drop(pending, std::move(why), cause);
                         }});
}

Result<size_t> LocalListener::OnCalleeProof(const std::shared_ptr<PendingConnection>& pending,
                                            std::span<const std::byte> unread) {
  if (unread.size() < kCalleeReplyBytes) return 0;
  WW_ASSIGN(const CalleeReply reply, DecodeCalleeReply(unread.first(kCalleeReplyBytes)));
  if (reply.code != Code::kOk)
    return OnCalleeReply(pending, unread);  // no callee's proof behind it
  if (unread.size() < kProvedReplyBytes) return 0;
  const auto first = EncodeCallerHello(pending->calling->caller_hello());
  auto proof = pending->calling->OnCalleeProof(first, unread.first(kProvedReplyBytes));
  if (!proof.has_value()) {
    Drop(pending, proof.error(), "refused");
    return kProvedReplyBytes;
  }
  pending->proved = true;
  pending->stream->Send(ToVector(*proof));
  return kProvedReplyBytes;
}

Result<size_t> LocalListener::OnCalleeReply(const std::shared_ptr<PendingConnection>& pending,
                                            std::span<const std::byte> unread) {
  if (unread.size() < kCalleeReplyBytes) return 0;
  WW_ASSIGN(const CalleeReply reply, DecodeCalleeReply(unread.first(kCalleeReplyBytes)));
  if (Status verdict = StatusOf(reply); !verdict.ok()) {
    Drop(pending, verdict, "refused");
    return kCalleeReplyBytes;
  }
  calls_.erase(pending);
  pending->timer.cancel();
  auto endpoint = std::make_shared<LocalEndpoint>(
      core_, pending->calling->hello(), pending->calling->hello().callee, pending->stream);
  endpoint->Start([&] { std::exchange(pending->done, nullptr)(endpoint); });
  return kCalleeReplyBytes;
}

void LocalListener::Drop(const std::shared_ptr<PendingConnection>& pending, Status why,
                         const char* cause) {
  if (pending_.erase(pending) + calls_.erase(pending) == 0) return;
  pending->timer.cancel();
  pending->stream->Close();
  if (pending->done) return std::exchange(pending->done, nullptr)(Fail(std::move(why)));
  core_->CountClose(cause);
  VisitorsChanged();
}

void LocalListener::VisitorsChanged() {
  Accept();
  core_->options.metrics->Set("connections", static_cast<double>(pending_.size()),
                              {{"transport", core_->name}, {"state", "handshaking"}});
}

void LocalListener::Stop() {
  stopped_ = true;
  error_code ignored;
  acceptor_.close(ignored);
  retry_.cancel();
  if (owns_path_) unlink(address_.c_str());
  for (const auto& pending : std::set(pending_)) Drop(pending, ClosedHere(), "closed_here");
  for (const auto& pending : std::set(calls_)) Drop(pending, ClosedHere(), "closed_here");
}

}  // namespace weightwire::transport
