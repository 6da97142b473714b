#include "server/transport/tcp/tcp_listener.h"

#include <algorithm>
#include <boost/asio/io_context.hpp>
#include <boost/asio/read.hpp>
#include <boost/asio/ssl/error.hpp>
#include <cstring>
#include <utility>

#include "server/base/failpoint.h"
#include "server/transport/address.h"

namespace weightwire::transport {
namespace {

using boost::asio::ip::tcp;
using boost::system::error_code;

constexpr auto kAcceptRetry = std::chrono::milliseconds(100);

TcpWelcome Refusal(Code code, Reason reason) { return {{0, 0, code, reason}, {}, 1}; }

Status CannotListen(const std::string& address, const std::string& why) {
  return Status(Code::kUnavailable, Reason::kIoError, "cannot listen on " + address + ": " + why);
}

}  // namespace

TcpListener::PendingConnection::PendingConnection(tcp::socket socket)
    : stream(std::move(socket)), timer(stream.get_executor()) {
  error_code gone;
  remote = stream.socket().remote_endpoint(gone).address();
}

TcpListener::Opening::Opening(boost::asio::io_context& context, CalleeHandshake the_handshake,
                              size_t count)
    : handshake(std::move(the_handshake)), missing(count), timer(context) {
  for (size_t i = 0; i < count; ++i) streams.emplace_back(context);
}

TcpListener::TcpListener(std::shared_ptr<TcpCore> core)
    : core_(std::move(core)),
      acceptor_(core_->loop(0).context()),
      retry_(core_->loop(0).context()) {}

Status TcpListener::Open() {
  const std::string& bind = core_->options.bind;
  WW_ASSIGN_OR_STATUS(auto parts, SplitAddress(bind));
  error_code error;
  const auto host = boost::asio::ip::make_address(parts.first, error);
  if (error) return CannotListen(bind, "the host is not numeric");
  const tcp::endpoint endpoint(host, parts.second);
  acceptor_.open(endpoint.protocol(), error);
  if (!error) acceptor_.set_option(tcp::acceptor::reuse_address(true), error);
  if (!error) acceptor_.bind(endpoint, error);
  if (!error) acceptor_.listen(tcp::acceptor::max_listen_connections, error);
  if (error) return CannotListen(bind, error.message());
  const std::string& advertised = core_->options.advertised_host;
  address_ = JoinAddress(advertised.empty() ? parts.first : advertised,
                         acceptor_.local_endpoint(error).port());
  if (core_->options.tls_peers != nullptr) address_.insert(0, kTlsPrefix);
  core_->loop(0).Post([self = shared_from_this()] { self->Accept(); });
  return OkStatus();
}

void TcpListener::Accept() {
  if (stopped_ || accepting_) return;
  if (pending_.size() >= core_->options.inbound_handshakes_max) {
    // Further callers wait in the kernel's backlog until a pending connection has left.
    core_->CountFull();
    const auto leaves = NextToLeave();
    const auto end = leaves->since + core_->options.handshake_grace;
    const auto now = std::chrono::steady_clock::now();
    if (now < end) return AcceptAfter(end - now);
    return Drop(leaves, "displaced");  // which accepts
  }
  accepting_ = true;
  acceptor_.async_accept([self = shared_from_this()](const error_code& error, tcp::socket socket) {
    self->accepting_ = false;
    if (self->stopped_) return;
    if (error) return self->OnAcceptError(error);
    self->Accept(std::move(socket));
  });
}

void TcpListener::OnAcceptError(const error_code& error) {
  const char* name = strerrorname_np(error.value());
  core_->options.metrics->Add("accept_errors_total", 1,
                              {{"errno", name != nullptr ? name : "other"}});
  // Without file descriptors the next accept fails as well: wait instead of spinning.
  AcceptAfter(kAcceptRetry);
}

void TcpListener::AcceptAfter(std::chrono::steady_clock::duration pause) {
  retry_.expires_after(pause);
  retry_.async_wait([self = shared_from_this()](const error_code& cancelled) {
    if (!cancelled) self->Accept();
  });
}

std::shared_ptr<TcpListener::PendingConnection> TcpListener::NextToLeave() const {
  std::map<boost::asio::ip::address, size_t> by_address;
  for (const auto& pending : pending_) ++by_address[pending->remote];
  return *std::ranges::min_element(pending_, [&](const auto& a, const auto& b) {
    const size_t of_a = by_address[a->remote];
    const size_t of_b = by_address[b->remote];
    return of_a != of_b ? of_a > of_b : a->since < b->since;
  });
}

void TcpListener::Accept(tcp::socket socket) {
  Tune(socket, core_->options);
  auto pending = std::make_shared<PendingConnection>(std::move(socket));
  pending_.insert(pending);
  VisitorsChanged();
  pending->timer.expires_after(core_->options.handshake_timeout);
  pending->timer.async_wait([self = shared_from_this(), pending](const error_code& cancelled) {
    if (!cancelled) self->Drop(pending, "handshake_timeout");
  });
  if (core_->options.tls_peers == nullptr) return ReadPreamble(pending);
  Secure(pending);
}

void TcpListener::Secure(const std::shared_ptr<PendingConnection>& pending) {
  const auto context = core_->options.tls_peers->Context();
  IoLoop& loop = core_->loop(core_->NextHome());
  pending->securing = &loop;
  pending->stream = pending->stream.MovedTo(loop.context());
  loop.Post([self = shared_from_this(), pending, context] {
    pending->stream.AsyncSecure(context.get(), TlsSocket::Side::kCallee,
                                [self, pending](const error_code& error) {
                                  IoLoop& own = self->core_->loop(0);
                                  pending->stream = pending->stream.MovedTo(own.context());
                                  own.Post([self, pending, error] {
                                    pending->securing = nullptr;
                                    if (self->pending_.contains(pending))
                                      self->OnSecured(pending, error);
                                  });
                                });
  });
}

void TcpListener::OnSecured(const std::shared_ptr<PendingConnection>& pending,
                            const error_code& error) {
  const bool failed = error.category() == boost::asio::error::get_ssl_category();
  if (!error && pending->stream.CheckPeer(*core_->options.tls_peers).ok()) {
    return ReadPreamble(pending);
  }
  if (!error || failed) core_->options.metrics->Add("auth_failures_total", 1, {{"reason", "tls"}});
  Drop(pending, error && !failed ? "broken" : "refused");
}

void TcpListener::ReadPreamble(const std::shared_ptr<PendingConnection>& pending) {
  boost::asio::async_read(pending->stream, boost::asio::buffer(pending->preamble),
                          [self = shared_from_this(), pending](const error_code& error, size_t) {
                            if (error) return self->Drop(pending, "broken");
                            self->OnPreamble(pending);
                          });
}

void TcpListener::Drop(const std::shared_ptr<PendingConnection>& pending, const char* cause) {
  if (pending_.erase(pending) == 0) return;
  Close(pending);
  pending->timer.cancel();
  core_->CountClose(cause);
  VisitorsChanged();
}

void TcpListener::Close(const std::shared_ptr<PendingConnection>& pending) {
  if (pending->securing == nullptr) return pending->stream.Close();
  pending->securing->Post([pending] { pending->stream.Close(); });
}

void TcpListener::OnPreamble(const std::shared_ptr<PendingConnection>& pending) {
  if (!pending_.contains(pending)) return;
  auto preamble = DecodePreamble(pending->preamble);
  if (!preamble.has_value()) return Drop(pending, "garbage");
  if (const auto* open = std::get_if<TcpOpen>(&*preamble)) return OnOpen(pending, *open);
  OnJoin(std::get<TcpJoin>(*preamble), Leave(pending));
}

TcpStream TcpListener::Leave(const std::shared_ptr<PendingConnection>& pending) {
  pending_.erase(pending);
  pending->timer.cancel();
  VisitorsChanged();
  return std::move(pending->stream);
}

void TcpListener::OnOpen(const std::shared_ptr<PendingConnection>& pending, const TcpOpen& open) {
  pending->connections = open.connections;
  pending->handshake.emplace(open.caller_hello, pending->preamble, core_->self, *core_->handler,
                             FeaturesOf(core_->options));
  WW_FAILPOINT("transport.before_a_session_is_accepted");
  const CalleeHandshake& handshake = *pending->handshake;
  if (!handshake.awaits_proof()) return Conclude(pending, handshake.reply(), "ticket");
  if (!pending->stream.SendNow(handshake.callee_proof())) return Drop(pending, "broken");
  boost::asio::async_read(pending->stream, boost::asio::buffer(pending->proof),
                          [self = shared_from_this(), pending](const error_code& error, size_t) {
                            if (error) return self->Drop(pending, "broken");
                            self->OnProof(pending);
                          });
}

void TcpListener::OnProof(const std::shared_ptr<PendingConnection>& pending) {
  if (!pending_.contains(pending)) return;
  const auto verdict = pending->handshake->OnProof(pending->proof);
  if (!verdict.has_value()) return Drop(pending, "garbage");
  Conclude(pending, *verdict, "proof");
}

void TcpListener::Conclude(const std::shared_ptr<PendingConnection>& pending, CalleeReply reply,
                           const char* check) {
  TcpStream stream = Leave(pending);
  if (reply.code == Code::kOk &&
      core_->open_count() + openings_.size() >= core_->options.inbound_sessions_max) {
    reply = {0, 0, Code::kResourceExhausted, Reason::kLimitExceeded};
  }
  if (reply.code != Code::kOk) {
    CountRefused(*core_->options.metrics, core_->name, reply, check);
    stream.SendNow(EncodeWelcome(Refusal(reply.code, reply.reason)));
    return;
  }
  const SessionToken token = RandomNonce();
  const uint32_t count = std::min(pending->connections, kTcpConnectionsMax);
  if (!stream.SendNow(EncodeWelcome({reply, token, count}))) return core_->CountClose("broken");
  auto opening =
      std::make_unique<Opening>(core_->loop(0).context(), std::move(*pending->handshake), count);
  opening->streams[0] = std::move(stream);
  --opening->missing;
  opening->timer.expires_after(core_->options.handshake_timeout);
  opening->timer.async_wait([self = shared_from_this(), token](const error_code& cancelled) {
    if (cancelled || self->openings_.erase(token) == 0) return;
    self->core_->CountClose("handshake_timeout");
    self->VisitorsChanged();
  });
  openings_.emplace(token, std::move(opening));
  Complete(token);
  VisitorsChanged();
}

bool TcpListener::MayJoin(const Opening& opening, const TcpJoin& join) {
  if (join.index >= opening.streams.size() || opening.streams[join.index].is_open()) return false;
  const CalleeHandshake& handshake = opening.handshake;
  return !handshake.awaits_proof() ||
         SameProof(join.proof, JoinProof(handshake.key(), join.token, join.index));
}

void TcpListener::OnJoin(const TcpJoin& join, TcpStream stream) {
  auto entry = openings_.find(join.token);
  if (entry == openings_.end() || !MayJoin(*entry->second, join)) {
    const TcpWelcome refusal = Refusal(Code::kUnauthenticated, Reason::kTicketRejected);
    CountRefused(*core_->options.metrics, core_->name, refusal.reply, "proof");
    stream.SendNow(EncodeWelcome(refusal));
    return;
  }
  const TcpWelcome welcome{entry->second->handshake.reply(), join.token, 1};
  if (!stream.SendNow(EncodeWelcome(welcome))) return core_->CountClose("broken");
  entry->second->streams[join.index] = std::move(stream);
  --entry->second->missing;
  Complete(join.token);
  VisitorsChanged();
}

void TcpListener::Complete(const SessionToken& token) {
  auto entry = openings_.find(token);
  if (entry->second->missing > 0) return;
  const std::unique_ptr<Opening> opening = std::move(entry->second);
  openings_.erase(entry);
  opening->timer.cancel();
  const CalleeHandshake& handshake = opening->handshake;
  auto endpoint = MakeTcpEndpoint(core_, handshake.hello(), handshake.key(), Sender::kCallee,
                                  std::move(opening->streams));
  endpoint->Start([core = core_, endpoint] { core->handler->OnAccepted(endpoint); });
}

void TcpListener::VisitorsChanged() {
  Accept();
  core_->options.metrics->Set("connections",
                              static_cast<double>(pending_.size() + openings_.size()),
                              {{"transport", core_->name}, {"state", "handshaking"}});
}

void TcpListener::Stop() {
  stopped_ = true;
  error_code ignored;
  acceptor_.close(ignored);
  retry_.cancel();
  for (const auto& pending : pending_) {
    pending->timer.cancel();
    Close(pending);
  }
  pending_.clear();
  openings_.clear();
}

}  // namespace weightwire::transport
