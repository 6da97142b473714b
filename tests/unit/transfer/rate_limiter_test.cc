#include "server/transfer/rate_limiter.h"

#include <gtest/gtest.h>

#include "tests/support/sim_executor.h"

namespace weightwire::transfer {
namespace {

using std::chrono::seconds;
const Incarnation kA{1}, kB{2};

class RateLimiterTest : public ::testing::Test {
 protected:
  /// Lets `count` pieces of `bytes` through one after another; seconds until the last went.
  double Send(RateLimits& limits, Incarnation peer, int count, uint64_t bytes) {
    RateLimitedTurn turn(sim, sim);
    Nanos last{};
    for (int i = 0; i < count; ++i) {
      bool gone = turn.Enter(limits.For({peer}, bytes), [&](Nanos) { gone = true; });
      EXPECT_TRUE(sim.RunUntil([&] { return gone; }, seconds(1'000)));
      last = sim.Now();
    }
    return Seconds(last);
  }
  static double Seconds(Nanos time) { return std::chrono::duration<double>(time).count(); }
  ::weightwire::testing::SimExecutor sim;
};

TEST_F(RateLimiterTest, WithoutALimitNothingWaits) {
  RateLimits limits(0, 0);
  EXPECT_TRUE(limits.For({kA}, 1'000).empty());
  EXPECT_EQ(Send(limits, kA, 100, 1'000'000'000), 0);
}

TEST_F(RateLimiterTest, BytesGoAtTheirRate) {
  RateLimits limits(1'000'000, 0);
  // The first piece goes at once, each other one when those before it have had their time.
  EXPECT_NEAR(Send(limits, kA, 101, 50'000), 5, 0.01);
}

TEST_F(RateLimiterTest, APieceThatIsLargerThanASecondsWorthGoesThroughToo) {
  RateLimits limits(1'000, 0);
  EXPECT_NEAR(Send(limits, kA, 3, 100'000), 200, 0.01);
}

TEST_F(RateLimiterTest, WhatWasNotUsedIsLost) {
  RateLimits limits(1'000'000, 0);
  Send(limits, kA, 1, 50'000);
  sim.RunFor(seconds(60));
  EXPECT_NEAR(Send(limits, kA, 21, 50'000), 61, 0.02);
}

TEST_F(RateLimiterTest, AnAgentsLimitIsSharedByItsPeersAndThePeersOwnIsNot) {
  RateLimits limits(1'000'000, 600'000);
  const RateLimitedBytes both = limits.For({kA, kB}, 10);
  ASSERT_EQ(both.size(), 3u);
  EXPECT_EQ(both[2].second, 20u) << "both copies pass our own link";
  EXPECT_NE(both[0].first, both[1].first);
  EXPECT_EQ(both[0].first, limits.For({kA}, 10)[0].first);
  EXPECT_EQ(both[2].first, limits.For({kB}, 10)[1].first);
  EXPECT_TRUE(limits.For({}, 10).empty());
}

TEST_F(RateLimiterTest, ANarrowPeerKeepsNothingOfOurOwnLimitBusy) {
  RateLimits limits(1'000'000, 10'000);
  RateLimitedTurn slow(sim, sim);
  limits.For({kA}, 0)[0].first->Reserve(sim.Now(), 100'000);  // A is busy for 10 s
  bool gone = false;
  EXPECT_FALSE(slow.Enter(limits.For({kA}, 5'000), [&](Nanos waited) {
    gone = true;
    EXPECT_NEAR(Seconds(waited), 10, 0.01);
  }));
  EXPECT_EQ(Send(limits, kB, 1, 5'000), 0) << "B waits behind A";
  EXPECT_TRUE(sim.RunUntil([&] { return gone; }, seconds(11)));
}

TEST_F(RateLimiterTest, ACancelledTurnIsForgotten) {
  RateLimits limits(1'000, 0);
  RateLimitedTurn turn(sim, sim);
  EXPECT_TRUE(turn.Enter(limits.For({kA}, 5'000), [](Nanos) { FAIL(); }));
  EXPECT_FALSE(turn.waiting());
  EXPECT_FALSE(turn.Enter(limits.For({kA}, 5'000), [](Nanos) { FAIL(); }));
  EXPECT_TRUE(turn.waiting());
  turn.Cancel();
  turn.Cancel();
  EXPECT_FALSE(turn.waiting());
  sim.RunFor(seconds(60));
}

}  // namespace
}  // namespace weightwire::transfer
