#include "server/agent/slice_cache.h"

#include "server/plan/memory_bytes.h"
#include "tests/unit/agent/agent_fixture.h"

namespace weightwire::agent {
namespace {

class SliceCacheTest : public AgentTest {
 protected:
  SliceCache::Slice Get(SliceCache& cache, PlanId plan = kPlan) {
    SliceCache::Slice slice;
    cache.Get(plan, plan::Side::kSource, 0,
              [&](const Result<SliceCache::Slice>& got) { slice = got ? *got : nullptr; });
    return slice;
  }
  void AddPlan(uint64_t low) {
    auto slice = SliceFor(plan::Side::kSource);
    slice.plan = PlanId{1, low};
    coordinator.slices[{slice.plan, plan::Side::kSource, 0}] = slice;
  }
};

TEST_F(SliceCacheTest, SharesOneFetchBetweenThoseWhoWait) {
  SliceCache cache(coordinator);
  coordinator.hold_replies = true;
  int answers = 0;
  for (int i = 0; i < 3; ++i) {
    cache.Get(kPlan, plan::Side::kSource, 0,
              [&](const Result<SliceCache::Slice>& got) { answers += got.has_value(); });
  }
  EXPECT_EQ(coordinator.fetches, 1);
  coordinator.Answer();
  EXPECT_EQ(answers, 3);
}

TEST_F(SliceCacheTest, TellsSidesApart) {
  SliceCache cache(coordinator);
  Get(cache);
  cache.Get(kPlan, plan::Side::kTarget, 0, [](const Result<SliceCache::Slice>& got) {
    EXPECT_EQ((*got)->side, plan::Side::kTarget);
  });
  EXPECT_EQ(coordinator.fetches, 2);
}

TEST_F(SliceCacheTest, AsksAgainAfterAFailure) {
  SliceCache cache(coordinator);
  EXPECT_EQ(Get(cache, PlanId{1, 40}), nullptr);
  AddPlan(40);
  EXPECT_NE(Get(cache, PlanId{1, 40}), nullptr);
}

TEST_F(SliceCacheTest, ForgetsTheLeastRecentlyUsedBeyondItsBound) {
  const plan::RankSlice slice = SliceFor(plan::Side::kSource);
  const uint64_t one = plan::MemoryBytes(plan::RankSlice(slice));  // a copy has no spare capacity
  SliceCache cache(coordinator, 2 * one + one / 2);
  AddPlan(3);
  AddPlan(4);
  auto first = Get(cache);
  Get(cache, PlanId{1, 3});
  Get(cache);
  Get(cache, PlanId{1, 4});
  ASSERT_EQ(coordinator.fetches, 3);
  Get(cache);
  EXPECT_EQ(coordinator.fetches, 3);
  Get(cache, PlanId{1, 3});
  EXPECT_EQ(coordinator.fetches, 4);
  EXPECT_EQ(first->streams.size(), 1u) << "whoever holds a slice keeps it";
}

TEST_F(SliceCacheTest, KeepsTheNewestEvenWhenItAloneIsOverTheBound) {
  SliceCache cache(coordinator, 1);
  Get(cache);
  Get(cache);
  EXPECT_EQ(coordinator.fetches, 1);
}

}  // namespace
}  // namespace weightwire::agent
