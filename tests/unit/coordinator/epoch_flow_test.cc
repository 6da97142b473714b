#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>
#include <tuple>

#include "tests/unit/coordinator/fleet.h"

namespace weightwire::coordinator::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

TEST(CoordinatorEpoch, CommitsOnEveryEngineWhenAllRanksPublished) {
  Fleet fleet;
  const auto trainer = fleet.Trainer(2);
  fleet.Engine("engine-a", 2);
  fleet.Engine("engine-b", 1);
  EXPECT_TRUE(fleet.coordinator->Ready()) << "nothing was ever published";
  fleet.PublishAll(trainer, 1);
  EXPECT_FALSE(fleet.coordinator->Ready());
  fleet.Run();

  const StatusSnapshot status = fleet.coordinator->Snapshot();
  EXPECT_EQ(status.committed_version, Version(1));
  EXPECT_EQ(status.waiting_for, "");
  EXPECT_TRUE(fleet.coordinator->Ready());
  EXPECT_TRUE(fleet.journal.Committed(status.committed));
  for (const char* name : {"engine-a", "engine-b"}) {
    const EngineStatus engine = fleet.EngineNamed(name);
    EXPECT_EQ(engine.state, EngineState::kServing);
    EXPECT_EQ(engine.serving, status.committed);
    EXPECT_EQ(engine.version, Version(1));
    EXPECT_EQ(engine.lag, Version(0));
  }
  for (const auto& member : trainer) EXPECT_TRUE(fleet.Released(member, 1)->ok());
  const auto commits = fleet.Agent("engine-a-agent").All<epoch::CommitCommand>();
  ASSERT_EQ(commits.size(), 2u);
  EXPECT_TRUE(commits[0].leader);
  EXPECT_FALSE(commits[1].leader) << "one rank swaps for its engine";
  const auto installed = fleet.Agent("engine-a-agent").All<epoch::CommittedEverywhereCommand>();
  EXPECT_EQ(installed.size(), 2u);

  const EpochStatus epoch = fleet.Newest();
  EXPECT_EQ(epoch.phase, epoch::Phase::kCommitted);
  EXPECT_EQ(epoch.attempt, 1u);
  EXPECT_EQ(epoch.bytes, 2 * (7 * 3 * 4 + 5 * 2)) << "each engine holds the whole model";
  EXPECT_EQ(epoch.bytes_by_transport.at("tcp"), epoch.bytes);
  EXPECT_EQ(epoch.flip_seconds_max, 0.25);
  EXPECT_TRUE(epoch.waiting_for.empty());
  EXPECT_EQ(fleet.metrics.Value("epochs_total{outcome=committed}"), 1);
  EXPECT_EQ(fleet.metrics.Value("epoch_committed"), static_cast<double>(epoch.epoch.value));
  EXPECT_EQ(fleet.metrics.Value("epoch_phase_seconds{phase=transferring}"), 1);
  EXPECT_EQ(fleet.metrics.Value("invariant_violations_total{id=I2}"), 0);
}

TEST(CoordinatorEpoch, CommitRecordIsOfTheRequiredEngines) {
  Fleet fleet;
  const auto trainer = fleet.Trainer(1);
  fleet.Engine("engine-b");
  fleet.Engine("engine-a");
  fleet.PublishAll(trainer, 7);
  fleet.Run();
  const auto* commit = std::get_if<CommitRecord>(&fleet.journal.durable().back());
  ASSERT_NE(commit, nullptr);
  EXPECT_EQ(commit->version, Version(7));
  EXPECT_EQ(commit->engines, (EngineSum{"engine-a", "engine-b"}));
}

