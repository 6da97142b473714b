#pragma once

#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "server/memory/region.h"
#include "server/transport/ucx/ucx_plugin.h"

namespace weightwire::transport {

/// Registers each region with UCX once, for as long as it lives: registering costs far more than
/// reading. Runs where the worker runs.
class UcxRegistry {
 public:
  /// nullptr and `failure` when UCX refuses.
  const UcxMemory* Of(UcxWorker& worker, const std::shared_ptr<memory::MemoryRegion>& region,
                      std::string& failure);
  /// Releases what belongs to regions that are gone; returns their ids.
  std::vector<uint64_t> ReleaseDead(UcxWorker& worker);
  void ReleaseAll(UcxWorker& worker);

 private:
  struct Entry {
    std::weak_ptr<memory::MemoryRegion> region;
    UcxMemory memory;
  };
  std::map<uint64_t, Entry> entries_;  ///< by region id
};

}  // namespace weightwire::transport
