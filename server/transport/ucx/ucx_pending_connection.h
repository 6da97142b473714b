#pragma once

#include <boost/asio/steady_timer.hpp>
#include <memory>
#include <optional>

#include "server/transport/handshake.h"
#include "server/transport/ucx/ucx_core.h"

namespace weightwire::transport {

class UcxListener;

/// A caller that has not introduced itself or not proved what it said, or one that was refused and
/// has not gone: its refusal may still be on the way, so the caller or the handshake timeout ends
/// it. On the loop.
class UcxPendingConnection final : public UcxConnection,
                                   public std::enable_shared_from_this<UcxPendingConnection> {
 public:
  UcxPendingConnection(std::shared_ptr<UcxCore> core, std::weak_ptr<UcxListener> listener,
                       uint64_t id);
  void Start();
  void OnMessage(std::span<const std::byte> message) override;
  void OnBroken(const std::string& why) override;
  void Shut() override;

 private:
  void OnProof(std::span<const std::byte> message);
  /// A session for the pending connection, or the refusal that `reply` is; `check` as in
  /// CountRefused.
  void Conclude(CalleeReply reply, const char* check);
  void Leave();
  void Drop(const char* cause);

  const std::shared_ptr<UcxCore> core_;
  const std::weak_ptr<UcxListener> listener_;
  const uint64_t id_;
  boost::asio::steady_timer timer_;
  std::optional<CalleeHandshake> handshake_;  ///< once it introduced itself
  bool refused_ = false;
  bool left_ = false;
};

}  // namespace weightwire::transport
