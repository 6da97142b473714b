#include <algorithm>

#include "tests/unit/agent/agent_fixture.h"

namespace weightwire::agent {
namespace {

const Status kGivenUp(Code::kAborted, Reason::kAbortRequested, "given up");

class AgentPublish : public AgentTest {
 protected:
  AgentPublish() {
    Start();
    trainer_ = BoundTrainer();
    told_ = &trainer_->application.told;
  }
  std::unique_ptr<Rank> trainer_;
  std::vector<std::string>* told_;
};

TEST_F(AgentPublish, IsRefusedWithoutABinding) {
  auto unbound = Attach(RequestFor(control::GroupRole::kTrainer, "trainer", 1));
  ExpectStatus(Publish(*unbound, 1), Code::kFailedPrecondition, Reason::kNotReady);
  EXPECT_THAT(coordinator.published, IsEmpty());
}

TEST_F(AgentPublish, PassesTheCoordinatorsRefusalOnAndHoldsNothing) {
  coordinator.publish_answer = Status(Code::kFailedPrecondition, Reason::kStaleVersion, "old");
  EXPECT_EQ(Publish(*trainer_, 1), coordinator.publish_answer);
  coordinator.publish_answer = OkStatus();
  EXPECT_TRUE(Publish(*trainer_, 2).ok());
  EXPECT_THAT(*told_, IsEmpty());
}

TEST_F(AgentPublish, IsRefusedWhileAVersionIsHeld) {
  ASSERT_TRUE(Publish(*trainer_, 1).ok());
  ExpectStatus(Publish(*trainer_, 2), Code::kFailedPrecondition, Reason::kNotReady);
  EXPECT_EQ(coordinator.published.size(), 1u);
}

TEST_F(AgentPublish, ReportsSumsAndReleasesOnceNothingReadsTheBytes) {
  ASSERT_TRUE(Publish(*trainer_, 7).ok());
  Source(*trainer_, 3, 7);
  auto sourced = coordinator.All<epoch::SourceDoneReport>();
  ASSERT_EQ(sourced.size(), 1u);
  EXPECT_THAT(sourced[0].digests, ElementsAre(epoch::Digest{kPlan, 9, 0xabc}));
  const auto& job = engine.sources.at(JobOf(*trainer_, 3)).first;
  EXPECT_EQ(job.name, "trainer/0");
  ASSERT_EQ(job.assignments.size(), 1u);
  EXPECT_EQ(job.assignments[0].readers, 2u);
  ASSERT_TRUE(job.readers.has_value());
  EXPECT_THAT(job.readers->callers, ElementsAre(Incarnation{88}))
      << "whose ticket came with the command";

  engine.hold_drains = true;
  Release(*trainer_, 3, 7);
  EXPECT_THAT(*told_, IsEmpty()) << "a reader has not let go yet";
  ExpectStatus(Publish(*trainer_, 8), Code::kFailedPrecondition, Reason::kNotReady);
  engine.EndDrains();
  EXPECT_THAT(*told_, ElementsAre("released v7 e3"));
  Release(*trainer_, 3, 7);
  Release(*trainer_, 3, 7, kGivenUp);
  EXPECT_EQ(told_->size(), 1u);
  EXPECT_TRUE(Publish(*trainer_, 8).ok());
}

TEST_F(AgentPublish, ServesOnWithoutAReaderWheneverItIsExcluded) {
  ASSERT_TRUE(Publish(*trainer_, 7).ok());
  const auto exclude = [&](uint64_t epoch, uint32_t reader) {
    Command(epoch::ExcludeCommand{Epoch{epoch}, trainer_->member, kPlan, {ParticipantId{reader}}});
  };
  const auto excluded = [&](uint32_t reader) {
    return std::tuple(JobOf(*trainer_, 3), kPlan, std::vector{ParticipantId{reader}});
  };
  auto prepare = SourcePrepare(*trainer_, 3, 7);
  prepare.drops_readers = true;
  Command(prepare);
  exclude(3, 50);
  EXPECT_THAT(engine.excluded, IsEmpty()) << "there is no job yet";
  Command(epoch::TransferCommand{Epoch{3}, trainer_->member});
  EXPECT_TRUE(engine.sources.at(JobOf(*trainer_, 3)).first.drops_readers);
  EXPECT_THAT(engine.excluded, ElementsAre(excluded(50)));
  exclude(3, 51);
  exclude(3, 51);  // said again
  exclude(2, 52);  // of an epoch that does not run
  EXPECT_THAT(engine.excluded, ElementsAre(excluded(50), excluded(51)));
  engine.FinishSource(JobOf(*trainer_, 3), Sums());
  EXPECT_EQ(coordinator.All<epoch::SourceDoneReport>().size(), 1u);
  EXPECT_THAT(coordinator.All<epoch::FailedReport>(), IsEmpty()) << "it needs no answer";
}

TEST_F(AgentPublish, KnowsWhatItServedLastFromVersionToVersion) {
  ASSERT_TRUE(Publish(*trainer_, 7).ok());
  Source(*trainer_, 3, 7);
  const auto heads = engine.sources.at(JobOf(*trainer_, 3)).first.heads;
  ASSERT_NE(heads, nullptr);
  Release(*trainer_, 3, 7);
  ASSERT_TRUE(Publish(*trainer_, 8).ok());
  Source(*trainer_, 4, 8);
  EXPECT_EQ(engine.sources.at(JobOf(*trainer_, 4)).first.heads, heads);
}

/// A publisher of an agent whose `delta` is one thing, and that asks for another.
class AgentDelta : public AgentTest {
 protected:
  using Mode = transfer::DeltaPolicy::Mode;
  /// What its job of version 7 would code by.
  std::shared_ptr<transfer::DeltaBases> Bases(Mode agents, std::optional<Mode> asked) {
    options.delta.mode = agents;
    options.notes = [this](const Note& note) { notes.push_back(note); };
    Start();
    auto request = RequestFor(control::GroupRole::kTrainer, "trainer");
    request.delta = asked;
    trainer_ = Attach(request);
    BindTrainer(*trainer_);
    EXPECT_TRUE(Publish(*trainer_, 7).ok());
    Source(*trainer_, 3, 7);
    return engine.sources.at(JobOf(*trainer_, 3)).first.delta;
  }
  std::unique_ptr<Rank> trainer_;
  std::vector<Note> notes;
};

TEST_F(AgentDelta, CodesAsTheAgentIsConfigured) {
  const auto bases = Bases(Mode::kAlways, std::nullopt);
  ASSERT_NE(bases, nullptr);
  EXPECT_EQ(bases->policy().mode, Mode::kAlways);
  Release(*trainer_, 3, 7);
  ASSERT_TRUE(Publish(*trainer_, 8).ok());
  Source(*trainer_, 4, 8);
  EXPECT_EQ(engine.sources.at(JobOf(*trainer_, 4)).first.delta, bases);
}

TEST_F(AgentDelta, CodesAsItsProcessAsks) {
  const auto bases = Bases(Mode::kAuto, Mode::kAlways);
  ASSERT_NE(bases, nullptr);
  EXPECT_EQ(bases->policy().mode, Mode::kAlways);
}

TEST_F(AgentDelta, MayBeAskedNotTo) { EXPECT_EQ(Bases(Mode::kAuto, Mode::kOff), nullptr); }

TEST_F(AgentDelta, IsOffWhereTheAgentSaysSo) {
  EXPECT_EQ(Bases(Mode::kOff, Mode::kAlways), nullptr);
}

TEST_F(AgentDelta, TakesItsMemoryFromTheBudget) {
  const auto bases = Bases(Mode::kAlways, std::nullopt);
  ASSERT_NE(bases, nullptr);
  plan::StreamSchedule schedule;
  schedule.segments.push_back({0, {0}, {3'000}, 3'000});
  EXPECT_NE(bases->Of(kPlan, 1, schedule), nullptr);
  EXPECT_EQ(bases->Of(kPlan, 2, schedule), nullptr) << "of 4,096 bytes";
  EXPECT_EQ(bases->why_not().reason(), Reason::kLimitExceeded);
  EXPECT_THAT(bases->why_not().message(), HasSubstr("trainer/0: delta base"));
  for (uint64_t version : {8u, 9u}) {  // it is said once
    Release(*trainer_, version - 5, version - 1);
    ASSERT_TRUE(Publish(*trainer_, version).ok());
    Source(*trainer_, version - 4, version);
  }
  EXPECT_EQ(std::ranges::count_if(notes,
                                  [](const Note& note) {
                                    return note.text.find("sends everything, not what changed") !=
                                           std::string::npos;
                                  }),
            1);
  bases->Follow([](const PlanId&) { return false; });
  EXPECT_NE(bases->Of(kPlan, 2, schedule), nullptr) << "the first one's were given back";
}

// What is coded is a saving; a snapshot is what the trainer asked for.
TEST_F(AgentDelta, GivesWayToASnapshot) {
  const auto bases = Bases(Mode::kAlways, std::nullopt);
  ASSERT_NE(bases, nullptr);
  plan::StreamSchedule schedule;
  schedule.segments.push_back({0, {0}, {4'000}, 4'000});
  const auto base = bases->Of(kPlan, 1, schedule);
  ASSERT_NE(base, nullptr);
  ASSERT_TRUE(base->Begin(false));
  Release(*trainer_, 3, 7);
  EXPECT_FALSE(Publish(*trainer_, 8, PublishMode::kSnapshot).ok()) << "a job has the base";
  base->End();
  EXPECT_TRUE(Publish(*trainer_, 9, PublishMode::kSnapshot).ok());
  EXPECT_EQ(bases->bytes(), 0u);
  EXPECT_EQ(bases->Of(kPlan, 1, schedule), nullptr) << "it would have to give way again";
}

TEST_F(AgentPublish, RefusesAVersionThatItHasHadReleased) {
  ASSERT_TRUE(Publish(*trainer_, 7).ok());
  Source(*trainer_, 3, 7);
  Release(*trainer_, 3, 7);
  ExpectStatus(Publish(*trainer_, 7), Code::kFailedPrecondition, Reason::kStaleVersion);
  EXPECT_EQ(coordinator.published.size(), 1u) << "its release could never come";
  EXPECT_TRUE(Publish(*trainer_, 8).ok());
}

/// What a rank was released from is known by its number alone.
TEST_F(AgentPublish, ARankHasOneLineageAndTellsItToTheCoordinator) {
  const auto publish = [&](uint64_t version, uint64_t lineage) {
    PublishCall call{Version{version}, PublishMode::kHold, false, std::chrono::seconds(60)};
    call.lineage = lineage;
    std::optional<Status> answer;
    agent->Publish(trainer_->handle, call, [&](Status status) { answer = std::move(status); });
    sim.RunReady();
    return answer.value_or(Status(Code::kUnknown, Reason::kInternal, "no answer"));
  };
  ASSERT_TRUE(publish(7, 2).ok());
  EXPECT_EQ(coordinator.published.back().lineage, 2u);
  ExpectStatus(publish(7, 3), Code::kInvalidArgument, Reason::kInvalidRequest);
  Source(*trainer_, 3, 7);
  Release(*trainer_, 3, 7);
  const Status other = publish(1, 3);
  ExpectStatus(other, Code::kInvalidArgument, Reason::kInvalidRequest);
  EXPECT_THAT(other.message(), HasSubstr("publishes in lineage 2 and asks for lineage 3"));
  EXPECT_EQ(coordinator.published.size(), 1u);
  EXPECT_TRUE(publish(8, 2).ok());
}

TEST_F(AgentPublish, MayGoOnInsideOnReleased) {
  ASSERT_TRUE(Publish(*trainer_, 1).ok());
  Source(*trainer_, 1, 1);
  Status next(Code::kUnknown, Reason::kInternal, "not called");
  trainer_->application.when_released = [&] { next = Publish(*trainer_, 2); };
  Release(*trainer_, 1, 1);
  EXPECT_TRUE(next.ok()) << next.ToString();
}

TEST_F(AgentPublish, KeepsTheVersionThroughAnAbortAndServesItUnderANewEpoch) {
  ASSERT_TRUE(Publish(*trainer_, 7).ok());
  Command(SourcePrepare(*trainer_, 3, 7));
  Command(epoch::TransferCommand{Epoch{3}, trainer_->member});
  Command(epoch::AbortCommand{Epoch{3}, trainer_->member, kGivenUp});
  EXPECT_EQ(coordinator.All<epoch::DrainedReport>().size(), 1u);
  EXPECT_THAT(*told_, IsEmpty());
  Source(*trainer_, 4, 7);
  Release(*trainer_, 4, 7);
  EXPECT_THAT(*told_, ElementsAre("released v7 e4"));
}

TEST_F(AgentPublish, TellsWhyAVersionWasGivenUp) {
  ASSERT_TRUE(Publish(*trainer_, 7).ok());
  Release(*trainer_, 0, 7, kGivenUp);
  EXPECT_THAT(*told_, ElementsAre("released v7 e0 (abort_requested)"));
}

TEST_F(AgentPublish, IgnoresTheReleaseOfAnotherVersion) {
  ASSERT_TRUE(Publish(*trainer_, 7).ok());
  Release(*trainer_, 0, 6, kGivenUp);
  EXPECT_THAT(*told_, IsEmpty());
  ExpectStatus(Publish(*trainer_, 8), Code::kFailedPrecondition, Reason::kNotReady);
}

TEST_F(AgentPublish, PrepareWaitsForTheAnswerThatItOvertook) {
  coordinator.hold_replies = true;
  agent->Publish(trainer_->handle, {Version{7}, PublishMode::kHold, false, Nanos{1}},
                 [](Status) {});
  auto answer_publish = std::exchange(coordinator.held, {});
  coordinator.hold_replies = false;
  Command(SourcePrepare(*trainer_, 3, 7));
  EXPECT_THAT(coordinator.reports, IsEmpty());
  answer_publish[0]();
  sim.RunReady();
  EXPECT_EQ(coordinator.All<epoch::PreparedReport>().size(), 1u);
}

TEST_F(AgentPublish, PrepareFailsWhenTheOvertakenAnswerIsARefusal) {
  coordinator.hold_replies = true;
  coordinator.publish_answer = Status(Code::kFailedPrecondition, Reason::kMissingRank, "no rank 1");
  std::optional<Status> answer;
  agent->Publish(trainer_->handle, {Version{7}, PublishMode::kHold, false, Nanos{1}},
                 [&](Status status) { answer = status; });
  auto answer_publish = std::exchange(coordinator.held, {});
  coordinator.hold_replies = false;
  Command(SourcePrepare(*trainer_, 3, 7));
  answer_publish[0]();
  sim.RunReady();
  ASSERT_EQ(coordinator.All<epoch::FailedReport>().size(), 1u);
  EXPECT_EQ(*answer, coordinator.publish_answer);
  EXPECT_THAT(engine.sources, IsEmpty());
}

TEST_F(AgentPublish, ReleaseWaitsForTheAnswerThatItOvertook) {
  coordinator.hold_replies = true;
  std::optional<Status> answer;
  agent->Publish(trainer_->handle, {Version{7}, PublishMode::kHold, false, Nanos{1}},
                 [&](Status status) { answer = status; });
  Release(*trainer_, 0, 7, kGivenUp);
  EXPECT_THAT(*told_, IsEmpty());
  coordinator.Answer();
  sim.RunReady();
  EXPECT_TRUE(answer->ok());
  EXPECT_THAT(*told_, ElementsAre("released v7 e0 (abort_requested)"));
}

TEST_F(AgentPublish, FailsToPrepareAVersionThatIsNotHeld) {
  ASSERT_TRUE(Publish(*trainer_, 7).ok());
  Command(SourcePrepare(*trainer_, 3, 8));
  auto failed = coordinator.All<epoch::FailedReport>();
  ASSERT_EQ(failed.size(), 1u);
  ExpectStatus(failed[0].why, Code::kFailedPrecondition, Reason::kStaleVersion);
  EXPECT_EQ(failed[0].why.rank(), "trainer/0");
}

TEST_F(AgentPublish, RefusesATrainerAsATarget) {
  Command(TargetPrepare(*trainer_, 3, 7));
  ASSERT_EQ(coordinator.All<epoch::FailedReport>().size(), 1u);
  EXPECT_EQ(coordinator.All<epoch::FailedReport>()[0].why.reason(), Reason::kInvalidRequest);
}

TEST_F(AgentPublish, ReportsATransferThatFailed) {
  ASSERT_TRUE(Publish(*trainer_, 7).ok());
  Command(SourcePrepare(*trainer_, 3, 7));
  Command(epoch::TransferCommand{Epoch{3}, trainer_->member});
  engine.FinishSource(JobOf(*trainer_, 3),
                      Fail(Code::kUnavailable, Reason::kTransportFailed, "cable"));
  ASSERT_EQ(coordinator.All<epoch::FailedReport>().size(), 1u);
  EXPECT_EQ(coordinator.All<epoch::FailedReport>()[0].why.reason(), Reason::kTransportFailed);
}

TEST_F(AgentPublish, AdmitsASharedTicketForEachRankAndWithdrawsItForEach) {
  auto second = BoundTrainer(1);
  coordinator.slices[{kPlan, plan::Side::kSource, 1}] = SliceFor(plan::Side::kSource);
  coordinator.slices[{kPlan, plan::Side::kSource, 1}].rank = 1;
  coordinator.slices[{kPlan, plan::Side::kSource, 1}].streams[0].source_rank = 1;
  ASSERT_TRUE(Publish(*trainer_, 1).ok());
  ASSERT_TRUE(Publish(*second, 1).ok());
  Command(SourcePrepare(*trainer_, 1, 1));
  auto command = SourcePrepare(*second, 1, 1);
  command.assignments[0].rank = 1;
  Command(command);
  ASSERT_EQ(coordinator.All<epoch::PreparedReport>().size(), 2u);
  EXPECT_THAT(engine.tickets, ElementsAre(Ticket{5}, Ticket{5}));
  Command(epoch::AbortCommand{Epoch{1}, trainer_->member, kGivenUp});
  EXPECT_THAT(engine.tickets, ElementsAre(Ticket{5}));
  Command(epoch::AbortCommand{Epoch{1}, second->member, kGivenUp});
  EXPECT_THAT(engine.tickets, IsEmpty());
}

TEST_F(AgentPublish, AdmitsNoTicketOfAnEpochThatCouldNotBePrepared) {
  ASSERT_TRUE(Publish(*trainer_, 1).ok());
  auto command = SourcePrepare(*trainer_, 1, 1);
  command.assignments[0].plan = PlanId{7, 7};
  Command(command);
  ASSERT_EQ(coordinator.All<epoch::FailedReport>().size(), 1u);
  EXPECT_EQ(coordinator.All<epoch::FailedReport>()[0].why.reason(), Reason::kNotRegistered);
  EXPECT_THAT(engine.tickets, IsEmpty());
}

TEST_F(AgentPublish, NeverRunsAPlanThatReachesOutsideATensor) {
  coordinator.slices[{kPlan, plan::Side::kSource, 0}].streams[0].ops[1].source_offset = 1;
  ASSERT_TRUE(Publish(*trainer_, 1).ok());
  Command(SourcePrepare(*trainer_, 1, 1));
  auto failed = coordinator.All<epoch::FailedReport>();
  ASSERT_EQ(failed.size(), 1u);
  ExpectStatus(failed[0].why, Code::kInvalidArgument, Reason::kShapeMismatch);
  EXPECT_EQ(failed[0].why.tensor(), "b");
  Command(epoch::TransferCommand{Epoch{1}, trainer_->member});
  EXPECT_THAT(engine.sources, IsEmpty());
  EXPECT_THAT(engine.tickets, IsEmpty());
}

// Of the two tensors the first one changes with every version, and the second one does not.
TEST_F(AgentPublish, TellsWhatChangedSinceAndKeepsTheSums) {
  std::vector<std::vector<uint64_t>> generations;
  std::set<const void*> served;
  const auto publish = [&](uint64_t version, std::vector<uint32_t> unchanged) {
    ASSERT_TRUE(Publish(*trainer_, version, PublishMode::kHold, std::move(unchanged)).ok());
    Command(SourcePrepare(*trainer_, version, version));
    Command(epoch::TransferCommand{Epoch{version}, trainer_->member});
    const auto& job = engine.sources.at(JobOf(*trainer_, version)).first;
    generations.push_back(job.generations);
    served.insert(job.served.get());
    engine.FinishSource(JobOf(*trainer_, version), Sums());
    Release(*trainer_, version, version);
  };
  publish(1, {});
  publish(2, {1});
  ExpectStatus(Publish(*trainer_, 3, PublishMode::kHold, {0, 2}), Code::kInvalidArgument,
               Reason::kInvalidRequest);
  publish(3, {0, 1});
  coordinator.publish_answer = Status(Code::kFailedPrecondition, Reason::kMissingRank, "no rank 1");
  ASSERT_FALSE(Publish(*trainer_, 4, PublishMode::kHold, {1}).ok());
  coordinator.publish_answer = OkStatus();
  publish(4, {0, 1});
  publish(5, {});
  ASSERT_EQ(generations.size(), 5u);
  ASSERT_EQ(generations[0].size(), 2u);
  EXPECT_GT(generations[0][0], 0u);
  EXPECT_GT(generations[0][1], 0u);
  EXPECT_LT(generations[0][0], generations[1][0]);
  EXPECT_EQ(generations[0][1], generations[1][1]);
  EXPECT_EQ(generations[1], generations[2]);
  EXPECT_LT(generations[2][0], generations[3][0]) << "the call that was refused told so";
  EXPECT_EQ(generations[2][1], generations[3][1]);
  EXPECT_LT(generations[3][1], generations[4][1]);
  EXPECT_EQ(served.size(), 1u);
  EXPECT_FALSE(served.contains(nullptr));
}

TEST_F(AgentPublish, ARepeatTellsToo) {
  ASSERT_TRUE(Publish(*trainer_, 1).ok());
  Source(*trainer_, 1, 1);
  const auto before = engine.sources.at(JobOf(*trainer_, 1)).first.generations;
  ASSERT_TRUE(Publish(*trainer_, 1, PublishMode::kHold, {1}).ok());
  Release(*trainer_, 1, 1);
  ASSERT_TRUE(Publish(*trainer_, 2, PublishMode::kHold, {0, 1}).ok());
  Source(*trainer_, 2, 2);
  const auto after = engine.sources.at(JobOf(*trainer_, 2)).first.generations;
  EXPECT_LT(before[0], after[0]);
  EXPECT_EQ(before[1], after[1]);
}

TEST_F(AgentPublish, OtherMemoryIsOtherBytes) {
  ASSERT_TRUE(Publish(*trainer_, 1).ok());
  Source(*trainer_, 1, 1);
  const auto before = engine.sources.at(JobOf(*trainer_, 1)).first.generations;
  Release(*trainer_, 1, 1);
  const uint64_t region = Import(trainer_->handle, *MakeRegion()).value();
  ASSERT_TRUE(agent->Bind(trainer_->handle, {{0, region, 0}, {1, region, 64}}).ok());
  ASSERT_TRUE(Publish(*trainer_, 2, PublishMode::kHold, {0, 1}).ok());
  Source(*trainer_, 2, 2);
  const auto after = engine.sources.at(JobOf(*trainer_, 2)).first.generations;
  EXPECT_LT(before[0], after[0]);
  EXPECT_LT(before[1], after[1]);
}

// ---- snapshots ----

class AgentSnapshot : public AgentPublish {};

TEST_F(AgentSnapshot, ReleasesAfterTheCopyAndServesTheCopiedBytes) {
  std::memset(parameters->data(), 0x11, 128);
  ASSERT_TRUE(Publish(*trainer_, 7, PublishMode::kSnapshot).ok());
  EXPECT_THAT(*told_, ElementsAre("released v7 e0"));
  std::memset(parameters->data(), 0x22, 128);  // the optimizer goes on

  Command(SourcePrepare(*trainer_, 3, 7));
  Command(epoch::TransferCommand{Epoch{3}, trainer_->member});
  const auto& binding = engine.sources.at(JobOf(*trainer_, 3)).first.binding;
  ASSERT_EQ(binding.size(), 2u);
  for (const auto& span : binding) {
    for (uint64_t i = 0; i < span.bytes; ++i) ASSERT_EQ(span.data()[i], std::byte{0x11});
  }
  EXPECT_EQ(binding[0].bytes, 48u);
  EXPECT_EQ(binding[1].bytes, 10u);
  engine.FinishSource(JobOf(*trainer_, 3), Sums());
  Release(*trainer_, 3, 7);
  EXPECT_EQ(told_->size(), 1u) << "told twice";
}

// What is told to be unchanged is in the copy already; a call that made none counts for nothing.
TEST_F(AgentSnapshot, CopiesWhatChangedSinceItsOwnLastCopy) {
  const auto copied = [&](uint64_t version, std::vector<uint32_t> unchanged) {
    EXPECT_TRUE(Publish(*trainer_, version, PublishMode::kSnapshot, std::move(unchanged)).ok());
    Source(*trainer_, version, version);
    const auto& binding = engine.sources.at(JobOf(*trainer_, version)).first.binding;
    const std::pair bytes(std::to_integer<int>(binding[0].data()[47]),
                          std::to_integer<int>(binding[1].data()[9]));
    Release(*trainer_, version, version);
    return bytes;
  };
  std::memset(parameters->data(), 1, 128);
  EXPECT_EQ(copied(1, {}), std::pair(1, 1));
  std::memset(parameters->data(), 2, 128);
  EXPECT_EQ(copied(2, {1}), std::pair(2, 1));
  std::memset(parameters->data(), 3, 128);
  ASSERT_TRUE(Publish(*trainer_, 3, PublishMode::kHold, {0}).ok());
  Source(*trainer_, 3, 3);
  Release(*trainer_, 3, 3);
  EXPECT_EQ(copied(4, {0, 1}), std::pair(2, 3)) << "the version before wrote the second one";
}

TEST_F(AgentSnapshot, RefusesTheNextVersionWhileTheLastOneMoves) {
  ASSERT_TRUE(Publish(*trainer_, 1, PublishMode::kSnapshot).ok());
  ExpectStatus(Publish(*trainer_, 2, PublishMode::kSnapshot), Code::kFailedPrecondition,
               Reason::kNotReady);
  Source(*trainer_, 1, 1);
  Release(*trainer_, 1, 1);
  EXPECT_TRUE(Publish(*trainer_, 2, PublishMode::kSnapshot).ok());
  EXPECT_THAT(*told_, ElementsAre("released v1 e0", "released v2 e0"));
}

TEST_F(AgentSnapshot, PrepareWaitsForTheCopy) {
  agent->Publish(trainer_->handle, {Version{1}, PublishMode::kSnapshot, false, Nanos{1}},
                 [](Status) {});
  while (coordinator.published.empty()) ASSERT_TRUE(sim.RunOne());
  ASSERT_THAT(*told_, IsEmpty());
  coordinator.agent_port->OnCommand(SourcePrepare(*trainer_, 1, 1));
  EXPECT_THAT(coordinator.reports, IsEmpty());
  sim.RunReady();
  EXPECT_EQ(coordinator.All<epoch::PreparedReport>().size(), 1u);
  EXPECT_THAT(*told_, ElementsAre("released v1 e0"));
}

TEST_F(AgentSnapshot, IsGivenUpDuringTheCopyWithTheReason) {
  agent->Publish(trainer_->handle, {Version{1}, PublishMode::kSnapshot, false, Nanos{1}},
                 [](Status) {});
  while (coordinator.published.empty()) ASSERT_TRUE(sim.RunOne());
  coordinator.agent_port->OnCommand(
      epoch::ReleaseCommand{Epoch{}, Version{1}, trainer_->member, kGivenUp});
  EXPECT_THAT(*told_, IsEmpty()) << "the copy still reads the bytes";
  sim.RunReady();
  EXPECT_THAT(*told_, ElementsAre("released v1 e0 (abort_requested)"));
  EXPECT_TRUE(Publish(*trainer_, 2, PublishMode::kSnapshot).ok());
}

TEST_F(AgentSnapshot, IsRefusedBeyondTheBudget) {
  options.stage_bytes_max = 73;
  Start();
  auto trainer = BoundTrainer(0, 2);
  ExpectStatus(Publish(*trainer, 1, PublishMode::kSnapshot), Code::kResourceExhausted,
               Reason::kLimitExceeded);
  EXPECT_THAT(coordinator.published, IsEmpty());
  EXPECT_TRUE(Publish(*trainer, 1, PublishMode::kHold).ok());
}

TEST_F(AgentSnapshot, CountsItsMemoryAndReusesIt) {
  ASSERT_TRUE(Publish(*trainer_, 1, PublishMode::kSnapshot).ok());
  EXPECT_EQ(sink.gauges["staging_bytes"], 74);
  Source(*trainer_, 1, 1);
  const auto first = coordinator.reports.size();
  Release(*trainer_, 1, 1);
  ASSERT_TRUE(Publish(*trainer_, 2, PublishMode::kSnapshot).ok());
  EXPECT_EQ(sink.gauges["staging_bytes"], 74);
  EXPECT_EQ(coordinator.reports.size(), first);
  agent->Detach(trainer_->handle, OkStatus());
  EXPECT_EQ(sink.gauges["staging_bytes"], 0);
}

TEST_F(AgentSnapshot, CopiesTensorsLongerThanAChunkWhole) {
  const int64_t elements = (20 << 20) / 4 + 3;
  options.stage_bytes_max = 64 << 20;
  Start();
  auto trainer = Attach(RequestFor(control::GroupRole::kTrainer, "trainer", 0, 2));
  layout::RankLayout big;
  big.tensors.push_back({"small", layout::DType::kU8, {5}, {}});
  big.tensors.push_back({"big", layout::DType::kF32, {elements}, {}});
  big.tensors.push_back({"last", layout::DType::kU8, {7}, {}});
  ASSERT_TRUE(Submit(trainer->handle, big).ok());
  auto region = MakeRegion(static_cast<uint64_t>(elements) * 4 + 64);
  for (uint64_t i = 0; i < region->size(); ++i) {
    region->data()[i] = static_cast<std::byte>(i * 2654435761u >> 13);
  }
  const uint64_t id = Import(trainer->handle, *region).value();
  ASSERT_TRUE(agent->Bind(trainer->handle, {{0, id, 1}, {1, id, 16}, {2, id, 7}}).ok());
  ASSERT_TRUE(Publish(*trainer, 1, PublishMode::kSnapshot).ok());
  plan::RankSlice slice{kPlan, plan::Side::kSource, 0, {}, {}};
  coordinator.slices[{kPlan, plan::Side::kSource, 0}] = slice;
  Command(SourcePrepare(*trainer, 1, 1));
  Command(epoch::TransferCommand{Epoch{1}, trainer->member});
  const auto& binding = engine.sources.at(JobOf(*trainer, 1)).first.binding;
  const uint64_t offsets[] = {1, 16, 7};
  ASSERT_EQ(binding.size(), 3u);
  for (size_t t = 0; t < 3; ++t) {
    EXPECT_EQ(std::memcmp(binding[t].data(), region->data() + offsets[t], binding[t].bytes), 0);
  }
  EXPECT_EQ(binding[1].bytes, static_cast<uint64_t>(elements) * 4);
}

}  // namespace
}  // namespace weightwire::agent
