#include "server/daemon/gpu_memory.h"

#include <spdlog/spdlog.h>

#include <iterator>

#include "server/base/checked.h"

namespace weightwire::daemon {
namespace {

constexpr uint64_t kLaneAlignment = 256;

/// One for each worker, so that none waits for another, with room for a segment.
device::LaneSizes LanesOf(const Config& config) {
  return {config.worker_threads, RoundUp(config.segment_bytes_max, kLaneAlignment)};
}

/// Copies between GPUs go directly where the machine can; told where it cannot, once.
void ConnectAll(const memory::GpuMemoryPools& pools) {
  for (auto one = pools.by_device.begin(); one != pools.by_device.end(); ++one) {
    for (auto other = std::next(one); other != pools.by_device.end(); ++other) {
      const Status can = one->second->device().Connect(other->second->device());
      if (can.ok()) continue;
      spdlog::warn("gpu: {} and {} exchange through host memory: {}", ToString(one->first),
                   ToString(other->first), can.message());
    }
  }
}

Result<memory::GpuMemoryPools> TakeAll(const Config& config) {
  WW_ASSIGN(auto library, device::Library::Load(config.gpu_library));
  memory::GpuMemoryPools pools;
  for (const device::Uuid& uuid : library->devices()) {
    WW_ASSIGN(auto device, device::Device::Open(library, uuid, LanesOf(config)));
    WW_ASSIGN(auto pool, memory::GpuMemoryPool::Make(std::move(device), config.gpu_slab_bytes));
    spdlog::info("gpu: lends {} bytes of {} (untested on hardware)", config.gpu_slab_bytes,
                 ToString(uuid));
    pools.by_device.emplace(uuid, std::move(pool));
  }
  ConnectAll(pools);
  return pools;
}

}  // namespace

Result<memory::GpuMemoryPools> LendGpuMemory(const Config& config) {
  memory::GpuMemoryPools pools;
  if (config.gpu == Gpu::kOff) {
    pools.none = Status(Code::kFailedPrecondition, Reason::kConfigInvalid, "gpu is off")
                     .Remedy("start the agent with gpu auto or required, and gpu_slab_bytes");
    return pools;
  }
  auto taken = TakeAll(config);
  if (taken) {
    taken->required = config.gpu == Gpu::kRequired;
    return taken;
  }
  if (config.gpu == Gpu::kRequired) return Fail(std::move(taken.error()));
  spdlog::warn("gpu: ranks that ask for GPU memory get host memory: {}", taken.error().ToString());
  pools.none = std::move(taken.error());
  return pools;
}

}  // namespace weightwire::daemon
