#include "server/memory/slot_pool.h"

#include <algorithm>
#include <utility>

#include "server/base/checked.h"

namespace weightwire::memory {
namespace {

constexpr uint64_t kSlotAlignment = 4096;

}  // namespace

Result<std::unique_ptr<SlotPool>> SlotPool::Make(const std::string& name, uint64_t slot_bytes,
                                                 uint32_t slot_count) {
  if (slot_bytes == 0 || slot_bytes % kSlotAlignment != 0 || slot_count == 0) {
    return Fail(Code::kInvalidArgument, Reason::kConfigInvalid,
                "slots of " + std::to_string(slot_bytes) + " bytes × " +
                    std::to_string(slot_count) + ": needs at least one, of a multiple of 4096");
  }
  auto total = CheckedMul(slot_bytes, slot_count);
  if (!total.has_value()) {
    return Fail(Code::kInvalidArgument, Reason::kShapeOverflow, "the slots' bytes do not fit");
  }
  WW_ASSIGN(auto region, MemoryRegion::Allocate(name, *total));
  return Of(std::move(region), slot_bytes);
}

std::unique_ptr<SlotPool> SlotPool::Of(std::shared_ptr<MemoryRegion> region, uint64_t slot_bytes) {
  WW_CHECK(slot_bytes > 0 && region->size() >= slot_bytes);
  const auto slot_count = static_cast<uint32_t>(region->size() / slot_bytes);
  std::unique_ptr<SlotPool> pool(new SlotPool(std::move(region), slot_bytes));
  // Taken from the back: the slot used last is the one whose pages are still in the caches.
  for (uint32_t slot = slot_count; slot > 0; --slot) pool->free_.push_back(slot - 1);
  return pool;
}

uint64_t SlotPool::Acquire(Turn& turn, double cost, Waiter waiter) {
  if (free_.empty()) return waiters_.Push(turn, cost, std::move(waiter));
  waiters_.Pass(turn, cost);
  const uint32_t slot = free_.back();
  free_.pop_back();
  waiter(RegionSpan{region_, slot * slot_bytes_, slot_bytes_});
  return 0;
}

void SlotPool::CancelWait(uint64_t ticket) { waiters_.Cancel(ticket); }

void SlotPool::Release(const RegionSpan& slot) {
  WW_CHECK(slot.region == region_ && slot.offset % slot_bytes_ == 0);
  const auto index = static_cast<uint32_t>(slot.offset / slot_bytes_);
  WW_CHECK(std::find(free_.begin(), free_.end(), index) == free_.end());
  if (waiters_.empty()) {
    free_.push_back(index);
    return;
  }
  waiters_.Pop()(RegionSpan{region_, slot.offset, slot_bytes_});
}

uint32_t SlotPool::free_count() const { return static_cast<uint32_t>(free_.size()); }
uint64_t SlotPool::slot_bytes() const { return slot_bytes_; }
uint64_t SlotPool::bytes_total() const { return region_->size(); }

}  // namespace weightwire::memory
