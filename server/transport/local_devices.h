#pragma once

#include <array>
#include <memory>
#include <span>

#include "server/base/ids.h"
#include "server/device/device.h"
#include "server/memory/region.h"

namespace weightwire::transport {

/// GPU memory as its owner tells a peer of it: bytes of an allocation.
struct DeviceRegion {
  device::Uuid device;
  device::IpcHandle handle{};
  uint64_t offset = 0;
  uint64_t bytes = 0;
  friend bool operator==(const DeviceRegion&, const DeviceRegion&) = default;
};
DeviceRegion DescribeDeviceRegion(const memory::MemoryRegion& region);

/// What names the allocation: the device's UUID and the handle.
inline constexpr size_t kAllocationNameBytes = 80;
std::array<std::byte, kAllocationNameBytes> EncodeAllocationName(const DeviceRegion& region);
/// Any bytes name some allocation; whether there is one shows when it is opened.
DeviceRegion DecodeAllocationName(std::span<const std::byte, kAllocationNameBytes> bytes);

/// What a back end with GPU memory adds to the sessions of one host. Called on the loop.
class LocalDevices {
 public:
  virtual ~LocalDevices() = default;
  /// The peer's memory, mapped here. `lease` is kept as long as the region.
  ///   kInvalidArgument  the peer has broken the rules: its session ends
  ///   any other         it cannot be mapped here; says why. The session goes on without it.
  virtual Result<std::shared_ptr<memory::MemoryRegion>> Import(Incarnation peer,
                                                               const DeviceRegion& region,
                                                               memory::UniqueFd lease) = 0;
  /// The last session with `peer` has ended. What is kept of it; letting go of that may wait for
  /// the GPU, so the loop leaves it to another thread.
  virtual std::shared_ptr<void> Forget(Incarnation peer) = 0;
};

}  // namespace weightwire::transport
