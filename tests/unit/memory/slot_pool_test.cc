#include "server/memory/slot_pool.h"

#include <random>
#include <set>

#include "gtest/gtest.h"

namespace weightwire::memory {
namespace {

TEST(SlotPool, SlotsAreDisjointAndInsideOneRegion) {
  SlotPool::Turn turn;
  auto pool = SlotPool::Make("slots", 8192, 3);
  ASSERT_TRUE(pool.has_value());
  EXPECT_EQ((*pool)->bytes_total(), 3 * 8192u);
  std::vector<RegionSpan> slots;
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ((*pool)->Acquire(turn, 0, [&](RegionSpan slot) { slots.push_back(slot); }), 0u);
  }
  EXPECT_EQ((*pool)->free_count(), 0u);
  std::set<uint64_t> offsets;
  for (const RegionSpan& slot : slots) {
    EXPECT_EQ(slot.bytes, 8192u);
    EXPECT_EQ(slot.region, slots.front().region);
    offsets.insert(slot.offset);
  }
  EXPECT_EQ(offsets, (std::set<uint64_t>{0, 8192, 16384}));
}

TEST(SlotPool, WaitersAreServedInOrderInsideRelease) {
  SlotPool::Turn turn;
  auto pool = SlotPool::Make("slots", 4096, 1);
  ASSERT_TRUE(pool.has_value());
  RegionSpan held;
  (*pool)->Acquire(turn, 0, [&](RegionSpan slot) { held = slot; });
  std::vector<int> served;
  const uint64_t first = (*pool)->Acquire(turn, 0, [&](RegionSpan) { served.push_back(1); });
  const uint64_t second = (*pool)->Acquire(turn, 0, [&](RegionSpan) { served.push_back(2); });
  (*pool)->Acquire(turn, 0, [&](RegionSpan) { served.push_back(3); });
  EXPECT_NE(first, 0u);
  EXPECT_NE(first, second);
  (*pool)->CancelWait(second);
  (*pool)->CancelWait(12345);
  (*pool)->Release(held);
  EXPECT_EQ(served, std::vector<int>{1});
  (*pool)->Release(held);
  EXPECT_EQ(served, (std::vector<int>{1, 3}));
  (*pool)->Release(held);
  EXPECT_EQ((*pool)->free_count(), 1u);
}

TEST(SlotPool, AWaiterMayReleaseAndAcquireAgain) {
  SlotPool::Turn turn;
  auto pool = SlotPool::Make("slots", 4096, 1);
  ASSERT_TRUE(pool.has_value());
  RegionSpan held;
  (*pool)->Acquire(turn, 0, [&](RegionSpan slot) { held = slot; });
  int served = 0;
  (*pool)->Acquire(turn, 0, [&](RegionSpan slot) {
    ++served;
    (*pool)->Release(slot);
    (*pool)->Acquire(turn, 0, [&](RegionSpan) { ++served; });
  });
  (*pool)->Release(held);
  EXPECT_EQ(served, 2);
  EXPECT_EQ((*pool)->free_count(), 0u);
}

TEST(SlotPool, RefusesBadSizes) {
  EXPECT_EQ(SlotPool::Make("odd", 4097, 1).error().code(), Code::kInvalidArgument);
  EXPECT_EQ(SlotPool::Make("none", 4096, 0).error().code(), Code::kInvalidArgument);
  EXPECT_EQ(SlotPool::Make("empty", 0, 1).error().code(), Code::kInvalidArgument);
  EXPECT_EQ(SlotPool::Make("overflow", uint64_t{1} << 62, 4).error().reason(),
            Reason::kShapeOverflow);
}

TEST(SlotPoolDeathTest, ReleasingTwiceOrAStrangerIsAProgrammersError) {
  auto pool = SlotPool::Make("slots", 4096, 2);
  auto other = SlotPool::Make("other", 4096, 2);
  ASSERT_TRUE(pool.has_value() && other.has_value());
  RegionSpan held;
  SlotPool::Turn turn;
  (*pool)->Acquire(turn, 0, [&](RegionSpan slot) { held = slot; });
  EXPECT_DEATH((*other)->Release(held), "");
  (*pool)->Release(held);
  EXPECT_DEATH((*pool)->Release(held), "");
}

}  // namespace
}  // namespace weightwire::memory
