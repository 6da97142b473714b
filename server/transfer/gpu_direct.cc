#include "server/transfer/gpu_direct.h"

#include <string>
#include <utility>

#include "server/transfer/staging.h"

namespace weightwire::transfer {
namespace {

Status Because(std::string why) {
  return Status(Code::kFailedPrecondition, Reason::kTransportFailed, std::move(why));
}

Status Fill(GpuPools& pools, memory::GpuMemoryPool& gpu_pool, const Tuning& tuning) {
  const PoolSize slots = SlotPoolSize(tuning), scratch = ScratchPoolSize(tuning);
  WW_ASSIGN_OR_STATUS(auto slots_region, gpu_pool.Allocate("slots for GPU-direct", slots.bytes()));
  WW_ASSIGN_OR_STATUS(auto scratch_region,
                      gpu_pool.Allocate("scratch for GPU-direct", scratch.bytes()));
  pools.slots = memory::SlotPool::Of(std::move(slots_region), slots.slot_bytes);
  pools.scratch = memory::SlotPool::Of(std::move(scratch_region), scratch.slot_bytes);
  return OkStatus();
}

}  // namespace

GpuPoolMap MakeGpuPools(const memory::GpuMemoryPools& gpu_pools, const Tuning& tuning) {
  GpuPoolMap all;
  for (const auto& [uuid, gpu_pool] : gpu_pools.by_device) {
    GpuPools& pools = all[&gpu_pool->device()];
    pools.missing = Fill(pools, *gpu_pool, tuning);
  }
  return all;
}

device::Device* DeviceOf(const plan::Stream& stream, plan::Side side, const Binding& binding) {
  for (const plan::CopyOp& op : stream.ops) {
    const memory::RegionSpan& tensor =
        binding[side == plan::Side::kSource ? op.source_tensor : op.target_tensor];
    if (tensor.region->on_device()) return tensor.region->bytes().device;
  }
  return nullptr;
}

Result<const GpuPools*> GpuDirectPools(const GpuPoolMap& pools, const device::Device* device,
                                       const std::vector<const transport::Transport*>& transports) {
  if (device == nullptr) return Fail(Because("its tensors lie in host memory"));
  for (const transport::Transport* transport : transports) {
    if (!transport->capabilities().gets_device_memory) {
      return Fail(Because(transport->name() + " does not reach the memory of " + device->name()));
    }
  }
  const auto found = pools.find(device);
  if (found == pools.end()) {
    return Fail(Because("there are no slots for GPU-direct on " + device->name()));
  }
  if (!found->second.missing.ok()) return Fail(Because(found->second.missing.message()));
  return &found->second;
}

Status GpuDirectRefusal(const std::string& what, const Status& why) {
  return Status(Code::kFailedPrecondition, Reason::kTransportFailed,
                "gpu_direct is required, but the payload of " + what +
                    " would pass host memory: " + why.message())
      .Remedy(
          "let every rank attach with its GPU and reach its peers by ucx or nccl alone, raise "
          "gpu_slab_bytes where a GPU has no room for slots, or set gpu_direct to auto");
}

}  // namespace weightwire::transfer
