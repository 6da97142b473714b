#include <gtest/gtest.h>

#include <algorithm>

#include "tests/unit/transfer/fleet.h"

namespace weightwire::transfer {
namespace {

using testing::Below;
using testing::ExpectArrived;
using testing::Fleet;
using testing::FleetOptions;
using testing::RandomFleet;

TEST(Transfer, EveryByteArrivesAndNoOtherIsTouched) {
  const uint64_t first = testing::SeedOr(1);
  for (uint64_t seed = first; seed < first + 150; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const FleetOptions options = RandomFleet(seed);
    Fleet fleet(options);
    fleet.StartAll();
    ExpectArrived(fleet, options.engines);
    if (HasFailure()) return;
  }
}

// Readers that open before, between and after the sources start.
TEST(Transfer, OpensThatComeBeforeTheSourceStartsAreKept) {
  for (bool map : {false, true}) {
    FleetOptions options;
    options.map = map;
    options.engines = 2;
    Fleet fleet(options);
    fleet.StartTarget(0);
    fleet.StartTarget(1);
    fleet.sim.RunFor(std::chrono::seconds(1));
    for (size_t i = 0; i < fleet.sources.size(); ++i) fleet.StartSource(i);
    fleet.sim.RunFor(std::chrono::seconds(1));
    EXPECT_FALSE(fleet.targets[0].result.has_value());
    fleet.StartTarget(2);
    fleet.StartTarget(3);
    ExpectArrived(fleet, options.engines);
  }
}

TEST(Transfer, OneSlotServesManyStreamsAndReaders) {
  const uint64_t first = testing::SeedOr(1);
  for (uint64_t seed = first; seed < first + 20; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    FleetOptions options;
    options.seed = seed;
    options.shape = {.source_ranks = 3, .target_ranks = 5, .ops_per_stream_max = 8};
    options.engines = 2;
    options.source_agents = 1;
    options.tuning.slots_in_pool = 1;
    options.tuning.window = 4;
    Fleet fleet(options);
    fleet.StartAll();
    ExpectArrived(fleet, options.engines);
  }
}

// Agents that are source and target for each other at once, with one slot each: a pool that both
// sides shared could wait in a circle.
TEST(Transfer, TwoFleetsThatFeedEachOtherShareNoSlots) {
  FleetOptions options;
  options.tuning.slots_in_pool = 1;
  Fleet fleet(options);
  std::deque<Fleet::Target> back;
  std::deque<Fleet::Source> forth;
  // The target ranks' memory as sources of a second plan with the roles exchanged.
  testing::RandomPlan plan = testing::MakeRandomPlan(fleet.rng, {1, 1, 6, 4'000});
  auto source_memory = testing::MakeMemory(fleet.rng, plan.source_tensor_bytes[0]);
  testing::TameFloats(fleet.rng, plan.plan, 0, source_memory);
  auto target_memory = testing::MakeMemory(fleet.rng, plan.target_tensor_bytes[0]);
  const auto expected = testing::Expected(plan.plan, 0, target_memory, {source_memory});
  SourceJob source;
  source.epoch = Epoch(6);
  source.participant = ParticipantId(1'000);
  source.assignments = {
      {std::make_shared<plan::RankSlice>(plan::SliceOf(plan.plan, plan::Side::kSource, 0)), 1}};
  source.binding = source_memory.binding;
  TargetJob target;
  target.epoch = Epoch(6);
  target.participant = ParticipantId(10);
  target.slice =
      std::make_shared<plan::RankSlice>(plan::SliceOf(plan.plan, plan::Side::kTarget, 0));
  target.binding = target_memory.binding;
  Peer peer;
  peer.incarnation = fleet.target_agents[0].incarnation;
  peer.addresses = {{"fake", fleet.target_agents[0].address}};
  peer.ticket = {99};
  target.sources = {{0, peer}};
  target.source_participants = {{0, source.participant}};
  fleet.target_agents[0].engine->AdmitTicket({99}, fleet.source_agents[0].incarnation);

  std::optional<Result<TargetReport>> result;
  fleet.StartAll();
  fleet.target_agents[0].engine->StartSource(source, [](Result<SourceReport>) {});
  fleet.source_agents[0].engine->StartTarget(
      target, [&](Result<TargetReport> done) { result = std::move(done); });
  ExpectArrived(fleet, 1);
  ASSERT_TRUE(result.has_value());
  ASSERT_TRUE(result->has_value()) << result->error().ToString();
  EXPECT_EQ(target_memory.Snapshot(), expected);
}

TEST(Transfer, FullNotifyQueuesOnlySlowItDown) {
  for (bool map : {false, true}) {
    FleetOptions options;
    options.map = map;
    options.shape = {.source_ranks = 4, .target_ranks = 4, .ops_per_stream_max = 4};
    options.source_agents = 1;
    options.target_agents = 1;
    options.link.latency = std::chrono::milliseconds(1);
    options.notifies_queued_max = 1;
    Fleet fleet(options);
    fleet.StartAll();
    ExpectArrived(fleet, 1);
  }
}

TEST(Transfer, SecondEpochReusesTheSessions) {
  FleetOptions options;
  options.source_agents = 1;
  options.target_agents = 1;
  Fleet fleet(options);
  fleet.StartAll();
  ExpectArrived(fleet, 1);
  for (auto& source : fleet.sources) source.result.reset();
  for (auto& target : fleet.targets) {
    target.result.reset();
    std::ranges::copy(target.before, target.memory.region->data());
    target.job.epoch = Epoch(9);
    // A new session would need this ticket.
    for (auto& [rank, peer] : target.job.sources) peer.ticket = {1, 2, 3};
  }
  for (auto& source : fleet.sources) source.job.epoch = Epoch(9);
  fleet.StartAll();
  fleet.RunToResults();
  for (auto& target : fleet.targets) {
    ASSERT_TRUE(target.result->has_value()) << target.result->error().ToString();
    EXPECT_EQ(target.memory.Snapshot(), target.expected);
    target.done_calls = 1;
  }
  for (auto& source : fleet.sources) source.done_calls = 1;
}

TEST(Transfer, SliceWithoutStreamsIsFilledAtOnce) {
  Fleet fleet({});
  fleet.targets[0].job.slice = std::make_shared<plan::RankSlice>();
  fleet.StartTarget(0);
  fleet.sim.RunFor(std::chrono::seconds(1));
  ASSERT_TRUE(fleet.targets[0].result.has_value());
  EXPECT_TRUE(fleet.targets[0].result->has_value());
}

TEST(Transfer, CountsBytesOnBothSidesAndJobsOnce) {
  FleetOptions options;
  options.engines = 2;
  Fleet fleet(options);
  fleet.StartAll();
  ExpectArrived(fleet, 2);
  const auto bytes = static_cast<double>(2 * fleet.plan.plan.bytes_total);
  EXPECT_EQ(fleet.metrics.Count("transfer_bytes_total{direction=in,transport=fake}"), bytes);
  EXPECT_EQ(fleet.metrics.Count("transfer_bytes_total{direction=out,transport=fake}"), bytes);
  EXPECT_EQ(fleet.metrics.Count("transfers_started_total"), 4);
  EXPECT_EQ(fleet.metrics.Count("transfers_finished_total{result=ok}"), 4);
  EXPECT_EQ(fleet.metrics.Count("transfer_seconds{transport=fake}"), 4);
}

TEST(Transfer, ProgressRisesToTheTotal) {
  FleetOptions options;
  options.link.latency = std::chrono::milliseconds(1);
  Fleet fleet(options);
  fleet.StartAll();
  auto& target = fleet.targets[0];
  int64_t last = 0;
  int64_t total = 0;
  while (!target.result.has_value() && fleet.sim.RunOne()) {
    const auto progress =
        fleet.EngineOf(target).ProgressOf(target.job.epoch, target.job.participant);
    if (progress.bytes_total == 0) continue;
    EXPECT_GE(progress.bytes_done, last);
    last = progress.bytes_done;
    total = progress.bytes_total;
  }
  int64_t planned = 0;
  for (const auto& stream : target.job.slice->streams) planned += stream.bytes;
  EXPECT_EQ(total, planned);
  EXPECT_EQ((*target.result)->bytes, planned);
  EXPECT_GT(last, 0);
}

TEST(Transfer, LongRunsAreNotPacked) {
  for (int64_t run_min : {int64_t{1}, int64_t{1} << 30}) {
    FleetOptions options;
    options.seed = 3;
    options.tuning.direct_run_bytes_min = run_min;
    Fleet fleet(options);
    fleet.StartAll();
    ExpectArrived(fleet, 1);
    int64_t packed = 0;
    for (auto& source : fleet.sources) packed += (*source.result)->bytes_packed;
    if (run_min == 1) {
      EXPECT_LT(packed, fleet.plan.plan.bytes_total);
    } else {
      EXPECT_EQ(packed, fleet.plan.plan.bytes_total);
    }
  }
}

TEST(Transfer, MappedReadersNeedNoPackingAtAll) {
  FleetOptions options;
  options.map = true;
  options.engines = 2;
  options.tuning.direct_run_bytes_min = 1 << 30;
  Fleet fleet(options);
  fleet.StartAll();
  ExpectArrived(fleet, 2);
  for (auto& source : fleet.sources) EXPECT_EQ((*source.result)->bytes_packed, 0);
}

TEST(Transfer, ReadersOfOneStreamMayDifferInKind) {
  const uint64_t first = testing::SeedOr(1);
  for (uint64_t seed = first; seed < first + 20; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    FleetOptions options;
    options.seed = seed;
    options.map = true;
    options.odd_targets_map = false;
    options.tuning.direct_run_bytes_min = 1 << 20;
    options.engines = 3;
    options.shape = {.source_ranks = 2, .target_ranks = 1, .elements_per_op_max = 10'000};
    options.target_agents = 3;
    Fleet fleet(options);
    fleet.StartAll();
    ExpectArrived(fleet, options.engines);
    EXPECT_GT((*fleet.sources[0].result)->bytes_packed, 0);
  }
}

}  // namespace
}  // namespace weightwire::transfer
