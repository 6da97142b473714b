#pragma once

#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "server/transfer/context.h"

namespace weightwire::transfer {

/// The sessions of one engine: one outbound for each (peer incarnation, transport), shared by all
/// jobs and kept for later epochs, and those that peers opened. Strand-only.
class SessionTable : public std::enable_shared_from_this<SessionTable> {
 public:
  using Waiter = std::function<void(Result<std::shared_ptr<transport::Endpoint>>)>;
  explicit SessionTable(std::shared_ptr<Context> context) : context_(std::move(context)) {}

  /// The first transport of the preference that runs here, that the peer can be reached by and that
  /// has not failed lately; "shm" and "cuda_ipc" only on our own host, and none that says itself
  /// that it does not reach the peer. Nothing else is tried within a job when it fails.
  ///   kUnavailable / kTransportFailed  none; names what each side has
  Result<transport::Transport*> Choose(const Peer& peer) const;

  /// The peer could not be reached over `transport`, or was lost: see Options::avoid_after_failure.
  void Avoid(const Peer& peer, const std::string& transport);

  /// The live session with the peer over `transport`, or a new one. `waiter` runs on the strand,
  /// never inside the call. Errors: Transport::Connect's; kUnavailable / kShuttingDown.
  void Connect(const Peer& peer, transport::Transport* transport, Waiter waiter);

  void OnAccepted(const std::shared_ptr<transport::Endpoint>& endpoint);
  void OnClosed(const std::shared_ptr<transport::Endpoint>& endpoint);

  /// Closes every session, and those that are still being made. `done` runs when all are closed.
  void CloseAll(std::function<void()> done);

 private:
  using Name = std::pair<Incarnation, std::string>;

  /// Says the highest protocol, and below kProtocolProof to a peer that knows no other.
  void Call(const Peer& peer, transport::Transport* transport, uint16_t protocol);
  void OnConnected(const Name& name, Result<std::shared_ptr<transport::Endpoint>> result);
  void MaybeClosed();

  std::shared_ptr<Context> context_;
  std::map<Name, std::shared_ptr<transport::Endpoint>> outbound_;
  std::map<Name, std::vector<Waiter>> connecting_;
  std::map<uint64_t, std::shared_ptr<transport::Endpoint>> open_;  ///< all, by endpoint id
  std::map<Name, Nanos> avoided_until_;
  std::set<uint64_t> closed_early_;  ///< closed before their Connect was answered
  bool closing_ = false;
  std::vector<std::function<void()>> closed_;
};

}  // namespace weightwire::transfer
