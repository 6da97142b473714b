#include "server/coordinator/plan_cache.h"

#include <gtest/gtest.h>

#include "server/plan/memory_bytes.h"
#include "tests/support/sim_executor.h"

namespace weightwire::coordinator {
namespace {

AgreedLayoutPtr LayoutNumber(uint64_t number) {
  return std::make_shared<const AgreedLayout>(AgreedLayout{{}, {number, number}});
}

/// Plans of a thousand copies, which say only for which layout they are.
class CountingWork final : public Work {
 public:
  explicit CountingWork(int& plans) : plans_(plans) {}
  Result<PlannedPairPtr> Plan(const AgreedLayoutPtr& source,
                              const AgreedLayoutPtr& target) const override {
    ++plans_;
    auto plan = std::make_shared<plan::TransferPlan>();
    plan->id = IdFor(target->fingerprint.low);
    plan->streams.push_back({.ops = std::vector<plan::CopyOp>(1'000)});
    return std::make_shared<const PlannedPair>(PlannedPair{std::move(plan), source, target});
  }
  static PlanId IdFor(uint64_t layout) { return {7, layout}; }

 private:
  int& plans_;
};

class PlanCacheTest : public ::testing::Test {
 protected:
  PlannedPairPtr Get(PlanCache& cache, uint64_t layout) {
    PlannedPairPtr got;
    cache.Get(source_, LayoutNumber(layout),
              [&got](const Result<PlannedPairPtr>& pair) { got = pair.value_or(nullptr); });
    sim_.RunUntilIdle();
    return got;
  }
  PlanCache Cache(uint64_t bytes_max) {
    return {sim_, sim_, sim_, work_, metrics::Null(), bytes_max};
  }

  testing::SimExecutor sim_;
  int plans_ = 0;
  std::shared_ptr<const Work> work_ = std::make_shared<CountingWork>(plans_);
  const AgreedLayoutPtr source_ = LayoutNumber(0);
};

TEST_F(PlanCacheTest, NeverGivesUpThePlansOfARunningEpoch) {
  PlanCache cache = Cache(uint64_t{1} << 20);  // about three plans
  std::vector<PlannedPairPtr> running;
  for (uint64_t engine = 1; engine <= 300; ++engine) running.push_back(Get(cache, engine));
  for (uint64_t engine = 1; engine <= 300; ++engine) {
    EXPECT_EQ(cache.Find(CountingWork::IdFor(engine)), running[engine - 1]) << engine;
  }
  Get(cache, 1);
  EXPECT_EQ(plans_, 300) << "one that is held is not made again";
}

TEST_F(PlanCacheTest, KeepsWhatFitsAndGivesUpTheLeastRecentlyUsed) {
  PlanCache tiny = Cache(1);
  const uint64_t one = plan::MemoryBytes(*Get(tiny, 1)->plan);
  EXPECT_GE(one, 1'000 * sizeof(plan::CopyOp));
  plans_ = 0;
  PlanCache cache = Cache(2 * one);
  Get(cache, 1);
  Get(cache, 2);
  Get(cache, 1);
  Get(cache, 3);
  EXPECT_NE(cache.Find(CountingWork::IdFor(1)), nullptr);
  EXPECT_EQ(cache.Find(CountingWork::IdFor(2)), nullptr);
  EXPECT_NE(cache.Find(CountingWork::IdFor(3)), nullptr);
  EXPECT_EQ(plans_, 3);
  Get(cache, 2);
  EXPECT_EQ(plans_, 4);
}

TEST_F(PlanCacheTest, GivesOutAPlanThatIsLargerThanItsBound) {
  PlanCache cache = Cache(1);
  EXPECT_NE(Get(cache, 1), nullptr);
  EXPECT_EQ(cache.Find(CountingWork::IdFor(1)), nullptr);
}

}  // namespace
}  // namespace weightwire::coordinator
