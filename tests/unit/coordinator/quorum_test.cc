#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/unit/coordinator/fleet.h"

namespace weightwire::coordinator::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

Options With(CommitPolicy policy) {
  Options options;
  options.commit_policy = policy;
  return options;
}

/// Three engines that serve version 1; engine-c is slow from then on: it answers no transfer.
struct SlowFleet : Fleet {
  explicit SlowFleet(CommitPolicy policy, uint64_t features = control::kFeatureExclude)
      : Fleet(With(policy)) {
    agent_features |= features;
    trainer = Trainer(1);
    for (const char* name : {"engine-a", "engine-b", "engine-c"}) Engine(name);
    PublishAll(trainer, 1);
    Run();
    EXPECT_EQ(coordinator->Snapshot().committed_version, Version(1));
    Agent("engine-c-agent").deaf = [this](const epoch::Command& command) {
      return slow && std::holds_alternative<epoch::TransferCommand>(command);
    };
  }
  CommitRecord LastCommit() {
    CommitRecord last;
    for (const auto& record : journal.durable()) {
      if (const auto* commit = std::get_if<CommitRecord>(&record)) last = *commit;
    }
    return last;
  }
  bool slow = true;
  std::vector<epoch::Member> trainer;
};

constexpr CommitPolicy kTwo{CommitPolicy::Kind::kQuorum, 2, milliseconds(500)};

TEST(CoordinatorQuorum, GoesOnWithoutALaggardAfterTheGrace) {
  SlowFleet fleet(kTwo);
  fleet.PublishAll(fleet.trainer, 2);
  fleet.Run(milliseconds(400));
  EXPECT_FALSE(fleet.Released(fleet.trainer[0], 2).has_value()) << "the grace has not passed";
  fleet.Run(milliseconds(300));
  EXPECT_EQ(fleet.Released(fleet.trainer[0], 2), OkStatus());
  EXPECT_EQ(fleet.LastCommit().engines, (EngineSum{"engine-a", "engine-b"}))
      << "COMMIT is of those who were required";
  const auto publish = fleet.coordinator->Snapshot().epochs;
  const auto committed = std::find_if(publish.begin(), publish.end(), [](const EpochStatus& e) {
    return e.kind == epoch::Kind::kPublish;
  });
  EXPECT_EQ(committed->attempt, 1u) << "its lateness costs its own place, not an attempt";
  EXPECT_THAT(committed->left_out, ElementsAre("engine-c"));
  EXPECT_EQ(fleet.metrics.Value("engines_left_behind_total"), 1);
}

/// An older agent cannot drop a reader: the others are tried again without it.
TEST(CoordinatorQuorum, ALaggardThatCannotBeDroppedCostsAnAttempt) {
  SlowFleet fleet(kTwo, 0);
  fleet.PublishAll(fleet.trainer, 2);
  fleet.Run(seconds(1));
  EXPECT_EQ(fleet.LastCommit().engines, (EngineSum{"engine-a", "engine-b"}));
  const auto epochs = fleet.coordinator->Snapshot().epochs;
  const auto last = std::ranges::find(epochs, epoch::Kind::kPublish, &EpochStatus::kind);
  EXPECT_EQ(last->attempt, 2u);
  EXPECT_EQ(fleet.metrics.Value("engines_left_behind_total"), 1);
}

/// Whom it would read from is out, too: only who is left is told.
TEST(CoordinatorQuorum, ALateRelayIsExcludedTogetherWithWhoReadsFromIt) {
  Options options = With({CommitPolicy::Kind::kQuorum, 1, milliseconds(500)});
  options.fanout = Fanout::kChain;
  Fleet fleet(options);
  fleet.agent_features |= control::kFeatureExclude;
  const auto trainer = fleet.Trainer(1);
  for (const char* name : {"engine-a", "engine-b", "engine-c"}) fleet.Engine(name);
  for (const char* agent : {"trainer-agent", "engine-b-agent", "engine-c-agent"}) {
    fleet.Agent(agent).deaf = [](const epoch::Command& command) {
      return std::holds_alternative<epoch::TransferCommand>(command);
    };
  }
  fleet.PublishAll(trainer, 1);
  fleet.Run(seconds(1));
  EXPECT_EQ(fleet.Agent("engine-a-agent").All<epoch::ExcludeCommand>().size(), 1u);
  EXPECT_TRUE(fleet.Agent("engine-b-agent").All<epoch::ExcludeCommand>().empty());
  EXPECT_EQ(fleet.Newest().phase, epoch::Phase::kTransferring) << "the trainer is not done";
  fleet.Agent("trainer-agent").deaf = nullptr;
  fleet.Agent("trainer-agent")
      .OnCommand(*fleet.Agent("trainer-agent").Last<epoch::TransferCommand>());
  fleet.Run();
  EXPECT_EQ(fleet.coordinator->Snapshot().committed_version, Version(1));
  const auto epochs = fleet.coordinator->Snapshot().epochs;
  const auto publish = std::ranges::find(epochs, epoch::Kind::kPublish, &EpochStatus::kind);
  EXPECT_EQ(publish->attempt, 1u);
  EXPECT_THAT(publish->left_out, ElementsAre("engine-b", "engine-c"));
  EXPECT_EQ(fleet.metrics.Value("engines_left_behind_total"), 2);
}

