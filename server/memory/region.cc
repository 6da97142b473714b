#include "server/memory/region.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/sysinfo.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <utility>

#include "server/base/checked.h"
#include "server/base/failpoint.h"

namespace weightwire::memory {
namespace {

constexpr uint64_t kHugePageBytes = 2 << 20;

uint64_t NextRegionId() {
  static std::atomic<uint64_t> next{1};
  return next.fetch_add(1, std::memory_order_relaxed);
}

std::string ErrorText(const char* what, int error) {
  return std::string(what) + ": " + std::strerror(error);
}

tl::unexpected<Status> Refused(uint64_t bytes, const std::string& why) {
  return Fail(Code::kResourceExhausted, Reason::kLimitExceeded,
              "no shared memory of " + std::to_string(bytes) + " bytes: " + why);
}

tl::unexpected<Status> Invalid(Reason reason, std::string why) {
  return Fail(Code::kInvalidArgument, reason, std::move(why));
}

/// The kernel hands out shared memory that it does not have and kills somebody on first touch. What
/// exceeds the whole host is refused beforehand; finer limits belong to the configuration.
bool ExceedsHost(uint64_t bytes) {
  struct sysinfo info {};
  if (sysinfo(&info) != 0) return false;
  auto total = CheckedMul(info.totalram, info.mem_unit);
  return total.has_value() && bytes > *total;
}

/// Gives every page its memory now. 0, or the errno of the kernel that has none left.
int Prefault(std::byte* data, uint64_t bytes) {
  if (madvise(data, bytes, MADV_POPULATE_WRITE) == 0) return 0;
  if (errno != EINVAL) return errno;
  const auto page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));  // kernels before 5.14
  for (uint64_t at = 0; at < bytes; at += page) const_cast<volatile std::byte*>(data)[at] = {};
  return 0;
}

/// OK when `fd` is a memfd that can no longer shrink below `bytes`.
Status CheckForeign(int fd, uint64_t bytes) {
  auto refuse = [](Reason reason, std::string why) {
    return Status(Code::kInvalidArgument, reason, std::move(why));
  };
  if (bytes == 0) return refuse(Reason::kMemoryInvalid, "a region of 0 bytes");
  const int seals = fcntl(fd, F_GET_SEALS);
  if (seals < 0) {
    return refuse(Reason::kMemoryInvalid,
                  errno == EINVAL ? "the file descriptor is not a memfd"
                                  : ErrorText("the file descriptor cannot be examined", errno));
  }
  if ((seals & F_SEAL_SHRINK) == 0) {
    return refuse(Reason::kMemoryNotSealed, "the memfd lacks F_SEAL_SHRINK")
        .Remedy("create it with MFD_ALLOW_SEALING and add F_SEAL_SHRINK | F_SEAL_GROW");
  }
  struct stat info {};
  if (fstat(fd, &info) != 0) return refuse(Reason::kMemoryInvalid, ErrorText("fstat", errno));
  if (!S_ISREG(info.st_mode)) return refuse(Reason::kMemoryInvalid, "not a memory file");
  if (static_cast<uint64_t>(info.st_size) < bytes) {
    return refuse(Reason::kMemoryTooSmall, "the memfd has " + std::to_string(info.st_size) +
                                               " bytes, needed are " + std::to_string(bytes));
  }
  return OkStatus();
}

}  // namespace

UniqueFd& UniqueFd::operator=(UniqueFd&& other) noexcept {
  if (this != &other) {
    if (valid()) close(fd_);
    fd_ = other.Release();
  }
  return *this;
}

UniqueFd::~UniqueFd() {
  if (valid()) close(fd_);
}

int UniqueFd::Release() { return std::exchange(fd_, -1); }

Result<UniqueFd> UniqueFd::Duplicate() const {
  const int copy = fcntl(fd_, F_DUPFD_CLOEXEC, 0);
  if (copy < 0) {
    return Fail(Code::kResourceExhausted, Reason::kIoError, ErrorText("dup", errno));
  }
  return UniqueFd(copy);
}

