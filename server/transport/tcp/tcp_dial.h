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
  TcpDial(std::shared_ptr<TcpCore> core, std::string address, const Hello& hello,
          Transport::ConnectDone done, Ended ended);
  void Start(Nanos timeout);
  /// Gives up for `why`, unless the answer has been given.
  void Fail(Status why);

 private:
  using Socket = boost::asio::ip::tcp::socket;
  struct Leg {
    explicit Leg(boost::asio::io_context& context) : socket(context) {}
    Socket socket;
    std::array<std::byte, kWelcomeBytes> welcome{};
  };

  void Resolve(const std::string& host, uint16_t port);
  void ConnectFirst(boost::asio::ip::tcp::resolver::results_type candidates);
  void Open();
  void AwaitChallenge();
  void OnChallenge();
  /// False when the socket did not take it; the call has failed then.
  bool Say(size_t leg, std::span<const std::byte> message);
  void AwaitWelcome(size_t leg);
  void OnWelcome(size_t leg);
  void FailGarbage(const Status& what);
  void Join(size_t leg, const SessionToken& token);
  void ConnectOthers(const SessionToken& token, uint32_t connections);
  void Succeed();
  void FailIo(const boost::system::error_code& error);

  const std::shared_ptr<TcpCore> core_;
  const std::string address_;
  CallerHandshake handshake_;
  Preamble open_{};  ///< as it was sent
  std::array<std::byte, kChallengedReplyBytes> challenge_{};
  Transport::ConnectDone done_;  ///< null once answered
  Ended ended_;
  boost::asio::steady_timer timer_;
  boost::asio::ip::tcp::resolver resolver_;
  std::vector<Leg> legs_;
  size_t missing_ = 1;  ///< welcomes
};

}  // namespace weightwire::transport
