#pragma once

#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/steady_timer.hpp>
#include <memory>
#include <span>
#include <string>

#include "server/transport/handshake.h"
#include "server/transport/ucx/ucx_core.h"

namespace weightwire::transport {

class UcxListener;

/// One Connect under way. On the loop.
class UcxDial final : public UcxConnection, public std::enable_shared_from_this<UcxDial> {
 public:
  UcxDial(std::shared_ptr<UcxCore> core, std::weak_ptr<UcxListener> listener, std::string address,
          const Hello& hello, Transport::ConnectDone done);
  void Start(Nanos deadline);
  /// Gives up for `why`, unless the answer has been given.
  void Fail(Status why);

  void OnMessage(std::span<const std::byte> message) override;
  void OnBroken(const std::string& why) override;
  void Shut() override;

 private:
  void OnCalleeProof(std::span<const std::byte> message);
  void FailGarbage(const Status& what);
  void Connect(const boost::asio::ip::tcp::endpoint& peer);
  void End();

  const std::shared_ptr<UcxCore> core_;
  const std::weak_ptr<UcxListener> listener_;
  const std::string address_;
  CallerHandshake handshake_;
  bool challenged_ = false;      ///< and answered
  Transport::ConnectDone done_;  ///< null once answered
  Nanos deadline_{0};
  uint64_t id_ = 0;  ///< 0: no connection yet
  boost::asio::steady_timer timer_;
  boost::asio::ip::tcp::resolver resolver_;
};

}  // namespace weightwire::transport
