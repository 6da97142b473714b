#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "server/device/device.h"
#include "server/memory/region.h"
#include "server/transport/ucx/ucx_plugin.h"

namespace weightwire::transport {

/// What UCX has registered, under a number of its own: never 0, never reused.
struct UcxRegistered {
  uint64_t id = 0;
  UcxMemory memory;
};

/// Registers memory with UCX once, because that costs far more than reading: each host region for
/// as long as it lives; of GPU memory whole allocations, of which regions are ranges, until
/// ReleaseAll and kept alive until then, so that no remote read ever meets memory that is gone.
/// Whoever has the key of an allocation can read all of it. Runs where the worker runs.
class UcxRegistry {
 public:
  // nullptr and `failure` when UCX refuses.
  const UcxRegistered* Of(UcxWorker& worker, const std::shared_ptr<memory::MemoryRegion>& region,
                          std::string& failure);
  /// One that this process has made.
  const UcxRegistered* Of(UcxWorker& worker, const device::Allocation& allocation,
                          std::string& failure);

  /// Releases what belongs to regions that are gone; returns their numbers.
  std::vector<uint64_t> ReleaseDead(UcxWorker& worker);
  void ReleaseAll(UcxWorker& worker);

 private:
  struct HostEntry {
    std::weak_ptr<memory::MemoryRegion> region;
    UcxRegistered registered;
  };
  struct DeviceEntry {
    std::shared_ptr<const device::Allocation> allocation;
    UcxRegistered registered;
  };
  uint64_t next_id_ = 1;
  std::map<uint64_t, HostEntry> regions_;  ///< by region id
  std::map<const device::Allocation*, DeviceEntry> allocations_;
};

}  // namespace weightwire::transport
