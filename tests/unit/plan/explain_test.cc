#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "server/plan/explain.h"
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
  const std::string text = Explain(plan, source, target, "w", {"trainer", "engine-a"});
  EXPECT_THAT(text, HasSubstr(plan.id.ToHex()));
  EXPECT_THAT(text, HasSubstr(": 96 B in 6 copies and 6 streams, from 3 to 2 ranks"));
  EXPECT_THAT(text, HasSubstr("  trainer/2 sends 32 B\n"));
  EXPECT_THAT(text, HasSubstr("  engine-a/1 receives 48 B\n"));
  EXPECT_THAT(text, HasSubstr("             engine-a/0  engine-a/1\n"
                              "  trainer/0        16 B        16 B\n"));
  EXPECT_THAT(text, HasSubstr("[4:8, 2:4]  trainer/1 local.w BF16@2 strides [4, 1] -> engine-a/1 "
                              "local.w BF16@8 strides [2, 1]"));
}

TEST(Explain, LeavesOutTheMatrixOfManyRanksAndCopiesNotAskedFor) {
  const auto source = OneTensor({17}, Cut({17}, 0, 17));
  const auto target = OneTensor({17}, Cut({17}, 0, 2));
  const std::string text = Explain(BuildPlan(source, target).value(), source, target, "");
  EXPECT_THAT(text, Not(HasSubstr("from (row)")));
  EXPECT_THAT(text, Not(HasSubstr("copies of")));
}

TEST(Explain, SaysLargeSizesInUnitsAndWhoSendsNothingToWhom) {
  const auto source = OneTensor({4'000, 1'000}, Cut({4'000, 1'000}, 0, 2));
  const auto target = OneTensor({4'000, 1'000}, Cut({4'000, 1'000}, 0, 2));
  const std::string text = Explain(BuildPlan(source, target).value(), source, target, "");
  EXPECT_THAT(text, HasSubstr(": 8.0 MB in "));
  EXPECT_THAT(text, HasSubstr("  source/1 sends 4.0 MB\n"));
  EXPECT_THAT(text, HasSubstr("  source/1         -    4.0 MB\n"));
}

TEST(Explain, SaysSoWhenTheTensorIsUnknown) {
  const auto layout = OneTensor({17}, Cut({17}, 0, 2));
  EXPECT_THAT(Explain(BuildPlan(layout, layout).value(), layout, layout, "v"),
              HasSubstr("no tensor 'v'"));
}

}  // namespace
}  // namespace weightwire::plan
