#pragma once

#include <boost/asio/steady_timer.hpp>
#include <memory>

#include "server/transport/ucx/ucx_core.h"

namespace weightwire::transport {

class UcxGate;

/// A caller that has not introduced itself, or one that was refused and has not gone: its refusal
/// may still be on the way, so the caller or the handshake timeout ends it. On the loop.
class UcxVisitor final : public UcxConnection, public std::enable_shared_from_this<UcxVisitor> {
 public:
  UcxVisitor(std::shared_ptr<UcxCore> core, std::weak_ptr<UcxGate> gate, uint64_t id);
  void Start();
  void OnMessage(std::span<const std::byte> message) override;
  void OnBroken(const std::string& why) override;
  void Shut() override;

 private:
  void Answer(const Hello& hello);
  void Leave();
  void Drop(const char* cause);

  const std::shared_ptr<UcxCore> core_;
  const std::weak_ptr<UcxGate> gate_;
  const uint64_t id_;
  boost::asio::steady_timer timer_;
  bool refused_ = false;
  bool left_ = false;
};

}  // namespace weightwire::transport
