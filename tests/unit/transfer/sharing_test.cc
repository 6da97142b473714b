#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "server/plan/fluid.h"
#include "tests/unit/transfer/fleet.h"

// Who gets how much of a link that is too narrow for all: the engine itself, under virtual time,
// over addresses whose bytes pass one after another.
namespace weightwire::transfer {
namespace {

using testing::Fleet;
using testing::FleetOptions;
using Matrix = std::vector<std::vector<int64_t>>;

constexpr uint64_t kBytesPerSecond = 1'000'000;
constexpr double kUnit = 400'000;  ///< bytes of 1 in a matrix: some fifty slots

double Seconds(Nanos time) { return std::chrono::duration<double>(time).count(); }

// `units[source][target]`; each rank on an agent of its own.
FleetOptions OptionsOf(const Matrix& units, uint32_t slots_in_pool) {
  FleetOptions options;
  options.shape.source_ranks = options.source_agents = static_cast<uint32_t>(units.size());
  options.shape.target_ranks = options.target_agents = static_cast<uint32_t>(units[0].size());
  options.stream_bytes = units;
  for (auto& row : options.stream_bytes) {
    for (int64_t& bytes : row) bytes *= static_cast<int64_t>(kUnit);
  }
  // As many bytes of slots as of Gets, as in the defaults; and much to divide.
  options.tuning.slots_in_pool = slots_in_pool;
  options.tuning.window = 32;
  options.tuning.chunk_bytes = options.tuning.slot_bytes;
  options.tuning.gets_in_flight = options.tuning.window;
  options.tuning.mapped_window = options.tuning.window;
  return options;
}

void LimitAll(Fleet& fleet, transport::FakeNic nic) {
  for (const auto& agent : fleet.source_agents) fleet.network.SetNic(agent.address, nic);
  for (const auto& agent : fleet.target_agents) fleet.network.SetNic(agent.address, nic);
}

// When each job of the side ended.
template <typename Jobs>
std::vector<double> RunToEnds(Fleet& fleet, const Jobs& jobs) {
  fleet.StartAll();
  std::vector<double> ends(jobs.size(), 0);
  const bool all = fleet.sim.RunUntil(
      [&] {
        for (size_t i = 0; i < jobs.size(); ++i) {
          if (ends[i] == 0 && jobs[i].result) ends[i] = Seconds(fleet.sim.Now());
        }
        return std::ranges::all_of(ends, [](double end) { return end > 0; });
      },
      std::chrono::minutes(10));
  EXPECT_TRUE(all);
  for (const auto& job : jobs) EXPECT_TRUE(job.result->has_value());
  return ends;
}

TEST(Sharing, StreamsOfOneSourceEndTogether) {
  for (uint32_t slots_in_pool : {3, 32}) {  // fewer than streams; as many as the window
    Fleet fleet(OptionsOf({{8, 4, 1, 2}}, slots_in_pool));
    LimitAll(fleet, {.egress_bytes_per_second = kBytesPerSecond});
    const std::vector<double> ends = RunToEnds(fleet, fleet.targets);
    const double whole = 15.0 * kUnit / kBytesPerSecond;
    for (double end : ends) EXPECT_NEAR(end, whole, 0.08 * whole);
  }
}

TEST(Sharing, StreamsOfOneTargetEndTogether) {
  Fleet fleet(OptionsOf({{8}, {4}, {1}, {2}}, 32));
  LimitAll(fleet, {.ingress_bytes_per_second = kBytesPerSecond});
  const std::vector<double> ends = RunToEnds(fleet, fleet.sources);
  const double whole = 15.0 * kUnit / kBytesPerSecond;
  for (double end : ends) EXPECT_NEAR(end, whole, 0.08 * whole);
}

// Plans that equal shares would make 17 % and 22 % longer than the busiest link (plan/fluid.h).
TEST(Sharing, LastsAsLongAsTheBusiestLinkWhereEqualSharesWouldNot) {
  for (const Matrix& units :
       {Matrix{{8, 1, 1, 1}, {4, 1, 1, 1}}, Matrix{{1, 4, 2, 2}, {1, 1, 2, 4}, {2, 4, 1, 2}}}) {
    Fleet fleet(OptionsOf(units, 32));
    LimitAll(fleet, {kBytesPerSecond, kBytesPerSecond});
    const std::vector<double> ends = RunToEnds(fleet, fleet.targets);
    const double measured = *std::ranges::max_element(ends) * kBytesPerSecond;
    EXPECT_GT(plan::RunFluid(fleet.plan.plan, plan::Sharing::kEqual).end, 1.1 * measured);
    EXPECT_NEAR(plan::RunFluid(fleet.plan.plan, plan::Sharing::kByBytes).end, measured,
                0.05 * measured);
  }
}

// Copying takes no time here, so that a stream gets one window in each round trip.
TEST(Sharing, StreamsThatAreMappedEndTogether) {
  FleetOptions options = OptionsOf({{8, 4, 1, 3}}, 32);
  options.map = true;
  options.link.latency = std::chrono::milliseconds(10);
  Fleet fleet(options);
  const std::vector<double> ends = RunToEnds(fleet, fleet.targets);
  const auto [first, last] = std::ranges::minmax(ends);
  EXPECT_NEAR(first, last, 0.06 * last);
}

}  // namespace
}  // namespace weightwire::transfer
