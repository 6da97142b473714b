#include "tests/unit/agent/agent_fixture.h"

namespace weightwire::agent {
namespace {

class AgentAttach : public AgentTest {};

TEST_F(AgentAttach, RegistersUnderTheAgentAndItsJob) {
  options.job = "job-7";
  Start();
  auto trainer = Attach(RequestFor(control::GroupRole::kTrainer, "trainer", 3, 41));
  ASSERT_EQ(coordinator.registered.size(), 1u);
  const auto& request = coordinator.registered[0];
  EXPECT_EQ(request.agent, AgentId{1});
  EXPECT_EQ(request.job, "job-7");
  EXPECT_EQ(request.rank, 3u);
  EXPECT_EQ(request.incarnation, Incarnation{41});
  EXPECT_NE(trainer->handle.value, 0u);
  ASSERT_EQ(agent->Local().size(), 1u);
  EXPECT_EQ(agent->Local()[0].group, "trainer");
  EXPECT_EQ(agent->Local()[0].phase, "idle");
}

TEST_F(AgentAttach, NeedsASession) {
  coordinator.open_answer = Status(Code::kUnavailable, Reason::kTransportFailed, "refused");
  Start();
  FakeApplication application;
  auto reply = TryAttach(RequestFor(control::GroupRole::kTrainer, "trainer"), &application);
  ExpectStatus(reply.error(), Code::kUnavailable, Reason::kNotReady);
}

TEST_F(AgentAttach, RefusesIncarnationZero) {
  Start();
  FakeApplication application;
  auto reply = TryAttach(RequestFor(control::GroupRole::kTrainer, "t", 0, 0), &application);
  ExpectStatus(reply.error(), Code::kInvalidArgument, Reason::kInvalidRequest);
}

TEST_F(AgentAttach, RefusesMoreThanItsLimit) {
  options.participants_max = 2;
  Start();
  auto first = Attach(RequestFor(control::GroupRole::kTrainer, "trainer", 0));
  coordinator.hold_replies = true;
  agent->Attach(RequestFor(control::GroupRole::kTrainer, "trainer", 1), nullptr, [](auto) {});
  FakeApplication application;
  auto reply = TryAttach(RequestFor(control::GroupRole::kTrainer, "trainer", 2), &application);
  ExpectStatus(reply.error(), Code::kResourceExhausted, Reason::kLimitExceeded);
}

TEST_F(AgentAttach, PassesTheCoordinatorsRefusalOn) {
  coordinator.register_answer = Status(Code::kAlreadyExists, Reason::kDuplicateRank, "taken");
  Start();
  FakeApplication application;
  auto reply = TryAttach(RequestFor(control::GroupRole::kTrainer, "trainer"), &application);
  EXPECT_EQ(reply.error(), coordinator.register_answer);
}

TEST_F(AgentAttach, RefusesTheSameIncarnationTwice) {
  Start();
  auto first = Attach(RequestFor(control::GroupRole::kTrainer, "trainer"));
  FakeApplication application;
  auto reply = TryAttach(RequestFor(control::GroupRole::kTrainer, "trainer"), &application);
  ExpectStatus(reply.error(), Code::kAlreadyExists, Reason::kDuplicateRank);
}

TEST_F(AgentAttach, APlaceWhoseProcessHasEndedIsGivenUpBeforeSomebodyElseAsksForIt) {
  std::vector<int64_t> ended;
  options.process_ended = [&](int64_t pid) { return std::ranges::count(ended, pid) > 0; };
  Start();
  auto holding = [&](const std::string& group, uint32_t rank, int64_t pid) {
    AttachRequest request = RequestFor(control::GroupRole::kTrainer, group, rank);
    request.pid = pid;
    return Attach(request);
  };
  const auto first = holding("trainer", 0, 11), beside = holding("trainer", 1, 12),
             other = holding("engine-a", 0, 13);
  auto next = RequestFor(control::GroupRole::kTrainer, "trainer", 0, 2);
  coordinator.register_answer = Status(Code::kAlreadyExists, Reason::kDuplicateRank, "taken");
  FakeApplication refused;
  ASSERT_FALSE(TryAttach(next, &refused).has_value());
  EXPECT_THAT(coordinator.All<epoch::LostReport>(), IsEmpty()) << "it lives";
  coordinator.register_answer = OkStatus();
  ended = {11, 12, 13};
  std::vector<epoch::LostReport> lost;
  agent->Attach(next, &refused, [&](auto) { lost = coordinator.All<epoch::LostReport>(); });
  sim.RunReady();
  ASSERT_EQ(lost.size(), 1u) << "only whose place is asked for, and before it is";
  EXPECT_EQ(lost[0].member, first->member);
  EXPECT_THAT(lost[0].why.message(), HasSubstr("process 11 has ended"));
  EXPECT_THAT(first->application.told, ElementsAre("evicted (member_lost)"));
  EXPECT_THAT(beside->application.told, IsEmpty());
  EXPECT_THAT(other->application.told, IsEmpty());
}

TEST_F(AgentAttach, AsksAgainForAnAnswerThatWasLost) {
  Start();
  coordinator.register_answer = Status(Code::kDeadlineExceeded, Reason::kDeadlineExceeded, "lost");
  std::optional<Result<AttachReply>> answer;
  FakeApplication application;
  agent->Attach(RequestFor(control::GroupRole::kTrainer, "trainer"), &application,
                [&](Result<AttachReply> reply) { answer = std::move(reply); });
  sim.RunFor(std::chrono::milliseconds(100));
  EXPECT_FALSE(answer.has_value());
  coordinator.register_answer = OkStatus();
  sim.RunFor(std::chrono::milliseconds(250));
  ASSERT_TRUE(answer.has_value() && answer->has_value());
  ASSERT_EQ(coordinator.registered.size(), 2u);
  EXPECT_EQ(coordinator.registered[0], coordinator.registered[1]);
}

TEST_F(AgentAttach, GivesThePlaceBackThatNobodyWaitsForAnyMore) {
  Start();
  coordinator.register_answer = Status(Code::kDeadlineExceeded, Reason::kDeadlineExceeded, "lost");
  std::optional<Result<AttachReply>> answer;
  FakeApplication application;
  agent->Attach(RequestFor(control::GroupRole::kTrainer, "trainer"), &application,
                [&](Result<AttachReply> reply) { answer = std::move(reply); });
  sim.RunFor(std::chrono::seconds(21));
  ASSERT_TRUE(answer.has_value() && !answer->has_value());
  EXPECT_EQ(answer->error(), coordinator.register_answer);
  coordinator.register_answer = OkStatus();
  sim.RunFor(std::chrono::seconds(1));
  EXPECT_EQ(coordinator.All<epoch::LostReport>().size(), 1u);
  EXPECT_THAT(agent->Local(), IsEmpty());
  const size_t asked = coordinator.registered.size();
  sim.RunFor(std::chrono::seconds(1));
  EXPECT_EQ(coordinator.registered.size(), asked);
}

TEST_F(AgentAttach, FailsWhenTheSessionIsLostMeanwhile) {
  Start();
  coordinator.hold_replies = true;
  std::optional<Status> answer;
  FakeApplication application;
  agent->Attach(RequestFor(control::GroupRole::kTrainer, "trainer"), &application,
                [&](Result<AttachReply> reply) { answer = reply.error(); });
  agent->OnSessionLost(Status(Code::kUnavailable, Reason::kLeaseExpired, "gone"));
  coordinator.Answer();
  ASSERT_TRUE(answer.has_value());
  ExpectStatus(*answer, Code::kUnavailable, Reason::kNotReady);
  EXPECT_THAT(agent->Local(), IsEmpty());
}

TEST_F(AgentAttach, APrepareThatOvertakesTheAnswerToTheLayoutWaitsForIt) {
  Start();
  auto rollout = Attach(RequestFor(control::GroupRole::kEngine, "engine-a"));
  coordinator.hold_layouts = true;
  control::LayoutSubmission submission;
  submission.layout = Layout();
  std::optional<Status> answer;
  agent->SubmitLayout(rollout->handle, submission, [&](Result<control::LayoutReply> reply) {
    answer = reply ? OkStatus() : reply.error();
  });
  Command(TargetPrepare(*rollout, 3, 30));
  EXPECT_THAT(coordinator.reports, IsEmpty());
  coordinator.Answer();
  sim.RunReady();
  EXPECT_EQ(answer, OkStatus());
  EXPECT_EQ(coordinator.All<epoch::PreparedReport>().size(), 1u);
}

TEST_F(AgentAttach, APrepareWaitsNoLongerWhenTheLayoutIsRefused) {
  Start();
  auto rollout = Attach(RequestFor(control::GroupRole::kEngine, "engine-a"));
  coordinator.hold_layouts = true;
  coordinator.layout_answer = Status(Code::kFailedPrecondition, Reason::kShapeMismatch, "other");
  control::LayoutSubmission submission;
  submission.layout = Layout();
  agent->SubmitLayout(rollout->handle, submission, [](const auto&) {});
  Command(TargetPrepare(*rollout, 3, 30));
  coordinator.Answer();
  sim.RunReady();
  ASSERT_EQ(coordinator.All<epoch::FailedReport>().size(), 1u);
  EXPECT_EQ(coordinator.All<epoch::FailedReport>()[0].why.reason(), Reason::kNotReady);
}

TEST_F(AgentAttach, FencesTheHandleOfADetachedProcess) {
  Start();
  auto trainer = BoundTrainer();
  agent->Detach(trainer->handle, Status(Code::kCancelled, Reason::kMemberLost, "socket closed"));
  agent->Detach(trainer->handle, OkStatus());
  ASSERT_EQ(coordinator.All<epoch::LostReport>().size(), 1u);
  EXPECT_EQ(coordinator.All<epoch::LostReport>()[0].member, trainer->member);
  EXPECT_THAT(trainer->application.told, IsEmpty()) << "a process that left is not called";

  const auto stale = [&](const Status& status) {
    ExpectStatus(status, Code::kFailedPrecondition, Reason::kStaleIncarnation);
  };
  stale(Submit(trainer->handle));
  stale(Import(trainer->handle, *parameters).error());
  stale(agent->Bind(trainer->handle, {}));
  stale(agent->OpenStage(trainer->handle).error());
  stale(Publish(*trainer, 1));
  stale(agent->AcknowledgeSwap(trainer->handle, Epoch{1}, 0));
}

TEST_F(AgentAttach, GivesTheNextIncarnationAnotherHandle) {
  Start();
  auto first = Attach(RequestFor(control::GroupRole::kTrainer, "trainer", 0, 1));
  agent->Detach(first->handle, Status(Code::kCancelled, Reason::kMemberLost, "left"));
  auto second = Attach(RequestFor(control::GroupRole::kTrainer, "trainer", 0, 2));
  EXPECT_NE(first->handle, second->handle);
  EXPECT_EQ(first->member.id, second->member.id);
}

TEST_F(AgentAttach, AnswersCommandsForNobodySoThatTheSenderNeedNotWait) {
  Start();
  Rank nobody;
  nobody.member = {ParticipantId{50}, Incarnation{51}};
  Command(TargetPrepare(nobody, 4, 1));
  Command(epoch::TransferCommand{Epoch{4}, nobody.member});
  Commit(nobody, 4, 1);
  Command(epoch::AbortCommand{Epoch{4}, nobody.member, {}});
  Command(epoch::CommittedEverywhereCommand{Epoch{4}, nobody.member});
  Command(epoch::EvictCommand{nobody.member, {}});
  auto failed = coordinator.All<epoch::FailedReport>();
  ASSERT_EQ(failed.size(), 4u);
  EXPECT_EQ(coordinator.reports.size(), 4u);
  for (const auto& report : failed) {
    EXPECT_EQ(report.member, nobody.member);
    EXPECT_EQ(report.epoch, Epoch{4});
    EXPECT_EQ(report.why.reason(), Reason::kStaleIncarnation);
  }
}

TEST_F(AgentAttach, PassesTheCoordinatorsRefusalOfALayoutOn) {
  Start();
  auto trainer = Attach(RequestFor(control::GroupRole::kTrainer, "trainer"));
  coordinator.layout_answer =
      Status(Code::kFailedPrecondition, Reason::kTensorMissing, "no such tensor");
  EXPECT_EQ(Submit(trainer->handle), coordinator.layout_answer);
}

TEST_F(AgentAttach, KeepsOneLayoutForAProcessLifetime) {
  Start();
  auto trainer = BoundTrainer();
  EXPECT_TRUE(Submit(trainer->handle).ok()) << "a repeat";
  layout::RankLayout other = Layout();
  other.tensors[0].shape = {12};
  ExpectStatus(Submit(trainer->handle, other), Code::kFailedPrecondition,
               Reason::kStaleIncarnation);
  EXPECT_THAT(trainer->application.told, ElementsAre("evicted (stale_incarnation)"));
  EXPECT_EQ(coordinator.All<epoch::LostReport>().size(), 1u);
}

TEST_F(AgentAttach, RefusesALayoutWhoseSizesOverflow) {
  Start();
  auto trainer = Attach(RequestFor(control::GroupRole::kTrainer, "trainer"));
  layout::RankLayout huge = Layout();
  huge.tensors[1].shape = {int64_t{1} << 62, 4};
  Status status = Submit(trainer->handle, huge);
  ExpectStatus(status, Code::kInvalidArgument, Reason::kShapeOverflow);
  EXPECT_EQ(status.tensor(), "b");
}

}  // namespace
}  // namespace weightwire::agent
