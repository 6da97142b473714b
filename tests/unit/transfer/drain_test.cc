#include <gtest/gtest.h>

#include <algorithm>

#include "tests/unit/transfer/fleet.h"

namespace weightwire::transfer {
namespace {

using std::chrono::milliseconds;
using testing::Fleet;
using testing::FleetOptions;

FleetOptions Small(bool map) {
  FleetOptions options;
  options.seed = 6;
  options.map = map;
  options.shape = {.source_ranks = 2, .target_ranks = 1, .ops_per_stream_max = 4};
  options.target_agents = 1;
  options.link.latency = milliseconds(1);
  options.link.get_jitter_max = milliseconds(2);
  return options;
}

void Poison(const testing::RankMemory& memory) {
  std::fill_n(memory.region->data(), memory.region->size(), std::byte{0xee});
}
bool IsPoisoned(const testing::RankMemory& memory) {
  const auto bytes = memory.Snapshot();
  return std::ranges::all_of(bytes, [](std::byte b) { return b == std::byte{0xee}; });
}

TEST(Drain, TargetIsNeverWrittenAfterwardsAtAnyStep) {
  for (bool map : {false, true}) {
    size_t aborted = 0;
    bool finished_first = false;
    for (size_t steps = 0; !finished_first; ++steps) {
      SCOPED_TRACE((map ? "map, steps " : "get, steps ") + std::to_string(steps));
      Fleet fleet(Small(map));
      fleet.StartAll();
      for (size_t i = 0; i < steps; ++i) fleet.sim.RunOne();
      auto& target = fleet.targets[0];
      finished_first = target.result.has_value();
      fleet.DrainTarget(0);
      ASSERT_TRUE(fleet.sim.RunUntil([&] { return target.drained; }, std::chrono::seconds(60)));
      ASSERT_TRUE(target.result.has_value());
      if (target.result->has_value()) {
        EXPECT_EQ(target.memory.Snapshot(), target.expected);
      } else {
        EXPECT_EQ(target.result->error().code(), Code::kAborted);
        ++aborted;
      }
      Poison(target.memory);
      fleet.sim.RunFor(std::chrono::seconds(60));
      ASSERT_TRUE(IsPoisoned(target.memory));
      fleet.End();
    }
    EXPECT_GT(aborted, 20u);
  }
}

// A source that was drained may free or change its memory: a reader that still says OK must have
// read everything before.
TEST(Drain, SourceIsNotReadAfterwardsAtAnyStep) {
  for (bool map : {false, true}) {
    bool finished_first = false;
    for (size_t steps = 0; !finished_first; ++steps) {
      SCOPED_TRACE((map ? "map, steps " : "get, steps ") + std::to_string(steps));
      Fleet fleet(Small(map));
      fleet.StartAll();
      for (size_t i = 0; i < steps; ++i) fleet.sim.RunOne();
      auto& source = fleet.sources[0];
      finished_first = source.result.has_value();
      fleet.DrainSource(0);
      ASSERT_TRUE(fleet.sim.RunUntil([&] { return source.drained; }, std::chrono::seconds(60)));
      ASSERT_TRUE(source.result.has_value());
      Poison(fleet.source_memory[0]);
      fleet.RunToResults();
      auto& target = fleet.targets[0];
      if (target.result->has_value()) {
        EXPECT_EQ(target.memory.Snapshot(), target.expected);
      } else {
        EXPECT_EQ(target.result->error().code(), Code::kAborted)
            << target.result->error().ToString();
      }
      fleet.End();
      if (HasFailure()) return;
    }
  }
}

TEST(Drain, WaitsForAMappedReaderToClose) {
  FleetOptions options = Small(true);
  options.shape.source_ranks = 1;
  options.tuning.mapped_window = 1;
  Fleet fleet(options);
  fleet.StartAll();
  auto& target = fleet.targets[0];
  // Until the first slots were copied, so that the reader has it mapped.
  ASSERT_TRUE(fleet.sim.RunUntil(
      [&] {
        return fleet.EngineOf(target)
                   .ProgressOf(target.job.epoch, target.job.participant)
                   .bytes_done > 0;
      },
      std::chrono::seconds(1)));
  ASSERT_FALSE(fleet.sources[0].result.has_value());
  fleet.DrainSource(0);
  fleet.sim.RunFor(std::chrono::microseconds(1'500));  // FAIL has arrived, CLOSE has not
  EXPECT_FALSE(fleet.sources[0].drained);
  fleet.sim.RunFor(milliseconds(2));
  EXPECT_TRUE(fleet.sources[0].drained);
}

TEST(Drain, ClosesTheSessionOfAReaderThatDoesNotLetGo) {
  FleetOptions options = Small(true);
  options.shape.source_ranks = 1;
  options.tuning.mapped_window = 1;
  options.tuning.drain_grace = milliseconds(500);
  Fleet fleet(options);
  fleet.StartAll();
  fleet.sim.RunFor(milliseconds(4));
  ASSERT_FALSE(fleet.sources[0].result.has_value());
  transport::FakeLink silent;
  silent.silent = true;
  fleet.network.SetLink("s0", "t0", silent);
  fleet.network.SetLink("t0", "s0", silent);
  fleet.DrainSource(0);
  fleet.sim.RunFor(milliseconds(499));
  EXPECT_FALSE(fleet.sources[0].drained);
  fleet.sim.RunFor(milliseconds(10));
  EXPECT_TRUE(fleet.sources[0].drained);
}

TEST(Drain, UnknownJobIsDrained) {
  Fleet fleet({});
  bool drained = false;
  fleet.source_agents[0].engine->Drain(Epoch(77), ParticipantId(1), [&] { drained = true; });
  EXPECT_FALSE(drained) << "callbacks must not run inside the call";
  fleet.sim.RunFor(milliseconds(1));
  EXPECT_TRUE(drained);
}

TEST(Drain, EveryCallerIsAnswered) {
  Fleet fleet(Small(false));
  fleet.StartAll();
  fleet.sim.RunFor(milliseconds(3));
  int drained = 0;
  auto& job = fleet.targets[0].job;
  for (int i = 0; i < 3; ++i) {
    fleet.EngineOf(fleet.targets[0]).Drain(job.epoch, job.participant, [&] { ++drained; });
  }
  fleet.sim.RunFor(std::chrono::seconds(1));
  EXPECT_EQ(drained, 3);
}

TEST(Drain, FreesTheNameForANewJob) {
  Fleet fleet(Small(false));
  fleet.StartTarget(0);
  fleet.StartTarget(0);
  fleet.sim.RunFor(milliseconds(1));
  ASSERT_TRUE(fleet.targets[0].result.has_value());
  EXPECT_EQ(fleet.targets[0].result->error().code(), Code::kAlreadyExists);
  fleet.targets[0].done_calls = 0;
  fleet.DrainTarget(0);
  fleet.sim.RunFor(milliseconds(100));
  fleet.targets[0].result.reset();
  fleet.targets[0].done_calls = 0;
  fleet.StartAll();
  fleet.RunToResults();
  EXPECT_TRUE(fleet.targets[0].result->has_value());
}

TEST(Shutdown, EndsRunningJobsAndRefusesNewOnes) {
  for (size_t steps = 0; steps < 100; steps += 7) {
    Fleet fleet(Small(steps % 2 == 0));
    fleet.StartAll();
    for (size_t i = 0; i < steps; ++i) fleet.sim.RunOne();
    bool shut = false;
    fleet.target_agents[0].engine->Shutdown([&] { shut = true; });
    ASSERT_TRUE(fleet.sim.RunUntil([&] { return shut; }, std::chrono::seconds(60)));
    ASSERT_TRUE(fleet.targets[0].result.has_value());
    TargetJob job = fleet.targets[0].job;
    job.epoch = Epoch(50);
    std::optional<Result<TargetReport>> result;
    fleet.target_agents[0].engine->StartTarget(job, [&](auto done) { result = std::move(done); });
    fleet.sim.RunFor(milliseconds(1));
    ASSERT_TRUE(result.has_value());
    EXPECT_EQ(result->error().reason(), Reason::kShuttingDown);
    bool again = false;
    fleet.target_agents[0].engine->Shutdown([&] { again = true; });
    fleet.sim.RunFor(milliseconds(1));
    EXPECT_TRUE(again);
  }
}

}  // namespace
}  // namespace weightwire::transfer
