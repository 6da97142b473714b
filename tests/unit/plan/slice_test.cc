#include <gtest/gtest.h>

#include "server/plan/plan.h"
#include "tests/unit/plan/hand_layouts.h"

namespace weightwire::plan {
namespace {

using testing::Cut;
using testing::OneTensor;

TEST(SliceOf, HoldsTheStreamsOfOneRankAndSide) {
  const TransferPlan plan =
      BuildPlan(OneTensor({12, 4}, Cut({12, 4}, 0, 3)), OneTensor({12, 4}, Cut({12, 4}, 1, 2)))
          .value();
  const RankSlice sends = SliceOf(plan, Side::kSource, 1);
  EXPECT_EQ(sends.plan, plan.id);
  EXPECT_EQ(sends.side, Side::kSource);
  EXPECT_EQ(sends.rank, 1u);
  EXPECT_EQ(sends.tensor_names, plan.tensor_names);
  EXPECT_EQ(sends.streams, (std::vector<Stream>{plan.streams[1], plan.streams[4]}));
  const RankSlice receives = SliceOf(plan, Side::kTarget, 1);
  EXPECT_EQ(receives.streams,
            (std::vector<Stream>{plan.streams[3], plan.streams[4], plan.streams[5]}));
}

TEST(SliceOf, IsEmptyForARankOutsideThePlan) {
  const TransferPlan plan =
      BuildPlan(OneTensor({12}, Cut({12}, 0, 3)), OneTensor({12}, Cut({12}, 0, 2))).value();
  EXPECT_TRUE(SliceOf(plan, Side::kTarget, 2).streams.empty());
}

}  // namespace
}  // namespace weightwire::plan
