#include "server/plan/classes.h"

#include <gtest/gtest.h>

#include "tests/unit/plan/hand_layouts.h"

namespace weightwire::plan {
namespace {

using testing::Cut;
using testing::OneTensor;

std::vector<std::vector<uint32_t>> RanksOf(const std::vector<LayoutClass>& classes) {
  std::vector<std::vector<uint32_t>> ranks;
  for (const LayoutClass& entry : classes) ranks.push_back(entry.ranks);
  return ranks;
}

TEST(LayoutClasses, PutsEqualRanksTogetherInOrderOfTheirFirst) {
  const auto halves = Cut({8, 4}, 0, 2);
  const auto layout = OneTensor({8, 4}, {halves[1], halves[1], halves[0], halves[1], halves[0]});
  const auto classes = LayoutClasses(layout);
  EXPECT_EQ(RanksOf(classes), (std::vector<std::vector<uint32_t>>{{0, 1, 3}, {2, 4}}));
  const auto one = OnePerClass(layout, classes);
  ASSERT_EQ(one.ranks.size(), 2u);
  EXPECT_EQ(one.canonical, layout.canonical);
  EXPECT_EQ(one.ranks[0], layout.ranks[0]);
  EXPECT_EQ(one.ranks[1], layout.ranks[2]);
}

TEST(LayoutClasses, KeepsApartWhatDiffersInAnyDetail) {
  auto layout = OneTensor({8, 4}, std::vector(6, testing::Whole({8, 4})));
  layout.ranks[1].tensors[0].name = "other";
  layout.ranks[2].tensors[0].dtype = layout::DType::kF16;
  layout.ranks[3].tensors[0].shape = {9, 4};
  layout.ranks[4].tensors[0].pieces[0].local_stride = {1, 8};
  layout.ranks[5].tensors.clear();
  EXPECT_EQ(LayoutClasses(layout).size(), 6u);
}

}  // namespace
}  // namespace weightwire::plan