TEST(CoordinatorEpoch, PrepareCarriesPeersTicketsAndReaders) {
  Fleet fleet;
  const auto trainer = fleet.Trainer(2);
  fleet.Engine("engine-a", 1);
  fleet.Engine("engine-b", 1);
  fleet.Engine("engine-c", 2);
  fleet.PublishAll(trainer, 1);
  fleet.Run();
  const auto sources = fleet.Agent("trainer-agent").All<epoch::PrepareCommand>();
  ASSERT_EQ(sources.size(), 2u);
  std::set<Ticket> admitted;
  for (const auto& source : sources) {
    EXPECT_EQ(source.role, epoch::Role::kSource);
    ASSERT_EQ(source.assignments.size(), 2u) << "engines a and b have equal layouts: one plan";
    EXPECT_THAT(
        (std::vector<uint32_t>{source.assignments[0].readers, source.assignments[1].readers}),
        ::testing::UnorderedElementsAre(1, 2));
    for (const auto& [ticket, caller] : source.admitted) admitted.insert(ticket);
    // Engine c's ranks read half each, of two halves at the sources: each from one source only.
    std::set<std::tuple<ParticipantId, uint32_t, Incarnation>> readers, expected;
    for (const epoch::Reader& reader : source.readers) {
      EXPECT_TRUE(readers.emplace(reader.participant, reader.rank, reader.caller).second);
    }
    for (const char* name : {"engine-a-agent", "engine-b-agent", "engine-c-agent"}) {
      for (const auto& target : fleet.Agent(name).All<epoch::PrepareCommand>()) {
        if (!target.sources.contains(source.assignments[0].rank)) continue;
        expected.emplace(target.member.id, target.assignments[0].rank,
                         fleet.Agent(name).incarnation);
      }
    }
    EXPECT_FALSE(readers.empty());
    EXPECT_EQ(readers, expected);
  }
  std::set<Ticket> shown;
  for (const char* name : {"engine-a-agent", "engine-b-agent", "engine-c-agent"}) {
    std::set<Ticket> of_agent;
    for (const auto& target : fleet.Agent(name).All<epoch::PrepareCommand>()) {
      EXPECT_EQ(target.role, epoch::Role::kTarget);
      EXPECT_EQ(target.assignments.size(), 1u);
      EXPECT_EQ(target.content, target.epoch);
      for (const auto& [rank, peer] : target.sources) {
        EXPECT_EQ(peer.agent, fleet.Agent("trainer-agent").id());
        EXPECT_EQ(peer.incarnation, fleet.Agent("trainer-agent").incarnation);
        EXPECT_EQ(peer.host, "host-of-trainer-agent");
        EXPECT_EQ(peer.addresses.at("tcp"), "trainer-agent:1");
        EXPECT_EQ(target.source_participants.at(rank), trainer[rank].id);
        of_agent.insert(peer.ticket);
      }
    }
    EXPECT_EQ(of_agent.size(), 1u) << "one ticket for each pair of agents";
    shown.insert(of_agent.begin(), of_agent.end());
  }
  EXPECT_EQ(shown.size(), 3u);
  EXPECT_EQ(shown, admitted);
}

TEST(CoordinatorEpoch, TicketsAreNewInEveryEpoch) {
  Fleet fleet;
  const auto trainer = fleet.Trainer(1);
  fleet.Engine("engine-a");
  fleet.PublishAll(trainer, 1);
  fleet.Run();
  fleet.PublishAll(trainer, 2);
  fleet.Run();
  const auto prepares = fleet.Agent("trainer-agent").All<epoch::PrepareCommand>();
  ASSERT_EQ(prepares.size(), 2u);
  EXPECT_NE(prepares[0].admitted, prepares[1].admitted);
  EXPECT_LT(prepares[0].epoch, prepares[1].epoch);
}

TEST(CoordinatorEpoch, SecondVersionUsesTheCachedPlan) {
  Fleet fleet;
  const auto trainer = fleet.Trainer(2);
  fleet.Engine("engine-a");
  fleet.PublishAll(trainer, 1);
  fleet.Run();
  EXPECT_EQ(fleet.metrics.Value("plan_cache_hits_total"), 0);
  fleet.PublishAll(trainer, 2);
  fleet.Run();
  EXPECT_EQ(fleet.metrics.Value("plan_cache_hits_total"), 1);
  EXPECT_EQ(fleet.metrics.Value("plan_seconds"), 1);
  EXPECT_EQ(fleet.metrics.Value("plan_bytes"), 7 * 3 * 4 + 5 * 2);
  EXPECT_EQ(fleet.coordinator->Snapshot().committed_version, Version(2));
}

TEST(CoordinatorEpoch, WaitsForTheLastRank) {
  Fleet fleet;
  const auto trainer = fleet.Trainer(3);
  fleet.Engine("engine-a");
  EXPECT_TRUE(fleet.Publish(trainer[0], 1).ok());
  EXPECT_TRUE(fleet.Publish(trainer[2], 1).ok());
  fleet.Run(seconds(1));
  EXPECT_TRUE(fleet.Agent("engine-a-agent").commands.empty());
  EXPECT_EQ(fleet.coordinator->Snapshot().waiting_for, "version 1: trainer/1: publish");
  EXPECT_TRUE(fleet.Publish(trainer[1], 1).ok());
  fleet.Run();
  EXPECT_EQ(fleet.coordinator->Snapshot().committed_version, Version(1));
}

