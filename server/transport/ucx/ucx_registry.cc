#include "server/transport/ucx/ucx_registry.h"

#include <utility>

namespace weightwire::transport {

const UcxRegistered* UcxRegistry::Of(UcxWorker& worker,
                                     const std::shared_ptr<memory::MemoryRegion>& region,
                                     std::string& failure) {
  if (region->on_device()) return Of(worker, region->allocation(), failure);
  if (auto known = regions_.find(region->id()); known != regions_.end()) {
    return &known->second.registered;
  }
  UcxMemory memory;
  failure = worker.Register(region->data(), region->size(), UcxKind::kHost, memory);
  if (!failure.empty()) return nullptr;
  HostEntry entry{region, {next_id_++, std::move(memory)}};
  return &regions_.emplace(region->id(), std::move(entry)).first->second.registered;
}

const UcxRegistered* UcxRegistry::Of(UcxWorker& worker, const device::Allocation& allocation,
                                     std::string& failure) {
  if (auto known = allocations_.find(&allocation); known != allocations_.end()) {
    return &known->second.registered;
  }
  WW_CHECK(allocation.bytes() > 0);
  UcxMemory memory;
  failure = worker.Register(allocation.at(), allocation.bytes(), UcxKind::kCuda, memory);
  if (!failure.empty()) return nullptr;
  DeviceEntry entry{allocation.shared_from_this(), {next_id_++, std::move(memory)}};
  return &allocations_.emplace(&allocation, std::move(entry)).first->second.registered;
}

std::vector<uint64_t> UcxRegistry::ReleaseDead(UcxWorker& worker) {
  std::vector<uint64_t> dead;
  std::erase_if(regions_, [&](auto& entry) {
    if (!entry.second.region.expired()) return false;
    worker.Release(entry.second.registered.memory);
    dead.push_back(entry.second.registered.id);
    return true;
  });
  return dead;
}

void UcxRegistry::ReleaseAll(UcxWorker& worker) {
  for (auto& [id, entry] : regions_) worker.Release(entry.registered.memory);
  for (auto& [at, entry] : allocations_) worker.Release(entry.registered.memory);
  regions_.clear();
  allocations_.clear();
}

}  // namespace weightwire::transport
