#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "server/plan/plan.h"
#include "tests/unit/plan/hand_layouts.h"

namespace weightwire::plan {
namespace {

using testing::Cut;
using ::testing::HasSubstr;
using ::testing::Not;
using testing::OneTensor;

TEST(Explain, NamesTotalsRanksMatrixAndCopies) {
  const auto source = OneTensor({12, 4}, Cut({12, 4}, 0, 3));
  const auto target = OneTensor({12, 4}, Cut({12, 4}, 1, 2));
  const TransferPlan plan = BuildPlan(source, target).value();
  const std::string text = Explain(plan, source, target, "w");
  EXPECT_THAT(text, HasSubstr(plan.id.ToHex()));
  EXPECT_THAT(text, HasSubstr("96 bytes in 6 copies and 6 streams, from 3 to 2 ranks"));
  EXPECT_THAT(text, HasSubstr("source/2 sends 32 bytes"));
  EXPECT_THAT(text, HasSubstr("target/1 receives 48 bytes"));
  EXPECT_THAT(text, HasSubstr("      source/0            16            16\n"));
  EXPECT_THAT(text, HasSubstr("[4:8, 2:4]  source/1 local.w BF16@2 strides [4, 1] -> target/1 "
                              "local.w BF16@8 strides [2, 1]"));
}

TEST(Explain, LeavesOutTheMatrixOfManyRanksAndCopiesNotAskedFor) {
  const auto source = OneTensor({17}, Cut({17}, 0, 17));
  const auto target = OneTensor({17}, Cut({17}, 0, 2));
  const std::string text = Explain(BuildPlan(source, target).value(), source, target);
  EXPECT_THAT(text, Not(HasSubstr("bytes from source (row)")));
  EXPECT_THAT(text, Not(HasSubstr("copies of")));
}

TEST(Explain, SaysSoWhenTheTensorIsUnknown) {
  const auto layout = OneTensor({17}, Cut({17}, 0, 2));
  EXPECT_THAT(Explain(BuildPlan(layout, layout).value(), layout, layout, "v"),
              HasSubstr("no tensor 'v'"));
}

}  // namespace
}  // namespace weightwire::plan
