#include "tests/unit/agent/agent_fixture.h"

namespace weightwire::agent {
namespace {

const Status kAbort(Code::kAborted, Reason::kAbortRequested, "aborted");

class AgentTarget : public AgentTest {
 protected:
  AgentTarget() {
    Start();
    rollout_ = StagedEngine();
    told_ = &rollout_->application.told;
    auto stage = agent->OpenStage(rollout_->handle);
    buffers_ = stage->buffers;
  }
  std::unique_ptr<Rank> rollout_;
  std::vector<std::string>* told_;
  std::vector<std::shared_ptr<memory::MemoryRegion>> buffers_;
};

TEST_F(AgentTarget, FillsTheBufferThatIsNotServed) {
  Command(TargetPrepare(*rollout_, 1, 7));
  ASSERT_EQ(coordinator.All<epoch::PreparedReport>().size(), 1u);
  EXPECT_THAT(engine.targets, IsEmpty()) << "started before everyone was prepared";
  Command(epoch::TransferCommand{Epoch{1}, rollout_->member});
  const auto& job = engine.targets.at(JobOf(*rollout_, 1)).first;
  EXPECT_EQ(job.name, "engine-a/0");
  EXPECT_EQ(job.slice->rank, 0u);
  ASSERT_TRUE(job.sources.contains(0));
  EXPECT_EQ(job.sources.at(0).incarnation, Incarnation{99});
  EXPECT_EQ(job.sources.at(0).ticket, Ticket{6});
  EXPECT_EQ(job.source_participants.at(0), ParticipantId{900});
  ASSERT_EQ(job.binding.size(), 2u);
  EXPECT_EQ(job.binding[0].region, buffers_[0]);
  EXPECT_EQ(job.binding[1].offset, 64u);
  EXPECT_EQ(job.binding[1].bytes, 10u);
}

TEST_F(AgentTarget, ReportsDigestsBytesAndSeconds) {
  Command(TargetPrepare(*rollout_, 1, 7));
  sim.RunFor(std::chrono::seconds(1));
  Command(epoch::TransferCommand{Epoch{1}, rollout_->member});
  sim.RunFor(std::chrono::milliseconds(1500));
  engine.FinishTarget(JobOf(*rollout_, 1), Verified());
  auto staged = coordinator.All<epoch::StagedReport>();
  ASSERT_EQ(staged.size(), 1u);
  EXPECT_THAT(staged[0].digests, ElementsAre(epoch::Digest{kPlan, 9, 0xabc}));
  EXPECT_EQ(staged[0].bytes, 58);
  EXPECT_EQ(staged[0].bytes_by_transport.at("shm"), 50);
  EXPECT_EQ(staged[0].bytes_by_transport.at("tcp"), 8);
  EXPECT_EQ(staged[0].rereads, 1u);
  EXPECT_DOUBLE_EQ(staged[0].seconds, 1.5);
  EXPECT_THAT(*told_, IsEmpty()) << "nothing is served before COMMIT";
}

TEST_F(AgentTarget, AHeartbeatSaysHowMuchOfAnEpochHasArrived) {
  sim.RunFor(std::chrono::seconds(2));
  EXPECT_THAT(coordinator.receiving, IsEmpty()) << "nothing moves";
  Command(TargetPrepare(*rollout_, 1, 7));
  Command(epoch::TransferCommand{Epoch{1}, rollout_->member});
  sim.RunFor(std::chrono::seconds(2));
  EXPECT_THAT(coordinator.receiving,
              ElementsAre(control::Receiving{rollout_->member, Epoch{1}, 3}));
  Command(epoch::AbortCommand{Epoch{1}, rollout_->member, kAbort});
  sim.RunFor(std::chrono::seconds(2));
  EXPECT_THAT(coordinator.receiving, IsEmpty()) << "it has ended";
}

TEST_F(AgentTarget, SwapsBuffersEpochByEpoch) {
  Serve(*rollout_, 1, 7);
  EXPECT_THAT(*told_,
              ElementsAre("committed e1 content 1 v7 buffer 0 leader", "installed e1 content 1"));
  auto applied = coordinator.All<epoch::SwappedReport>();
  ASSERT_EQ(applied.size(), 1u);
  EXPECT_EQ(applied[0].epoch, Epoch{1});
  EXPECT_DOUBLE_EQ(applied[0].flip_seconds, 0.25);
  EXPECT_EQ(agent->Local()[0].serving, Epoch{1});
  told_->clear();
  Serve(*rollout_, 2, 8);
  EXPECT_THAT(*told_,
              ElementsAre("committed e2 content 2 v8 buffer 1 leader", "installed e2 content 2"));
  Command(TargetPrepare(*rollout_, 3, 9));
  Command(epoch::TransferCommand{Epoch{3}, rollout_->member});
  EXPECT_EQ(engine.targets.at(JobOf(*rollout_, 3)).first.binding[0].region, buffers_[0]);
}

TEST_F(AgentTarget, TellsThatTheEngineRefusesWhatItIsOffered) {
  ExpectStatus(agent->RefuseSwap(rollout_->handle, Epoch{1}, "why"), Code::kFailedPrecondition,
               Reason::kStaleEpoch);
  Stage(*rollout_, 1, 7);
  Commit(*rollout_, 1, 7);
  EXPECT_TRUE(agent->RefuseSwap(rollout_->handle, Epoch{1}, "a canary sang").ok());
  const auto failed = coordinator.All<epoch::FailedReport>();
  ASSERT_EQ(failed.size(), 1u);
  EXPECT_EQ(failed[0].epoch, Epoch{1});
  EXPECT_TRUE(failed[0].refused);
  EXPECT_THAT(failed[0].why.ToString(), HasSubstr("the engine refuses it: a canary sang"));
  EXPECT_EQ(agent->Local()[0].serving, Epoch{0});
  EXPECT_TRUE(agent->AcknowledgeSwap(rollout_->handle, Epoch{1}, 0).ok());
  ExpectStatus(agent->RefuseSwap(rollout_->handle, Epoch{1}, "too late"), Code::kFailedPrecondition,
               Reason::kStaleEpoch);
}

TEST_F(AgentTarget, OnlyTheLeaderRefuses) {
  Stage(*rollout_, 1, 7);
  Commit(*rollout_, 1, 7, /*leader=*/false);
  ExpectStatus(agent->RefuseSwap(rollout_->handle, Epoch{1}, "why"), Code::kPermissionDenied,
               Reason::kPermissionDenied);
}

TEST_F(AgentTarget, WritesTheSameBufferAgainAfterAnAbort) {
  Serve(*rollout_, 1, 7);
  Command(TargetPrepare(*rollout_, 2, 8));
  Command(epoch::TransferCommand{Epoch{2}, rollout_->member});
  Command(epoch::AbortCommand{Epoch{2}, rollout_->member, kAbort});
  EXPECT_EQ(coordinator.All<epoch::DrainedReport>().size(), 1u);
  Command(TargetPrepare(*rollout_, 3, 8));
  Command(epoch::TransferCommand{Epoch{3}, rollout_->member});
  EXPECT_EQ(engine.targets.at(JobOf(*rollout_, 3)).first.binding[0].region, buffers_[1]);
  EXPECT_EQ(agent->Local()[0].serving, Epoch{1});
}

TEST_F(AgentTarget, SettlesWhatIsKnownOfABufferWhenItIsServed) {
  Command(TargetPrepare(*rollout_, 2, 8));
  Command(epoch::TransferCommand{Epoch{2}, rollout_->member});
  const auto kept = engine.targets.at(JobOf(*rollout_, 2)).first.kept;
  engine.FinishTarget(JobOf(*rollout_, 2), Verified());
  EXPECT_FALSE(kept->Unsettle()) << "another attempt may want what is staged";
  Commit(*rollout_, 2, 8);
  EXPECT_TRUE(agent->AcknowledgeSwap(rollout_->handle, Epoch{2}, 0).ok());
  EXPECT_FALSE(kept->Unsettle()) << "not everyone has swapped";
  Command(epoch::CommittedEverywhereCommand{Epoch{2}, rollout_->member});
  EXPECT_TRUE(kept->Unsettle());
}

TEST_F(AgentTarget, ServesAgainWhatItsSpareBufferHolds) {
  Serve(*rollout_, 1, 7);
  Serve(*rollout_, 2, 8);
  EXPECT_EQ(coordinator.All<epoch::StagedReport>().back().keeps,
            (epoch::Contents{{Epoch{1}, Version{7}}}));
  told_->clear();
  Command(RollbackPrepare(*rollout_, 3, 7, 1));
  ASSERT_EQ(coordinator.All<epoch::PreparedReport>().size(), 3u);
  Command(epoch::TransferCommand{Epoch{3}, rollout_->member});
  EXPECT_FALSE(engine.targets.contains(JobOf(*rollout_, 3))) << "nothing moves";
  const auto staged = coordinator.All<epoch::StagedReport>().back();
  EXPECT_EQ(staged.epoch, Epoch{3});
  EXPECT_THAT(staged.digests, IsEmpty());
  EXPECT_EQ(staged.keeps, (epoch::Contents{{Epoch{2}, Version{8}}}));
  Commit(*rollout_, 3, 7);
  EXPECT_TRUE(agent->AcknowledgeSwap(rollout_->handle, Epoch{3}, 0).ok());
  Command(epoch::CommittedEverywhereCommand{Epoch{3}, rollout_->member});
  EXPECT_THAT(*told_,
              ElementsAre("committed e3 content 3 v7 buffer 0 leader", "installed e3 content 3"));
  EXPECT_EQ(agent->Local()[0].serving, Epoch{3});
}

TEST_F(AgentTarget, DoesNotHoldWhatAnotherEpochBeganToOverwrite) {
  Serve(*rollout_, 1, 7);
  Serve(*rollout_, 2, 8);
  Command(TargetPrepare(*rollout_, 3, 9));
  Command(epoch::AbortCommand{Epoch{3}, rollout_->member, kAbort});
  Command(RollbackPrepare(*rollout_, 4, 7, 1));
  EXPECT_EQ(coordinator.All<epoch::PreparedReport>().back().epoch, Epoch{4})
      << "prepared only: nothing was written";
  Command(epoch::AbortCommand{Epoch{4}, rollout_->member, kAbort});
  Command(TargetPrepare(*rollout_, 5, 9));
  Command(epoch::TransferCommand{Epoch{5}, rollout_->member});
  Command(epoch::AbortCommand{Epoch{5}, rollout_->member, kAbort});
  Command(RollbackPrepare(*rollout_, 6, 7, 1));
  const auto failed = coordinator.All<epoch::FailedReport>().back();
  EXPECT_EQ(failed.epoch, Epoch{6});
  ExpectStatus(failed.why, Code::kFailedPrecondition, Reason::kStaleEpoch);
  EXPECT_EQ(failed.why.rank(), "engine-a/0");
}

TEST_F(AgentTarget, HoldsAsManyVersionsAsThePolicySays) {
  auto many = StagedEngine(1, 1, 4);
  for (uint64_t epoch = 1; epoch <= 5; ++epoch) Serve(*many, epoch, 10 * epoch);
  const auto held = [](std::vector<uint64_t> epochs) {
    epoch::Contents contents;
    for (const uint64_t epoch : epochs) contents.push_back({Epoch{epoch}, Version{10 * epoch}});
    return contents;
  };
  EXPECT_EQ(coordinator.All<epoch::PreparedReport>().back().holds, held({3, 2}))
      << "while epoch 5 moved";
  EXPECT_EQ(coordinator.All<epoch::StagedReport>().back().keeps, held({4, 3, 2}));
  Command(RollbackPrepare(*many, 6, 20, 2));
  Command(epoch::TransferCommand{Epoch{6}, many->member});
  const auto staged = coordinator.All<epoch::StagedReport>().back();
  EXPECT_EQ(staged.epoch, Epoch{6});
  EXPECT_EQ(staged.keeps, held({5, 4, 3}));
  Commit(*many, 6, 20);
  EXPECT_TRUE(agent->AcknowledgeSwap(many->handle, Epoch{6}, 0).ok());
  Command(epoch::CommittedEverywhereCommand{Epoch{6}, many->member});
  EXPECT_EQ(agent->Local().back().serving, Epoch{6});
  EXPECT_THAT(many->application.told,
              ::testing::Contains("committed e6 content 6 v20 buffer 1 leader"))
      << "the buffer that epoch 2 was written to";
  Command(RollbackPrepare(*many, 7, 20, 2));
  const auto failed = coordinator.All<epoch::FailedReport>().back();
  EXPECT_EQ(failed.why.message(), "no buffer holds epoch 2 but 5, 4, 3");
}

TEST_F(AgentTarget, RefusesARollbackToAnythingElse) {
  Serve(*rollout_, 1, 7);
  Command(RollbackPrepare(*rollout_, 2, 6, 0));
  Command(RollbackPrepare(*rollout_, 3, 7, 1));
  auto assignments = RollbackPrepare(*rollout_, 4, 7, 1);
  assignments.assignments = {{kPlan, 0, 1}};
  Command(assignments);
  EXPECT_EQ(coordinator.All<epoch::FailedReport>().size(), 3u) << "1 is served";
  EXPECT_EQ(agent->Local()[0].serving, Epoch{1});
}

TEST_F(AgentTarget, AnswersAnAbortOnlyWhenDrained) {
  Command(TargetPrepare(*rollout_, 2, 8));
  Command(epoch::TransferCommand{Epoch{2}, rollout_->member});
  engine.hold_drains = true;
  Command(epoch::AbortCommand{Epoch{2}, rollout_->member, kAbort});
  Command(TargetPrepare(*rollout_, 3, 8));
  EXPECT_THAT(coordinator.All<epoch::DrainedReport>(), IsEmpty());
  EXPECT_EQ(coordinator.All<epoch::PreparedReport>().size(), 1u);
  engine.EndDrains();
  sim.RunReady();
  EXPECT_EQ(coordinator.All<epoch::DrainedReport>().size(), 1u);
  EXPECT_EQ(coordinator.All<epoch::PreparedReport>().size(), 2u);
}

TEST_F(AgentTarget, TakesAnAcknowledgementOnlyForTheOfferedEpoch) {
  const auto stale = [&](uint64_t epoch) {
    ExpectStatus(agent->AcknowledgeSwap(rollout_->handle, Epoch{epoch}, 0),
                 Code::kFailedPrecondition, Reason::kStaleEpoch);
  };
  stale(0);
  Stage(*rollout_, 4, 7);
  stale(4);
  Commit(*rollout_, 4, 7);
  stale(3);
  stale(5);
  EXPECT_THAT(coordinator.All<epoch::SwappedReport>(), IsEmpty());
  EXPECT_TRUE(agent->AcknowledgeSwap(rollout_->handle, Epoch{4}, 0).ok());
  EXPECT_TRUE(agent->AcknowledgeSwap(rollout_->handle, Epoch{4}, 0).ok()) << "a repeat";
  EXPECT_EQ(coordinator.All<epoch::SwappedReport>().size(), 1u);
}

TEST_F(AgentTarget, TakesAnAcknowledgementOnlyFromTheLeader) {
  Stage(*rollout_, 4, 7);
  Commit(*rollout_, 4, 7, /*leader=*/false);
  EXPECT_THAT(*told_, ElementsAre("committed e4 content 4 v7 buffer 0"));
  ExpectStatus(agent->AcknowledgeSwap(rollout_->handle, Epoch{4}, 0), Code::kPermissionDenied,
               Reason::kPermissionDenied);
  Command(epoch::CommittedEverywhereCommand{Epoch{4}, rollout_->member});
  EXPECT_EQ(told_->back(), "installed e4 content 4");
}

TEST_F(AgentTarget, MayAcknowledgeInsideOnCommitted) {
  Stage(*rollout_, 4, 7);
  rollout_->application.when_committed = [&] {
    EXPECT_TRUE(agent->AcknowledgeSwap(rollout_->handle, Epoch{4}, 0.5).ok());
  };
  Commit(*rollout_, 4, 7);
  EXPECT_EQ(coordinator.All<epoch::SwappedReport>().size(), 1u);
}

TEST_F(AgentTarget, MayLeaveInsideOnCommitted) {
  Stage(*rollout_, 4, 7);
  rollout_->application.when_committed = [&] { agent->Detach(rollout_->handle, kAbort); };
  Commit(*rollout_, 4, 7);
  EXPECT_EQ(coordinator.All<epoch::LostReport>().size(), 1u);
  EXPECT_THAT(agent->Local(), IsEmpty());
}

TEST_F(AgentTarget, ReportsAFailedVerification) {
  Command(TargetPrepare(*rollout_, 1, 7));
  Command(epoch::TransferCommand{Epoch{1}, rollout_->member});
  engine.FinishTarget(JobOf(*rollout_, 1),
                      Fail(Code::kDataLoss, Reason::kDigestMismatch, "segment 3"));
  ASSERT_EQ(coordinator.All<epoch::FailedReport>().size(), 1u);
  EXPECT_EQ(coordinator.All<epoch::FailedReport>()[0].why.reason(), Reason::kDigestMismatch);
  Commit(*rollout_, 1, 7);
  EXPECT_THAT(*told_, IsEmpty()) << "a COMMIT of bytes that were never verified";
}

TEST_F(AgentTarget, FailsToPrepareWhenASenderIsNotNamed) {
  auto command = TargetPrepare(*rollout_, 1, 7);
  command.sources.clear();
  Command(command);
  command = TargetPrepare(*rollout_, 2, 7);
  command.source_participants.clear();
  Command(command);
  auto failed = coordinator.All<epoch::FailedReport>();
  ASSERT_EQ(failed.size(), 2u);
  EXPECT_EQ(failed[0].why.reason(), Reason::kInvalidRequest);
  EXPECT_EQ(failed[1].why.reason(), Reason::kInvalidRequest);
}

TEST_F(AgentTarget, FailsToPrepareWithoutExactlyOnePlan) {
  auto command = TargetPrepare(*rollout_, 1, 7);
  command.assignments.clear();
  Command(command);
  ASSERT_EQ(coordinator.All<epoch::FailedReport>().size(), 1u);
}

TEST_F(AgentTarget, FailsToPrepareWithoutALayoutOrAStage) {
  options.stage_bytes_max = 100;
  Start();
  auto bare = Attach(RequestFor(control::GroupRole::kEngine, "engine-b"));
  Command(TargetPrepare(*bare, 1, 7));
  ASSERT_EQ(coordinator.All<epoch::FailedReport>().size(), 1u);
  EXPECT_EQ(coordinator.All<epoch::FailedReport>()[0].why.reason(), Reason::kNotReady);
  ASSERT_TRUE(Submit(bare->handle).ok());
  Command(TargetPrepare(*bare, 2, 7));
  ASSERT_EQ(coordinator.All<epoch::FailedReport>().size(), 2u);
  EXPECT_EQ(coordinator.All<epoch::FailedReport>()[1].why.reason(), Reason::kLimitExceeded);
}

TEST_F(AgentTarget, NeverRunsAPlanThatReachesOutsideATensor) {
  coordinator.slices[{kPlan, plan::Side::kTarget, 0}].streams[0].ops[0].target_stride = {4, 1};
  Command(TargetPrepare(*rollout_, 1, 7));
  auto failed = coordinator.All<epoch::FailedReport>();
  ASSERT_EQ(failed.size(), 1u);
  ExpectStatus(failed[0].why, Code::kInvalidArgument, Reason::kShapeMismatch);
  EXPECT_EQ(failed[0].why.tensor(), "a");
  EXPECT_EQ(failed[0].why.rank(), "engine-a/0");
}

TEST_F(AgentTarget, FetchesASliceOnceForAllVersions) {
  Serve(*rollout_, 1, 7);
  Serve(*rollout_, 2, 8);
  EXPECT_EQ(coordinator.fetches, 1);
}

// ---- relays ----

TEST_F(AgentTarget, PassesOnWhatItReceives) {
  auto command = TargetPrepare(*rollout_, 1, 7);
  command.relay_readers = 1;
  command.admitted = {{Ticket{8}, Incarnation{55}}};
  command.readers = {{ParticipantId(31), 4, Incarnation{55}}};
  Command(command);
  EXPECT_THAT(engine.tickets, ElementsAre(Ticket{8}));
  EXPECT_THAT(engine.sources, IsEmpty());
  Command(epoch::TransferCommand{Epoch{1}, rollout_->member});
  const auto& target = engine.targets.at(JobOf(*rollout_, 1)).first;
  const auto& relay = engine.sources.at(JobOf(*rollout_, 1)).first;
  ASSERT_NE(relay.received, nullptr);
  EXPECT_EQ(relay.received, target.received);
  ASSERT_EQ(relay.assignments.size(), 1u);
  EXPECT_EQ(relay.assignments[0].readers, 1u);
  ASSERT_TRUE(relay.readers.has_value());
  EXPECT_THAT(relay.readers->callers, ElementsAre(Incarnation{55}));
  ASSERT_TRUE(relay.readers->ranks.contains(ParticipantId(31)));
  EXPECT_EQ(relay.readers->ranks.at(ParticipantId(31)).caller, Incarnation{55});
  EXPECT_EQ(relay.readers->ranks.at(ParticipantId(31)).rank, 4u);
  EXPECT_EQ(relay.assignments[0].slice->side, plan::Side::kSource);
  EXPECT_EQ(relay.binding[1].region, target.binding[1].region);
  EXPECT_EQ(relay.binding[1].offset, target.binding[1].offset);
  engine.FinishTarget(JobOf(*rollout_, 1), Verified());
  Commit(*rollout_, 1, 7);
  EXPECT_TRUE(agent->AcknowledgeSwap(rollout_->handle, Epoch{1}, 0).ok());
  Command(epoch::CommittedEverywhereCommand{Epoch{1}, rollout_->member});
  EXPECT_THAT(engine.tickets, IsEmpty());
  Serve(*rollout_, 2, 8);
  EXPECT_FALSE(engine.sources.contains(JobOf(*rollout_, 2)));
}

TEST_F(AgentTarget, ReadsFromARelayWhatThatHasWritten) {
  coordinator.slices[{kPlan, plan::Side::kTarget, 0}].streams[0].ops[1].source_tensor = 5;
  auto command = TargetPrepare(*rollout_, 1, 7);
  command.relayed = true;
  Command(command);
  Command(epoch::TransferCommand{Epoch{1}, rollout_->member});
  const auto& job = engine.targets.at(JobOf(*rollout_, 1)).first;
  EXPECT_EQ(job.slice->side, plan::Side::kTarget);
  EXPECT_EQ(job.slice->streams[0].ops[1].source_tensor, 1u);
  EXPECT_EQ(job.received, nullptr);
}

// ---- fills ----

TEST_F(AgentTarget, SendsItsLiveBufferToAFill) {
  Serve(*rollout_, 1, 7);
  Serve(*rollout_, 2, 8);
  auto fill = SourcePrepare(*rollout_, 3, 8);
  fill.kind = epoch::Kind::kFill;
  fill.content = Epoch{2};
  Command(fill);
  Command(epoch::TransferCommand{Epoch{3}, rollout_->member});
  EXPECT_EQ(engine.sources.at(JobOf(*rollout_, 3)).first.binding[0].region, buffers_[1]);
  EXPECT_EQ(engine.sources.at(JobOf(*rollout_, 3)).first.heads, nullptr);
  engine.FinishSource(JobOf(*rollout_, 3), Sums());
  told_->clear();
  Release(*rollout_, 3, 8);
  EXPECT_THAT(*told_, IsEmpty()) << "nobody waits for a fill's release";
  EXPECT_EQ(engine.drains_asked.back(), JobOf(*rollout_, 3));
  Serve(*rollout_, 4, 9);
}

TEST_F(AgentTarget, RefusesToBeTheSourceOfWhatItDoesNotServe) {
  auto fill = SourcePrepare(*rollout_, 3, 8);
  fill.kind = epoch::Kind::kFill;
  fill.content = Epoch{2};
  Command(fill);
  Serve(*rollout_, 4, 7);
  fill.epoch = Epoch{5};
  Command(fill);
  auto failed = coordinator.All<epoch::FailedReport>();
  ASSERT_EQ(failed.size(), 2u);
  ExpectStatus(failed[0].why, Code::kFailedPrecondition, Reason::kStaleEpoch);
  ExpectStatus(failed[1].why, Code::kFailedPrecondition, Reason::kStaleEpoch);
}

TEST_F(AgentTarget, ServesTheContentOfAFillUnderItsOwnEpoch) {
  auto fill = TargetPrepare(*rollout_, 9, 7);
  fill.kind = epoch::Kind::kFill;
  fill.content = Epoch{5};
  Command(fill);
  Command(epoch::TransferCommand{Epoch{9}, rollout_->member});
  engine.FinishTarget(JobOf(*rollout_, 9), Verified());
  Command(epoch::CommitCommand{Epoch{9}, Version{7}, Epoch{5}, rollout_->member, true});
  EXPECT_TRUE(agent->AcknowledgeSwap(rollout_->handle, Epoch{9}, 0).ok());
  Command(epoch::CommittedEverywhereCommand{Epoch{9}, rollout_->member});
  EXPECT_THAT(*told_,
              ElementsAre("committed e9 content 5 v7 buffer 0 leader", "installed e9 content 5"));
  EXPECT_EQ(agent->Local()[0].serving, Epoch{5});
}

TEST_F(AgentTarget, ShowsItsProgress) {
  Command(TargetPrepare(*rollout_, 1, 7));
  Command(epoch::TransferCommand{Epoch{1}, rollout_->member});
  const LocalStatus status = agent->Local()[0];
  EXPECT_EQ(status.phase, "transferring");
  EXPECT_EQ(status.epoch, Epoch{1});
  EXPECT_EQ(status.bytes_done, 3);
  EXPECT_EQ(status.bytes_total, 10);
}

}  // namespace
}  // namespace weightwire::agent
