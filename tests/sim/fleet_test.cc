#include "tests/sim/fleet.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

// A whole fleet under virtual time: 4 Megatron ranks (tp2, pp2) on two pods publish to engines in
// the layouts of vLLM (tp1, tp2) and Hugging Face on three. Every byte is compared with the oracle
// of the loaders at every flip and after every step.
namespace weightwire::sim {
namespace {

using agent::PublishMode;
using std::chrono::milliseconds;
using std::chrono::seconds;

class FleetTest : public ::testing::Test {
 protected:
  void Make(Fleet::Options options = {}) {
    fleet.emplace(std::move(options));
    ASSERT_TRUE(fleet->Start());
  }
  void ExpectServed(uint64_t version) {
    for (const auto& engine : fleet->engines()) {
      EXPECT_EQ(engine->version(), version) << engine->name();
    }
  }
  std::vector<coordinator::EpochStatus> Epochs(epoch::Kind kind) {
    std::vector<coordinator::EpochStatus> epochs;
    for (const auto& epoch : fleet->coordinator()->Snapshot().epochs) {
      if (epoch.kind == kind) epochs.push_back(epoch);
    }
    return epochs;
  }
  /// Publishes in the background: returns when the newest epoch is in `phase`.
  void PublishUpTo(epoch::Phase phase, uint64_t version, Nanos deadline = seconds(60),
                   uint64_t lineage = coordinator::kFirstLineage) {
    const size_t before = Epochs(epoch::Kind::kPublish).size();
    fleet->trainer().Publish(version, PublishMode::kHold, deadline, lineage);
    ASSERT_TRUE(fleet->RunUntil(
        [&] {
          return Epochs(epoch::Kind::kPublish).size() > before && fleet->NewestPhase() == phase;
        },
        seconds(30)));
  }
  bool TrainerIdle(Nanos span = seconds(60)) {
    return fleet->RunUntil([&] { return fleet->trainer().Idle(); }, span);
  }
  std::optional<Fleet> fleet;
};

TEST_F(FleetTest, PublishesThreeVersionsIntoEveryLayout) {
  Make();
  for (uint64_t version = 1; version <= 3; ++version) {
    const Status status = fleet->Publish(version);
    ASSERT_TRUE(status.ok()) << status.ToString();
    ASSERT_TRUE(fleet->AllServe(version));
  }
  fleet->RunFor(milliseconds(100));  // the last acknowledgement
  const auto epochs = Epochs(epoch::Kind::kPublish);
  ASSERT_EQ(epochs.size(), 3u);
  for (const auto& epoch : epochs) {
    EXPECT_EQ(epoch.phase, epoch::Phase::kCommitted);
    EXPECT_EQ(epoch.attempt, 1u);
    EXPECT_THAT(epoch.engines, ::testing::UnorderedElementsAre("one", "two", "hf"));
    EXPECT_GT(epoch.bytes_by_transport.at("shm"), 0) << "same host: mapped";
    EXPECT_GT(epoch.bytes, epoch.bytes_by_transport.at("shm")) << "other hosts: over the network";
  }
  for (const auto& engine : fleet->engines()) EXPECT_EQ(engine->flips(), 3u) << engine->name();
}

TEST_F(FleetTest, ServesASnapshotAlthoughTheParametersChanged) {
  Make();
  ASSERT_TRUE(fleet->Publish(1).ok());
  ASSERT_TRUE(fleet->AllServe(1));
  fleet->trainer().Publish(2, PublishMode::kSnapshot, seconds(60));
  ASSERT_TRUE(TrainerIdle());  // released, and scribbled over
  EXPECT_TRUE(fleet->trainer().outcome().ok());
  ExpectServed(1);
  ASSERT_TRUE(fleet->AllServe(2));
}

TEST_F(FleetTest, CommitsWithoutAnEngineLostMidTransferAndFillsItFromAPeersStage) {
  Make();
  ASSERT_TRUE(fleet->Publish(1).ok());
  ASSERT_TRUE(fleet->AllServe(1));
  PublishUpTo(epoch::Phase::kTransferring, 2);
  fleet->engine("two").KillRank(1);
  ASSERT_TRUE(TrainerIdle());
  EXPECT_TRUE(fleet->trainer().outcome().ok()) << fleet->trainer().outcome().ToString();
  ASSERT_TRUE(fleet->AllServe(2));
  const auto epochs = Epochs(epoch::Kind::kPublish);
  EXPECT_EQ(epochs[0].phase, epoch::Phase::kCommitted);
  EXPECT_EQ(epochs[0].attempt, 1u) << "it costs its own place, not an attempt";
  EXPECT_THAT(epochs[0].engines, ::testing::UnorderedElementsAre("one", "hf"));
  EXPECT_THAT(epochs[0].left_out, ::testing::ElementsAre("two"));
  const auto fills = Epochs(epoch::Kind::kFill);
  ASSERT_EQ(fills.size(), 1u);
  EXPECT_THAT(fills[0].engines, ::testing::ElementsAre("two"));
  EXPECT_EQ(fleet->engine("two").served()->content, epochs[0].epoch);
}

TEST_F(FleetTest, CommitsAlthoughAnEngineDiesBetweenCommitAndSwap) {
  Make();
  ASSERT_TRUE(fleet->Publish(1).ok());
  ASSERT_TRUE(fleet->AllServe(1));
  Rollout& two = fleet->engine("two");
  two.before_flip = [&] {
    two.before_flip = nullptr;
    two.KillRank(0);
  };
  ASSERT_TRUE(fleet->Publish(2).ok());
  ASSERT_TRUE(fleet->AllServe(2));
  EXPECT_EQ(Epochs(epoch::Kind::kPublish)[0].attempt, 1u) << "a decision is not taken back";
  EXPECT_EQ(Epochs(epoch::Kind::kFill).size(), 1u);
}

TEST_F(FleetTest, B7AnEngineThatHangsIsWaitedForOnceAndCatchesUpWhenItGoesOn) {
  Make();
  ASSERT_TRUE(fleet->Publish(1).ok());
  ASSERT_TRUE(fleet->AllServe(1));
  Rollout& two = fleet->engine("two");
  two.SetStepMax(std::chrono::hours(1'000));
  ASSERT_TRUE(fleet->Publish(2).ok());
  fleet->RunFor(seconds(31));  // the deadline of COMMITTING
  uint64_t version = 2;
  const auto goes_on = [&](uint64_t until) {
    while (version < until) {
      ASSERT_TRUE(fleet->Publish(++version).ok());
      ASSERT_TRUE(fleet->RunUntil(
          [&] {
            return fleet->engine("one").Serves(version) && fleet->engine("hf").Serves(version);
          },
          seconds(5)))
          << version;
    }
  };
  goes_on(5);
  EXPECT_EQ(two.version(), 1u) << "it serves on";
  EXPECT_EQ(two.lives(), 1u) << "nobody has fenced it";
  EXPECT_FALSE(fleet->StatusOf("two").ready);
  fleet->RunFor(seconds(120));
  goes_on(8);
  EXPECT_EQ(two.version(), 1u);
  EXPECT_EQ(two.lives(), 1u);
  two.SetStepMax(milliseconds(20));
  ASSERT_TRUE(fleet->AllServe(8)) << "filled by a peer";
  ASSERT_TRUE(fleet->Publish(9).ok());
  ASSERT_TRUE(fleet->AllServe(9));
}

TEST_F(FleetTest, KeepsTheOldEpochWhenATrainerRankIsLostMidTransfer) {
  Make();
  ASSERT_TRUE(fleet->Publish(1).ok());
  ASSERT_TRUE(fleet->AllServe(1));
  PublishUpTo(epoch::Phase::kTransferring, 2);
  fleet->trainer().KillRank(2);
  ASSERT_TRUE(TrainerIdle());
  EXPECT_FALSE(fleet->trainer().outcome().ok());
  EXPECT_EQ(fleet->NewestPhase(), epoch::Phase::kAborted);
  ExpectServed(1);
  ASSERT_TRUE(fleet->Publish(3).ok());
  ASSERT_TRUE(fleet->AllServe(3));
}

TEST_F(FleetTest, FillsALateJoiner) {
  Fleet::Options options;
  options.engines.push_back({"late", VllmTp2(), {"rollout-a"}});
  fleet.emplace(options);
  fleet->engine("late").SetRestart(false);
  ASSERT_TRUE(fleet->Start());
  fleet->engine("late").KillRank(0);
  fleet->engine("late").KillRank(1);
  ASSERT_TRUE(fleet->Publish(1).ok());
  fleet->RunFor(seconds(2));
  EXPECT_EQ(fleet->engine("late").version(), 0u);
  fleet->engine("late").Start();
  ASSERT_TRUE(fleet->AllServe(1));
  ASSERT_TRUE(fleet->Publish(2).ok());
  ASSERT_TRUE(fleet->AllServe(2));
}

// The new lineage's first version goes on after a cut of everybody, or with the next coordinator;
// from its commit on the trainer of the earlier one is refused. (Rollout compares bytes and order.)
TEST_F(FleetTest, ATrainerThatGoesBackBeginsALineageWhateverHappensAndEndsTheOneBefore) {
  using epoch::Phase;
  for (const Phase phase : {Phase::kPreparing, Phase::kTransferring, Phase::kCommitting}) {
    for (const bool crash : {false, true}) {
      SCOPED_TRACE(std::string(epoch::PhaseName(phase)) + (crash ? ", a crash" : ", a cut"));
      Make();
      for (uint64_t version = 1; version <= 3; ++version) {
        ASSERT_TRUE(fleet->Publish(version).ok());
        ASSERT_TRUE(fleet->AllServe(version));
      }
      fleet->trainer().Restart();
      ASSERT_TRUE(TrainerIdle());
      PublishUpTo(phase, 2, seconds(60), 2);
      if (crash) {
        fleet->CrashCoordinator();
        fleet->RunFor(seconds(1));
        fleet->StartCoordinator();
      } else {
        fleet->CutOff(fleet->Nodes(), true, seconds(3));
      }
      ASSERT_TRUE(TrainerIdle());
      EXPECT_TRUE(fleet->trainer().outcome().ok()) << fleet->trainer().outcome().ToString();
      ASSERT_TRUE(fleet->AllServe(2, seconds(30), 2));
      fleet->RunFor(milliseconds(100));  // the last acknowledgement
      EXPECT_EQ(fleet->StatusOf("two").lineage, 2u);
      fleet->trainer().Restart();
      ASSERT_TRUE(TrainerIdle());
      EXPECT_EQ(fleet->Publish(9).reason(), Reason::kStaleIncarnation) << "it was overtaken";
      ASSERT_TRUE(fleet->AllServe(2, seconds(30), 2));
    }
  }
}

TEST_F(FleetTest, OutlivesTheLossOfEverySession) {
  for (const bool coordinator_learns : {true, false}) {
    for (const char* name : {"rollout-a", "rollout-b", "trainer-a"}) {
      SCOPED_TRACE(std::string(name) + (coordinator_learns ? ", told" : ", by its lease"));
      Make();
      ASSERT_TRUE(fleet->Publish(1).ok());
      ASSERT_TRUE(fleet->AllServe(1));
      PublishUpTo(epoch::Phase::kTransferring, 2);
      fleet->node(name).port().Cut(coordinator_learns);
      ASSERT_TRUE(TrainerIdle());
      EXPECT_TRUE(fleet->trainer().outcome().ok()) << fleet->trainer().outcome().ToString();
      ASSERT_TRUE(fleet->AllServe(2));
      for (const auto& engine : fleet->engines()) EXPECT_EQ(engine->lives(), 1u);
    }
  }
}

// Every rank of every engine serves a committed version at every instant (Rollout checks that
// nothing is taken from one), nothing is published after the cut, and all is well when it is over.
TEST_F(FleetTest, NoCutFromALivingCoordinatorStopsAnEngine) {
  using epoch::Phase;
  const std::vector<std::vector<const char*>> cuts = {
      {"trainer-a", "trainer-b", "rollout-a", "rollout-b", "rollout-c"},
      {"rollout-a", "rollout-b", "rollout-c"},
      {"rollout-b"},
      {"trainer-a", "trainer-b"}};
  for (const Phase phase :
       {Phase::kAborted, Phase::kPreparing, Phase::kTransferring, Phase::kCommitting}) {
    for (size_t who = 0; who < cuts.size(); ++who) {
      for (const bool learns : {true, false}) {
        for (const Nanos span : {Nanos(milliseconds(200)), Nanos(seconds(3)), Nanos(seconds(12))}) {
          SCOPED_TRACE(std::string(epoch::PhaseName(phase)) + ", cut " + std::to_string(who) +
                       (learns ? ", told, " : ", by leases, ") + std::to_string(span.count()));
          Make();
          ASSERT_TRUE(fleet->Publish(1).ok());
          ASSERT_TRUE(fleet->AllServe(1));
          fleet->RunFor(seconds(1));
          const bool publishing = phase != Phase::kAborted;
          if (publishing) PublishUpTo(phase, 2);
          std::vector<Node*> nodes;
          for (const char* name : cuts[who]) nodes.push_back(&fleet->node(name));
          fleet->CutOff(nodes, learns, span);
          fleet->RunFor(span + seconds(25));
          EXPECT_TRUE(TrainerIdle());
          EXPECT_TRUE(fleet->trainer().outcome().ok()) << fleet->trainer().outcome().ToString();
          EXPECT_EQ(fleet->trainer().evictions(), 0u);
          ExpectServed(publishing ? 2 : 1);
          for (const auto& engine : fleet->engines()) {
            EXPECT_EQ(engine->lives(), 1u) << engine->name();
            const auto status = fleet->StatusOf(engine->name());
            EXPECT_EQ(status.state, coordinator::EngineState::kServing) << engine->name();
            EXPECT_TRUE(status.ready) << engine->name();
          }
        }
      }
    }
  }
}

/// "two" alone holds the reward model: nobody could fill it.
Fleet::Options OfTwoModels() {
  Fleet::Options options;
  options.trainer = TwoModels(options.trainer, MegatronTp2());
  for (auto& engine : options.engines) {
    engine.party = EngineOf(engine.name == "two" ? "reward" : "actor", engine.party);
  }
  return options;
}

TEST_F(FleetTest, NoCutWithinALeaseLeavesAModelBehind) {
  using epoch::Phase;
  const std::vector<std::vector<const char*>> cuts = {
      {"trainer-a", "trainer-b", "rollout-a", "rollout-b", "rollout-c"},
      {"rollout-b", "rollout-c"},
      {"rollout-b"}};
  for (const Phase phase :
       {Phase::kAborted, Phase::kPreparing, Phase::kTransferring, Phase::kCommitting}) {
    for (size_t who = 0; who < cuts.size(); ++who) {
      for (const bool learns : {true, false}) {
        for (const bool restart : {false, true}) {
          SCOPED_TRACE(std::string(epoch::PhaseName(phase)) + ", cut " + std::to_string(who) +
                       (learns ? ", told" : ", by leases") + (restart ? ", a restart" : ""));
          Make(OfTwoModels());
          ASSERT_TRUE(fleet->Publish(1).ok());
          ASSERT_TRUE(fleet->AllServe(1));
          const bool before = phase == Phase::kAborted;
          if (!before) PublishUpTo(phase, 2);
          std::vector<Node*> nodes;
          for (const char* name : cuts[who]) nodes.push_back(&fleet->node(name));
          fleet->CutOff(nodes, learns, seconds(3));
          if (restart) {
            fleet->CrashCoordinator();
            fleet->StartCoordinator();
          }
          if (before) {
            // Once the trainer is back; the others have a while to go.
            fleet->RunUntil([&] { return fleet->trainer().Idle(); }, seconds(1));
            fleet->trainer().Publish(2, PublishMode::kHold, seconds(60));
          }
          fleet->RunFor(seconds(30));
          EXPECT_TRUE(TrainerIdle());
          EXPECT_TRUE(fleet->trainer().outcome().ok()) << fleet->trainer().outcome().ToString();
          ExpectServed(2);
        }
      }
    }
  }
}

TEST_F(FleetTest, AnEngineThatStallsPastItsLeaseServesOnAndIsFilled) {
  Make();
  ASSERT_TRUE(fleet->Publish(1).ok());
  ASSERT_TRUE(fleet->AllServe(1));
  fleet->node("rollout-b").port().Stall(seconds(12));
  ASSERT_TRUE(fleet->Publish(2).ok());
  ASSERT_TRUE(fleet->RunUntil(
      [&] { return fleet->engine("one").Serves(2) && fleet->engine("hf").Serves(2); }, seconds(1)));
  EXPECT_TRUE(fleet->engine("two").Serves(1));
  ASSERT_TRUE(fleet->AllServe(2));
  EXPECT_EQ(fleet->engine("two").lives(), 1u);
}

TEST_F(FleetTest, OutlivesAKilledAgent) {
  Make();
  ASSERT_TRUE(fleet->Publish(1).ok());
  PublishUpTo(epoch::Phase::kTransferring, 2);
  fleet->node("rollout-c").Kill(/*coordinator_learns=*/true);
  ASSERT_TRUE(TrainerIdle());
  EXPECT_TRUE(fleet->trainer().outcome().ok()) << fleet->trainer().outcome().ToString();
  ASSERT_TRUE(fleet->RunUntil([&] { return fleet->engine("one").Serves(2); }, seconds(1)));
  fleet->node("rollout-c").Start();
  ASSERT_TRUE(fleet->AllServe(2));
}

TEST_F(FleetTest, ReadsCorruptedBytesAgain) {
  Make();
  transport::FakeLink link = Fleet::Options().link;
  link.corrupt_every_get = 7;
  fleet->SetLinks(link);
  for (uint64_t version = 1; version <= 3; ++version) {
    ASSERT_TRUE(fleet->Publish(version).ok());
    ASSERT_TRUE(fleet->AllServe(version));
  }
}

TEST_F(FleetTest, GivesAVersionUpWhenEveryReadIsCorruptAndInstallsNothing) {
  Make();
  ASSERT_TRUE(fleet->Publish(1).ok());
  ASSERT_TRUE(fleet->AllServe(1));
  transport::FakeLink link = Fleet::Options().link;
  link.corrupt_every_get = 1;
  fleet->SetLinks(link);
  const Status status = fleet->Publish(2);
  EXPECT_EQ(status.reason(), Reason::kDigestMismatch) << status.ToString();
  EXPECT_EQ(Epochs(epoch::Kind::kPublish)[0].attempt, 3u);
  ExpectServed(1);
  fleet->SetLinks(Fleet::Options().link);
  ASSERT_TRUE(fleet->Publish(3).ok());
  ASSERT_TRUE(fleet->AllServe(3));
}

TEST_F(FleetTest, OutlivesABrokenConnectionAtAnyMoment) {
  for (uint64_t operation : {1, 2, 3, 5, 9, 17, 33, 65}) {
    SCOPED_TRACE(operation);
    Make();
    ASSERT_TRUE(fleet->Publish(1).ok());
    ASSERT_TRUE(fleet->AllServe(1));
    transport::FakeLink link = Fleet::Options().link;
    link.drop_at_operation = operation;
    fleet->network.SetLink(fleet->node("rollout-b").tcp_address(),
                           fleet->node("trainer-b").tcp_address(), link);
    const Status status = fleet->Publish(2);
    ASSERT_TRUE(status.ok()) << status.ToString();
    ASSERT_TRUE(fleet->AllServe(2));
  }
}

TEST_F(FleetTest, CommitsWithoutAnEngineWhoseNetworkIsSilentOnceItIsGone) {
  Fleet::Options options;
  options.tuning.get_timeout = seconds(2);
  options.tuning.progress_timeout = seconds(3);
  options.tuning.connect_timeout = seconds(1);
  Make(options);
  ASSERT_TRUE(fleet->Publish(1).ok());
  ASSERT_TRUE(fleet->AllServe(1));
  transport::FakeLink silent;
  silent.silent = true;
  fleet->network.SetLink(fleet->node("rollout-a").tcp_address(),
                         fleet->node("trainer-b").tcp_address(), silent);
  const Status status = fleet->Publish(2);
  EXPECT_EQ(status.reason(), Reason::kDeadlineExceeded) << status.ToString();
  EXPECT_GT(Epochs(epoch::Kind::kPublish)[0].attempt, 3u)
      << "until its deadline, for the engine lives: policy `all`";
  ExpectServed(1);
}

TEST_F(FleetTest, RecoversFromACrashOfTheCoordinatorInEveryPhase) {
  using epoch::Phase;
  for (Phase phase : {Phase::kPreparing, Phase::kTransferring, Phase::kCommitting}) {
    for (uint64_t seed = 1; seed <= 3; ++seed) {
      SCOPED_TRACE(std::string(epoch::PhaseName(phase)) + ", seed " + std::to_string(seed));
      Fleet::Options options;
      options.seed = seed;
      Make(options);
      ASSERT_TRUE(fleet->Publish(1).ok());
      ASSERT_TRUE(fleet->AllServe(1));
      PublishUpTo(phase, 2);
      fleet->CrashCoordinator();
      fleet->RunFor(seconds(1));
      for (const auto& engine : fleet->engines()) EXPECT_NE(engine->version(), 0u) << "serves on";
      fleet->StartCoordinator();
      ASSERT_TRUE(TrainerIdle());
      EXPECT_EQ(fleet->trainer().outcome(), OkStatus()) << "the version goes on";
      ASSERT_TRUE(fleet->AllServe(2));
      EXPECT_EQ(fleet->recalled(), fleet->engines().size());
      ASSERT_TRUE(fleet->Publish(3).ok()) << fleet->trainer().outcome().ToString();
      ASSERT_TRUE(fleet->AllServe(3));
      EXPECT_EQ(fleet->trainer().evictions(), 0u);
      for (const auto& engine : fleet->engines()) EXPECT_EQ(engine->lives(), 1u);
    }
  }
}

TEST_F(FleetTest, StopsDecidingWhenTheJournalFailsAndRecoversByARestart) {
  for (const bool kept : {false, true}) {
    SCOPED_TRACE(kept);
    Make();
    ASSERT_TRUE(fleet->Publish(1).ok());
    ASSERT_TRUE(fleet->AllServe(1));
    PublishUpTo(epoch::Phase::kTransferring, 2);
    fleet->journal.FailNext(kept);
    fleet->RunFor(seconds(5));
    EXPECT_FALSE(fleet->coordinator()->Snapshot().deciding);
    for (const auto& engine : fleet->engines()) EXPECT_LE(engine->version(), 1u);
    fleet->CrashCoordinator();
    fleet->StartCoordinator();
    fleet->RunFor(seconds(1));
    ASSERT_TRUE(TrainerIdle());
    ASSERT_TRUE(fleet->Publish(3).ok());
    ASSERT_TRUE(fleet->AllServe(3));
  }
}

TEST_F(FleetTest, TheWallClockMayJumpByYears) {
  Make();
  ASSERT_TRUE(fleet->Publish(1).ok());
  uint64_t version = 1;
  for (const double jump : {-3e8, 6e8}) {
    ASSERT_TRUE(fleet->AllServe(version));
    PublishUpTo(epoch::Phase::kTransferring, ++version);
    fleet->executor.JumpWall(jump);
    ASSERT_TRUE(TrainerIdle());
    ASSERT_TRUE(fleet->trainer().outcome().ok()) << fleet->trainer().outcome().ToString();
    ASSERT_TRUE(fleet->AllServe(version));
    fleet->RunFor(seconds(20));
  }
  for (const auto& epoch : Epochs(epoch::Kind::kPublish)) EXPECT_EQ(epoch.attempt, 1u);
  for (const auto& engine : fleet->engines()) EXPECT_EQ(engine->lives(), 1u) << engine->name();
}

TEST_F(FleetTest, GoesBackWithoutMovingAByteAndForwardAgain) {
  Make();
  for (uint64_t version : {1, 2}) {
    ASSERT_TRUE(fleet->Publish(version).ok());
    ASSERT_TRUE(fleet->AllServe(version));
  }
  fleet->RunFor(milliseconds(100));  // the last acknowledgement
  for (uint64_t version : {1, 2, 1}) {
    ASSERT_EQ(fleet->Rollback(version), OkStatus());
    ExpectServed(version);
    const auto rollback = Epochs(epoch::Kind::kRollback).front();
    EXPECT_EQ(rollback.bytes, 0);
    EXPECT_EQ(rollback.version, Version{version});
  }
  EXPECT_EQ(fleet->Rollback(7)->reason(), Reason::kStaleVersion);
  ASSERT_TRUE(fleet->Publish(3).ok());
  ASSERT_TRUE(fleet->AllServe(3));
}

TEST_F(FleetTest, ARollbackFillsWhoCameLateOrHasOneBuffer) {
  Fleet::Options options;
  options.engines.push_back({"single", VllmTp2(), {"rollout-a"}, 1});
  Make(options);
  for (uint64_t version : {1, 2}) {
    ASSERT_TRUE(fleet->Publish(version).ok());
    ASSERT_TRUE(fleet->AllServe(version));
  }
  fleet->engine("two").KillRank(0);
  ASSERT_TRUE(fleet->RunUntil([&] { return fleet->engine("two").version() == 0; }, seconds(5)));
  ASSERT_TRUE(fleet->AllServe(2));
  fleet->RunFor(milliseconds(100));
  ASSERT_EQ(fleet->Rollback(1), OkStatus());
  EXPECT_THAT(Epochs(epoch::Kind::kRollback).front().engines,
              ::testing::UnorderedElementsAre("one", "hf"));
  ASSERT_TRUE(fleet->AllServe(1));
  EXPECT_GE(Epochs(epoch::Kind::kFill).size(), 2u);
}

TEST_F(FleetTest, TwoRunsWithOneSeedAreEqual) {
  std::vector<size_t> steps;
  for (int run = 0; run < 2; ++run) {
    Make();
    ASSERT_TRUE(fleet->Publish(1).ok());
    ASSERT_TRUE(fleet->AllServe(1));
    steps.push_back(fleet->executor.tasks_run());
  }
  EXPECT_EQ(steps[0], steps[1]);
}

}  // namespace
}  // namespace weightwire::sim
