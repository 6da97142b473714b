#pragma once

#include <cstdint>
#include <map>

#include "server/agent/agent.h"
#include "server/rpc/random.h"

namespace weightwire::rpc {

/// The secrets by which attached processes name themselves on the wire: random, so that no process
/// can speak for another by counting. Belongs to the agent's strand.
class HandleTable {
 public:
  uint64_t Add(agent::Handle handle) {
    uint64_t secret = RandomNonZero();
    while (!handles_.emplace(secret, handle).second) secret = RandomNonZero();
    return secret;
  }
  /// Handle 0, which the agent knows as nobody's, when there is none.
  agent::Handle Find(uint64_t secret) const {
    const auto found = handles_.find(secret);
    return found == handles_.end() ? agent::Handle() : found->second;
  }
  void Remove(uint64_t secret) { handles_.erase(secret); }

 private:
  std::map<uint64_t, agent::Handle> handles_;
};

}  // namespace weightwire::rpc
