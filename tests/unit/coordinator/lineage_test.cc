#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>

#include "server/coordinator/decisions.h"
#include "tests/unit/coordinator/fleet.h"

namespace weightwire::coordinator::testing {
namespace {

using ::testing::HasSubstr;

/// An engine that serves version 120 of the first lineage, and version 110 of it beside that.
class CoordinatorLineage : public ::testing::Test {
 protected:
  CoordinatorLineage() {
    trainer_ = fleet_.Trainer(2);
    engine_ = fleet_.Engine("engine-a", 1).front();
    Committed(110, 1);
    Committed(120, 1);
  }
  Status Publish(const epoch::Member& member, uint64_t version, uint64_t lineage,
                 bool manual_commit = false) {
    control::PublishRequest request;
    request.member = member;
    request.version = Version(version);
    request.lineage = lineage;
    request.manual_commit = manual_commit;
    request.deadline = std::chrono::seconds(100);
    std::optional<Status> answer;
    fleet_.coordinator->Publish(request, [&](Status status) { answer = std::move(status); });
    fleet_.sim.RunReady();
    EXPECT_TRUE(answer.has_value());
    return *answer;
  }
  void Committed(uint64_t version, uint64_t lineage) {
    for (const epoch::Member& member : trainer_) {
      const Status status = Publish(member, version, lineage);
      ASSERT_TRUE(status.ok()) << status.ToString();
    }
    fleet_.Run();
    const StatusSnapshot now = fleet_.coordinator->Snapshot();
    ASSERT_EQ(now.committed_version, Version(version));
    ASSERT_EQ(now.committed_lineage, lineage);
  }
  /// The processes of the trainer end and others take their places.
  void TrainerStartsAnew() {
    ASSERT_TRUE(fleet_.coordinator->Evict("trainer", "it starts anew").ok());
    fleet_.Run();
    trainer_ = fleet_.Trainer(2);
  }
  /// The coordinator is another process; the engine brings along what it serves.
  void CoordinatorStartsAnew() {
    const EngineStatus engine = fleet_.EngineNamed("engine-a");
    control::RejoinState claim;
    claim.serving = {engine.serving, engine.version};
    claim.holds = engine.held;
    fleet_.Restart();
    for (auto& [name, agent] : fleet_.agents) ASSERT_TRUE(agent->Open().has_value());
    const auto member = fleet_.Register("engine-a-agent", control::GroupRole::kEngine, "engine-a",
                                        0, 1, engine_.incarnation.value, claim);
    ASSERT_TRUE(member.has_value()) << member.error().ToString();
    ASSERT_TRUE(fleet_.SubmitRows(*member, 0, 1).ok());
    trainer_ = fleet_.Trainer(2);
    fleet_.Run();
  }
  Result<RolledBack> RollBack(uint64_t version) {
    auto answer = std::make_shared<std::optional<Result<RolledBack>>>();
    fleet_.coordinator->Rollback(Version(version), [answer](auto result) { *answer = result; });
    fleet_.Run();
    EXPECT_TRUE(answer->has_value());
    return **answer;
  }
  CommitRecord LastCommit() {
    CommitRecord last;
    for (const auto& record : fleet_.journal.durable()) {
      if (const auto* commit = std::get_if<CommitRecord>(&record)) last = *commit;
    }
    return last;
  }

