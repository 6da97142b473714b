#include "server/transport/local_devices.h"

#include <algorithm>

#include "server/transport/little_endian.h"

namespace weightwire::transport {

DeviceRegion DescribeDeviceRegion(const memory::MemoryRegion& region) {
  const device::Allocation& allocation = region.allocation();
  return {allocation.device().uuid(), allocation.handle(), region.offset(), region.size()};
}

std::array<std::byte, kAllocationNameBytes> EncodeAllocationName(const DeviceRegion& region) {
  std::array<std::byte, kAllocationNameBytes> bytes;
  LittleEndianWriter writer(bytes);
  writer.PutBytes(region.device.bytes);
  writer.PutBytes(region.handle);
  return bytes;
}

DeviceRegion DecodeAllocationName(std::span<const std::byte, kAllocationNameBytes> bytes) {
  DeviceRegion region;
  LittleEndianReader reader(bytes);
  reader.TakeBytes(region.device.bytes);
  reader.TakeBytes(region.handle);
  return region;
}

}  // namespace weightwire::transport
