#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <utility>

#include "server/base/status.h"
#include "weightwire/v1/coordinator.pb.h"

/// An agent with several ranks reads from the same agents with each, version after version: on one
/// session their addresses are told once, and left off afterwards (PeerAddress.as_told). Both ends
/// go through a message by rising source rank.
namespace weightwire::wire {

/// Incarnations that a session remembers; beyond that it begins anew.
inline constexpr size_t kAddressesToldMax = 1'024;

/// The coordinator's end of one session. Remembers a digest of what it told: some 80 bytes for each
/// agent.
class AddressesTold {
 public:
  void Shorten(v1::Prepare* prepare);

 private:
  using Digest = std::pair<size_t, size_t>;
  std::map<uint64_t, Digest> told_;  ///< by incarnation
};

/// The agent's end.
class AddressesHeard {
 public:
  /// Fills in what was left off.
  ///   kInvalidArgument / kInvalidRequest   it was never told
  ///   kInvalidArgument / kMessageTooLarge  more was told than a session remembers
  Status Complete(v1::Prepare* prepare);

 private:
  std::map<uint64_t, v1::PeerAddress> heard_;  ///< by incarnation; host and addresses count
};

}  // namespace weightwire::wire
