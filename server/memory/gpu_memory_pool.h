#pragma once

#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "server/memory/region.h"

namespace weightwire::memory {

/// A part of one GPU's memory that this process lends to others of its host: one allocation, made
/// and exported once, because freeing synchronises the device and a handle covers an allocation
/// anyhow. A GPU pool is a range of it.
///
/// Whoever has mapped the allocation can write all of it and cannot be kept from it. So a GPU pool
/// is given out again only when its region has gone here *and* nobody has its lease open any more:
/// a pipe's end that is handed out with it and that the kernel closes with its last holder. Who
/// maps a GPU pool keeps the lease until it has stopped to use it.
///
/// Thread-safe. Regions keep it alive.
class GpuMemoryPool : public std::enable_shared_from_this<GpuMemoryPool> {
 public:
  ///   kResourceExhausted / kLimitExceeded  the GPU has less; names the bytes and the GPU
  static Result<std::shared_ptr<GpuMemoryPool>> Make(std::shared_ptr<device::Device> device,
                                                     uint64_t bytes);
  ~GpuMemoryPool();

  device::Device& device() const { return allocation_->device(); }
  /// A region of exactly `bytes` (> 0) with undefined content, that begins at a multiple of 512.
  ///   kResourceExhausted / kLimitExceeded  `what` does not fit: names need, use, budget and GPU,
  ///                                        and how much of it processes that have left still hold
  Result<std::shared_ptr<MemoryRegion>> Allocate(const std::string& what, uint64_t bytes);

  uint64_t bytes_total() const { return bytes_; }
  /// Lent, or not yet let go.
  uint64_t bytes_used();

 private:
  struct Leaving {
    uint64_t offset = 0;
    UniqueFd lease;  ///< the pipe's other end: hung up when nobody has this one open
  };
  GpuMemoryPool(std::shared_ptr<device::Allocation> allocation, uint64_t bytes)
      : allocation_(std::move(allocation)), bytes_(bytes) {}
  void Sweep();
  uint64_t UsedLocked() const;

  const std::shared_ptr<device::Allocation> allocation_;
  const uint64_t bytes_;
  std::mutex mutex_;
  std::map<uint64_t, uint64_t> used_;  ///< bytes by offset, multiples of the alignment
  std::list<Leaving> leaving_;         ///< of used_
};

/// What an agent has to lend, by GPU.
struct GpuMemoryPools {
  std::map<device::Uuid, std::shared_ptr<GpuMemoryPool>> by_device;
  /// A GPU that is not among them is refused; otherwise its rank is told why it gets host memory.
  bool required = false;
  Status none;  ///< why there is no pool at all

  /// The pool of `device`, or why there is none.
  ///   kFailedPrecondition / kConfigInvalid  names the GPU and what to do
  Result<std::shared_ptr<GpuMemoryPool>> Of(const device::Uuid& device) const;
};

}  // namespace weightwire::memory
