#include "server/transport/ucx/ucx_registry.h"

#include <utility>

namespace weightwire::transport {

const UcxMemory* UcxRegistry::Of(UcxWorker& worker,
                                 const std::shared_ptr<memory::MemoryRegion>& region,
                                 std::string& failure) {
  if (auto known = entries_.find(region->id()); known != entries_.end()) {
    return &known->second.memory;
  }
  UcxMemory memory;
  failure = worker.Register(region->data(), region->size(), memory);
  if (!failure.empty()) return nullptr;
  return &entries_.emplace(region->id(), Entry{region, std::move(memory)}).first->second.memory;
}

std::vector<uint64_t> UcxRegistry::ReleaseDead(UcxWorker& worker) {
  std::vector<uint64_t> dead;
  std::erase_if(entries_, [&](auto& entry) {
    if (!entry.second.region.expired()) return false;
    worker.Release(entry.second.memory);
    dead.push_back(entry.first);
    return true;
  });
  return dead;
}

void UcxRegistry::ReleaseAll(UcxWorker& worker) {
  for (auto& [id, entry] : entries_) worker.Release(entry.memory);
  entries_.clear();
}

}  // namespace weightwire::transport
