#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

#include "server/base/clock.h"
#include "server/memory/region.h"

namespace weightwire::rpc {

/// The process at the other end of a Unix socket.
class PeerProcess {
 public:
  /// `nth`: of the connection; tells processes apart that have no pid here, as those of another
  /// container have none.
  PeerProcess(int socket, uint64_t nth);
  /// Its pid, or a number that no pid is.
  uint64_t key() const { return key_; }
  /// False as long as the kernel does not say so.
  bool Ended() const;

 private:
  uint64_t key_;
  memory::UniqueFd pidfd_;
  bool ended_ = false;
};

struct FdTableLimits {
  size_t entries_max = 1'024;    ///< of other processes, and as many of this one
  size_t per_process_max = 256;  ///< of each other process
  Nanos lifetime = std::chrono::seconds(30);
};

/// File descriptors on their way between a process and its agent, by token. A token is random,
/// never 0, good for one redemption, and expires; it ends with the process that put its fd.
/// Thread-safe.
class FdTable {
 public:
  using Limits = FdTableLimits;
  explicit FdTable(Clock& clock, Limits limits = {});

  /// `from`: who put it; null: this process.
  ///   kResourceExhausted / kLimitExceeded  entries_max or per_process_max tokens are alive
  Result<uint64_t> Put(memory::UniqueFd fd, std::shared_ptr<const PeerProcess> from = nullptr);
  ///   kNotFound / kNotRegistered  never given, redeemed, or expired
  Result<memory::UniqueFd> Redeem(uint64_t token);
  /// Tokens that have not expired.
  size_t size();

 private:
  struct Owner {
    std::shared_ptr<const PeerProcess> process;  ///< null: this one
    size_t count = 0;
  };
  struct Entry {
    memory::UniqueFd fd;
    Nanos expires;
    uint64_t owner = 0;
  };
  void DropExpired();
  void Forget(uint64_t owner);
  Status CheckRoom(uint64_t owner) const;

  Clock& clock_;
  const Limits limits_;
  std::mutex mutex_;
  std::map<uint64_t, Entry> entries_;
  std::map<uint64_t, Owner> owners_;  ///< of entries_, by PeerProcess::key; 0: this process
};

}  // namespace weightwire::rpc
