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

TcpListener::Visitor::Visitor(tcp::socket socket)
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
  if (visitors_.size() >= core_->options.inbound_handshakes_max) {
    // Further callers wait in the kernel's backlog until a visitor has left.
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
    self->Welcome(std::move(socket));
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

std::shared_ptr<TcpListener::Visitor> TcpListener::NextToLeave() const {
  std::map<boost::asio::ip::address, size_t> pending;
  for (const auto& visitor : visitors_) ++pending[visitor->remote];
  return *std::ranges::min_element(visitors_, [&](const auto& a, const auto& b) {
    const size_t of_a = pending[a->remote];
    const size_t of_b = pending[b->remote];
    return of_a != of_b ? of_a > of_b : a->since < b->since;
  });
}

void TcpListener::Welcome(tcp::socket socket) {
  Tune(socket, core_->options);
  auto visitor = std::make_shared<Visitor>(std::move(socket));
  visitors_.insert(visitor);
  VisitorsChanged();
  visitor->timer.expires_after(core_->options.handshake_timeout);
  visitor->timer.async_wait([self = shared_from_this(), visitor](const error_code& cancelled) {
    if (!cancelled) self->Drop(visitor, "handshake_timeout");
  });
  if (core_->options.tls_peers == nullptr) return ReadPreamble(visitor);
  Secure(visitor);
}

void TcpListener::Secure(const std::shared_ptr<Visitor>& visitor) {
  const auto context = core_->options.tls_peers->Context();
  IoLoop& loop = core_->loop(core_->NextHome());
  visitor->securing = &loop;
  visitor->stream = visitor->stream.MovedTo(loop.context());
  loop.Post([self = shared_from_this(), visitor, context] {
    visitor->stream.AsyncSecure(context.get(), TlsSocket::Side::kCallee,
                                [self, visitor](const error_code& error) {
                                  IoLoop& own = self->core_->loop(0);
                                  visitor->stream = visitor->stream.MovedTo(own.context());
                                  own.Post([self, visitor, error] {
                                    visitor->securing = nullptr;
                                    if (self->visitors_.contains(visitor))
                                      self->OnSecured(visitor, error);
                                  });
                                });
  });
}

void TcpListener::OnSecured(const std::shared_ptr<Visitor>& visitor, const error_code& error) {
  const bool failed = error.category() == boost::asio::error::get_ssl_category();
  if (!error && visitor->stream.CheckPeer(*core_->options.tls_peers).ok()) {
    return ReadPreamble(visitor);
  }
  if (!error || failed) core_->options.metrics->Add("auth_failures_total", 1, {{"reason", "tls"}});
  Drop(visitor, error && !failed ? "broken" : "refused");
}

void TcpListener::ReadPreamble(const std::shared_ptr<Visitor>& visitor) {
  boost::asio::async_read(visitor->stream, boost::asio::buffer(visitor->preamble),
                          [self = shared_from_this(), visitor](const error_code& error, size_t) {
                            if (error) return self->Drop(visitor, "broken");
                            self->OnPreamble(visitor);
                          });
}

void TcpListener::Drop(const std::shared_ptr<Visitor>& visitor, const char* cause) {
  if (visitors_.erase(visitor) == 0) return;
  Close(visitor);
  visitor->timer.cancel();
  core_->CountClose(cause);
  VisitorsChanged();
}

void TcpListener::Close(const std::shared_ptr<Visitor>& visitor) {
  if (visitor->securing == nullptr) return visitor->stream.Close();
  visitor->securing->Post([visitor] { visitor->stream.Close(); });
}

void TcpListener::OnPreamble(const std::shared_ptr<Visitor>& visitor) {
  if (!visitors_.contains(visitor)) return;
  auto preamble = DecodePreamble(visitor->preamble);
  if (!preamble.has_value()) return Drop(visitor, "garbage");
  if (const auto* open = std::get_if<TcpOpen>(&*preamble)) return OnOpen(visitor, *open);
  OnJoin(std::get<TcpJoin>(*preamble), Leave(visitor));
}

TcpStream TcpListener::Leave(const std::shared_ptr<Visitor>& visitor) {
  visitors_.erase(visitor);
  visitor->timer.cancel();
  VisitorsChanged();
  return std::move(visitor->stream);
}

void TcpListener::OnOpen(const std::shared_ptr<Visitor>& visitor, const TcpOpen& open) {
  visitor->connections = open.connections;
  visitor->handshake.emplace(open.introduction, visitor->preamble, core_->self, *core_->handler,
                             FeaturesOf(core_->options));
  WW_FAILPOINT("transport.before_a_session_is_accepted");
  const CalleeHandshake& handshake = *visitor->handshake;
  if (!handshake.awaits_proof()) return Conclude(visitor, handshake.reply(), "ticket");
  if (!visitor->stream.SendNow(handshake.challenge())) return Drop(visitor, "broken");
  boost::asio::async_read(visitor->stream, boost::asio::buffer(visitor->proof),
                          [self = shared_from_this(), visitor](const error_code& error, size_t) {
                            if (error) return self->Drop(visitor, "broken");
                            self->OnProof(visitor);
                          });
}

void TcpListener::OnProof(const std::shared_ptr<Visitor>& visitor) {
  if (!visitors_.contains(visitor)) return;
  const auto verdict = visitor->handshake->OnProof(visitor->proof);
  if (!verdict.has_value()) return Drop(visitor, "garbage");
  Conclude(visitor, *verdict, "proof");
}

void TcpListener::Conclude(const std::shared_ptr<Visitor>& visitor, HelloReply reply,
                           const char* check) {
  TcpStream stream = Leave(visitor);
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
  const uint32_t count = std::min(visitor->connections, kTcpConnectionsMax);
  if (!stream.SendNow(EncodeWelcome({reply, token, count}))) return core_->CountClose("broken");
  auto opening =
      std::make_unique<Opening>(core_->loop(0).context(), std::move(*visitor->handshake), count);
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
                              static_cast<double>(visitors_.size() + openings_.size()),
                              {{"transport", core_->name}, {"state", "handshaking"}});
}

void TcpListener::Stop() {
  stopped_ = true;
  error_code ignored;
  acceptor_.close(ignored);
  retry_.cancel();
  for (const auto& visitor : visitors_) {
    visitor->timer.cancel();
    Close(visitor);
  }
  visitors_.clear();
  openings_.clear();
}

}  // namespace weightwire::transport
