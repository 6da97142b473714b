#include "tests/unit/agent/agent_fixture.h"

// A publisher that does not wait any more: whatever the coordinator believes, no byte of what was
// revoked is read, and a version that is published again is another one.
namespace weightwire::agent {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

class AgentWithdraw : public AgentTest {
 protected:
  AgentWithdraw() {
    Start();
    trainer_ = BoundTrainer();
    told_ = &trainer_->application.told;
  }
  void Call(uint64_t version, uint64_t number, PublishMode mode = PublishMode::kHold) {
    PublishCall call{Version{version}, mode, false, seconds(60)};
    call.number = number;
    agent->Publish(trainer_->handle, call, [this](Status status) { answers_.push_back(status); });
  }
  void Ask(uint64_t version, uint64_t number, bool if_accepted) {
    agent->Withdraw(trainer_->handle, {Version{version}, number, if_accepted},
                    [this](Result<Withdrawal> found) { found_.push_back(std::move(found)); });
  }
  /// Nothing of it may have to be waited for.
  Withdrawal Withdraw(uint64_t version, uint64_t number, bool if_accepted) {
    found_.clear();
    Ask(version, number, if_accepted);
    EXPECT_EQ(found_.size(), 1u);
    return found_.at(0).value();
  }
  /// An epoch of the version fails here before it reads anything.
  void ExpectUnreadable(uint64_t epoch, uint64_t version) {
    coordinator.reports.clear();
    Command(SourcePrepare(*trainer_, epoch, version));
    ASSERT_EQ(coordinator.All<epoch::FailedReport>().size(), 1u);
    EXPECT_THAT(coordinator.All<epoch::PreparedReport>(), IsEmpty());
    Command(epoch::AbortCommand{Epoch{epoch}, trainer_->member, {}});
  }

