#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "server/base/status.h"
#include "server/device/bytes.h"

namespace weightwire::memory {

/// Owns a file descriptor. Movable.
class UniqueFd {
 public:
  UniqueFd() = default;
  explicit UniqueFd(int fd) : fd_(fd) {}
  UniqueFd(UniqueFd&& other) noexcept : fd_(other.Release()) {}
  UniqueFd& operator=(UniqueFd&& other) noexcept;
  ~UniqueFd();
  int get() const { return fd_; }
  bool valid() const { return fd_ >= 0; }
  int Release();
  /// A duplicate with close-on-exec.
  Result<UniqueFd> Duplicate() const;

 private:
  int fd_ = -1;
};

enum class Access { kReadOnly, kReadWrite };

/// Memory that processes share: a mapped memfd of the host, or a range of a GPU's memory, which the
/// host must not touch. It lives as long as the object: whoever hands bytes of it to a transport
/// keeps the shared_ptr until the completion has run.
///
/// `id` is unique in the process and never reused. Immutable after construction; thread-safe.
class MemoryRegion {
 public:
  /// Makes a memfd of exactly `bytes` (> 0), sealed SHRINK | GROW | SEAL, mapped read-write and
  /// pre-faulted (so that the first transfer does not pay for page faults). Huge pages are advised
  /// where one fits.
  ///   kResourceExhausted / kLimitExceeded  the kernel has no memory for it; names the bytes
  static Result<std::shared_ptr<MemoryRegion>> Allocate(const std::string& name, uint64_t bytes);

  /// Maps memory that another process made. Nothing about it is trusted but what the seals prove.
  ///   kInvalidArgument / kMemoryInvalid    not a memfd (F_GET_SEALS fails), closed, no bytes
  ///                                        asked for, or opened without the access
  ///   kInvalidArgument / kMemoryNotSealed  no F_SEAL_SHRINK: truncation would be a SIGBUS here
  ///   kInvalidArgument / kMemoryTooSmall   shorter than `bytes`; names both sizes
  ///   kResourceExhausted / kLimitExceeded  mmap refused
  static Result<std::shared_ptr<MemoryRegion>> Import(UniqueFd fd, uint64_t bytes, Access access);

  /// `bytes` of `allocation` from `offset` on. `lease` is what fd() gives; `gone` runs at the end,
  /// once that is closed here.
  static std::shared_ptr<MemoryRegion> OnDevice(std::shared_ptr<device::Allocation> allocation,
                                                uint64_t offset, uint64_t bytes, UniqueFd lease,
                                                std::function<void()> gone);

  ~MemoryRegion();
  MemoryRegion(const MemoryRegion&) = delete;
  MemoryRegion& operator=(const MemoryRegion&) = delete;

  uint64_t id() const { return id_; }
  uint64_t size() const { return size_; }
  /// Host: the memfd. Device: the lease: as long as anybody has it open, the memory is lent to
  /// nobody else (gpu_memory_pool.h).
  int fd() const { return fd_.get(); }
  /// Of the host only; aborts for device memory. Writing through data() of a read-only region is a
  /// SIGSEGV.
  std::byte* data() const {
    WW_CHECK(!on_device());
    return data_;
  }
  /// For what can touch either.
  device::Bytes bytes() const { return {data_, on_device() ? &allocation_->device() : nullptr}; }
  bool on_device() const { return allocation_ != nullptr; }
  /// Of a device region: what it is a range of, and where it begins there.
  const device::Allocation& allocation() const { return *allocation_; }
  uint64_t offset() const { return static_cast<uint64_t>(data_ - allocation_->at()); }

 private:
  MemoryRegion(UniqueFd fd, std::byte* data, uint64_t size);
  uint64_t id_;
  UniqueFd fd_;
  std::byte* data_;
  uint64_t size_;
  std::shared_ptr<device::Allocation> allocation_;
  std::function<void()> gone_;
};

/// A range inside a region. Keeps the region alive.
struct RegionSpan {
  std::shared_ptr<MemoryRegion> region;
  uint64_t offset = 0;
  uint64_t bytes = 0;
  std::byte* data() const { return region->data() + offset; }
  device::Bytes at() const { return region->bytes() + offset; }
};
/// Checked: kInvalidArgument / kMemoryInvalid when the range leaves the region.
Result<RegionSpan> SpanOf(std::shared_ptr<MemoryRegion> region, uint64_t offset, uint64_t bytes);

}  // namespace weightwire::memory
