#include "tests/unit/agent/agent_fixture.h"

namespace weightwire::agent {
namespace {

const Status kKilled(Code::kUnavailable, Reason::kMemberLost, "killed");

class AgentLifetime : public AgentTest {
 protected:
  AgentLifetime() { Start(); }
  /// An engine rank in the middle of a transfer.
  std::unique_ptr<Rank> Transferring() {
    auto rollout = StagedEngine();
    Command(TargetPrepare(*rollout, 1, 7));
    Command(epoch::TransferCommand{Epoch{1}, rollout->member});
    return rollout;
  }
  /// A trainer rank in the middle of a transfer of version 7.
  std::unique_ptr<Rank> Sending() {
    auto trainer = BoundTrainer();
    EXPECT_TRUE(Publish(*trainer, 7).ok());
    Command(SourcePrepare(*trainer, 1, 7));
    Command(epoch::TransferCommand{Epoch{1}, trainer->member});
    return trainer;
  }
};

TEST_F(AgentLifetime, KeepsTheStageOfADeadEngineUntilItsTransferIsDrained) {
  auto rollout = Transferring();
  std::weak_ptr<memory::MemoryRegion> buffer = agent->OpenStage(rollout->handle)->buffers[0];
  engine.hold_drains = true;
  agent->Detach(rollout->handle, kKilled);
  EXPECT_EQ(coordinator.All<epoch::LostReport>().size(), 1u);
  EXPECT_EQ(engine.drains_asked.size(), 1u);
  EXPECT_FALSE(buffer.expired());
  EXPECT_EQ(sink.gauges["staging_bytes"], 148);
  engine.EndDrains();
  EXPECT_TRUE(buffer.expired());
  EXPECT_EQ(sink.gauges["staging_bytes"], 0);
}

TEST_F(AgentLifetime, KeepsTheParametersOfADeadTrainerUntilItsReadersAreDrained) {
  auto trainer = Sending();
  engine.hold_drains = true;
  agent->Detach(trainer->handle, kKilled);
  EXPECT_EQ(sink.gauges["registered_memory_bytes"], 128);
  EXPECT_THAT(engine.tickets, ElementsAre(Ticket{5}));
  engine.EndDrains();
  EXPECT_EQ(sink.gauges["registered_memory_bytes"], 0);
  EXPECT_THAT(engine.tickets, IsEmpty());
  EXPECT_THAT(trainer->application.told, IsEmpty());
}

TEST_F(AgentLifetime, DrainsEvenWhenTheStageIsReadByAFill) {
  auto rollout = StagedEngine();
  Serve(*rollout, 1, 7);
  auto fill = SourcePrepare(*rollout, 2, 7);
  fill.kind = epoch::Kind::kFill;
  fill.content = Epoch{1};
  Command(fill);
  Command(epoch::TransferCommand{Epoch{2}, rollout->member});
  engine.hold_drains = true;
  agent->Detach(rollout->handle, kKilled);
  EXPECT_EQ(sink.gauges["staging_bytes"], 148);
  engine.EndDrains();
  EXPECT_EQ(sink.gauges["staging_bytes"], 0);
}

TEST_F(AgentLifetime, ReleasesAnEvictedPublisherOnlyWhenNothingReadsItsBytes) {
  auto trainer = Sending();
  engine.hold_drains = true;
  Command(epoch::EvictCommand{trainer->member, kKilled});
  EXPECT_THAT(trainer->application.told, IsEmpty());
  ExpectStatus(Publish(*trainer, 8), Code::kFailedPrecondition, Reason::kStaleIncarnation);
  engine.EndDrains();
  EXPECT_THAT(trainer->application.told,
              ElementsAre("released v7 e0 (member_lost)", "evicted (member_lost)"));
}

TEST_F(AgentLifetime, TellsAnEvictedEngineAtOnce) {
  auto rollout = Transferring();
  engine.hold_drains = true;
  Command(epoch::EvictCommand{rollout->member, kKilled});
  EXPECT_THAT(rollout->application.told, ElementsAre("evicted (member_lost)"));
  ExpectStatus(agent->OpenStage(rollout->handle).error(), Code::kFailedPrecondition,
               Reason::kStaleIncarnation);
  engine.EndDrains();
  EXPECT_EQ(sink.gauges["staging_bytes"], 0);
}

TEST_F(AgentLifetime, AnswersAPublishThatAnEvictionOvertakes) {
  auto trainer = BoundTrainer();
  coordinator.hold_replies = true;
  std::optional<Status> answer;
  agent->Publish(trainer->handle, {Version{1}, PublishMode::kHold, false, Nanos{1}},
                 [&](Status status) { answer = status; });
  Command(epoch::EvictCommand{trainer->member, kKilled});
  ASSERT_TRUE(answer.has_value());
  EXPECT_EQ(*answer, kKilled);
  EXPECT_THAT(trainer->application.told, ElementsAre("evicted (member_lost)"));
  coordinator.Answer();
  EXPECT_EQ(trainer->application.told.size(), 1u);
}

TEST_F(AgentLifetime, DoesNotReleaseASnapshotASecondTimeOnEviction) {
  auto trainer = BoundTrainer();
  ASSERT_TRUE(Publish(*trainer, 1, PublishMode::kSnapshot).ok());
  Command(epoch::EvictCommand{trainer->member, kKilled});
  EXPECT_THAT(trainer->application.told, ElementsAre("released v1 e0", "evicted (member_lost)"));
}

TEST_F(AgentLifetime, StaleMembersGetNothingDone) {
  auto rollout = StagedEngine();
  Rank old;
  old.member = rollout->member;
  old.member.incarnation = Incarnation{1000};
  Command(TargetPrepare(old, 3, 7));
  Command(epoch::EvictCommand{old.member, kKilled});
  EXPECT_EQ(coordinator.All<epoch::FailedReport>()[0].why.reason(), Reason::kStaleIncarnation);
  EXPECT_THAT(rollout->application.told, IsEmpty());
}

TEST_F(AgentLifetime, LetsANewIncarnationInWhileTheOldOneDrains) {
  auto rollout = Transferring();
  engine.hold_drains = true;
  agent->Detach(rollout->handle, kKilled);
  auto next = StagedEngine(0, 2);
  EXPECT_EQ(next->member.id, rollout->member.id);
  Command(TargetPrepare(*next, 2, 7));
  EXPECT_EQ(coordinator.All<epoch::PreparedReport>().back().member, next->member);
  engine.EndDrains();
  EXPECT_EQ(agent->Local().size(), 1u);
}

TEST_F(AgentLifetime, ShutdownDrainsTellsEveryoneAndCloses) {
  auto trainer = Sending();
  auto rollout = StagedEngine();
  engine.hold_drains = true;
  int done = 0;
  agent->Shutdown([&](Status status) { done += status.ok(); });
  EXPECT_EQ(done, 0);
  EXPECT_EQ(coordinator.All<epoch::LostReport>().size(), 2u);
  EXPECT_THAT(rollout->application.told, ElementsAre("evicted (shutting_down)"));
  EXPECT_THAT(trainer->application.told, IsEmpty());
  FakeApplication application;
  ExpectStatus(TryAttach(RequestFor(control::GroupRole::kEngine, "b"), &application).error(),
               Code::kUnavailable, Reason::kShuttingDown);
  EXPECT_THAT(coordinator.closed, IsEmpty());
  engine.EndDrains();
  EXPECT_EQ(done, 1);
  EXPECT_THAT(trainer->application.told,
              ElementsAre("released v7 e0 (shutting_down)", "evicted (shutting_down)"));
  EXPECT_THAT(coordinator.closed, ElementsAre(AgentId{1}));
}

TEST_F(AgentLifetime, ShutdownOfAnIdleAgentEndsAtOnce) {
  int done = 0;
  agent->Shutdown([&](Status) { ++done; });
  EXPECT_EQ(done, 1);
}

TEST_F(AgentLifetime, AnswersThatComeAfterItsEndAreHarmless) {
  auto trainer = Sending();
  auto second = BoundTrainer(1);
  auto rollout = StagedEngine();
  coordinator.hold_replies = true;
  agent->Attach(RequestFor(control::GroupRole::kTrainer, "trainer", 2), nullptr, [](auto) {});
  agent->Publish(second->handle, {Version{1}, PublishMode::kHold, false, Nanos{1}}, [](Status) {});
  Command(TargetPrepare(*rollout, 2, 7));
  engine.hold_drains = true;
  Command(epoch::EvictCommand{trainer->member, kKilled});
  agent.reset();
  coordinator.Answer();
  engine.EndDrains();
  sim.RunFor(std::chrono::seconds(10));
  EXPECT_THAT(trainer->application.told, IsEmpty());
}

}  // namespace
}  // namespace weightwire::agent
