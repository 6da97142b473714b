#pragma once

#include <array>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/steady_timer.hpp>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "server/transport/handshake.h"
#include "server/transport/tcp/tcp_core.h"
#include "server/transport/tcp/tcp_handshake.h"

namespace weightwire::transport {

/// One Connect under way. Everything runs on loop 0.
class TcpDial final : public std::enable_shared_from_this<TcpDial> {
 public:
  using Ended = std::function<void(const std::shared_ptr<TcpDial>&)>;
  /// `ended` runs once, before `done` does.
  TcpDial(std::shared_ptr<TcpCore> core, const std::string& address, const Hello& hello,
          Transport::ConnectDone done, Ended ended);
  void Start(Nanos timeout);
  /// Gives up for `why`, unless the answer has been given.
  void Fail(Status why);

 private:
  struct Attempt {
    explicit Attempt(boost::asio::io_context& context) : stream(context) {}
    TcpStream stream;
    std::array<std::byte, kWelcomeBytes> welcome{};
  };

  void Resolve(const std::string& host, uint16_t port);
  void ConnectFirst(boost::asio::ip::tcp::resolver::results_type candidates);
  /// Goes on with `then` under TLS, where the options ask for it.
  void Secure(size_t attempt, void (TcpDial::*then)(size_t attempt));
  void Open(size_t attempt);
  void AwaitChallenge();
  void OnCalleeProof();
  /// False when the socket did not take it; the call has failed then.
  bool Say(size_t attempt, std::span<const std::byte> message);
  void AwaitWelcome(size_t attempt);
  void OnWelcome(size_t attempt);
  void FailGarbage(const Status& what);
  void Join(size_t attempt);
  void ConnectOthers(uint32_t connections);
  void Succeed();
  void FailIo(const boost::system::error_code& error);

  const std::shared_ptr<TcpCore> core_;
  const std::string address_;  ///< without what says that it is under TLS
  const bool peer_has_tls_;
  CallerHandshake handshake_;
  Preamble open_{};  ///< as it was sent
  std::array<std::byte, kProvedReplyBytes> callee_proof_{};
  Transport::ConnectDone done_;  ///< null once answered
  Ended ended_;
  boost::asio::steady_timer timer_;
  boost::asio::ip::tcp::resolver resolver_;
  std::vector<Attempt> attempts_;
  SessionToken token_{};  ///< of the first welcome
  size_t missing_ = 1;    ///< welcomes
};

}  // namespace weightwire::transport
