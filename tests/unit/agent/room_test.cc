#include "tests/unit/agent/agent_fixture.h"

namespace weightwire::agent {
namespace {

using std::chrono::seconds;
const Status kAbort(Code::kAborted, Reason::kAbortRequested, "aborted");

/// An engine rank with one buffer that serves version 7 of epoch 1.
class AgentRoom : public AgentTest {
 protected:
  AgentRoom() {
    options.room_deadline = seconds(5);
    Start();
    rollout_ = StagedEngine(0, 1, 1);
    told_ = &rollout_->application.told;
  }
  void ServeFirst() {
    Serve(*rollout_, 1, 7);
    told_->clear();
  }
  size_t prepared() const { return coordinator.All<epoch::PreparedReport>().size(); }
  /// Epoch 2 begins to move into the room that was made for it, and is aborted.
  void LoseEpoch2() {
    ServeFirst();
    Command(TargetPrepare(*rollout_, 2, 8));
    EXPECT_TRUE(MakeRoom(2).ok());
    sim.RunReady();
    Command(epoch::TransferCommand{Epoch{2}, rollout_->member});
    EXPECT_TRUE(engine.targets.contains(JobOf(*rollout_, 2)));
    Command(epoch::AbortCommand{Epoch{2}, rollout_->member, kAbort});
  }
  Status MakeRoom(uint64_t epoch) { return agent->MakeRoom(rollout_->handle, Epoch{epoch}); }

