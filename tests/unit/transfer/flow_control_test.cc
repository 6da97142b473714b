#include "server/transfer/flow_control.h"

#include <gtest/gtest.h>

#include <cstdint>

namespace weightwire::transfer {
namespace {

TEST(WindowOf, IsThePartByBytesRoundedUp) {
  EXPECT_EQ(WindowOf(1'000, 4'000, 16), 4u);
  EXPECT_EQ(WindowOf(1'001, 4'000, 16), 5u);
  EXPECT_EQ(WindowOf(4'000, 4'000, 16), 16u);
}

TEST(ReadAhead, OfPeersOnOurHostIsTheLesserOne) {
  Tuning tuning;
  tuning.chunk_bytes = 4 << 20;
  tuning.gets_in_flight = 16;
  tuning.near_chunk_bytes = 2 << 20;
  tuning.near_gets_in_flight = 4;
  EXPECT_EQ(ReadAheadOf(tuning, false), (ReadAhead{4 << 20, 16}));
  EXPECT_EQ(ReadAheadOf(tuning, true), (ReadAhead{2 << 20, 4}));
  tuning.chunk_bytes = 1 << 20;
  tuning.gets_in_flight = 2;
  EXPECT_EQ(ReadAheadOf(tuning, true), (ReadAhead{1 << 20, 2}));
}

TEST(WindowOf, IsNeverNothingAndNeverMoreThanAll) {
  EXPECT_EQ(WindowOf(1, INT64_MAX, 16), 1u);
  EXPECT_EQ(WindowOf(INT64_MAX, INT64_MAX, UINT32_MAX), UINT32_MAX);
}

}  // namespace
}  // namespace weightwire::transfer