  std::unique_ptr<Rank> trainer_;
  std::vector<std::string>* told_;
  std::vector<Status> answers_;
  std::vector<Result<Withdrawal>> found_;
};

TEST_F(AgentWithdraw, ARepeatedPublishIsTheSameAndItsReleaseIsToldOnce) {
  Call(7, 1);
  Call(7, 2);
  EXPECT_THAT(answers_, ElementsAre(OkStatus(), OkStatus()));
  EXPECT_EQ(coordinator.published.size(), 1u);
  Source(*trainer_, 3, 7);
  Release(*trainer_, 3, 7);
  EXPECT_THAT(*told_, ElementsAre("released v7 e3"));
}

TEST_F(AgentWithdraw, ARepeatBeforeTheAnswerWaitsForThatAnswer) {
  coordinator.hold_replies = true;
  Call(7, 1);
  Call(7, 2);
  EXPECT_THAT(answers_, IsEmpty());
  coordinator.Answer();
  EXPECT_THAT(answers_, ElementsAre(OkStatus(), OkStatus()));
  EXPECT_EQ(coordinator.published.size(), 1u);
}

TEST_F(AgentWithdraw, ARepeatInAnotherModeIsRefusedAndTheFirstStays) {
  Call(7, 1);
  Call(7, 2, PublishMode::kSnapshot);
  ExpectStatus(answers_.at(1), Code::kInvalidArgument, Reason::kInvalidRequest);
  Source(*trainer_, 3, 7);
  Release(*trainer_, 3, 7);
  EXPECT_THAT(*told_, ElementsAre("released v7 e3"));
}

TEST_F(AgentWithdraw, RevokesWhatTheCoordinatorHasNotAnswered) {
  coordinator.hold_replies = true;
  Call(7, 1);
  EXPECT_EQ(Withdraw(7, 1, false), Withdrawal::kRevoked);
  ExpectStatus(answers_.at(0), Code::kAborted, Reason::kAbortRequested);
  EXPECT_THAT(coordinator.withdrawn,
              ElementsAre(control::WithdrawRequest{trainer_->member, Version{7},
                                                   coordinator.published.at(0).number}));
  coordinator.Answer();  // it had accepted it
  coordinator.hold_replies = false;
  EXPECT_EQ(answers_.size(), 1u);
  ExpectUnreadable(3, 7);
  EXPECT_THAT(engine.sources, IsEmpty());
  EXPECT_THAT(*told_, IsEmpty());
}

TEST_F(AgentWithdraw, RevokesWhatAPrepareThatOvertookTheAnswerWaitsFor) {
  coordinator.hold_replies = true;
  Call(7, 1);
  const auto answers = std::exchange(coordinator.held, {});
  coordinator.hold_replies = false;
  Command(SourcePrepare(*trainer_, 3, 7));
  EXPECT_THAT(coordinator.reports, IsEmpty());
  EXPECT_EQ(Withdraw(7, 1, false), Withdrawal::kRevoked);
  EXPECT_EQ(coordinator.All<epoch::FailedReport>().size(), 1u);
  for (const auto& answer : answers) answer();
  sim.RunReady();
  EXPECT_THAT(coordinator.All<epoch::PreparedReport>(), IsEmpty());
}

TEST_F(AgentWithdraw, RefusesACallThatComesAfterItWasWithdrawn) {
  EXPECT_EQ(Withdraw(7, 1, false), Withdrawal::kRevoked);
  EXPECT_THAT(coordinator.withdrawn, IsEmpty()) << "the coordinator never heard of it";
  Call(7, 1);
  ExpectStatus(answers_.at(0), Code::kAborted, Reason::kAbortRequested);
  EXPECT_THAT(coordinator.published, IsEmpty());
  Call(7, 2);
  EXPECT_TRUE(answers_.at(1).ok());
}

TEST_F(AgentWithdraw, ALateWithdrawalLeavesTheRepeatAlone) {
  Call(7, 1);
  Call(7, 2);
  EXPECT_EQ(Withdraw(7, 1, true), Withdrawal::kAccepted);
  Source(*trainer_, 3, 7);
  Release(*trainer_, 3, 7);
  EXPECT_THAT(*told_, ElementsAre("released v7 e3"));
  EXPECT_EQ(Withdraw(7, 2, true), Withdrawal::kReleased);
}

TEST_F(AgentWithdraw, TakesAnAcceptedVersionBackOnlyWhenAskedTo) {
  Call(7, 1);
  EXPECT_EQ(Withdraw(7, 1, false), Withdrawal::kAccepted);
  EXPECT_THAT(coordinator.withdrawn, IsEmpty());
  EXPECT_EQ(Withdraw(7, 1, true), Withdrawal::kRevoked);
  ExpectUnreadable(3, 7);
  EXPECT_THAT(*told_, IsEmpty()) << "the answer has said it";
}

TEST_F(AgentWithdraw, WhatIsPublishedAnewIsAnotherVersion) {
  Call(7, 1);
  EXPECT_EQ(Withdraw(7, 1, true), Withdrawal::kRevoked);
  Call(7, 2);
  EXPECT_TRUE(answers_.at(1).ok());
  ASSERT_EQ(coordinator.published.size(), 2u);
  EXPECT_GT(coordinator.published[1].number, coordinator.published[0].number);
  Source(*trainer_, 3, 7);
  Release(*trainer_, 3, 7);
  EXPECT_THAT(*told_, ElementsAre("released v7 e3"));
}

TEST_F(AgentWithdraw, FailsAnEpochThatIsBeingPrepared) {
  Call(7, 1);
  coordinator.hold_replies = true;  // of the slice
  Command(SourcePrepare(*trainer_, 3, 7));
  EXPECT_EQ(Withdraw(7, 1, true), Withdrawal::kRevoked);
  ASSERT_EQ(coordinator.All<epoch::FailedReport>().size(), 1u);
  EXPECT_EQ(coordinator.All<epoch::FailedReport>()[0].why.rank(), "trainer/0");
  coordinator.Answer();
  sim.RunReady();
  EXPECT_THAT(coordinator.All<epoch::PreparedReport>(), IsEmpty());
}

TEST_F(AgentWithdraw, FailsAnEpochThatIsPreparedWhenItIsToMove) {
  Call(7, 1);
  Command(SourcePrepare(*trainer_, 3, 7));
  EXPECT_EQ(Withdraw(7, 1, true), Withdrawal::kRevoked);
  EXPECT_THAT(engine.tickets, IsEmpty());
  Call(7, 2);  // other bytes
  Command(epoch::TransferCommand{Epoch{3}, trainer_->member});
  EXPECT_THAT(engine.sources, IsEmpty());
  EXPECT_EQ(coordinator.All<epoch::FailedReport>().size(), 1u);
}

TEST_F(AgentWithdraw, IsAnsweredWhenNothingReadsAnyMore) {
  Call(7, 1);
  Command(SourcePrepare(*trainer_, 3, 7));
  Command(epoch::TransferCommand{Epoch{3}, trainer_->member});
  engine.hold_drains = true;
  Ask(7, 1, true);
  EXPECT_THAT(found_, IsEmpty()) << "a reader has not let go yet";
  EXPECT_EQ(coordinator.All<epoch::FailedReport>().size(), 1u);
  engine.EndDrains();
  ASSERT_EQ(found_.size(), 1u);
  EXPECT_EQ(*found_[0], Withdrawal::kRevoked);
  EXPECT_THAT(coordinator.All<epoch::SourceDoneReport>(), IsEmpty());
}

TEST_F(AgentWithdraw, WhatWasReadMayBeCommittedAndIsNotReadAgain) {
  Call(7, 1);
  Source(*trainer_, 3, 7);
  engine.hold_drains = true;
  Ask(7, 1, true);
  EXPECT_THAT(found_, IsEmpty());
  engine.EndDrains();
  engine.hold_drains = false;
  ASSERT_EQ(found_.size(), 1u);
  EXPECT_EQ(*found_[0], Withdrawal::kRead);
  EXPECT_THAT(coordinator.withdrawn, IsEmpty()) << "the epoch may go on";
  Call(7, 2);
  ExpectStatus(answers_.at(1), Code::kAborted, Reason::kAbortRequested);
  Release(*trainer_, 3, 7);
  EXPECT_THAT(*told_, ElementsAre("released v7 e3"));
}

TEST_F(AgentWithdraw, WhatWasReadIsNotReadAgainByTheNextAttempt) {
  Call(7, 1);
  Source(*trainer_, 3, 7);
  EXPECT_EQ(Withdraw(7, 1, true), Withdrawal::kRead);
  Command(epoch::AbortCommand{Epoch{3}, trainer_->member, {}});
  EXPECT_EQ(coordinator.All<epoch::DrainedReport>().size(), 1u);
  ExpectUnreadable(4, 7);
  Release(*trainer_, 4, 7, Status(Code::kAborted, Reason::kAbortRequested, "given up"));
  EXPECT_THAT(*told_, ElementsAre("released v7 e4 (abort_requested)"));
}

TEST_F(AgentWithdraw, WhatWasReadByAnAbortedEpochIsRevoked) {
  Call(7, 1);
  Source(*trainer_, 3, 7);
  Command(epoch::AbortCommand{Epoch{3}, trainer_->member, {}});
  EXPECT_EQ(Withdraw(7, 1, true), Withdrawal::kRevoked);
  ExpectUnreadable(4, 7);
}

TEST_F(AgentWithdraw, ASnapshotIsWaitedForAndThenIsReleased) {
  coordinator.hold_replies = true;
  Call(7, 1, PublishMode::kSnapshot);
  sim.RunReady();
  coordinator.Answer();
  Ask(7, 1, true);
  EXPECT_THAT(found_, IsEmpty()) << "the copy still reads the parameters";
  sim.RunReady();
  ASSERT_EQ(found_.size(), 1u);
  EXPECT_EQ(*found_[0], Withdrawal::kReleased);
  EXPECT_THAT(*told_, ElementsAre("released v7 e0"));
}

TEST_F(AgentWithdraw, ASnapshotThatNobodyAcceptedIsNotMade) {
  coordinator.hold_replies = true;
  Call(7, 1, PublishMode::kSnapshot);
  EXPECT_EQ(Withdraw(7, 1, false), Withdrawal::kRevoked) << "while its memory is made";
  sim.RunReady();
  EXPECT_THAT(coordinator.published, IsEmpty());
  Call(7, 2, PublishMode::kSnapshot);
  sim.RunReady();
  EXPECT_EQ(Withdraw(7, 2, false), Withdrawal::kRevoked);
  coordinator.Answer();
  sim.RunReady();
  EXPECT_THAT(*told_, IsEmpty());
}

TEST_F(AgentWithdraw, ARankThatLeavesWhileItCopiesIsAnswered) {
  coordinator.hold_replies = true;
  Call(7, 1, PublishMode::kSnapshot);
  sim.RunReady();
  coordinator.Answer();
  Ask(7, 1, true);
  agent->Detach(trainer_->handle, Status(Code::kCancelled, Reason::kMemberLost, "left"));
  ASSERT_EQ(found_.size(), 1u);
  EXPECT_EQ(found_[0].error().reason(), Reason::kStaleIncarnation);
  sim.RunReady();
}

TEST_F(AgentWithdraw, TheCoordinatorIsToldUntilItAnswers) {
  coordinator.withdraw_answer = Status(Code::kUnavailable, Reason::kTransportFailed, "cut");
  Call(7, 1);
  EXPECT_EQ(Withdraw(7, 1, true), Withdrawal::kRevoked);
  sim.RunFor(milliseconds(600));
  EXPECT_EQ(coordinator.withdrawn.size(), 3u) << "after each pause";
  coordinator.withdraw_answer = OkStatus();
  sim.RunFor(seconds(2));
  EXPECT_EQ(coordinator.withdrawn.size(), 4u);
}

TEST_F(AgentWithdraw, TheNextCoordinatorIsToldToo) {
  coordinator.withdraw_answer = Status(Code::kUnavailable, Reason::kTransportFailed, "cut");
  Call(7, 1);
  EXPECT_EQ(Withdraw(7, 1, true), Withdrawal::kRevoked);
  coordinator.ids.clear();
  coordinator.next_id += 100;
  coordinator.agent_port->OnSessionLost(coordinator.withdraw_answer);
  coordinator.withdraw_answer = OkStatus();
  coordinator.withdrawn.clear();
  sim.RunFor(seconds(2));
  ASSERT_EQ(coordinator.withdrawn.size(), 1u);
  EXPECT_EQ(coordinator.withdrawn[0].member, agent->Local().at(0).member);
  EXPECT_EQ(coordinator.published.size(), 1u) << "nothing is held";
}

TEST_F(AgentWithdraw, WithoutACoordinatorItIsRevokedAllTheSame) {
  Call(7, 1);
  coordinator.agent_port->OnSessionLost(Status(Code::kUnavailable, Reason::kNotReady, "gone"));
  EXPECT_EQ(Withdraw(7, 1, true), Withdrawal::kRevoked);
  EXPECT_THAT(coordinator.withdrawn, IsEmpty());
  sim.RunFor(seconds(2));
  EXPECT_EQ(coordinator.withdrawn.size(), 1u);
  EXPECT_EQ(coordinator.published.size(), 1u);
}

TEST_F(AgentWithdraw, AnAnswerThatWasLostAndAVersionThatIsOverAreNoRefusal) {
  coordinator.publish_answer = Status(Code::kDeadlineExceeded, Reason::kDeadlineExceeded, "lost");
  Call(7, 1);
  Release(*trainer_, 0, 7, Status(Code::kDeadlineExceeded, Reason::kDeadlineExceeded, "late"));
  coordinator.publish_answer = Status(Code::kFailedPrecondition, Reason::kStaleVersion, "over");
  sim.RunFor(milliseconds(300));
  EXPECT_THAT(answers_, ElementsAre(OkStatus()));
  EXPECT_THAT(*told_, ElementsAre("released v7 e0 (deadline_exceeded)"));
}

TEST_F(AgentWithdraw, OnlyATrainersRankWithdraws) {
  auto rollout = StagedEngine();
  agent->Withdraw(rollout->handle, {Version{7}, 1, true},
                  [this](Result<Withdrawal> found) { found_.push_back(std::move(found)); });
  ASSERT_EQ(found_.size(), 1u);
  EXPECT_EQ(found_[0].error().reason(), Reason::kInvalidRequest);
}

}  // namespace
}  // namespace weightwire::agent
