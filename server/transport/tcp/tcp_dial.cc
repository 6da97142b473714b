#include "server/transport/tcp/tcp_dial.h"

#include <algorithm>
#include <boost/asio/connect.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/read.hpp>
#include <utility>

#include "server/transport/address.h"
#include "server/transport/operation.h"

namespace weightwire::transport {

using boost::asio::ip::tcp;
using boost::system::error_code;

namespace {

Hello With(Hello hello, uint64_t features) {
  hello.features |= features;
  return hello;
}

std::string WithoutTls(const std::string& address) {
  return address.starts_with(kTlsPrefix) ? address.substr(kTlsPrefix.size()) : address;
}

}  // namespace

TcpDial::TcpDial(std::shared_ptr<TcpCore> core, const std::string& address, const Hello& hello,
                 Transport::ConnectDone done, Ended ended)
    : core_(std::move(core)),
      address_(WithoutTls(address)),
      peer_has_tls_(address_.size() < address.size()),
      handshake_(With(hello, FeaturesOf(core_->options))),
      done_(std::move(done)),
      ended_(std::move(ended)),
      timer_(core_->loop(0).context()),
      resolver_(core_->loop(0).context()) {
  // All at once: an attempt must not move while its socket is in use.
  const int count = std::clamp(core_->options.connections, 1, static_cast<int>(kTcpConnectionsMax));
  attempts_.reserve(static_cast<size_t>(count));
  for (int i = 0; i < count; ++i) attempts_.emplace_back(core_->loop(0).context());
}

void TcpDial::Start(Nanos timeout) {
  timer_.expires_at(std::chrono::steady_clock::time_point(DeadlineAfter(timeout)));
  timer_.async_wait([self = shared_from_this()](const error_code& cancelled) {
    if (cancelled) return;
    self->Fail(Status(Code::kDeadlineExceeded, Reason::kDeadlineExceeded,
                      "no session with " + self->address_ + " in time"));
  });
  if (FeaturesOf(core_->options) != 0 && !handshake_.awaits_proof()) {
    return Fail(Status(Code::kFailedPrecondition, Reason::kProtocolVersion,
                       "integrity is mac, and " + address_ + " is to be shown a ticket")
                    .Remedy("upgrade that agent"));
  }
  if (peer_has_tls_ != (core_->options.tls_peers != nullptr)) {
    return Fail(Status(Code::kFailedPrecondition, Reason::kConfigInvalid,
                       peer_has_tls_ ? "integrity is tls at " + address_ + ", and not here"
                                     : "integrity is tls here, and not at " + address_)
                    .Remedy("set integrity alike on all agents of the job"));
  }
  auto parts = SplitAddress(address_);
  if (!parts.has_value()) return Fail(parts.error());
  Resolve(parts->first, parts->second);
}

void TcpDial::Resolve(const std::string& host, uint16_t port) {
  error_code error;
  if (const auto numeric = boost::asio::ip::make_address(host, error); !error) {
    return ConnectFirst(tcp::resolver::results_type::create(tcp::endpoint(numeric, port), host,
                                                            std::to_string(port)));
  }
  resolver_.async_resolve(host, std::to_string(port),
                          [self = shared_from_this()](const error_code& failure,
                                                      tcp::resolver::results_type candidates) {
                            if (!self->done_) return;
                            if (failure) return self->FailIo(failure);
                            self->ConnectFirst(std::move(candidates));
                          });
}

void TcpDial::ConnectFirst(tcp::resolver::results_type candidates) {
  boost::asio::async_connect(
      attempts_[0].stream.socket(), candidates,
      [self = shared_from_this()](const error_code& error, const tcp::endpoint&) {
        if (!self->done_) return;
        if (error) return self->FailIo(error);
        self->Secure(0, &TcpDial::Open);
      });
}

void TcpDial::Secure(size_t attempt, void (TcpDial::*then)(size_t attempt)) {
  Tune(attempts_[attempt].stream.socket(), core_->options);
  if (!peer_has_tls_) return (this->*then)(attempt);
  const auto context = core_->options.tls_peers->Context();
  attempts_[attempt].stream.AsyncSecure(
      context.get(), TlsSocket::Side::kCaller,
      [self = shared_from_this(), attempt, then](const error_code& error) {
        if (!self->done_) return;
        if (error) return self->FailIo(error);
        Status may = self->attempts_[attempt].stream.CheckPeer(*self->core_->options.tls_peers);
        if (!may.ok()) return self->Fail(std::move(may));
        (self.get()->*then)(attempt);
      });
}

void TcpDial::Open(size_t attempt) {
  int wanted = static_cast<int>(attempts_.size());
  if (StaysOnThisHost(attempts_[attempt].stream.socket())) {
    wanted = std::clamp(core_->options.near_connections, 1, wanted);
  }
  open_ = EncodeOpen({handshake_.caller_hello(), static_cast<uint32_t>(wanted)});
  if (!Say(attempt, open_)) return;
  if (!handshake_.awaits_proof()) return AwaitWelcome(attempt);
  // A refusal has no callee's proof behind it.
  boost::asio::async_read(attempts_[attempt].stream,
                          boost::asio::buffer(callee_proof_, kCalleeReplyBytes),
                          [self = shared_from_this()](const error_code& error, size_t) {
                            if (!self->done_) return;
                            if (error) return self->FailIo(error);
                            self->AwaitChallenge();
                          });
}

void TcpDial::AwaitChallenge() {
  const auto reply = DecodeCalleeReply(std::span(callee_proof_).first(kCalleeReplyBytes));
  if (!reply.has_value()) return FailGarbage(reply.error());
  if (Status verdict = StatusOf(*reply); !verdict.ok()) return Fail(verdict);
  boost::asio::async_read(
      attempts_[0].stream,
      boost::asio::buffer(callee_proof_.data() + kCalleeReplyBytes, kCalleeProofBytes),
      [self = shared_from_this()](const error_code& error, size_t) {
        if (!self->done_) return;
        if (error) return self->FailIo(error);
        self->OnCalleeProof();
      });
}

void TcpDial::OnCalleeProof() {
  const auto proof = handshake_.OnCalleeProof(open_, callee_proof_);
  if (!proof.has_value()) {
    const bool garbage = proof.error().code() == Code::kInvalidArgument;
    return garbage ? FailGarbage(proof.error()) : Fail(proof.error());
  }
  if (Say(0, *proof)) AwaitWelcome(0);
}

bool TcpDial::Say(size_t attempt, std::span<const std::byte> message) {
  if (attempts_[attempt].stream.SendNow(message)) return true;
  Fail(TransportFailed("the connection to " + address_ + " broke"));
  return false;
}

void TcpDial::AwaitWelcome(size_t attempt) {
  boost::asio::async_read(attempts_[attempt].stream,
                          boost::asio::buffer(attempts_[attempt].welcome),
                          [self = shared_from_this(), attempt](const error_code& error, size_t) {
                            if (!self->done_) return;
                            if (error) return self->FailIo(error);
                            self->OnWelcome(attempt);
                          });
}

void TcpDial::OnWelcome(size_t attempt) {
  auto welcome = DecodeWelcome(attempts_[attempt].welcome);
  if (!welcome.has_value()) return FailGarbage(welcome.error());
  if (Status verdict = StatusOf(welcome->reply); !verdict.ok()) return Fail(verdict);
  --missing_;
  if (attempt == 0) {
    token_ = welcome->token;
    ConnectOthers(welcome->connections);
  }
  if (done_ && missing_ == 0) Succeed();
}

void TcpDial::ConnectOthers(uint32_t connections) {
  error_code error;
  const tcp::endpoint peer = attempts_[0].stream.socket().remote_endpoint(error);
  if (error) return FailIo(error);
  while (attempts_.size() > connections) attempts_.pop_back();
  missing_ = attempts_.size() - 1;
  for (size_t attempt = 1; attempt < attempts_.size(); ++attempt) {
    attempts_[attempt].stream.socket().async_connect(
        peer, [self = shared_from_this(), attempt](const error_code& failure) {
          if (!self->done_) return;
          if (failure) return self->FailIo(failure);
          self->Secure(attempt, &TcpDial::Join);
        });
  }
}

void TcpDial::Join(size_t attempt) {
  const auto index = static_cast<uint32_t>(attempt);
  TcpJoin join{token_, index, {}};
  if (handshake_.awaits_proof()) join.proof = JoinProof(handshake_.key(), token_, index);
  if (Say(attempt, EncodeJoin(join))) AwaitWelcome(attempt);
}

void TcpDial::Succeed() {
  timer_.cancel();
  std::vector<TcpStream> streams;
  for (Attempt& attempt : attempts_) streams.push_back(std::move(attempt.stream));
  ended_(shared_from_this());
  auto endpoint = MakeTcpEndpoint(core_, handshake_.hello(), handshake_.key(), Sender::kCaller,
                                  std::move(streams));
  endpoint->Start([done = std::exchange(done_, nullptr), endpoint] { done(endpoint); });
}

void TcpDial::FailGarbage(const Status& what) {
  Fail(TransportFailed(address_ + " does not speak weightwire: " + what.message()));
}

void TcpDial::FailIo(const error_code& error) {
  Fail(TransportFailed("no session with " + address_ + ": " + error.message()));
}

void TcpDial::Fail(Status why) {
  if (!done_) return;
  timer_.cancel();
  resolver_.cancel();
  for (Attempt& attempt : attempts_) attempt.stream.Close();
  ended_(shared_from_this());
  std::exchange(done_, nullptr)(weightwire::Fail(std::move(why)));
}

}  // namespace weightwire::transport
