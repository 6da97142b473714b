#include "server/transport/tcp/tcp_listener.h"

#include <sys/random.h>

#include <algorithm>
#include <boost/asio/io_context.hpp>
#include <boost/asio/read.hpp>
#include <cstring>
#include <utility>

#include "server/base/failpoint.h"
#include "server/transport/address.h"
#include "server/transport/handshake.h"

namespace weightwire::transport {
namespace {

using boost::asio::ip::tcp;
using boost::system::error_code;

constexpr auto kAcceptRetry = std::chrono::milliseconds(100);

SessionToken RandomToken() {
  SessionToken token;
  WW_CHECK(getrandom(token.data(), token.size(), 0) == static_cast<ssize_t>(token.size()));
  return token;
}

TcpWelcome Refusal(Code code, Reason reason) { return {{0, 0, code, reason}, {}, 1}; }

Status CannotListen(const std::string& address, const std::string& why) {
  return Status(Code::kUnavailable, Reason::kIoError, "cannot listen on " + address + ": " + why);
}

}  // namespace

TcpListener::Visitor::Visitor(Socket the_socket)
    : socket(std::move(the_socket)), timer(socket.get_executor()) {}

TcpListener::Opening::Opening(boost::asio::io_context& context, const Hello& the_hello,
                              size_t count)
    : hello(the_hello), missing(count), timer(context) {
  for (size_t i = 0; i < count; ++i) sockets.emplace_back(context);
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
  core_->loop(0).Post([self = shared_from_this()] { self->Accept(); });
  return OkStatus();
}

void TcpListener::Accept() {
  if (stopped_ || accepting_) return;
  if (visitors_.size() >= core_->options.inbound_handshakes_max) {
    // Further callers wait in the kernel's backlog until a visitor has left.
    core_->CountFull();
    return;
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
  retry_.expires_after(kAcceptRetry);
  retry_.async_wait([self = shared_from_this()](const error_code& cancelled) {
    if (!cancelled) self->Accept();
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
  boost::asio::async_read(visitor->socket, boost::asio::buffer(visitor->preamble),
                          [self = shared_from_this(), visitor](const error_code& error, size_t) {
                            if (error) return self->Drop(visitor, "broken");
                            self->OnPreamble(visitor);
                          });
}

void TcpListener::Drop(const std::shared_ptr<Visitor>& visitor, const char* cause) {
  if (visitors_.erase(visitor) == 0) return;
  error_code ignored;
  visitor->socket.close(ignored);
  visitor->timer.cancel();
  core_->CountClose(cause);
  VisitorsChanged();
}

void TcpListener::OnPreamble(const std::shared_ptr<Visitor>& visitor) {
  if (!visitors_.contains(visitor)) return;
  auto preamble = DecodePreamble(visitor->preamble);
  if (!preamble.has_value()) return Drop(visitor, "garbage");
  visitors_.erase(visitor);
  visitor->timer.cancel();
  VisitorsChanged();
  if (const auto* open = std::get_if<TcpOpen>(&*preamble)) {
    OnOpen(*open, std::move(visitor->socket));
  } else {
    OnJoin(std::get<TcpJoin>(*preamble), std::move(visitor->socket));
  }
}

void TcpListener::OnOpen(const TcpOpen& open, tcp::socket socket) {
  if (core_->open_count() + openings_.size() >= core_->options.inbound_sessions_max) {
    core_->CountClose("sessions_full");
    SendNow(socket, EncodeWelcome(Refusal(Code::kResourceExhausted, Reason::kLimitExceeded)));
    return;
  }
  const HelloReply reply = AnswerHello(open.hello, core_->self, *core_->handler);
  WW_FAILPOINT("transport.before_a_session_is_accepted");
  if (reply.code != Code::kOk) {
    core_->CountClose("refused");
    SendNow(socket, EncodeWelcome(Refusal(reply.code, reply.reason)));
    return;
  }
  const SessionToken token = RandomToken();
  const uint32_t count = std::min(open.connections, kTcpConnectionsMax);
  if (!SendNow(socket, EncodeWelcome({reply, token, count}))) return core_->CountClose("broken");
  auto opening = std::make_unique<Opening>(core_->loop(0).context(), open.hello, count);
  opening->sockets[0] = std::move(socket);
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

void TcpListener::OnJoin(const TcpJoin& join, tcp::socket socket) {
  auto entry = openings_.find(join.token);
  if (entry == openings_.end() || join.index >= entry->second->sockets.size() ||
      entry->second->sockets[join.index].is_open()) {
    core_->CountClose("refused");
    SendNow(socket, EncodeWelcome(Refusal(Code::kUnauthenticated, Reason::kTicketRejected)));
    return;
  }
  const TcpWelcome welcome{{kProtocolMax, 0, Code::kOk, Reason::kNone}, join.token, 1};
  if (!SendNow(socket, EncodeWelcome(welcome))) return core_->CountClose("broken");
  entry->second->sockets[join.index] = std::move(socket);
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
  auto endpoint = MakeTcpEndpoint(core_, opening->hello, std::move(opening->sockets));
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
    visitor->socket.close(ignored);
  }
  visitors_.clear();
  openings_.clear();
}

}  // namespace weightwire::transport
