#pragma once

#include <map>
#include <memory>
#include <vector>

#include "server/memory/gpu_memory_pool.h"
#include "server/memory/slot_pool.h"
#include "server/transfer/transfer.h"
#include "server/transport/transport.h"

/// GPU-direct: payload that goes between GPU memory and a transport without a copy in host memory.
/// Whether a stream does is decided once, on each side for itself, before its first byte: by where
/// the rank's tensors lie, what the transport reaches (Capabilities::gets_device_memory), and
/// whether the GPU has slots and scratch. UNTESTED ON HARDWARE.
namespace weightwire::transfer {

/// As Context::slots and ::scratch, in one GPU's memory.
struct GpuPools {
  std::unique_ptr<memory::SlotPool> slots;
  std::unique_ptr<memory::SlotPool> scratch;
  Status missing;  ///< not OK: why there are none
};
using GpuPoolMap = std::map<const device::Device*, GpuPools>;

/// Takes GpuPoolBytes of every GPU pool. A GPU that lacks them gets the reason instead.
GpuPoolMap MakeGpuPools(const memory::GpuMemoryPools& gpu_pools, const Tuning& tuning);

/// Of the first of the stream's tensors on `side` that lies on a GPU; null: they lie in host
/// memory.
device::Device* DeviceOf(const plan::Stream& stream, plan::Side side, const Binding& binding);

/// The pools of `device`, or why payload passes host memory on its way between that GPU (null: host
/// memory) and `transports`. The reason is for people.
Result<const GpuPools*> GpuDirectPools(const GpuPoolMap& pools, const device::Device* device,
                                       const std::vector<const transport::Transport*>& transports);

/// What a job fails with whose payload passes host memory although that is forbidden.
Status GpuDirectRefusal(const std::string& what, const Status& why);

}  // namespace weightwire::transfer
