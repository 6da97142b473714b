#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "tests/unit/transfer/fleet.h"

// Readers that are lost, and that the coordinator takes out of the running attempt: the source and
// the other readers end as if they had never been planned.
namespace weightwire::transfer {
namespace {

using std::chrono::milliseconds;
using testing::Fleet;
using testing::FleetOptions;

constexpr size_t kLost = 1;  ///< the engine that is, of three

class ExcludedReader : public ::testing::Test {
 protected:
  static FleetOptions Options(uint64_t seed, bool map) {
    FleetOptions options;
    options.seed = seed;
    options.map = map;
    options.engines = options.target_agents = 3;
    options.shape = {.source_ranks = 2, .target_ranks = 1, .elements_per_op_max = 20'000};
    options.source_agents = 2;
    options.link.latency = milliseconds(1);
    return options;
  }
  void Make(const FleetOptions& options, bool told = true) {
    fleet_.emplace(options);
    for (auto& source : fleet_->sources) source.job.drops_readers = told;
  }
  PlanId plan() const { return fleet_->plan.plan.id; }
  void Exclude(size_t target = kLost) {
    for (auto& source : fleet_->sources) {
      fleet_->EngineOf(source).Exclude(source.job.epoch, source.job.participant, plan(),
                                       {fleet_->targets[target].job.participant});
    }
  }
  void Break(size_t target) {
    for (const auto& agent : fleet_->source_agents) {
      fleet_->network.Break(fleet_->target_agents[target].address, agent.address);
    }
  }
  bool SourcesEnd(Nanos within) {
    return fleet_->sim.RunUntil(
        [&] {
          return std::ranges::all_of(fleet_->sources, [](auto& s) { return s.result.has_value(); });
        },
        within);
  }
  /// All but `kLost` hold every byte, and the sources say of each stream what these wrote.
  void ExpectTheOthersAreDone() {
    std::vector<uint64_t> sent;
    for (const auto& source : fleet_->sources) {
      ASSERT_TRUE(source.result && source.result->has_value())
          << (source.result ? source.result->error().ToString() : "no end");
      for (const StreamDigest& digest : (*source.result)->digests) sent.push_back(digest.digest);
    }
    for (size_t i = 0; i < fleet_->targets.size(); ++i) {
      if (i == kLost) continue;
      const Fleet::Target& target = fleet_->targets[i];
      ASSERT_TRUE(target.result && target.result->has_value()) << i;
      EXPECT_EQ(target.memory.Snapshot(), target.expected);
      std::vector<uint64_t> written;
      for (const StreamDigest& digest : (*target.result)->digests) written.push_back(digest.digest);
      EXPECT_THAT(written, ::testing::UnorderedElementsAreArray(sent));
    }
  }
  std::optional<Fleet> fleet_;
};

TEST_F(ExcludedReader, WhoeverIsLostAtAnyMomentStopsNobodyElse) {
  int before_all_had_come = 0, while_bytes_moved = 0, at_the_end = 0;
  for (const bool map : {false, true}) {
    for (uint64_t seed = 1; seed <= 80; ++seed) {
      SCOPED_TRACE("seed " + std::to_string(seed) + (map ? ", mapped" : ""));
      Make(Options(seed, map));
      fleet_->StartAll();
      for (uint64_t i = testing::Below(fleet_->rng, 400); i > 0 && fleet_->sim.RunOne(); --i) {
      }
      int64_t moved = 0;
      for (const auto& source : fleet_->sources) {
        moved += fleet_->EngineOf(source)
                     .ProgressOf(source.job.epoch, source.job.participant)
                     .bytes_done;
      }
      const bool over = fleet_->targets[kLost].result.has_value();
      ++(over ? at_the_end : moved == 0 ? before_all_had_come : while_bytes_moved);
      const bool first_said = seed % 2 == 0;  // or the session's end is seen first
      if (first_said) Exclude();
      Break(kLost);
      fleet_->sim.RunFor(milliseconds(static_cast<int64_t>(testing::Below(fleet_->rng, 60))));
      Exclude();
      EXPECT_TRUE(SourcesEnd(std::chrono::seconds(20))) << "before anything times out";
      fleet_->RunToResults();
      ExpectTheOthersAreDone();
      fleet_->End();
    }
  }
  EXPECT_GT(before_all_had_come, 5);
  EXPECT_GT(while_bytes_moved, 20);
  EXPECT_GT(at_the_end, 5);
}

TEST_F(ExcludedReader, TheOthersGoOnAtOnceWithoutOneThatNeverCame) {
  Make(Options(3, false));
  for (size_t i = 0; i < fleet_->sources.size(); ++i) fleet_->StartSource(i);
  fleet_->StartTarget(0);
  fleet_->StartTarget(2);
  fleet_->sim.RunFor(std::chrono::seconds(1));
  EXPECT_FALSE(fleet_->targets[0].result.has_value()) << "nothing is packed before all have come";
  Exclude();
  Exclude();                   // again
  fleet_->StartTarget(kLost);  // it comes late
  EXPECT_TRUE(SourcesEnd(std::chrono::seconds(1)));
  fleet_->RunToResults();
  ExpectTheOthersAreDone();
  ASSERT_FALSE(fleet_->targets[kLost].result->has_value()) << "not one byte of it is delivered";
  EXPECT_EQ(fleet_->targets[kLost].result->error().reason(), Reason::kAbortRequested);
  EXPECT_EQ(fleet_->targets[kLost].memory.Snapshot(), fleet_->targets[kLost].before);
  fleet_->End();
}

TEST_F(ExcludedReader, OneThatLivesIsToldAndNobodyWaitsForWhatItKeeps) {
  Make(Options(4, false));
  fleet_->network.SetNic(fleet_->target_agents[kLost].address, {.ingress_bytes_per_second = 1'000});
  fleet_->StartAll();
  fleet_->sim.RunFor(std::chrono::seconds(2));
  EXPECT_FALSE(fleet_->targets[0].result.has_value()) << "slots are free with their last reader";
  Exclude();
  EXPECT_TRUE(SourcesEnd(std::chrono::seconds(5)));
  fleet_->RunToResults();
  EXPECT_EQ(fleet_->targets[kLost].result->error().reason(), Reason::kAbortRequested);
  ExpectTheOthersAreDone();
  fleet_->End();
}

TEST_F(ExcludedReader, AStreamThatHasNoOtherReaderIsOverAndHasNoSum) {
  FleetOptions options = Options(5, false);
  options.engines = options.target_agents = 1;
  Make(options);
  for (size_t i = 0; i < fleet_->sources.size(); ++i) fleet_->StartSource(i);
  fleet_->sim.RunFor(milliseconds(100));
  Exclude(0);
  ASSERT_TRUE(SourcesEnd(std::chrono::seconds(1)));
  for (const auto& source : fleet_->sources) {
    ASSERT_TRUE(source.result->has_value()) << source.result->error().ToString();
    EXPECT_TRUE((*source.result)->digests.empty()) << "nobody read it: there is nothing to compare";
  }
  fleet_->StartTarget(0);
  fleet_->RunToResults();
  EXPECT_FALSE(fleet_->targets[0].result->has_value());
  fleet_->End();
}

TEST_F(ExcludedReader, TheWordIsAwaitedForABoundedTime) {
  for (const bool told : {true, false}) {
    Make(Options(6, false), told);
    fleet_->StartAll();
    fleet_->sim.RunFor(milliseconds(15));
    Break(kLost);
    const auto others_done = [&] {
      return fleet_->targets[0].result.has_value() && fleet_->targets[2].result.has_value();
    };
    ASSERT_TRUE(fleet_->sim.RunUntil(others_done, std::chrono::minutes(1)));
    const Nanos timeout =
        fleet_->sources[0].job.drops_readers ? testing::SmallTuning().progress_timeout : Nanos(0);
    fleet_->sim.RunFor(milliseconds(100));
    EXPECT_EQ(fleet_->sources[0].result.has_value(), !told);
    EXPECT_TRUE(SourcesEnd(timeout + std::chrono::seconds(1)));
    ASSERT_FALSE(fleet_->sources[0].result->has_value());
    EXPECT_EQ(fleet_->sources[0].result->error().reason(), Reason::kTransportFailed);
    Exclude();
    fleet_->End();
  }
}

TEST_F(ExcludedReader, ARelayGoesOnWithoutItsReader) {
  FleetOptions options = Options(7, false);
  options.chain = true;
  options.engines = options.target_agents = 2;
  Make(options);
  for (size_t i = 0; i < fleet_->sources.size(); ++i) fleet_->StartSource(i);
  fleet_->StartTarget(0);  // engine 1, which reads from it, never comes
  fleet_->sim.RunFor(std::chrono::seconds(1));
  EXPECT_TRUE(fleet_->targets[0].result.has_value());
  EXPECT_EQ(fleet_->targets[0].relay_done_calls, 0) << "it waits for its reader";
  Fleet::Target& relay = fleet_->targets[0];
  fleet_->EngineOf(relay).Exclude(relay.job.epoch, relay.job.participant, plan(),
                                  {fleet_->targets[kLost].job.participant});
  fleet_->sim.RunFor(milliseconds(10));
  EXPECT_EQ(relay.relay_done_calls, 1);
  EXPECT_EQ(relay.memory.Snapshot(), relay.expected);
  fleet_->End();
}

TEST_F(ExcludedReader, OfAnotherPlanOrJobNothingChanges) {
  Make(Options(8, false));
  fleet_->StartAll();
  for (auto& source : fleet_->sources) {
    const ParticipantId reader = fleet_->targets[kLost].job.participant;
    Engine& engine = fleet_->EngineOf(source);
    engine.Exclude(source.job.epoch, source.job.participant, PlanId{1, 2}, {reader});
    engine.Exclude(Epoch(77), source.job.participant, plan(), {reader});
    engine.Exclude(source.job.epoch, ParticipantId(77), plan(), {reader});
    engine.Exclude(source.job.epoch, source.job.participant, plan(), {});
  }
  fleet_->RunToResults();
  for (const auto& target : fleet_->targets) {
    ASSERT_TRUE(target.result->has_value());
    EXPECT_EQ(target.memory.Snapshot(), target.expected);
  }
  ExpectTheOthersAreDone();
  fleet_->End();
}

}  // namespace
}  // namespace weightwire::transfer
