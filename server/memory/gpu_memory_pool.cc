#include "server/memory/gpu_memory_pool.h"

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <iterator>
#include <utility>

#include "server/base/checked.h"

// First fit: the ranges are few (ranks × buffers) and large, and live as long as their ranks.
namespace weightwire::memory {
namespace {

constexpr uint64_t kAlignment = 512;

bool HungUp(const UniqueFd& fd) {
  pollfd look{fd.get(), 0, 0};
  return poll(&look, 1, 0) > 0 && (look.revents & (POLLHUP | POLLERR)) != 0;
}

Result<std::pair<UniqueFd, UniqueFd>> MakeLease() {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) {
    return Fail(Code::kResourceExhausted, Reason::kIoError,
                std::string("no lease of GPU memory: pipe: ") + std::strerror(errno));
  }
  return std::pair(UniqueFd(ends[0]), UniqueFd(ends[1]));
}

}  // namespace

Result<std::shared_ptr<GpuMemoryPool>> GpuMemoryPool::Make(std::shared_ptr<device::Device> device,
                                                           uint64_t bytes) {
  WW_ASSIGN(auto allocation, device->Allocate(bytes));
  return std::shared_ptr<GpuMemoryPool>(new GpuMemoryPool(std::move(allocation), bytes));
}

GpuMemoryPool::~GpuMemoryPool() = default;

void GpuMemoryPool::Sweep() {
  std::erase_if(leaving_, [this](const Leaving& one) {
    if (!HungUp(one.lease)) return false;
    used_.erase(one.offset);
    return true;
  });
}

uint64_t GpuMemoryPool::UsedLocked() const {
  uint64_t bytes = 0;
  for (const auto& [offset, size] : used_) bytes += size;
  return bytes;
}

uint64_t GpuMemoryPool::bytes_used() {
  std::lock_guard lock(mutex_);
  Sweep();
  return UsedLocked();
}

Result<std::shared_ptr<MemoryRegion>> GpuMemoryPool::Allocate(const std::string& what,
                                                              uint64_t bytes) {
  if (bytes == 0)
    return Fail(Code::kInvalidArgument, Reason::kMemoryInvalid, "0 bytes of GPU memory");
  WW_ASSIGN(auto lease, MakeLease());
  std::lock_guard lock(mutex_);
  Sweep();
  const auto size = CheckedAdd(bytes, kAlignment - 1);
  const uint64_t rounded = size ? *size / kAlignment * kAlignment : UINT64_MAX;
  uint64_t offset = 0;
  for (const auto& [start, length] : used_) {
    if (rounded <= start - offset) break;
    offset = start + length;
  }
  if (offset > bytes_ || rounded > bytes_ - offset) {
    uint64_t left = 0;
    for (const Leaving& one : leaving_) left += used_.at(one.offset);
    return Fail(Status(Code::kResourceExhausted, Reason::kLimitExceeded,
                       what + " needs " + std::to_string(bytes) + " bytes together on " +
                           device().name() + "; " + std::to_string(UsedLocked()) +
                           " of the budget of " + std::to_string(bytes_) + " are in use, " +
                           std::to_string(left) + " of them by processes that have left")
                    .Remedy("raise gpu_slab_bytes, or place fewer ranks on this GPU"));
  }
  used_.emplace(offset, rounded);
  auto gone = [pool = shared_from_this(), offset,
               other = std::make_shared<UniqueFd>(std::move(lease.first))] {
    std::lock_guard regained(pool->mutex_);
    pool->leaving_.push_back({offset, std::move(*other)});
  };
  return MemoryRegion::OnDevice(allocation_, offset, bytes, std::move(lease.second),
                                std::move(gone));
}

Result<std::shared_ptr<GpuMemoryPool>> GpuMemoryPools::Of(const device::Uuid& device) const {
  const auto found = by_device.find(device);
  if (found != by_device.end()) return found->second;
  std::string why = none.message(), remedy = none.remedy();
  if (none.ok()) {
    why = "it sees only";
    for (const auto& [uuid, pool] : by_device) why.append(" ").append(ToString(uuid));
    remedy = "let the agent's container see every GPU of its pod";
  }
  return Fail(Status(Code::kFailedPrecondition, Reason::kConfigInvalid,
                     "this agent has no memory of " + ToString(device) + " to lend: " + why)
                  .Remedy(std::move(remedy)));
}

}  // namespace weightwire::memory
