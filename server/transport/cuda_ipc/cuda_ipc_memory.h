#pragma once

#include <map>
#include <memory>
#include <set>

#include "server/transport/local_devices.h"

namespace weightwire::transport {

using CudaIpcDevices = std::map<device::Uuid, std::shared_ptr<device::Device>>;

/// Allocations of peers, mapped: each once for a peer's incarnation, and kept until its last
/// session has ended, because to map and to unmap takes as long as a transfer and may wait for all
/// work of the GPU. A slab of it is given back with its lease, which goes with the region. On the
/// loop.
class CudaIpcMemory final : public LocalDevices {
 public:
  explicit CudaIpcMemory(CudaIpcDevices devices) : devices_(std::move(devices)) {}

  ///   kInvalidArgument / kMemoryInvalid       what came as the lease is no pipe, or the region
  ///                                           leaves its allocation
  ///   kFailedPrecondition / kTransportFailed  the GPU is not visible here; names those that are
  ///   kResourceExhausted / kLimitExceeded     the peer has too many allocations
  ///   kUnavailable / kMemoryInvalid           CUDA does not map it; says why
  Result<std::shared_ptr<memory::MemoryRegion>> Import(Incarnation peer, const DeviceRegion& region,
                                                       memory::UniqueFd lease) override;
  std::shared_ptr<void> Forget(Incarnation peer) override;

 private:
  using Allocations = std::set<std::shared_ptr<device::Allocation>>;

  const CudaIpcDevices devices_;
  std::map<Incarnation, Allocations> opened_;
};

}  // namespace weightwire::transport
