#include "server/transfer/windows.h"

#include <gtest/gtest.h>

#include <cstdint>

namespace weightwire::transfer {
namespace {

TEST(WindowOf, IsThePartByBytesRoundedUp) {
  EXPECT_EQ(WindowOf(1'000, 4'000, 16), 4u);
  EXPECT_EQ(WindowOf(1'001, 4'000, 16), 5u);
  EXPECT_EQ(WindowOf(4'000, 4'000, 16), 16u);
}

TEST(WindowOf, IsNeverNothingAndNeverMoreThanAll) {
  EXPECT_EQ(WindowOf(1, INT64_MAX, 16), 1u);
  EXPECT_EQ(WindowOf(INT64_MAX, INT64_MAX, UINT32_MAX), UINT32_MAX);
}

}  // namespace
}  // namespace weightwire::transfer