MemoryRegion::MemoryRegion(UniqueFd fd, std::byte* data, uint64_t size)
    : id_(NextRegionId()), fd_(std::move(fd)), data_(data), size_(size) {}

std::shared_ptr<MemoryRegion> MemoryRegion::OnDevice(std::shared_ptr<device::Allocation> allocation,
                                                     uint64_t offset, uint64_t bytes,
                                                     UniqueFd lease, std::function<void()> gone) {
  std::shared_ptr<MemoryRegion> region(
      new MemoryRegion(std::move(lease), allocation->at() + offset, bytes));
  region->allocation_ = std::move(allocation);
  region->gone_ = std::move(gone);
  return region;
}

MemoryRegion::~MemoryRegion() {
  if (!on_device()) {
    munmap(data_, size_);
    return;
  }
  fd_ = UniqueFd();
  if (gone_) gone_();
}

Result<std::shared_ptr<MemoryRegion>> MemoryRegion::Allocate(const std::string& name,
                                                             uint64_t bytes) {
  if (bytes == 0) return Invalid(Reason::kMemoryInvalid, "a region of 0 bytes");
  if (ExceedsHost(bytes)) return Refused(bytes, "the host has less memory");
  // The kernel takes names of up to 249 bytes; they only show in /proc.
  UniqueFd fd(memfd_create(name.substr(0, 200).c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd.valid()) return Refused(bytes, ErrorText("memfd_create", errno));
  if (ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0) {
    return Refused(bytes, ErrorText("ftruncate", errno));
  }
  if (fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    return Refused(bytes, ErrorText("F_ADD_SEALS", errno));
  }
  void* mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
  if (mapped == MAP_FAILED) return Refused(bytes, ErrorText("mmap", errno));
  std::shared_ptr<MemoryRegion> region(
      new MemoryRegion(std::move(fd), static_cast<std::byte*>(mapped), bytes));
  if (bytes >= kHugePageBytes) {
    madvise(mapped, bytes, MADV_HUGEPAGE);  // an advice: hosts that forbid it still work
  }
  if (int error = Prefault(region->data(), bytes); error != 0) {
    return Refused(bytes, ErrorText("prefault", error));
  }
  return region;
}

Result<std::shared_ptr<MemoryRegion>> MemoryRegion::Import(UniqueFd fd, uint64_t bytes,
                                                           Access access) {
  WW_FAIL_IF_ERROR(CheckForeign(fd.get(), bytes));
  const int protection = access == Access::kReadOnly ? PROT_READ : PROT_READ | PROT_WRITE;
  void* mapped = mmap(nullptr, bytes, protection, MAP_SHARED, fd.get(), 0);
  if (mapped == MAP_FAILED) {
    const int error = errno;
    if (error == EACCES || error == EPERM) {
      return Invalid(Reason::kMemoryInvalid, "the memfd does not allow this access");
    }
    return Refused(bytes, ErrorText("mmap", error));
  }
  WW_FAILPOINT("memory.after_foreign_memory_mapped");
  // Not pre-faulted: a sparse file would charge its holes to this process.
  return std::shared_ptr<MemoryRegion>(
      new MemoryRegion(std::move(fd), static_cast<std::byte*>(mapped), bytes));
}

Result<RegionSpan> SpanOf(std::shared_ptr<MemoryRegion> region, uint64_t offset, uint64_t bytes) {
  WW_CHECK(region != nullptr);
  auto end = CheckedAdd(offset, bytes);
  if (!end.has_value() || *end > region->size()) {
    return Invalid(Reason::kMemoryInvalid, "range " + std::to_string(offset) + " + " +
                                               std::to_string(bytes) + " leaves the region of " +
                                               std::to_string(region->size()) + " bytes");
  }
  return RegionSpan{std::move(region), offset, bytes};
}

}  // namespace weightwire::memory