TEST(CoordinatorQuorum, SourcesAndRelaysLeaveReadersBehindThatNobodyNeeds) {
  const auto limits = [](CommitPolicy policy) {
    Options options = With(policy);
    options.fanout = Fanout::kChain;
    Fleet fleet(options);
    const auto trainer = fleet.Trainer(1);
    for (const char* name : {"engine-a", "engine-b", "engine-c"}) fleet.Engine(name);
    fleet.PublishAll(trainer, 1);
    fleet.Run();
    std::vector<Nanos> told;
    for (const char* agent :
         {"trainer-agent", "engine-a-agent", "engine-b-agent", "engine-c-agent"}) {
      told.push_back(fleet.Agent(agent).All<epoch::PrepareCommand>().at(0).stall_limit);
    }
    return told;
  };
  EXPECT_THAT(limits(kTwo), ElementsAre(kTwo.grace, kTwo.grace, kTwo.grace, Nanos(0)));
  const CommitPolicy three{CommitPolicy::Kind::kQuorum, 3, milliseconds(500)};
  EXPECT_THAT(limits(three), ::testing::Each(Nanos(0))) << "all are needed";
  EXPECT_THAT(limits({CommitPolicy::Kind::kAll}), ::testing::Each(Nanos(0)));
  EXPECT_THAT(limits({CommitPolicy::Kind::kDeadline}), ::testing::Each(Nanos(0)))
      << "everybody has until the deadline";
}

TEST(CoordinatorQuorum, ALaggardIsNotReadyUntilItIsFilled) {
  SlowFleet fleet(kTwo);
  fleet.PublishAll(fleet.trainer, 2);
  fleet.Run(seconds(1));
  EXPECT_TRUE(fleet.EngineNamed("engine-a").ready);
  EXPECT_FALSE(fleet.EngineNamed("engine-c").ready);
  EXPECT_EQ(fleet.EngineNamed("engine-c").lag, Version(1));
  EXPECT_THAT(fleet.EngineNamed("engine-c").last_error, HasSubstr("left behind: engine-c"));
  EXPECT_EQ(fleet.Newest().kind, epoch::Kind::kFill) << "at once, from a peer";
  fleet.slow = false;
  fleet.Run(fleet.options.transfer_deadline + seconds(1));
  EXPECT_EQ(fleet.EngineNamed("engine-c").version, Version(2));
  EXPECT_TRUE(fleet.EngineNamed("engine-c").ready);
}

TEST(CoordinatorQuorum, WhoIsInTimeIsRequiredAgain) {
  SlowFleet fleet(kTwo);
  fleet.PublishAll(fleet.trainer, 2);
  fleet.Run(seconds(1));
  fleet.slow = false;
  fleet.PublishAll(fleet.trainer, 3);
  fleet.Run();
  EXPECT_EQ(fleet.LastCommit().engines, (EngineSum{"engine-a", "engine-b", "engine-c"}));
}

TEST(CoordinatorQuorum, BelowTheQuorumNothingIsCommitted) {
  SlowFleet fleet({CommitPolicy::Kind::kQuorum, 3, milliseconds(500)});
  fleet.PublishAll(fleet.trainer, 2);
  fleet.Run(seconds(60));
  EXPECT_EQ(fleet.coordinator->Snapshot().committed_version, Version(1));
  EXPECT_TRUE(fleet.coordinator->Evict("engine-c", "test").ok());
  fleet.Run(seconds(1));
  EXPECT_EQ(fleet.coordinator->Snapshot().committed_version, Version(1));
  EXPECT_THAT(fleet.coordinator->Snapshot().waiting_for, HasSubstr("2 of 3 engines"));
}

TEST(CoordinatorQuorum, AnEngineThatFailsIsLeftOutAtOnce) {
  SlowFleet fleet(kTwo);
  fleet.slow = false;
  fleet.Agent("engine-c-agent").deaf = [&](const epoch::Command& command) {
    const auto* transfer = std::get_if<epoch::TransferCommand>(&command);
    if (transfer == nullptr) return false;
    fleet.Agent("engine-c-agent")
        .Report(epoch::FailedReport{transfer->epoch, transfer->member,
                                    Status(Code::kUnavailable, Reason::kTransportFailed, "test")});
    return true;
  };
  fleet.PublishAll(fleet.trainer, 2);
  fleet.Run();
  EXPECT_EQ(fleet.LastCommit().engines, (EngineSum{"engine-a", "engine-b"}));
}

TEST(CoordinatorQuorum, ThePolicyDeadlineWaitsForThePhasesDeadline) {
  SlowFleet fleet({CommitPolicy::Kind::kDeadline, 0, milliseconds(500)});
  fleet.PublishAll(fleet.trainer, 2, false, seconds(200));
  fleet.Run(fleet.options.transfer_deadline - seconds(1));
  EXPECT_EQ(fleet.coordinator->Snapshot().committed_version, Version(1));
  fleet.Run(seconds(2));
  EXPECT_EQ(fleet.LastCommit().engines, (EngineSum{"engine-a", "engine-b"}));
}

TEST(CoordinatorQuorum, ThePolicyAllWaitsForEverybody) {
  SlowFleet fleet({});
  fleet.PublishAll(fleet.trainer, 2);
  fleet.Run(seconds(90));
  EXPECT_EQ(fleet.coordinator->Snapshot().committed_version, Version(1));
}

}  // namespace
}  // namespace weightwire::coordinator::testing
