#include "server/transport/cuda_ipc/cuda_ipc_memory.h"

#include <sys/stat.h>

#include <string>
#include <utility>

#include "server/base/checked.h"

namespace weightwire::transport {
namespace {

constexpr size_t kAllocationsMax = 64;  // of one peer, which makes one of each GPU

/// What is closed only when we close it, and costs nothing meanwhile.
bool IsPipe(const memory::UniqueFd& fd) {
  struct stat info {};
  return fstat(fd.get(), &info) == 0 && S_ISFIFO(info.st_mode);
}

tl::unexpected<Status> Lie(const char* what) {
  return Fail(Code::kInvalidArgument, Reason::kMemoryInvalid, what);
}

std::string NamesOf(const CudaIpcDevices& devices) {
  std::string names;
  for (const auto& [uuid, device] : devices) names.append(" ").append(ToString(uuid));
  return names;
}

}  // namespace

Result<std::shared_ptr<memory::MemoryRegion>> CudaIpcMemory::Import(Incarnation peer,
                                                                    const DeviceRegion& region,
                                                                    memory::UniqueFd lease) {
  if (!IsPipe(lease)) return Lie("the lease of GPU memory is no pipe");
  const auto end = CheckedAdd(region.offset, region.bytes);
  if (region.bytes == 0 || !end) return Lie("GPU memory of an impossible size");
  const auto device = devices_.find(region.device);
  if (device == devices_.end()) {
    return Fail(Status(Code::kFailedPrecondition, Reason::kTransportFailed,
                       "the peer's " + ToString(region.device) +
                           " is not visible here; visible are" + NamesOf(devices_))
                    .Remedy("let the agents of a host see the same GPUs"));
  }
  WW_ASSIGN(auto allocation, device->second->OpenIpc(region.handle));
  // The peer's word for its size is not enough: a kernel that leaves it loses us the GPU.
  if (*end > allocation->bytes()) return Lie("GPU memory that leaves its allocation");
  Allocations& of_peer = opened_[peer];
  if (!of_peer.contains(allocation) && of_peer.size() == kAllocationsMax) {
    return Fail(Code::kResourceExhausted, Reason::kLimitExceeded,
                "the peer has shared " + std::to_string(kAllocationsMax) + " allocations already");
  }
  of_peer.insert(allocation);
  return memory::MemoryRegion::OnDevice(std::move(allocation), region.offset, region.bytes,
                                        std::move(lease), nullptr);
}

std::shared_ptr<void> CudaIpcMemory::Forget(Incarnation peer) {
  auto known = opened_.extract(peer);
  if (known.empty()) return nullptr;
  return std::make_shared<Allocations>(std::move(known.mapped()));
}

}  // namespace weightwire::transport
