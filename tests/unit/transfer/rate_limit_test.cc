#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "tests/unit/transfer/fleet.h"

// rate_limit and peer_rate_limit between agents whose links are as fast as you like, under virtual
// time.
namespace weightwire::transfer {
namespace {

using testing::Fleet;
using testing::FleetOptions;

constexpr uint64_t kRate = 1'000'000;
constexpr int64_t kUnit = 400'000;  ///< bytes: some fifty slots

// `units[source][target]`; each rank on an agent of its own.
FleetOptions OptionsOf(std::vector<std::vector<int64_t>> units) {
  FleetOptions options;
  options.shape.source_ranks = options.source_agents = static_cast<uint32_t>(units.size());
  options.shape.target_ranks = options.target_agents = static_cast<uint32_t>(units[0].size());
  for (auto& row : units) {
    for (int64_t& bytes : row) bytes *= kUnit;
  }
  options.stream_bytes = std::move(units);
  options.tuning.slots_in_pool = 16;
  options.tuning.window = 16;
  return options;
}

/// Seconds until every job has its result.
double RunToEnd(Fleet& fleet) {
  fleet.StartAll();
  EXPECT_TRUE(fleet.sim.RunUntil(
      [&] {
        return std::ranges::all_of(fleet.targets,
                                   [](const auto& target) { return target.result.has_value(); });
      },
      std::chrono::minutes(10)));
  for (const auto& target : fleet.targets) {
    EXPECT_TRUE(target.result->has_value());
    EXPECT_EQ(target.memory.Snapshot(), target.expected);
  }
  return std::chrono::duration<double>(fleet.sim.Now()).count();
}

TEST(RateLimit, BoundsWhatAnAgentSends) {
  auto options = OptionsOf({{8, 4, 1, 2}});
  options.tuning.rate_limit = kRate;
  Fleet fleet(options);
  const double whole = 15.0 * kUnit / kRate;
  EXPECT_NEAR(RunToEnd(fleet), whole, 0.05 * whole);
  EXPECT_GT(fleet.metrics.Count("rate_limited_seconds_total{direction=out}"), whole / 2);
}

TEST(RateLimit, BoundsWhatAnAgentReads) {
  auto options = OptionsOf({{8}, {4}, {1}, {2}});
  options.tuning.rate_limit = kRate;
  Fleet fleet(options);
  const double whole = 15.0 * kUnit / kRate;
  EXPECT_NEAR(RunToEnd(fleet), whole, 0.05 * whole);
  EXPECT_GT(fleet.metrics.Count("rate_limited_seconds_total{direction=in}"), whole / 2);
}

TEST(RateLimit, EveryReaderOfAStreamCounts) {
  auto options = OptionsOf({{3}});
  options.engines = 4;
  options.target_agents = 4;
  options.tuning.rate_limit = kRate;
  Fleet fleet(options);
  const double whole = 12.0 * kUnit / kRate;
  EXPECT_NEAR(RunToEnd(fleet), whole, 0.05 * whole);
}

TEST(RateLimit, OfAPeerBoundsOnlyThatPair) {
  auto options = OptionsOf({{8, 4, 1, 2}});
  options.tuning.peer_rate_limit = kRate;
  Fleet fleet(options);
  const double longest = 8.0 * kUnit / kRate;
  EXPECT_NEAR(RunToEnd(fleet), longest, 0.05 * longest);
}

TEST(RateLimit, IsNotForMappedMemory) {
  auto options = OptionsOf({{8, 4}});
  options.map = true;
  options.tuning.rate_limit = kRate;
  Fleet fleet(options);
  EXPECT_LT(RunToEnd(fleet), 0.1 * kUnit / kRate);
}

TEST(RateLimit, AStreamThatWaitsForItsTurnCanBeDrained) {
  auto options = OptionsOf({{8, 4}});
  options.tuning.rate_limit = kRate;
  Fleet fleet(options);
  fleet.StartAll();
  fleet.sim.RunFor(std::chrono::milliseconds(500));
  fleet.DrainTarget(0);
  fleet.DrainSource(0);
  fleet.sim.RunFor(std::chrono::milliseconds(100));
  EXPECT_TRUE(fleet.targets[0].drained);
  EXPECT_TRUE(fleet.sources[0].drained);
  fleet.End();
}

}  // namespace
}  // namespace weightwire::transfer