TEST(CoordinatorEpoch, RankThatNeverPublishesIsNamedAtTheDeadline) {
  Fleet fleet;
  const auto trainer = fleet.Trainer(2);
  fleet.Engine("engine-a");
  EXPECT_TRUE(fleet.Publish(trainer[0], 1, false, seconds(7)).ok());
  fleet.Run(milliseconds(6'999));
  EXPECT_FALSE(fleet.Released(trainer[0], 1).has_value());
  fleet.Run(milliseconds(2));
  EXPECT_EQ(fleet.Released(trainer[0], 1)->reason(), Reason::kMissingRank);
  EXPECT_EQ(fleet.Released(trainer[0], 1)->rank(), "trainer/1");
  EXPECT_EQ(fleet.Publish(trainer[1], 1).reason(), Reason::kStaleVersion) << "it was given up";
}

TEST(CoordinatorEpoch, AnAbandonedPublishLeavesARowATraceAndACount) {
  Fleet fleet;
  const auto trainer = fleet.Trainer(2);
  fleet.Engine("engine-a");
  EXPECT_TRUE(fleet.Publish(trainer[0], 1, false, seconds(7)).ok());
  fleet.Run(seconds(3));
  EXPECT_DOUBLE_EQ(fleet.coordinator->Snapshot().waiting_seconds, 3);
  fleet.Run(seconds(5));
  EXPECT_EQ(fleet.metrics.Value("publishes_given_up_total{reason=missing_rank}"), 1);
  const EpochStatus row = fleet.Newest();
  EXPECT_EQ(row.version, Version(1));
  EXPECT_EQ(row.phase, epoch::Phase::kAborted);
  EXPECT_EQ(row.attempt, 0u) << "no epoch began";
  EXPECT_EQ(row.why.reason(), Reason::kMissingRank);
  EXPECT_EQ(row.why.rank(), "trainer/1");
  EXPECT_DOUBLE_EQ(row.total_seconds, 7);
  const auto trace = fleet.coordinator->Describe(row.epoch);
  ASSERT_TRUE(trace.has_value());
  ASSERT_EQ(trace->events.size(), 2u);
  EXPECT_EQ(trace->events[0].who, "trainer/0");
  // One that the ranks went past is one, too; the epoch of the next version has a higher number.
  EXPECT_TRUE(fleet.Publish(trainer[1], 2).ok());
  fleet.PublishAll(trainer, 3);
  fleet.Run();
  EXPECT_EQ(fleet.metrics.Value("publishes_given_up_total{reason=stale_version}"), 1);
  EXPECT_EQ(fleet.coordinator->Snapshot().committed_version, Version(3));
  EXPECT_EQ(fleet.Newest().version, Version(3));
  EXPECT_EQ(fleet.coordinator->Snapshot().epochs.at(1).version, Version(2));
}

TEST(CoordinatorEpoch, WaitsForMinEngines) {
  Options options;
  options.min_engines = 2;
  Fleet fleet(options);
  const auto trainer = fleet.Trainer(1);
  fleet.Engine("engine-a");
  fleet.PublishAll(trainer, 1);
  fleet.Run(seconds(2));
  EXPECT_EQ(fleet.coordinator->Snapshot().waiting_for, "version 1: 1 of 2 engines are complete");
  ASSERT_TRUE(fleet.Register("b", control::GroupRole::kEngine, "engine-b", 0, 2).has_value());
  fleet.Run();
  EXPECT_EQ(fleet.coordinator->Snapshot().waiting_for,
            "version 1: 1 of 2 engines are complete; engine-b/0: layout, engine-b/1: register");
  fleet.Engine("engine-c");
  fleet.Run();
  EXPECT_EQ(fleet.coordinator->Snapshot().committed_version, Version(1));
  EXPECT_EQ(fleet.EngineNamed("engine-b").state, EngineState::kIncomplete);
}

TEST(CoordinatorEpoch, TooFewEnginesUntilTheDeadlineReleasesTheVersion) {
  Fleet fleet;
  const auto trainer = fleet.Trainer(1);
  fleet.PublishAll(trainer, 1, false, seconds(3));
  fleet.Run(seconds(4));
  EXPECT_EQ(fleet.Released(trainer[0], 1)->reason(), Reason::kNotReady);
  EXPECT_EQ(fleet.Released(trainer[0], 1)->code(), Code::kDeadlineExceeded);
}

TEST(CoordinatorEpoch, ManualCommitWaitsForTheOperator) {
  Fleet fleet;
  const auto trainer = fleet.Trainer(1);
  fleet.Engine("engine-a");
  fleet.PublishAll(trainer, 1, /*manual=*/true);
  const Epoch epoch = fleet.Newest().epoch;
  EXPECT_EQ(fleet.coordinator->Commit(epoch).reason(), Reason::kStaleEpoch) << "not staged yet";
  fleet.Run();
  EXPECT_EQ(fleet.Newest().phase, epoch::Phase::kStaged);
  EXPECT_EQ(fleet.EngineNamed("engine-a").state, EngineState::kStaged);
  EXPECT_TRUE(fleet.Released(trainer[0], 1)->ok()) << "staged everywhere: the trainer goes on";
  EXPECT_EQ(fleet.coordinator->Snapshot().committed, Epoch{});
  EXPECT_TRUE(fleet.coordinator->Commit(epoch).ok());
  EXPECT_EQ(fleet.coordinator->Commit(epoch).reason(), Reason::kStaleEpoch) << "too late";
  EXPECT_EQ(fleet.coordinator->Abort(epoch, "no").reason(), Reason::kStaleEpoch);
  fleet.Run();
  EXPECT_EQ(fleet.coordinator->Snapshot().committed, epoch);
  EXPECT_EQ(fleet.coordinator->Commit(epoch).reason(), Reason::kNotRegistered);
}

TEST(CoordinatorEpoch, ManualCommitPastItsDeadlineAborts) {
  Fleet fleet;
  const auto trainer = fleet.Trainer(1);
  fleet.Engine("engine-a");
  fleet.PublishAll(trainer, 1, /*manual=*/true);
  fleet.Run(fleet.options.staged_deadline + seconds(1));
  EXPECT_EQ(fleet.Newest().phase, epoch::Phase::kAborted);
  EXPECT_EQ(fleet.Newest().why.reason(), Reason::kDeadlineExceeded);
  EXPECT_EQ(fleet.coordinator->Snapshot().epochs.size(), 1u)
      << "a version that was released is not tried again";
}

/// Released, but not committed: nobody serves it, and the trainer that made it is gone.
TEST(CoordinatorEpoch, AStagedVersionWhoseTrainerLeftIsTheNextTrainersToPublish) {
  Fleet fleet;
  const auto trainer = fleet.Trainer(1);
  fleet.Engine("engine-a");
  fleet.PublishAll(trainer, 1, /*manual=*/true);
  fleet.Run();
  ASSERT_EQ(fleet.Newest().phase, epoch::Phase::kStaged);
  fleet.Agent("trainer-agent")
      .Report(epoch::LostReport{trainer[0], Status(Code::kAborted, Reason::kMemberLost, "ended")});
  fleet.Run();
  ASSERT_EQ(fleet.Newest().phase, epoch::Phase::kAborted);
  const auto next = fleet.Trainer(1);
  EXPECT_EQ(fleet.Publish(next[0], 1, /*manual=*/true), OkStatus());
  fleet.Run();
  EXPECT_TRUE(fleet.coordinator->Commit(fleet.Newest().epoch).ok());
  fleet.Run();
  EXPECT_EQ(fleet.EngineNamed("engine-a").version, Version(1));
}

TEST(CoordinatorEpoch, OperatorsAbortIsNotTriedAgain) {
  Fleet fleet;
  const auto trainer = fleet.Trainer(1);
  fleet.Engine("engine-a");
  fleet.Agent("engine-a-agent").deaf = [](const epoch::Command& c) {
    return std::holds_alternative<epoch::TransferCommand>(c);
  };
  fleet.PublishAll(trainer, 1);
  fleet.Run();
  const EpochStatus running = fleet.Newest();
  EXPECT_THAT(running.waiting_for, ::testing::ElementsAre("engine-a/0: staged"));
  EXPECT_TRUE(fleet.coordinator->Abort(running.epoch, "changed my mind").ok());
  EXPECT_EQ(fleet.coordinator->Abort(Epoch(99'999), "x").reason(), Reason::kNotRegistered);
  fleet.Run();
  EXPECT_EQ(fleet.Newest().phase, epoch::Phase::kAborted);
  EXPECT_EQ(fleet.Released(trainer[0], 1)->reason(), Reason::kAbortRequested);
  EXPECT_EQ(fleet.coordinator->Snapshot().epochs.size(), 1u);
}

TEST(CoordinatorEpoch, NextVersionWaitsItsTurn) {
  Fleet fleet;
  const auto trainer = fleet.Trainer(1);
  fleet.Engine("engine-a");
  fleet.PublishAll(trainer, 1);
  fleet.PublishAll(trainer, 2);
  fleet.PublishAll(trainer, 3);
  EXPECT_EQ(fleet.Publish(trainer[0], 4).reason(), Reason::kLimitExceeded);
  fleet.Run();
  EXPECT_EQ(fleet.coordinator->Snapshot().committed_version, Version(3));
  const auto epochs = fleet.coordinator->Snapshot().epochs;
  ASSERT_EQ(epochs.size(), 3u);
  EXPECT_GT(epochs[0].epoch, epochs[1].epoch);
  EXPECT_EQ(epochs[2].version, Version(1));
}

TEST(CoordinatorEpoch, CompleteVersionSupersedesAnOlderIncompleteOne) {
  Fleet fleet;
  const auto trainer = fleet.Trainer(2);
  fleet.Engine("engine-a");
  EXPECT_TRUE(fleet.Publish(trainer[0], 1).ok());
  fleet.PublishAll(trainer, 2);
  fleet.Run();
  EXPECT_EQ(fleet.Released(trainer[0], 1)->reason(), Reason::kStaleVersion);
  EXPECT_EQ(fleet.coordinator->Snapshot().committed_version, Version(2));
}

TEST(CoordinatorEpoch, RefusesStaleVersions) {
  Fleet fleet;
  const auto trainer = fleet.Trainer(1);
  fleet.Engine("engine-a");
  fleet.PublishAll(trainer, 5);
  EXPECT_TRUE(fleet.Publish(trainer[0], 5).ok()) << "a repeated call has the same answer";
  fleet.Run();
  for (uint64_t version : {5, 4, 0}) {
    const Status status = fleet.Publish(trainer[0], version);
    EXPECT_EQ(status.reason(), Reason::kStaleVersion) << version;
    EXPECT_EQ(status.rank(), "trainer/0");
  }
}

TEST(CoordinatorEpoch, RanksMustAgreeOnManualCommit) {
  Fleet fleet;
  const auto trainer = fleet.Trainer(2);
  EXPECT_TRUE(fleet.Publish(trainer[0], 1, true).ok());
  EXPECT_EQ(fleet.Publish(trainer[1], 1, false).reason(), Reason::kInvalidRequest);
}

TEST(CoordinatorEpoch, OnlyTrainersWithALayoutPublish) {
  Fleet fleet;
  const auto engine = fleet.Engine("engine-a");
  EXPECT_EQ(fleet.Publish(engine[0], 1).reason(), Reason::kInvalidRequest);
  const auto bare = fleet.Register("t", control::GroupRole::kTrainer, "trainer", 0, 1);
  EXPECT_EQ(fleet.Publish(*bare, 1).reason(), Reason::kNotReady);
  EXPECT_EQ(fleet.Publish({ParticipantId(99), Incarnation(1)}, 1).reason(), Reason::kNotRegistered);
}

TEST(CoordinatorEpoch, UnownedElementIsToldToThePublisher) {
  Fleet fleet;
  const auto member = fleet.Register("t", control::GroupRole::kTrainer, "trainer", 0, 1);
  control::LayoutSubmission half;
  half.member = *member;
  half.canonical = SmallModel();
  half.layout = RowShard(SmallModel(), 0, 2);
  ASSERT_TRUE(fleet.Submit(half).has_value());
  fleet.Engine("engine-a");
  fleet.PublishAll({*member}, 1);
  fleet.Run();
  const auto why = fleet.Released(*member, 1);
  ASSERT_TRUE(why.has_value());
  EXPECT_EQ(why->reason(), Reason::kUnownedElement) << why->ToString();
  EXPECT_THAT(why->rank(), ::testing::HasSubstr("engine-a"));
  EXPECT_TRUE(fleet.Agent("engine-a-agent").commands.empty()) << "an error before the first byte";
  EXPECT_EQ(fleet.Newest().phase, epoch::Phase::kAborted);
  EXPECT_EQ(fleet.coordinator->Snapshot().epochs.size(), 1u) << "no second attempt";
  EXPECT_EQ(fleet.metrics.Value("epoch_aborts_total{reason=unowned_element}"), 1);
}

TEST(CoordinatorEpoch, IsDeterministic) {
  auto run = [] {
    Fleet fleet;
    const auto trainer = fleet.Trainer(2);
    fleet.Engine("engine-a", 2);
    fleet.PublishAll(trainer, 1);
    fleet.Run();
    fleet.Engine("engine-b");
    fleet.Run();
    fleet.PublishAll(trainer, 2);
    fleet.Run(seconds(3));
    return std::pair(fleet.trace, fleet.metrics.values);
  };
  const auto first = run();
  EXPECT_GT(first.first.size(), 20u);
  EXPECT_EQ(first, run());
}

}  // namespace
}  // namespace weightwire::coordinator::testing
