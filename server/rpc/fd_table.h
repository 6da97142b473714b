#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>

#include "server/base/clock.h"
#include "server/memory/region.h"

namespace weightwire::rpc {

struct FdTableLimits {
  size_t entries_max = 1'024;
  Nanos lifetime = std::chrono::seconds(30);
};

/// File descriptors on their way between a process and its agent, by token. A token is random,
/// never 0, good for one redemption, and expires. Thread-safe.
class FdTable {
 public:
  using Limits = FdTableLimits;
  explicit FdTable(Clock& clock, Limits limits = {});

  ///   kResourceExhausted / kLimitExceeded  entries_max tokens are alive
  Result<uint64_t> Put(memory::UniqueFd fd);
  ///   kNotFound / kNotRegistered  never given, redeemed, or expired
  Result<memory::UniqueFd> Redeem(uint64_t token);
  /// Tokens that have not expired.
  size_t size();

 private:
  struct Entry {
    memory::UniqueFd fd;
    Nanos expires;
  };
  void DropExpired();

  Clock& clock_;
  const Limits limits_;
  std::mutex mutex_;
  std::map<uint64_t, Entry> entries_;
};

}  // namespace weightwire::rpc
