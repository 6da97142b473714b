#include "server/coordinator/shared_slices.h"

#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <vector>

#include "tests/support/sim_executor.h"

namespace weightwire::coordinator {
namespace {

using Slice = SharedSlices::Slice;

struct SharedSlicesTest : ::testing::Test {
  void Ask(SharedSlices& slices, uint32_t rank) {
    slices.Get(
        {PlanId{1, 2}, plan::Side::kTarget, rank},
        [this, rank] {
          ++made;
          plan::RankSlice slice;
          slice.rank = rank;
          return std::make_shared<const plan::RankSlice>(slice);
        },
        [this](const Result<Slice>& slice) { answers.push_back(slice.value()); });
  }

  testing::SimExecutor sim;
  int made = 0;
  std::vector<Slice> answers;
};

TEST_F(SharedSlicesTest, AreMadeOnceForAllWhoAskAndWhileAnybodyHoldsThem) {
  SharedSlices slices(sim, sim);
  for (int engine = 0; engine < 1'000; ++engine) Ask(slices, 3);
  Ask(slices, 4);
  EXPECT_TRUE(answers.empty()) << "later, on the strand";
  sim.RunUntilIdle();
  EXPECT_EQ(made, 2);
  ASSERT_EQ(answers.size(), 1'001u);
  EXPECT_EQ(answers[0], answers[999]);
  EXPECT_EQ(answers[0]->rank, 3u);
  EXPECT_EQ(answers[1'000]->rank, 4u);
  answers.erase(answers.begin() + 1, answers.end());
  Ask(slices, 3);
  sim.RunUntilIdle();
  EXPECT_EQ(made, 2) << "somebody still sends it";
  EXPECT_EQ(answers[0], answers[1]);
}

TEST_F(SharedSlicesTest, AreNotKeptForNobody) {
  SharedSlices slices(sim, sim);
  Ask(slices, 3);
  sim.RunUntilIdle();
  const std::weak_ptr<const plan::RankSlice> gone = answers[0];
  answers.clear();
  EXPECT_TRUE(gone.expired());
  Ask(slices, 3);
  sim.RunUntilIdle();
  EXPECT_EQ(made, 2);
}

TEST_F(SharedSlicesTest, AnswerAlsoWhenTheyAreGone) {
  std::optional<SharedSlices> slices(std::in_place, sim, sim);
  Ask(*slices, 3);
  Ask(*slices, 3);
  slices.reset();
  sim.RunUntilIdle();
  EXPECT_EQ(answers.size(), 2u);
}

}  // namespace
}  // namespace weightwire::coordinator