  Fleet fleet_;
  std::vector<epoch::Member> trainer_;
  epoch::Member engine_;
};

TEST_F(CoordinatorLineage, AnEarlierStepIsRefusedWithoutOneAndTheErrorSaysWhatToSet) {
  TrainerStartsAnew();
  const Status why = Publish(trainer_[0], 101, 1);
  EXPECT_EQ(why.reason(), Reason::kStaleVersion);
  EXPECT_THAT(why.message(), HasSubstr("version 101 is not newer than version 120"));
  EXPECT_THAT(why.remedy(), HasSubstr("lineage=2, or in a new process lineage=\"resume\""));
}

TEST_F(CoordinatorLineage, BeginsWithTheCommitOfItsFirstVersionAndNothingChangesBefore) {
  const Epoch before = fleet_.coordinator->Snapshot().committed;
  TrainerStartsAnew();
  ASSERT_TRUE(Publish(trainer_[0], 101, 2).ok());
  fleet_.Run();
  StatusSnapshot now = fleet_.coordinator->Snapshot();
  EXPECT_EQ(now.lineage, 2u) << "whoever waits for version 101 must not take 120 for it";
  EXPECT_EQ(now.committed_lineage, 1u);
  EXPECT_EQ(now.committed, before);
  EXPECT_THAT(now.waiting_for, HasSubstr("version 101 of lineage 2: trainer/1: publish"));
  EXPECT_EQ(fleet_.EngineNamed("engine-a").version, Version(120)) << "it serves on";
  EXPECT_EQ(fleet_.EngineNamed("engine-a").lineage, 1u);
  ASSERT_TRUE(Publish(trainer_[0], 101, 2).ok()) << "a repeat is as once";
  ASSERT_TRUE(Publish(trainer_[1], 101, 2).ok());
  fleet_.Run();
  now = fleet_.coordinator->Snapshot();
  EXPECT_EQ(now.committed_version, Version(101));
  EXPECT_EQ(now.committed_lineage, 2u);
  EXPECT_EQ(now.epochs.at(0).lineage, 2u);
  EXPECT_EQ(fleet_.EngineNamed("engine-a").version, Version(101));
  EXPECT_EQ(fleet_.EngineNamed("engine-a").lineage, 2u);
  EXPECT_EQ(fleet_.Agent("engine-a-agent").Last<epoch::PrepareCommand>()->lineage, 2u);
  EXPECT_EQ(LastCommit().lineage, 2u);
  EXPECT_EQ(LastCommit().newest, 2u);
  EXPECT_EQ(fleet_.metrics.Value("lineage"), 2);
  Committed(102, 2);
  EXPECT_EQ(Publish(trainer_[0], 102, 2).reason(), Reason::kStaleVersion);
}

TEST_F(CoordinatorLineage, FencesATrainerThatDoesNotKnowWhateverItsNumbers) {
  TrainerStartsAnew();
  Committed(101, 2);
  TrainerStartsAnew();  // one that counts on from 120
  const Status why = Publish(trainer_[0], 121, 0);
  EXPECT_EQ(why.reason(), Reason::kStaleIncarnation);
  EXPECT_THAT(why.message(), HasSubstr("version 121 is of lineage 1, which has ended: version 101 "
                                       "of lineage 2 is committed"));
  EXPECT_THAT(why.remedy(), HasSubstr("lineage=2"));
  EXPECT_THAT(why.remedy(), HasSubstr("lineage=3"));
  EXPECT_EQ(fleet_.metrics.Value("fenced_requests_total{cause=stale_incarnation}"), 1);
  const Status far = Publish(trainer_[0], 121, 4);
  EXPECT_EQ(far.reason(), Reason::kInvalidRequest);
  EXPECT_THAT(far.message(), HasSubstr("lineage 4 does not follow lineage 2"));
}

TEST_F(CoordinatorLineage, RanksThatDisagreeAreRefused) {
  TrainerStartsAnew();
  ASSERT_TRUE(Publish(trainer_[0], 121, 2).ok());
  const Status why = Publish(trainer_[1], 121, 1);
  EXPECT_EQ(why.reason(), Reason::kInvalidRequest);
  EXPECT_THAT(why.message(), HasSubstr("lineage of version 121: 2 and 1"));
}

TEST_F(CoordinatorLineage, ANewCoordinatorKnowsIt) {
  TrainerStartsAnew();
  Committed(101, 2);
  CoordinatorStartsAnew();
  const StatusSnapshot now = fleet_.coordinator->Snapshot();
  EXPECT_EQ(now.committed_version, Version(101));
  EXPECT_EQ(now.committed_lineage, 2u);
  EXPECT_EQ(fleet_.EngineNamed("engine-a").lineage, 2u);
  EXPECT_EQ(fleet_.metrics.Value("lineage"), 2);
  EXPECT_EQ(Publish(trainer_[0], 121, 1).reason(), Reason::kStaleIncarnation);
  EXPECT_EQ(Publish(trainer_[0], 101, 2).reason(), Reason::kStaleVersion);
  Committed(102, 2);
}

TEST_F(CoordinatorLineage, OneThatWasNotCommittedIsForgottenWithItsCoordinator) {
  TrainerStartsAnew();
  ASSERT_TRUE(Publish(trainer_[0], 101, 2).ok());
  CoordinatorStartsAnew();
  EXPECT_EQ(fleet_.coordinator->Snapshot().lineage, 1u);
  Committed(121, 1);
}

TEST_F(CoordinatorLineage, ARollbackToAnEarlierOneEndsNoneAndKeepsTheFence) {
  TrainerStartsAnew();
  Committed(101, 2);
  const auto back = RollBack(120);
  ASSERT_TRUE(back.has_value()) << back.error().ToString();
  EXPECT_EQ(back->lineage, 1u);
  EXPECT_EQ(fleet_.EngineNamed("engine-a").lineage, 1u);
  StatusSnapshot now = fleet_.coordinator->Snapshot();
  EXPECT_EQ(now.committed_lineage, 1u);
  EXPECT_EQ(now.lineage, 2u);
  EXPECT_EQ(LastCommit().lineage, 1u);
  EXPECT_EQ(LastCommit().newest, 2u);
  Committed(102, 2);  // the trainer goes on, though 102 is below 120
  ASSERT_TRUE(RollBack(120).has_value());
  CoordinatorStartsAnew();
  EXPECT_EQ(Publish(trainer_[0], 121, 1).reason(), Reason::kStaleIncarnation);
  Committed(102, 2);
}

/// Its decision says of which lineage the epochs before it are.
TEST_F(CoordinatorLineage, AfterARestartThatOfEarlierEpochsIsKnown) {
  TrainerStartsAnew();
  Committed(101, 2);
  CoordinatorStartsAnew();
  const auto back = RollBack(120);
  ASSERT_TRUE(back.has_value()) << back.error().ToString();
  EXPECT_EQ(back->lineage, 1u);
  EXPECT_EQ(fleet_.EngineNamed("engine-a").lineage, 1u);
  CoordinatorStartsAnew();
  EXPECT_EQ(fleet_.EngineNamed("engine-a").lineage, 1u);
  EXPECT_EQ(fleet_.coordinator->Snapshot().committed_lineage, 1u);
  EXPECT_EQ(LastCommit().newest, 2u);
  EXPECT_EQ(Publish(trainer_[0], 121, 1).reason(), Reason::kStaleIncarnation);
  Committed(102, 2);
}

Decisions Knowing(const CommitRecord& record) {
  Decisions decisions{record, 0, record.epoch, {}, {}, {}, {}};
  decisions.Set(record);
  return decisions;
}

/// A journal that an earlier version wrote says it of its newest decision only: never a guess.
TEST(LineageRuns, WhatTheJournalDoesNotSayIsNotGuessed) {
  const Decisions publish = Knowing({Epoch(9), Version(101), {}, {}, 2, 2});
  EXPECT_EQ(publish.LineageOf(Epoch(8)), 0u);
  EXPECT_EQ(publish.LineageOf(Epoch(9)), 2u);
  const Decisions rollback = Knowing({Epoch(9), Version(120), {}, Epoch(4), 1, 2});
  EXPECT_EQ(rollback.LineageOf(Epoch(3)), 0u);
  EXPECT_EQ(rollback.LineageOf(Epoch(4)), 1u);
  EXPECT_EQ(rollback.LineageOf(Epoch(5)), 0u);
  EXPECT_EQ(rollback.LineageOf(Epoch(9)), 1u);
  EXPECT_EQ(Knowing({Epoch(9), Version(7), {}}).LineageOf(Epoch(1)), 1u) << "there is one";
}

/// Every change counts, those of rollbacks too; what is before the last kLineageRunsMax is unknown.
TEST(LineageRuns, AreBounded) {
  std::optional<Decisions> decisions = Knowing({Epoch(1), Version(120), {}});
  const uint64_t last = 3 * kLineageRunsMax;
  for (uint64_t epoch = 2; epoch <= last; ++epoch) {
    CommitRecord record{Epoch(epoch), Version(epoch), {}, {}, 1 + epoch % 2, 2};
    record.runs = decisions->RunsWith(record);
    EXPECT_LE(record.runs.size(), kLineageRunsMax);
    decisions.emplace(Knowing(record));  // as the next coordinator reads it
  }
  for (uint64_t epoch = 1; epoch <= last; ++epoch) {
    const bool known = epoch + kLineageRunsMax > last;
    EXPECT_EQ(decisions->LineageOf(Epoch(epoch)), known ? 1 + epoch % 2 : 0u) << epoch;
  }
}

TEST_F(CoordinatorLineage, AVersionOfAnEndedOneThatWaitsIsGivenUp) {
  TrainerStartsAnew();
  for (const epoch::Member& member : trainer_) ASSERT_TRUE(Publish(member, 101, 2, true).ok());
  fleet_.Run();
  ASSERT_TRUE(Publish(trainer_[0], 140, 1).ok()) << "nothing is decided yet";
  ASSERT_TRUE(fleet_.coordinator->Commit(fleet_.Newest().epoch).ok());
  fleet_.Run();
  ASSERT_EQ(fleet_.coordinator->Snapshot().committed_version, Version(101));
  const auto released = fleet_.Released(trainer_[0], 140);
  ASSERT_TRUE(released.has_value());
  EXPECT_EQ(released->reason(), Reason::kStaleIncarnation);
  EXPECT_THAT(released->message(), HasSubstr("lineage 2 was committed"));
}

}  // namespace
}  // namespace weightwire::coordinator::testing
