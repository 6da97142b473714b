#include "tests/unit/agent/agent_fixture.h"

namespace weightwire::agent {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

const Status kGone(Code::kUnavailable, Reason::kTransportFailed, "the connection broke");
const Status kStale(Code::kFailedPrecondition, Reason::kStaleVersion, "not newer");

/// An agent whose coordinator is lost and is there again, with numbers of its own.
class AgentRejoin : public AgentTest {
 protected:
  AgentRejoin() { Start(); }

  void LoseCoordinator() {
    coordinator.ids.clear();
    coordinator.next_id += 100;
    coordinator.reports.clear();
    coordinator.agent_port->OnSessionLost(kGone);
    sim.RunReady();
  }
  void ComeBack() { sim.RunFor(milliseconds(250)); }
  /// The participant goes by another member now.
  void Follow(Rank& rank) { rank.member = agent->Local().at(0).member; }
  const control::RejoinState& LastClaim() { return coordinator.registered.back().claim; }
  static epoch::Content At(uint64_t epoch, uint64_t version) {
    return {Epoch{epoch}, Version{version}};
  }
};

TEST_F(AgentRejoin, AnEngineServesOnAndRegistersWithWhatItHolds) {
  auto rollout = StagedEngine();
  Serve(*rollout, 3, 30);
  Serve(*rollout, 4, 40);
  const size_t told = rollout->application.told.size();
  LoseCoordinator();
  EXPECT_EQ(agent->Local().at(0).serving, Epoch{4});
  ComeBack();
  EXPECT_EQ(rollout->application.told.size(), told) << "the engine's process learns nothing of it";
  EXPECT_EQ(coordinator.registered.back().incarnation, Incarnation{1});
  EXPECT_EQ(LastClaim(), (control::RejoinState{At(4, 40), {At(3, 30)}, {}, {}, false, {}}));
  const epoch::Member before = rollout->member;
  Follow(*rollout);
  EXPECT_NE(rollout->member, before);
  EXPECT_EQ(coordinator.submitted.back(), rollout->member);
  Serve(*rollout, 6, 60);
  EXPECT_EQ(agent->Local().at(0).serving, Epoch{6});
}

TEST_F(AgentRejoin, WhatMovesIsStoppedBeforeItRegistersAgain) {
  auto rollout = StagedEngine();
  Serve(*rollout, 3, 30);
  Command(TargetPrepare(*rollout, 4, 40));
  Command(epoch::TransferCommand{Epoch{4}, rollout->member});
  engine.hold_drains = true;
  LoseCoordinator();
  EXPECT_THAT(engine.drains_asked, ::testing::Contains(JobOf(*rollout, 4)));
  const size_t registered = coordinator.registered.size();
  ComeBack();
  EXPECT_EQ(coordinator.registered.size(), registered) << "a peer still reads or writes";
  engine.EndDrains();
  sim.RunReady();
  ASSERT_EQ(coordinator.registered.size(), registered + 1);
  EXPECT_EQ(LastClaim(), (control::RejoinState{At(3, 30), {}, {}, {}, false, {}}));
  EXPECT_THAT(coordinator.reports, IsEmpty()) << "nobody asked for an abort";
}

TEST_F(AgentRejoin, AStagedEpochIsKeptUntilTheNextCoordinatorDecides) {
  auto rollout = StagedEngine();
  Serve(*rollout, 3, 30);
  Stage(*rollout, 4, 40);
  LoseCoordinator();
  ComeBack();
  EXPECT_EQ(LastClaim(),
            (control::RejoinState{At(3, 30), {}, Epoch{4}, Epoch{4}, false, {}, Version{40}}));
  Follow(*rollout);
  Commit(*rollout, 4, 40);
  EXPECT_EQ(rollout->application.told.back(), "committed e4 content 4 v40 buffer 1 leader");
  EXPECT_TRUE(agent->AcknowledgeSwap(rollout->handle, Epoch{4}, 0).ok());
  Command(epoch::CommittedEverywhereCommand{Epoch{4}, rollout->member});
  EXPECT_EQ(agent->Local().at(0).serving, Epoch{4});
}

TEST_F(AgentRejoin, AStagedEpochThatNobodyDecidedIsAborted) {
  auto rollout = StagedEngine();
  Stage(*rollout, 4, 40);
  const FakeEngine::Name job = JobOf(*rollout, 4);
  LoseCoordinator();
  ComeBack();
  Follow(*rollout);
  Command(epoch::AbortCommand{Epoch{4}, rollout->member, kGone});
  EXPECT_THAT(engine.drains_asked, ElementsAre(job)) << "it runs under the number it began with";
  ASSERT_EQ(coordinator.All<epoch::DrainedReport>().size(), 1u);
  EXPECT_EQ(coordinator.All<epoch::DrainedReport>()[0].member, rollout->member);
}

TEST_F(AgentRejoin, ASwapUnderWayIsAcknowledgedToTheNextCoordinator) {
  auto rollout = StagedEngine();
  Serve(*rollout, 3, 30);
  Stage(*rollout, 4, 40);
  Commit(*rollout, 4, 40);
  LoseCoordinator();
  EXPECT_TRUE(agent->AcknowledgeSwap(rollout->handle, Epoch{4}, 0.5).ok())
      << "while nobody is there";
  ComeBack();
  EXPECT_EQ(LastClaim(),
            (control::RejoinState{At(3, 30), {}, Epoch{4}, Epoch{4}, true, {}, Version{40}}));
  Follow(*rollout);
  const size_t told = rollout->application.told.size();
  Commit(*rollout, 4, 40);
  EXPECT_EQ(rollout->application.told.size(), told) << "offered once";
  ASSERT_EQ(coordinator.All<epoch::SwappedReport>().size(), 1u);
  EXPECT_EQ(coordinator.All<epoch::SwappedReport>()[0].member, rollout->member);
  Command(epoch::CommittedEverywhereCommand{Epoch{4}, rollout->member});
  EXPECT_EQ(rollout->application.told.back(), "installed e4 content 4");
}

TEST_F(AgentRejoin, APublisherGoesOnWaitingAndIsReleasedUnderTheNextCoordinator) {
  auto trainer = BoundTrainer();
  ASSERT_TRUE(Publish(*trainer, 7).ok());
  Source(*trainer, 3, 7);
  LoseCoordinator();
  EXPECT_THAT(trainer->application.told, IsEmpty());
  ComeBack();
  Follow(*trainer);
  ASSERT_EQ(coordinator.published.size(), 2u);
  EXPECT_EQ(coordinator.published[1].version, Version{7});
  EXPECT_EQ(coordinator.published[1].member, trainer->member);
  // What is left: the pause before the session was opened again is random below 250 ms.
  EXPECT_LT(coordinator.published[1].deadline, seconds(60));
  EXPECT_GE(coordinator.published[1].deadline, seconds(60) - milliseconds(250));
  Source(*trainer, 5, 7);
  Release(*trainer, 5, 7);
  EXPECT_THAT(trainer->application.told, ElementsAre("released v7 e5"));
  EXPECT_TRUE(Publish(*trainer, 8).ok());
  LoseCoordinator();
  ComeBack();
  EXPECT_EQ(LastClaim().released, Version{7});
}

TEST_F(AgentRejoin, AVersionThatWasCommittedOrLetGoMeanwhileIsReleased) {
  auto trainer = BoundTrainer();
  ASSERT_TRUE(Publish(*trainer, 7).ok());
  LoseCoordinator();
  coordinator.publish_answer = kStale;
  ComeBack();
  EXPECT_THAT(trainer->application.told, ElementsAre("released v7 e0"));
  coordinator.publish_answer = OkStatus();
  ASSERT_TRUE(Publish(*trainer, 8).ok());
  LoseCoordinator();
  ComeBack();
  Follow(*trainer);
  Release(*trainer, 0, 8, kStale);
  EXPECT_EQ(trainer->application.told.back(), "released v8 e0") << "another rank has let it go";
}

TEST_F(AgentRejoin, AnotherRefusalIsTold) {
  auto trainer = BoundTrainer();
  ASSERT_TRUE(Publish(*trainer, 7).ok());
  LoseCoordinator();
  coordinator.publish_answer = Status(Code::kFailedPrecondition, Reason::kMissingRank, "no rank 1");
  ComeBack();
  EXPECT_THAT(trainer->application.told, ElementsAre("released v7 e0 (missing_rank)"));
}

TEST_F(AgentRejoin, APublishWithoutACoordinatorWaitsForOne) {
  auto trainer = BoundTrainer();
  LoseCoordinator();
  std::optional<Status> answer;
  agent->Publish(trainer->handle, {Version{7}, PublishMode::kHold, false, seconds(60)},
                 [&](Status status) { answer = status; });
  sim.RunReady();
  EXPECT_FALSE(answer.has_value());
  ComeBack();
  EXPECT_EQ(answer, OkStatus());
  EXPECT_EQ(coordinator.published.size(), 1u);
}

TEST_F(AgentRejoin, ACallThatFailedOnItsWayIsRepeated) {
  auto trainer = BoundTrainer();
  coordinator.publish_answer = kGone;
  std::optional<Status> answer;
  agent->Publish(trainer->handle, {Version{7}, PublishMode::kHold, false, seconds(60)},
                 [&](Status status) { answer = status; });
  sim.RunFor(milliseconds(600));
  EXPECT_FALSE(answer.has_value());
  EXPECT_EQ(coordinator.published.size(), 3u) << "after each pause";
  coordinator.publish_answer = OkStatus();
  sim.RunFor(milliseconds(250));
  EXPECT_EQ(answer, OkStatus());
}

TEST_F(AgentRejoin, WithoutACoordinatorAVersionIsGivenUpAtItsDeadline) {
  auto trainer = BoundTrainer();
  ASSERT_TRUE(Publish(*trainer, 7).ok());
  Source(*trainer, 3, 7);
  coordinator.open_answer = kGone;
  engine.hold_drains = true;
  LoseCoordinator();
  sim.RunFor(seconds(61));
  EXPECT_THAT(trainer->application.told, IsEmpty()) << "a reader still reads";
  engine.EndDrains();
  sim.RunReady();
  EXPECT_THAT(trainer->application.told, ElementsAre("released v7 e0 (not_ready)"));
  coordinator.open_answer = OkStatus();
  sim.RunFor(seconds(2));
  Follow(*trainer);
  EXPECT_TRUE(Publish(*trainer, 7).ok()) << "it may be published again";
  EXPECT_EQ(coordinator.published.size(), 2u);
}

TEST_F(AgentRejoin, APublishThatNobodyTakesIsAnsweredInTime) {
  auto trainer = BoundTrainer();
  coordinator.open_answer = kGone;
  LoseCoordinator();
  std::optional<Status> answer;
  agent->Publish(trainer->handle, {Version{7}, PublishMode::kHold, false, seconds(60)},
                 [&](Status status) { answer = status; });
  sim.RunFor(seconds(19));
  EXPECT_FALSE(answer.has_value());
  sim.RunFor(seconds(2));
  ASSERT_TRUE(answer.has_value());
  ExpectStatus(*answer, Code::kUnavailable, Reason::kNotReady);
}

TEST_F(AgentRejoin, AnotherHistoryEvictsEveryone) {
  auto trainer = BoundTrainer();
  auto rollout = StagedEngine(0, 2);
  LoseCoordinator();
  coordinator.history = JournalId{6};
  ComeBack();
  EXPECT_THAT(trainer->application.told, ElementsAre("evicted (stale_incarnation)"));
  EXPECT_THAT(rollout->application.told, ElementsAre("evicted (stale_incarnation)"));
  EXPECT_THAT(agent->Local(), IsEmpty());
  BoundTrainer(0, 3);
  LoseCoordinator();
  ComeBack();
  EXPECT_EQ(agent->Local().size(), 1u) << "the new history counts from then on";
}

TEST_F(AgentRejoin, ARefusalEvicts) {
  auto rollout = StagedEngine();
  LoseCoordinator();
  coordinator.register_answer =
      Status(Code::kFailedPrecondition, Reason::kStaleIncarnation, "fenced");
  ComeBack();
  EXPECT_THAT(rollout->application.told, ElementsAre("evicted (stale_incarnation)"));
  coordinator.register_answer = OkStatus();
  auto again = StagedEngine(0, 2);
  LoseCoordinator();
  coordinator.layout_answer = Status(Code::kFailedPrecondition, Reason::kShapeMismatch, "other");
  ComeBack();
  EXPECT_THAT(again->application.told, ElementsAre("evicted (shape_mismatch)"));
  const auto lost = coordinator.All<epoch::LostReport>();
  EXPECT_EQ(std::ranges::count_if(lost,
                                  [&](const epoch::LostReport& report) {
                                    return report.member.incarnation == Incarnation{2};
                                  }),
            1)
      << "it was registered already";
}

TEST_F(AgentRejoin, AProcessThatLeftWhileItsAgentWasCutOffIsReportedInTheNextSession) {
  auto rollout = StagedEngine();
  const epoch::Member before = rollout->member;
  LoseCoordinator();
  agent->Detach(rollout->handle, OkStatus());
  ComeBack();
  const auto lost = coordinator.All<epoch::LostReport>();
  ASSERT_EQ(lost.size(), 1u);
  EXPECT_EQ(lost[0].member, before);
}

TEST_F(AgentRejoin, AnEngineThatIsCutOffForTooLongIsFenced) {
  options.stale_after = seconds(30);
  Start();
  auto rollout = StagedEngine();
  Serve(*rollout, 3, 30);
  auto trainer = BoundTrainer(0, 7);
  LoseCoordinator();
  sim.RunFor(seconds(60));
  EXPECT_EQ(agent->Local().size(), 2u) << "it was back in time";
  coordinator.open_answer = kGone;
  LoseCoordinator();
  sim.RunFor(seconds(29));
  EXPECT_EQ(agent->Local().size(), 2u);
  sim.RunFor(seconds(2));
  ASSERT_EQ(agent->Local().size(), 1u) << "a trainer serves nobody";
  EXPECT_EQ(agent->Local()[0].group, "trainer");
  EXPECT_THAT(rollout->application.told, ::testing::Contains("evicted (stale_epoch)"));
}

TEST_F(AgentRejoin, ACoordinatorThatIsLostAgainMeanwhileIsForgotten) {
  auto trainer = BoundTrainer();
  ASSERT_TRUE(Publish(*trainer, 7).ok());
  LoseCoordinator();
  coordinator.hold_replies = true;
  ComeBack();
  auto late = std::exchange(coordinator.held, {});
  ASSERT_EQ(late.size(), 1u);
  const size_t submitted = coordinator.submitted.size();
  LoseCoordinator();
  for (auto& answer : late) answer();
  sim.RunReady();
  EXPECT_EQ(coordinator.submitted.size(), submitted) << "that coordinator is gone";
  coordinator.hold_replies = false;
  ComeBack();
  EXPECT_EQ(coordinator.submitted.size(), submitted + 1);
  EXPECT_EQ(coordinator.published.size(), 2u);
}

TEST_F(AgentRejoin, AProcessMayLeaveWhileNobodyIsThere) {
  auto trainer = BoundTrainer();
  ASSERT_TRUE(Publish(*trainer, 7).ok());
  LoseCoordinator();
  const size_t registered = coordinator.registered.size();
  agent->Detach(trainer->handle, Status(Code::kCancelled, Reason::kMemberLost, "socket closed"));
  ComeBack();
  EXPECT_THAT(trainer->application.told, IsEmpty());
  EXPECT_EQ(coordinator.registered.size(), registered);
  EXPECT_THAT(agent->Local(), IsEmpty());
}

TEST_F(AgentRejoin, AProcessThatLeavesWhileItRegistersAgainGivesItsPlaceBack) {
  auto rollout = StagedEngine();
  LoseCoordinator();
  coordinator.hold_replies = true;
  ComeBack();
  agent->Detach(rollout->handle, Status(Code::kCancelled, Reason::kMemberLost, "socket closed"));
  coordinator.reports.clear();
  coordinator.Answer();
  sim.RunReady();
  ASSERT_EQ(coordinator.All<epoch::LostReport>().size(), 1u);
  EXPECT_NE(coordinator.All<epoch::LostReport>()[0].member, rollout->member);
  EXPECT_THAT(agent->Local(), IsEmpty());
}

TEST_F(AgentRejoin, ALayoutOnItsWayMustBeSubmittedAgain) {
  auto rollout = Attach(RequestFor(control::GroupRole::kEngine, "engine-a"));
  LoseCoordinator();
  ComeBack();
  const size_t submitted = coordinator.submitted.size();
  EXPECT_EQ(submitted, 0u) << "nothing was agreed yet";
  EXPECT_TRUE(Submit(rollout->handle).ok());
  LoseCoordinator();
  ComeBack();
  EXPECT_EQ(coordinator.submitted.size(), 2u);
}

}  // namespace
}  // namespace weightwire::agent
