#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/unit/coordinator/fleet.h"

namespace weightwire::coordinator::testing {
namespace {

using std::chrono::seconds;
using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(CoordinatorJournal, FailedCommitStopsDecidingAndGoesOnServingStatus) {
  for (const bool kept : {false, true}) {
    Fleet fleet;
    const auto trainer = fleet.Trainer(1);
    fleet.Engine("engine-a");
    fleet.PublishAll(trainer, 1);
    fleet.journal.FailNext(kept);
    fleet.Run();
    EXPECT_EQ(fleet.coordinator->Snapshot().committed, Epoch{});
    EXPECT_FALSE(fleet.coordinator->Snapshot().deciding);
    EXPECT_EQ(fleet.Newest().phase, epoch::Phase::kCommitting) << "its fate is unknown";
    EXPECT_TRUE(fleet.Agent("engine-a-agent").All<epoch::CommitCommand>().empty());
    EXPECT_TRUE(fleet.Agent("engine-a-agent").All<epoch::AbortCommand>().empty());
    const Status refused = fleet.Publish(trainer[0], 2);
    EXPECT_EQ(refused.reason(), Reason::kJournalFailed);
    EXPECT_NE(fleet.coordinator->Snapshot().waiting_for.find("journal"), std::string::npos);
    bool done = false;
    fleet.coordinator->Shutdown([&](const Status&) { done = true; });
    fleet.Run();
    EXPECT_TRUE(done) << "an epoch that nobody can decide is not waited for";
  }
}

TEST(CoordinatorJournal, WaitingVersionsAreReleasedWhenItFails) {
  Fleet fleet;
  const auto trainer = fleet.Trainer(1);
  fleet.Engine("engine-a");
  fleet.PublishAll(trainer, 1);
  fleet.PublishAll(trainer, 2);
  fleet.journal.FailNext(false);
  fleet.Run();
  EXPECT_EQ(fleet.Released(trainer[0], 2)->reason(), Reason::kJournalFailed);
}

TEST(CoordinatorJournal, NothingIsHandedOutBeforeTheReservationIsDurable) {
  SimExecutor sim;
  MemoryJournal journal(sim, seconds(5));
  Options options;
  options.random_ticket = [] { return Ticket{}; };
  StrictSink metrics;
  auto made = Coordinator::Make(options, sim, sim, sim, journal, metrics);
  ASSERT_TRUE(made.has_value());
  ASSERT_EQ(journal.pending(), 1u);
  sim.RunFor(seconds(6));
  ASSERT_EQ(journal.durable().size(), 1u);
  EXPECT_GT(std::get<ReserveRecord>(journal.durable()[0]).limit, Epoch(1));
}

TEST(CoordinatorJournal, FailedReservationStopsDeciding) {
  Fleet fleet;
  fleet.coordinator.reset();
  fleet.journal.Crash(0);
  fleet.journal.FailNext(false);
  auto made = Coordinator::Make(fleet.options, fleet.sim, fleet.sim, fleet.sim, fleet.journal,
                                fleet.metrics);
  fleet.coordinator = std::move(*made);
  fleet.Run();
  EXPECT_FALSE(fleet.coordinator->Snapshot().deciding);
}

TEST(CoordinatorJournal, RestartKeepsTheDecisionAndEpochsRise) {
  Fleet fleet;
  const auto trainer = fleet.Trainer(1);
  fleet.Engine("engine-a");
  fleet.PublishAll(trainer, 4);
  fleet.Run();
  const StatusSnapshot before = fleet.coordinator->Snapshot();
  fleet.Restart();
  const StatusSnapshot after = fleet.coordinator->Snapshot();
  EXPECT_EQ(after.committed, before.committed);
  EXPECT_EQ(after.committed_version, Version(4));
  EXPECT_TRUE(fleet.coordinator->Ready());
  EXPECT_TRUE(after.participants.empty());

  for (auto& [name, agent] : fleet.agents) ASSERT_TRUE(agent->Open().has_value());
  const auto again = fleet.Trainer(1);
  fleet.Engine("engine-a");
  EXPECT_EQ(fleet.Publish(again[0], 4).reason(), Reason::kStaleVersion);
  fleet.PublishAll(again, 5);
  fleet.Run();
  EXPECT_GT(fleet.coordinator->Snapshot().committed, before.committed);
  EXPECT_EQ(fleet.coordinator->Snapshot().committed_version, Version(5));
}

TEST(CoordinatorJournal, EpochThatWasPreparedBeforeACrashIsNeverReused) {
  Fleet fleet;
  auto trainer = fleet.Trainer(1);
  fleet.Engine("engine-a");
  fleet.Agent("engine-a-agent").deaf = [](const auto&) { return true; };
  fleet.PublishAll(trainer, 1);
  fleet.Run();
  const Epoch lost = fleet.Newest().epoch;
  fleet.Restart();
  EXPECT_EQ(fleet.coordinator->Snapshot().committed, Epoch{}) << "presumed abort";
  for (auto& [name, agent] : fleet.agents) {
    agent->deaf = nullptr;
    ASSERT_TRUE(agent->Open().has_value());
  }
  trainer = fleet.Trainer(1);
  fleet.Engine("engine-a");
  fleet.PublishAll(trainer, 1);
  fleet.Run();
  EXPECT_GT(fleet.coordinator->Snapshot().committed, lost);
}

TEST(CoordinatorJournal, EpochsGoOnBeyondOneReservation) {
  Fleet fleet;
  const auto trainer = fleet.Trainer(1);
  fleet.Engine("engine-a");
  for (uint64_t version = 1; version <= 1'500; ++version) {
    fleet.PublishAll(trainer, version);
    fleet.Run(std::chrono::milliseconds(10));
  }
  EXPECT_EQ(fleet.coordinator->Snapshot().committed_version, Version(1'500));
  EXPECT_EQ(fleet.coordinator->Snapshot().epochs.size(), fleet.options.epochs_remembered);
}

/// A full disk: nothing is lost, nothing is given up, and it goes on by itself.
TEST(CoordinatorJournal, WhatWaitsForAHinderedJournalGoesOnWithIt) {
  Fleet fleet;
  const auto trainer = fleet.Trainer(1);
  fleet.Engine("engine-a");
  fleet.PublishAll(trainer, 1);
  fleet.Run();
  ASSERT_TRUE(fleet.coordinator->Ready());
  const Status full =
      Status(Code::kUnavailable, Reason::kJournalFailed, "the disk is full").Remedy("free space");
  fleet.journal.Hinder(full);
  fleet.PublishAll(trainer, 2);
  fleet.Run(seconds(60));
  const Status why = fleet.coordinator->Readiness();
  EXPECT_EQ(why.reason(), Reason::kJournalFailed);
  EXPECT_THAT(why.ToString(), AllOf(HasSubstr("the disk is full"), HasSubstr("free space")));
  EXPECT_EQ(fleet.metrics.Value("journal_failing"), 1);
  const StatusSnapshot hindered = fleet.coordinator->Snapshot();
  EXPECT_TRUE(hindered.deciding);
  EXPECT_EQ(hindered.committed_version, Version(1));
  EXPECT_THAT(hindered.waiting_for, HasSubstr("the disk is full"));
  EXPECT_THAT(hindered.journal, HasSubstr("the disk is full"));
  EXPECT_EQ(fleet.EngineNamed("engine-a").version, Version(1)) << "it serves on";
  EXPECT_TRUE(fleet.Agent("engine-a-agent").All<epoch::AbortCommand>().empty());
  fleet.journal.Relent();
  fleet.Run();
  EXPECT_EQ(fleet.coordinator->Snapshot().committed_version, Version(2));
  EXPECT_EQ(fleet.EngineNamed("engine-a").version, Version(2));
  EXPECT_TRUE(fleet.coordinator->Ready());
  EXPECT_EQ(fleet.metrics.Value("journal_failing"), 0);
  EXPECT_EQ(fleet.coordinator->Snapshot().journal, "");
  fleet.PublishAll(trainer, 3);
  fleet.Run();
  EXPECT_EQ(fleet.EngineNamed("engine-a").version, Version(3));
}

TEST(CoordinatorJournal, IsNotReadyWhenItDecidesNothingAnyMore) {
  Fleet fleet;
  const auto trainer = fleet.Trainer(1);
  fleet.Engine("engine-a");
  fleet.PublishAll(trainer, 1);
  fleet.Run();
  fleet.PublishAll(trainer, 2);
  fleet.journal.FailNext(false);
  fleet.Run();
  EXPECT_EQ(fleet.coordinator->Readiness().reason(), Reason::kJournalFailed);
  EXPECT_THAT(fleet.coordinator->Readiness().message(), HasSubstr("injected failure"));
  EXPECT_EQ(fleet.metrics.Value("journal_failing"), 1);
}

}  // namespace
}  // namespace weightwire::coordinator::testing
