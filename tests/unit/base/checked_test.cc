#include "server/base/checked.h"

#include <gtest/gtest.h>

#include <limits>
#include <vector>

namespace weightwire {
namespace {

constexpr uint64_t kTop = std::numeric_limits<uint64_t>::max();

TEST(Checked, RefusesWhatDoesNotFit) {
  EXPECT_EQ(CheckedAdd(kTop - 1, 1), kTop);
  EXPECT_EQ(CheckedAdd(kTop, 1), std::nullopt);
  EXPECT_EQ(CheckedMul(kTop / 3, 3), kTop / 3 * 3);
  EXPECT_EQ(CheckedMul(kTop / 2 + 1, 2), std::nullopt);
}

TEST(Checked, ProductOfExtents) {
  EXPECT_EQ(CheckedProduct(std::vector<int64_t>{}), 1);
  EXPECT_EQ(CheckedProduct(std::vector<int64_t>{3, 0, 5}), 0);
  EXPECT_EQ(CheckedProduct(std::vector<int64_t>{3, -1}), std::nullopt);
  EXPECT_EQ(CheckedProduct(std::vector<int64_t>{int64_t{1} << 32, int64_t{1} << 31}), std::nullopt);
}

TEST(Checked, RoundsUpToAMultiple) {
  EXPECT_EQ(RoundUp(0, 64), 0U);
  EXPECT_EQ(RoundUp(1, 64), 64U);
  EXPECT_EQ(RoundUp(64, 64), 64U);
}

}  // namespace
}  // namespace weightwire