  std::unique_ptr<Rank> rollout_;
  std::vector<std::string>* told_;
};

TEST_F(AgentRoom, HasOneBufferAndItsBytes) {
  const auto stage = agent->OpenStage(rollout_->handle);
  ASSERT_EQ(stage->buffers.size(), 1u);
  EXPECT_EQ(agent->Local()[0].stage_bytes, stage->arena.bytes_total);
}

TEST_F(AgentRoom, TheFirstVersionNeedsNone) {
  Serve(*rollout_, 1, 7);
  EXPECT_THAT(*told_,
              ElementsAre("committed e1 content 1 v7 buffer 0 leader", "installed e1 content 1"));
}

TEST_F(AgentRoom, IsAskedForBeforeTheNextVersionMoves) {
  ServeFirst();
  Command(TargetPrepare(*rollout_, 2, 8));
  EXPECT_THAT(*told_, ElementsAre("room e2 v8"));
  EXPECT_EQ(prepared(), 1u) << "prepared over what is served";
  EXPECT_EQ(agent->Local()[0].serving, Epoch{1});
  EXPECT_TRUE(MakeRoom(2).ok());
  EXPECT_TRUE(MakeRoom(2).ok()) << "a repeat";
  sim.RunReady();
  EXPECT_EQ(prepared(), 2u);
  EXPECT_EQ(agent->Local()[0].serving, Epoch{}) << "served although it may be overwritten";
  Command(epoch::TransferCommand{Epoch{2}, rollout_->member});
  engine.FinishTarget(JobOf(*rollout_, 2), Verified());
  Commit(*rollout_, 2, 8);
  EXPECT_TRUE(agent->AcknowledgeSwap(rollout_->handle, Epoch{2}, 0).ok());
  Command(epoch::CommittedEverywhereCommand{Epoch{2}, rollout_->member});
  EXPECT_THAT(*told_, ElementsAre("room e2 v8", "committed e2 content 2 v8 buffer 0 leader",
                                  "installed e2 content 2"));
  EXPECT_EQ(agent->Local()[0].serving, Epoch{2});
  sim.RunFor(seconds(20));
  EXPECT_EQ(agent->Local().size(), 1u) << "fenced although it serves";
}

TEST_F(AgentRoom, MayBeMadeInsideTheQuestion) {
  ServeFirst();
  rollout_->application.when_room_wanted = [&] { EXPECT_TRUE(MakeRoom(2).ok()); };
  Command(TargetPrepare(*rollout_, 2, 8));
  EXPECT_EQ(prepared(), 2u);
}

TEST_F(AgentRoom, IsMadeOnlyForTheEpochThatWantsIt) {
  ExpectStatus(MakeRoom(0), Code::kFailedPrecondition, Reason::kStaleEpoch);
  ServeFirst();
  ExpectStatus(MakeRoom(1), Code::kFailedPrecondition, Reason::kStaleEpoch);
  Command(TargetPrepare(*rollout_, 2, 8));
  ExpectStatus(MakeRoom(3), Code::kFailedPrecondition, Reason::kStaleEpoch);
  Command(epoch::AbortCommand{Epoch{2}, rollout_->member, kAbort});
  ExpectStatus(MakeRoom(2), Code::kFailedPrecondition, Reason::kStaleEpoch);
  EXPECT_EQ(agent->Local()[0].serving, Epoch{1}) << "what was not given up is lost";
  ASSERT_EQ(agent->Local().size(), 1u);
}

TEST_F(AgentRoom, IsRefusedByTwoBuffersAndByTrainers) {
  auto flips = StagedEngine(1);
  Serve(*flips, 1, 7);
  Command(TargetPrepare(*flips, 2, 8));
  ExpectStatus(agent->MakeRoom(flips->handle, Epoch{2}), Code::kFailedPrecondition,
               Reason::kStaleEpoch);
  auto trainer = Attach(RequestFor(control::GroupRole::kTrainer, "trainer"));
  ExpectStatus(agent->MakeRoom(trainer->handle, Epoch{2}), Code::kInvalidArgument,
               Reason::kInvalidRequest);
}

TEST_F(AgentRoom, AnEngineThatDoesNotMakeItFailsThePrepare) {
  ServeFirst();
  Command(TargetPrepare(*rollout_, 2, 8));
  sim.RunFor(seconds(6));
  const auto failed = coordinator.All<epoch::FailedReport>();
  ASSERT_EQ(failed.size(), 1u);
  ExpectStatus(failed[0].why, Code::kDeadlineExceeded, Reason::kDeadlineExceeded);
  EXPECT_EQ(failed[0].why.rank(), "engine-a/0");
  EXPECT_EQ(agent->Local()[0].serving, Epoch{1});
  ExpectStatus(MakeRoom(2), Code::kFailedPrecondition, Reason::kStaleEpoch);
}

TEST_F(AgentRoom, TheNextAttemptFindsIt) {
  LoseEpoch2();
  sim.RunFor(seconds(4));
  Stage(*rollout_, 3, 8);
  sim.RunFor(seconds(20));
  EXPECT_THAT(*told_, ElementsAre("room e2 v8")) << "asked twice, or fenced while an attempt runs";
  Commit(*rollout_, 3, 8);
  EXPECT_THAT(told_->back(), "committed e3 content 3 v8 buffer 0 leader");
}

TEST_F(AgentRoom, ARankThatStaysEmptyIsFenced) {
  LoseEpoch2();
  sim.RunFor(seconds(4));
  EXPECT_EQ(agent->Local().size(), 1u);
  sim.RunFor(seconds(2));
  EXPECT_THAT(agent->Local(), IsEmpty());
  EXPECT_EQ(told_->back(), "evicted (deadline_exceeded)");
  const auto lost = coordinator.All<epoch::LostReport>();
  ASSERT_EQ(lost.size(), 1u);
  EXPECT_THAT(lost[0].why.message(), HasSubstr("given up for an epoch that failed"));
}

TEST_F(AgentRoom, WhatWasGivenUpIsNoSourceOfAFill) {
  LoseEpoch2();
  auto fill = SourcePrepare(*rollout_, 3, 7);
  fill.kind = epoch::Kind::kFill;
  fill.content = Epoch{1};
  Command(fill);
  const auto failed = coordinator.All<epoch::FailedReport>();
  ASSERT_EQ(failed.size(), 1u);
  ExpectStatus(failed[0].why, Code::kFailedPrecondition, Reason::kStaleEpoch);
}

}  // namespace
}  // namespace weightwire::agent
