#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "server/base/fair_queue.h"
#include "server/memory/region.h"

namespace weightwire::memory {

/// A fixed number of equal slots in one region, of the host's memory or a GPU's, made once and
/// reused for every epoch.
///
/// Not thread-safe: belongs to one strand. A waiter runs inside Release of the slot it gets.
class SlotPool {
 public:
  /// Allocates slot_count × slot_bytes (slot_bytes a multiple of 4096).
  static Result<std::unique_ptr<SlotPool>> Make(const std::string& name, uint64_t slot_bytes,
                                                uint32_t slot_count);
  /// As many as `region` has room for; at least one.
  static std::unique_ptr<SlotPool> Of(std::shared_ptr<MemoryRegion> region, uint64_t slot_bytes);

  using Waiter = std::function<void(RegionSpan slot)>;
  using Turn = FairQueue<Waiter>::Turn;
  /// Calls `waiter` with a free slot: at once, or when one is released and it is this user's turn
  /// (FairQueue; `cost` is what the slot counts). Returns a ticket for CancelWait, 0 when the slot
  /// was given at once.
  uint64_t Acquire(Turn& turn, double cost, Waiter waiter);
  void CancelWait(uint64_t ticket);
  void Release(const RegionSpan& slot);

  uint32_t free_count() const;
  uint64_t slot_bytes() const;
  uint64_t bytes_total() const;

 private:
  SlotPool(std::shared_ptr<MemoryRegion> region, uint64_t slot_bytes)
      : region_(std::move(region)), slot_bytes_(slot_bytes) {}
  const std::shared_ptr<MemoryRegion> region_;
  const uint64_t slot_bytes_;
  std::vector<uint32_t> free_;
  FairQueue<Waiter> waiters_;
};

}  // namespace weightwire::memory
