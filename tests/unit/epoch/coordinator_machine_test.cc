#include "server/epoch/coordinator_machine.h"

#include <gtest/gtest.h>

#include "server/epoch/digests.h"

namespace weightwire::epoch {
namespace {

const Member kSource0{ParticipantId(1), Incarnation(11)};
const Member kSource1{ParticipantId(2), Incarnation(12)};
const Member kA0{ParticipantId(3), Incarnation(13)};
const Member kA1{ParticipantId(4), Incarnation(14)};
const Member kB0{ParticipantId(5), Incarnation(15)};
constexpr PlanId kPlanA{1, 1};
constexpr PlanId kPlanB{1, 2};

const Status kGone(Code::kAborted, Reason::kMemberLost, "process ended");
const Status kBroken(Code::kUnavailable, Reason::kTransportFailed, "connection broke");

Spec TwoEngines() {
  Spec spec;
  spec.epoch = Epoch(4);
  spec.content = Epoch(4);
  spec.version = Version(9);
  spec.sources = {kSource0, kSource1};
  spec.engines = {{"engine-a", {kA0, kA1}}, {"engine-b", {kB0}}};
  return spec;
}

std::vector<Digest> DigestsOf(const Member& m) {
  if (m == kSource0) return {{kPlanA, 0, 70}, {kPlanA, 1, 71}, {kPlanB, 0, 80}};
  if (m == kSource1) return {{kPlanA, 2, 72}, {kPlanB, 1, 81}};
  if (m == kA0) return {{kPlanA, 0, 70}, {kPlanA, 2, 72}};
  if (m == kA1) return {{kPlanA, 1, 71}};
  return {{kPlanB, 0, 80}, {kPlanB, 1, 81}};
}

template <typename T>
int Count(const std::vector<Action>& actions) {
  int count = 0;
  for (const Action& action : actions) count += std::holds_alternative<T>(action) ? 1 : 0;
  return count;
}

/// Drives the machine and keeps the actions of the last event.
struct Machine {
  explicit Machine(Spec spec) {
    Outcome begin = Begin(std::move(spec));
    state = std::move(begin.state);
    last = std::move(begin.actions);
  }
  void Give(const Event& event) {
    Outcome outcome = Step(state, event);
    state = std::move(outcome.state);
    last = std::move(outcome.actions);
  }
  void PrepareAll() {
    for (const Member& m : {kSource0, kSource1, kA0, kA1, kB0}) Give(PreparedEvent{m});
  }
  void TransferAll() {
    Give(SourceDoneEvent{kSource0, DigestsOf(kSource0)});
    Give(SourceDoneEvent{kSource1, DigestsOf(kSource1)});
    Give(StagedEvent{kA0, DigestsOf(kA0)});
    Give(StagedEvent{kA1, DigestsOf(kA1)});
    Give(StagedEvent{kB0, DigestsOf(kB0)});
  }
  void DrainAll() {
    for (const Member& m : {kSource0, kSource1, kA0, kA1, kB0}) Give(DrainedEvent{m});
  }
  void ExpectNothingChangesOn(const Event& event) {
    const State before = state;
    Give(event);
    EXPECT_EQ(state, before);
    EXPECT_TRUE(last.empty());
  }
  State state;
  std::vector<Action> last;
};

Machine Staged(Spec spec) {
  Machine machine(std::move(spec));
  machine.PrepareAll();
  machine.TransferAll();
  return machine;
}

TEST(EpochMachine, BeginsByPreparingEveryone) {
  Machine machine(TwoEngines());
  ASSERT_EQ(machine.last.size(), 2u);
  EXPECT_TRUE(std::holds_alternative<SendPrepare>(machine.last[0]));
  EXPECT_EQ(std::get<ArmDeadline>(machine.last[1]).phase, Phase::kPreparing);
  EXPECT_EQ(WaitingFor(machine.state).size(), 5u);
}

TEST(EpochMachine, TransfersOnlyWhenEveryMemberPrepared) {
  Machine machine(TwoEngines());
  for (const Member& m : {kSource0, kSource1, kA0, kA1}) {
    machine.Give(PreparedEvent{m});
    EXPECT_TRUE(machine.last.empty());
  }
  EXPECT_EQ(WaitingFor(machine.state), std::vector<Member>{kB0});
  machine.Give(PreparedEvent{kB0});
  EXPECT_EQ(machine.state.phase, Phase::kTransferring);
  EXPECT_EQ(Count<SendTransfer>(machine.last), 1);
}

TEST(EpochMachine, RepeatedPreparedCountsOnce) {
  Machine machine(TwoEngines());
  machine.Give(PreparedEvent{kA0});
  for (int i = 0; i < 10; ++i) machine.ExpectNothingChangesOn(PreparedEvent{kA0});
}

TEST(EpochMachine, StaleIncarnationAndStrangersChangeNothing) {
  Machine machine(TwoEngines());
  const Member stale{kA0.id, Incarnation(99)};
  machine.ExpectNothingChangesOn(PreparedEvent{stale});
  machine.ExpectNothingChangesOn(LostEvent{stale, kGone});
  machine.ExpectNothingChangesOn(FailedEvent{stale, kBroken});
  machine.ExpectNothingChangesOn(PreparedEvent{{ParticipantId(77), Incarnation(1)}});
}

TEST(EpochMachine, ReportsOfAnotherPhaseChangeNothing) {
  Machine machine(TwoEngines());
  machine.ExpectNothingChangesOn(SourceDoneEvent{kSource0, DigestsOf(kSource0)});
  machine.ExpectNothingChangesOn(StagedEvent{kA0, DigestsOf(kA0)});
  machine.ExpectNothingChangesOn(SwappedEvent{kA0});
  machine.ExpectNothingChangesOn(DrainedEvent{kA0});
  machine.ExpectNothingChangesOn(JournalEvent{});
  machine.ExpectNothingChangesOn(CommitAskedEvent{});
  machine.ExpectNothingChangesOn(DeadlineEvent{Phase::kTransferring});
}

TEST(EpochMachine, ReleasesThenAppendsOnceStaged) {
  Machine machine = Staged(TwoEngines());
  EXPECT_EQ(machine.state.phase, Phase::kCommitting);
  ASSERT_EQ(machine.last.size(), 2u);
  EXPECT_TRUE(std::holds_alternative<SendRelease>(machine.last[0]));
  EXPECT_TRUE(std::holds_alternative<AppendCommit>(machine.last[1]));
}

TEST(EpochMachine, ManualCommitWaitsInStaged) {
  Spec spec = TwoEngines();
  spec.manual_commit = true;
  Machine machine = Staged(spec);
  EXPECT_EQ(machine.state.phase, Phase::kStaged);
  EXPECT_EQ(Count<SendRelease>(machine.last), 1);
  EXPECT_EQ(Count<AppendCommit>(machine.last), 0);
  EXPECT_TRUE(WaitingFor(machine.state).empty());
  machine.Give(CommitAskedEvent{});
  EXPECT_EQ(Count<AppendCommit>(machine.last), 1);
  machine.ExpectNothingChangesOn(CommitAskedEvent{});
}

TEST(EpochMachine, ManualCommitPastItsDeadlineAborts) {
  Spec spec = TwoEngines();
  spec.manual_commit = true;
  Machine machine = Staged(spec);
  machine.Give(DeadlineEvent{Phase::kStaged});
  EXPECT_EQ(machine.state.phase, Phase::kAborting);
  EXPECT_EQ(machine.state.why.reason(), Reason::kDeadlineExceeded);
  EXPECT_EQ(Count<SendAbort>(machine.last), 5);
}

struct WrongDigests {
  const char* name;
  Member member;
  std::vector<Digest> digests;
};
class EpochMachineDigests : public ::testing::TestWithParam<WrongDigests> {};

TEST_P(EpochMachineDigests, DifferenceAborts) {
  Machine machine(TwoEngines());
  machine.PrepareAll();
  for (const Member& m : {kSource0, kSource1, kA0, kA1, kB0}) {
    const auto& digests = m == GetParam().member ? GetParam().digests : DigestsOf(m);
    if (m == kSource0 || m == kSource1) {
      machine.Give(SourceDoneEvent{m, digests});
    } else {
      machine.Give(StagedEvent{m, digests});
    }
  }
  EXPECT_EQ(machine.state.phase, Phase::kAborting);
  EXPECT_EQ(machine.state.why.reason(), Reason::kDigestMismatch);
  EXPECT_EQ(Count<SendRelease>(machine.last), 0);
}

INSTANTIATE_TEST_SUITE_P(
    All, EpochMachineDigests,
    ::testing::Values(
        WrongDigests{"OneBit", kA1, {{kPlanA, 1, 70}}},
        WrongDigests{"StreamNotWritten", kA0, {{kPlanA, 0, 70}}},
        WrongDigests{"NothingWritten", kB0, {}},
        WrongDigests{"StreamNotSent", kSource1, {{kPlanA, 2, 72}}},
        WrongDigests{"UnknownPlan", kB0, {{PlanId{9, 9}, 0, 80}, {PlanId{9, 9}, 1, 81}}},
        WrongDigests{"AnotherEnginesPlan", kA1, {{kPlanA, 1, 71}, {kPlanB, 0, 80}}},
        WrongDigests{"WrittenTwice", kA0, {{kPlanA, 0, 70}, {kPlanA, 2, 72}, {kPlanA, 1, 71}}},
        WrongDigests{"SentTwice", kSource1, {{kPlanA, 2, 72}, {kPlanB, 1, 81}, {kPlanA, 1, 71}}},
        WrongDigests{
            "SentButUnread", kSource1, {{kPlanA, 2, 72}, {kPlanB, 1, 81}, {PlanId{3, 3}, 0, 1}}}),
    [](const auto& instance) { return std::string(instance.param.name); });

TEST(EpochMachine, CommitIsSentOnlyOnceDurable) {
  Machine machine = Staged(TwoEngines());
  machine.ExpectNothingChangesOn(SwappedEvent{kA0});
  machine.Give(JournalEvent{});
  EXPECT_EQ(Count<SendCommit>(machine.last), 2);
  EXPECT_EQ(std::get<ArmDeadline>(machine.last.back()).phase, Phase::kCommitting);
  machine.ExpectNothingChangesOn(JournalEvent{});
}

TEST(EpochMachine, CommitsWhenEveryLeaderApplied) {
  Machine machine = Staged(TwoEngines());
  machine.Give(JournalEvent{});
  machine.ExpectNothingChangesOn(SwappedEvent{kA1});
  machine.Give(SwappedEvent{kA0});
  EXPECT_EQ(std::get<SendCommittedEverywhere>(machine.last.at(0)).engine, "engine-a");
  machine.ExpectNothingChangesOn(SwappedEvent{kA0});
  EXPECT_EQ(WaitingFor(machine.state), std::vector<Member>{kB0});
  machine.Give(SwappedEvent{kB0});
  EXPECT_EQ(std::get<Finish>(machine.last.at(1)).phase, Phase::kCommitted);
  machine.ExpectNothingChangesOn(LostEvent{kA0, kGone});
}

TEST(EpochMachine, RefusesAbortOnceCommitIsSubmitted) {
  Machine machine = Staged(TwoEngines());
  machine.ExpectNothingChangesOn(AbortAskedEvent{kGone});
  machine.ExpectNothingChangesOn(DeadlineEvent{Phase::kCommitting});
  machine.ExpectNothingChangesOn(DeadlineEvent{Phase::kStaged});
  machine.ExpectNothingChangesOn(FailedEvent{kSource0, kBroken});
  machine.Give(LostEvent{kSource0, kGone});
  EXPECT_EQ(machine.state.phase, Phase::kCommitting);
  EXPECT_TRUE(machine.last.empty());
}

TEST(EpochMachine, FailedAppendStopsDeciding) {
  Machine machine = Staged(TwoEngines());
  machine.Give(JournalEvent{Status(Code::kUnknown, Reason::kJournalFailed, "disk")});
  ASSERT_EQ(machine.last.size(), 1u);
  EXPECT_TRUE(std::holds_alternative<Halt>(machine.last[0]));
  machine.ExpectNothingChangesOn(JournalEvent{});
  machine.ExpectNothingChangesOn(LostEvent{kA0, kGone});
  machine.ExpectNothingChangesOn(FailedEvent{kA0, kBroken});
  machine.ExpectNothingChangesOn(AbortAskedEvent{kGone});
}

TEST(EpochMachine, LostMemberBeforeTheDecisionAborts) {
  for (const Member& lost : {kSource1, kA1, kB0}) {
    Machine machine(TwoEngines());
    machine.PrepareAll();
    machine.Give(LostEvent{lost, kGone});
    EXPECT_EQ(machine.state.phase, Phase::kAborting);
    EXPECT_EQ(machine.state.why.reason(), Reason::kMemberLost);
    EXPECT_EQ(Count<SendAbort>(machine.last), 4) << "all but the lost one";
  }
}

Spec WithReadersThatCanBeDropped() {
  Spec spec = TwoEngines();
  spec.drops_readers = true;
  return spec;
}

TEST(EpochMachine, AnEngineThatIsLostWhileBytesMoveIsExcluded) {
  Machine machine(WithReadersThatCanBeDropped());
  machine.PrepareAll();
  machine.Give(StagedEvent{kB0, DigestsOf(kB0)});
  machine.Give(SourceDoneEvent{kSource0, DigestsOf(kSource0)});
  machine.Give(SourceDoneEvent{kSource1, DigestsOf(kSource1)});
  machine.Give(LostEvent{kA1, kGone});
  EXPECT_EQ(Count<SendAbort>(machine.last), 1) << "its other rank stops";
  EXPECT_EQ(std::get<SendAbort>(machine.last.at(0)).member, kA0);
  EXPECT_EQ(std::get<ExcludeEngine>(machine.last.at(1)).engine.name, "engine-a");
  EXPECT_EQ(Count<AppendCommit>(machine.last), 1) << "all the others had done their part";
  ASSERT_EQ(machine.state.spec.engines.size(), 1u) << "COMMIT names who holds the version";
  EXPECT_EQ(machine.state.spec.engines[0].name, "engine-b");
  machine.ExpectNothingChangesOn(DrainedEvent{kA0});
  machine.ExpectNothingChangesOn(StagedEvent{kA0, DigestsOf(kA0)});
}

TEST(EpochMachine, TransfersWhenTheOnlyOneThatWasNotPreparedIsExcluded) {
  Machine machine(WithReadersThatCanBeDropped());
  for (const Member& m : {kSource0, kSource1, kA0, kA1}) machine.Give(PreparedEvent{m});
  machine.Give(LostEvent{kB0, kGone});
  EXPECT_EQ(Count<SendTransfer>(machine.last), 1);
  EXPECT_EQ(machine.state.phase, Phase::kTransferring);
}

TEST(EpochMachine, AnEngineThatOthersReadFromEndsTheAttempt) {
  Spec spec = WithReadersThatCanBeDropped();
  spec.parents["engine-b"] = "engine-a";
  Machine machine(spec);
  machine.PrepareAll();
  machine.Give(LostEvent{kA0, kGone});
  EXPECT_EQ(machine.state.phase, Phase::kAborting);
  Machine leaf(spec);
  leaf.PrepareAll();
  leaf.Give(LostEvent{kB0, kGone});
  EXPECT_EQ(leaf.state.phase, Phase::kTransferring);
}

TEST(EpochMachine, NobodyIsExcludedBelowWhatThePolicyAsksFor) {
  Spec spec = WithReadersThatCanBeDropped();
  spec.engines_min = 2;
  Machine machine(spec);
  machine.PrepareAll();
  machine.Give(LostEvent{kB0, kGone});
  EXPECT_EQ(machine.state.phase, Phase::kAborting);
}

TEST(EpochMachine, AStagedVersionIsCommittedWithoutAnEngineThatIsLostBeforeTheManualCommit) {
  Spec spec = TwoEngines();
  spec.manual_commit = true;
  spec.parents["engine-b"] = "engine-a";
  Machine machine = Staged(spec);
  ASSERT_EQ(machine.state.phase, Phase::kStaged);
  machine.Give(LostEvent{kA1, kGone});
  EXPECT_EQ(machine.state.phase, Phase::kStaged) << "it is released: nobody can publish it again";
  machine.Give(CommitAskedEvent{});
  EXPECT_EQ(Count<AppendCommit>(machine.last), 1);
  ASSERT_EQ(machine.state.spec.engines.size(), 1u);
  EXPECT_EQ(machine.state.spec.engines[0].name, "engine-b");
}

TEST(EpochMachine, AGraceThatEndsBelowTheQuorumIsArmedAgain) {
  Spec spec = WithReadersThatCanBeDropped();
  const Member c{ParticipantId(6), Incarnation(16)}, d{ParticipantId(7), Incarnation(17)};
  spec.engines = {{"engine-b", {kB0}}, {"engine-c", {c}}, {"engine-d", {d}}};
  spec.quorum = 1;
  Machine machine(spec);
  for (const Member& m : {kSource0, kSource1, kB0, c, d}) machine.Give(PreparedEvent{m});
  machine.Give(StagedEvent{kB0, DigestsOf(kB0)});
  EXPECT_EQ(Count<ArmGrace>(machine.last), 1);
  machine.Give(LostEvent{kB0, kGone});
  machine.Give(GraceEvent{});
  EXPECT_EQ(machine.state.phase, Phase::kTransferring) << "nobody is staged any more";
  machine.Give(StagedEvent{c, DigestsOf(kB0)});
  EXPECT_EQ(Count<ArmGrace>(machine.last), 1);
  machine.Give(GraceEvent{});
  EXPECT_EQ(machine.state.excluded, (std::set<std::string>{"engine-b", "engine-d"}));
}

/// Two engines of the actor, one of the reward model; one engine is a quorum by number.
struct TwoModels {
  TwoModels() {
    Spec spec = WithReadersThatCanBeDropped();
    spec.engines = {
        {"engine-b", {kB0}, "actor"}, {"engine-c", {c}, "actor"}, {"engine-d", {d}, "reward"}};
    spec.quorum = 1;
    machine.emplace(spec);
    for (const Member& m : {kSource0, kSource1, kB0, c, d}) machine->Give(PreparedEvent{m});
  }
  void Stage(const Member& member) { machine->Give(StagedEvent{member, DigestsOf(kB0)}); }
  const Member c{ParticipantId(6), Incarnation(16)}, d{ParticipantId(7), Incarnation(17)};
  std::optional<Machine> machine;
};

TEST(EpochMachine, AQuorumHasAnEngineOfEveryModel) {
  TwoModels two;
  two.Stage(kB0);
  EXPECT_EQ(Count<ArmGrace>(two.machine->last), 0) << "nobody has the reward model";
  two.Stage(two.d);
  EXPECT_EQ(Count<ArmGrace>(two.machine->last), 1);
  two.machine->Give(GraceEvent{});
  EXPECT_EQ(two.machine->state.excluded, (std::set<std::string>{"engine-c"}));
}

TEST(EpochMachine, TheLastStagedEngineOfAModelThatIsLostLeavesNoQuorum) {
  TwoModels two;
  two.Stage(two.d);
  two.Stage(kB0);
  EXPECT_EQ(Count<ArmGrace>(two.machine->last), 1);
  two.machine->Give(LostEvent{kB0, kGone});
  two.machine->Give(GraceEvent{});
  EXPECT_EQ(two.machine->state.phase, Phase::kTransferring) << "nobody of the actor is staged";
  two.Stage(two.c);
  for (const Member& source : {kSource0, kSource1}) {
    two.machine->Give(SourceDoneEvent{source, DigestsOf(source)});
  }
  EXPECT_EQ(two.machine->state.excluded, (std::set<std::string>{"engine-b"}));
}

TEST(EpochMachine, AnEngineThatIsAloneOfItsModelIsNotLeftBehind) {
  for (const bool fails : {true, false}) {
    TwoModels two;
    two.Stage(kB0);
    two.Stage(two.c);
    if (fails) {
      two.machine->Give(FailedEvent{two.d, kBroken});
    } else {
      two.machine->Give(DeadlineEvent{Phase::kTransferring});
    }
    EXPECT_EQ(two.machine->state.phase, Phase::kAborting);
    EXPECT_EQ(two.machine->state.stragglers, std::set<std::string>{});
    EXPECT_EQ(two.machine->state.excluded, std::set<std::string>{});
  }
}

TEST(EpochMachine, TheLastEngineOfAModelIsNotExcludedBeforeTheDecision) {
  for (const Phase phase : {Phase::kPreparing, Phase::kTransferring, Phase::kStaged}) {
    Spec spec = TwoModels().machine->state.spec;
    spec.quorum = 0;
    spec.manual_commit = true;
    Machine machine(spec);
    const TwoModels two;
    for (const Member& m : {kSource0, kSource1, kB0, two.c, two.d}) {
      if (phase != Phase::kPreparing) machine.Give(PreparedEvent{m});
    }
    if (phase == Phase::kStaged) {
      for (const Member& m : {kB0, two.c}) machine.Give(StagedEvent{m, DigestsOf(kB0)});
      machine.Give(StagedEvent{two.d, {{kPlanA, 0, 70}, {kPlanA, 1, 71}, {kPlanA, 2, 72}}});
      for (const Member& m : {kSource0, kSource1}) {
        machine.Give(SourceDoneEvent{m, DigestsOf(m)});
      }
    }
    ASSERT_EQ(machine.state.phase, phase);
    machine.Give(LostEvent{two.c, kGone});
    EXPECT_EQ(machine.state.phase, phase) << "engine-b holds the model, too";
    machine.Give(LostEvent{kB0, kGone});
    EXPECT_EQ(machine.state.phase, Phase::kAborting);
    EXPECT_EQ(machine.state.excluded, std::set<std::string>{"engine-c"});
  }
}

TEST(EpochMachine, WhenTheLastEngineOfAModelMayGoTheOthersAreAQuorum) {
  TwoModels two;
  two.machine->state.spec.every_model = false;
  two.Stage(kB0);
  two.machine->Give(LostEvent{two.d, kGone});
  EXPECT_EQ(Count<ArmGrace>(two.machine->last), 1);
  two.machine->Give(GraceEvent{});
  EXPECT_EQ(two.machine->state.excluded, (std::set<std::string>{"engine-c", "engine-d"}));
}

TEST(EpochMachine, LostMemberAfterTheDecisionIsNotWaitedForAndEvictsNobody) {
  Machine machine = Staged(TwoEngines());
  machine.Give(LostEvent{kA1, kGone});
  EXPECT_TRUE(machine.last.empty());
  machine.Give(JournalEvent{});
  ASSERT_EQ(Count<SendCommit>(machine.last), 1);
  EXPECT_EQ(std::get<SendCommit>(machine.last[0]).engine, "engine-b");
  machine.Give(SwappedEvent{kB0});
  EXPECT_EQ(machine.state.phase, Phase::kCommitted);
}

TEST(EpochMachine, FailureAfterTheDecisionEvictsUnlessApplied) {
  Machine machine = Staged(TwoEngines());
  machine.Give(JournalEvent{});
  machine.Give(SwappedEvent{kA0});
  machine.ExpectNothingChangesOn(FailedEvent{kA1, kBroken});
  machine.Give(FailedEvent{kB0, kBroken});
  EXPECT_EQ(std::get<EvictEngine>(machine.last.at(0)).engine, "engine-b");
  EXPECT_EQ(machine.state.phase, Phase::kCommitted);
}

TEST(EpochMachine, EnginesThatDoNotSwapInTimeAreLeftBehindAndNotFenced) {
  Machine machine = Staged(TwoEngines());
  machine.Give(JournalEvent{});
  machine.Give(SwappedEvent{kB0});
  machine.Give(DeadlineEvent{Phase::kCommitting});
  const auto& behind = std::get<MarkStale>(machine.last.at(0));
  EXPECT_EQ(behind.engine, "engine-a");
  EXPECT_EQ(behind.why.rank(), "engine-a/0");
  EXPECT_EQ(Count<EvictEngine>(machine.last), 0);
  EXPECT_EQ(machine.state.phase, Phase::kCommitted);
}

TEST(EpochMachine, FailureAbortsWithItsReasonAndRank) {
  Machine machine(TwoEngines());
  machine.PrepareAll();
  machine.Give(FailedEvent{kA1, kBroken});
  EXPECT_EQ(machine.state.phase, Phase::kAborting);
  EXPECT_EQ(machine.state.why.reason(), Reason::kTransportFailed);
  EXPECT_EQ(machine.state.why.rank(), "engine-a/1");
  EXPECT_EQ(machine.state.why.epoch(), Epoch(4));
  machine.ExpectNothingChangesOn(FailedEvent{kA0, kBroken});
}

TEST(EpochMachine, DeadlineNamesWhoIsMissing) {
  Machine machine(TwoEngines());
  for (const Member& m : {kSource0, kA0, kB0}) machine.Give(PreparedEvent{m});
  machine.Give(DeadlineEvent{Phase::kPreparing});
  EXPECT_EQ(machine.state.why.reason(), Reason::kDeadlineExceeded);
  EXPECT_NE(machine.state.why.message().find("source/1, engine-a/1"), std::string::npos)
      << machine.state.why.message();
}

TEST(EpochMachine, AbortsOnlyWhenEveryLiveMemberDrained) {
  Machine machine(TwoEngines());
  machine.Give(AbortAskedEvent{Status(Code::kAborted, Reason::kAbortRequested, "operator")});
  for (const Member& m : {kSource0, kSource1, kA0}) {
    machine.Give(DrainedEvent{m});
    EXPECT_TRUE(machine.last.empty());
  }
  machine.Give(LostEvent{kA1, kGone});
  EXPECT_EQ(machine.state.phase, Phase::kAborting);
  machine.Give(DrainedEvent{kB0});
  EXPECT_EQ(machine.state.phase, Phase::kAborted);
  EXPECT_EQ(std::get<Finish>(machine.last.at(0)).why.reason(), Reason::kAbortRequested);
}

TEST(EpochMachine, MembersThatDoNotDrainInTimeAreEvicted) {
  Machine machine(TwoEngines());
  machine.Give(LostEvent{kB0, kGone});
  machine.Give(DrainedEvent{kSource1});
  machine.Give(DeadlineEvent{Phase::kAborting});
  EXPECT_EQ(Count<EvictEngine>(machine.last), 1) << "one for both ranks of engine-a";
  EXPECT_EQ(Count<EvictSource>(machine.last), 1);
  EXPECT_EQ(machine.state.phase, Phase::kAborted);
  EXPECT_EQ(machine.state.why.reason(), Reason::kMemberLost);
}

TEST(EpochMachine, FillCommitsWithoutAppending) {
  Spec spec = TwoEngines();
  spec.kind = Kind::kFill;
  spec.content = Epoch(3);
  spec.manual_commit = true;
  Machine machine = Staged(spec);
  EXPECT_EQ(Count<AppendCommit>(machine.last), 0);
  EXPECT_EQ(Count<SendRelease>(machine.last), 1);
  EXPECT_EQ(Count<SendCommit>(machine.last), 2);
  machine.ExpectNothingChangesOn(AbortAskedEvent{kGone});
  machine.Give(SwappedEvent{kA0});
  machine.Give(SwappedEvent{kB0});
  EXPECT_EQ(machine.state.phase, Phase::kCommitted);
}

Spec OneIsEnough() {
  Spec spec = TwoEngines();
  spec.quorum = 1;
  return spec;
}

TEST(EpochMachine, AQuorumThatIsStagedGivesTheOthersAGraceAndIsTriedAgainWhereReadersStay) {
  Machine machine(OneIsEnough());
  machine.PrepareAll();
  machine.Give(StagedEvent{kA0, DigestsOf(kA0)});
  EXPECT_TRUE(machine.last.empty()) << "an engine counts with all its ranks";
  machine.ExpectNothingChangesOn(GraceEvent{});
  machine.Give(StagedEvent{kA1, DigestsOf(kA1)});
  EXPECT_EQ(Count<ArmGrace>(machine.last), 1);
  machine.Give(GraceEvent{});
  EXPECT_EQ(machine.state.phase, Phase::kAborting);
  EXPECT_EQ(machine.state.stragglers, std::set<std::string>{"engine-b"});
  EXPECT_EQ(machine.state.why.rank(), "engine-b");
  EXPECT_EQ(machine.state.why.message(),
            "1 of 2 engines are staged, a quorum; left behind: engine-b");
}

/// engine-b, and engine-c and engine-d, of which the latter reads from the former; one is enough.
struct ThreeOfOneRank {
  ThreeOfOneRank() {
    spec.drops_readers = true;
    spec.engines = {{"engine-b", {kB0}}, {"engine-c", {c}}, {"engine-d", {d}}};
    spec.quorum = 1;
    spec.parents["engine-d"] = "engine-c";
  }
  /// engine-b and the sources have done their part.
  Machine OneIsStaged() {
    Machine machine(spec);
    for (const Member& m : {kSource0, kSource1, kB0, c, d}) machine.Give(PreparedEvent{m});
    machine.Give(SourceDoneEvent{kSource0, DigestsOf(kSource0)});
    machine.Give(SourceDoneEvent{kSource1, DigestsOf(kSource1)});
    machine.Give(StagedEvent{kB0, DigestsOf(kB0)});
    return machine;
  }
  const Member c{ParticipantId(6), Incarnation(16)}, d{ParticipantId(7), Incarnation(17)};
  Spec spec = TwoEngines();
};

TEST(EpochMachine, TheEndOfAGraceExcludesAllThatAreLateAndEndsNoAttempt) {
  Machine machine = ThreeOfOneRank().OneIsStaged();
  ASSERT_EQ(machine.state.phase, Phase::kTransferring);
  machine.Give(GraceEvent{});
  EXPECT_EQ(Count<SendAbort>(machine.last), 2) << "both live";
  EXPECT_EQ(Count<ExcludeEngine>(machine.last), 2);
  EXPECT_EQ(Count<AppendCommit>(machine.last), 1);
  EXPECT_EQ(machine.state.excluded, (std::set<std::string>{"engine-c", "engine-d"}));
  EXPECT_EQ(std::get<ExcludeEngine>(machine.last.at(1)).why.message(),
            "1 of 3 engines are staged, a quorum; left behind: engine-c, engine-d");
}

TEST(EpochMachine, TheEndOfAGraceEndsTheAttemptWhereSomebodyReadsFromWhoIsLate) {
  ThreeOfOneRank three;
  three.spec.parents = {{"engine-b", "engine-c"}};
  Machine machine = three.OneIsStaged();
  machine.Give(GraceEvent{});
  EXPECT_EQ(machine.state.phase, Phase::kAborting);
  EXPECT_EQ(machine.state.stragglers, (std::set<std::string>{"engine-c", "engine-d"}));
}

TEST(EpochMachine, AQuorumGoesOnWithoutWhoMissesAPhasesDeadlineAndTheSourcesHaveOneMore) {
  ThreeOfOneRank three;
  Machine machine(three.spec);
  for (const Member& m : {kSource0, kSource1, kB0, three.c}) machine.Give(PreparedEvent{m});
  machine.Give(DeadlineEvent{Phase::kPreparing});
  EXPECT_EQ(machine.state.excluded, std::set<std::string>{"engine-d"});
  EXPECT_EQ(Count<SendTransfer>(machine.last), 1);
  machine.Give(StagedEvent{kB0, DigestsOf(kB0)});
  machine.Give(DeadlineEvent{Phase::kTransferring});
  EXPECT_EQ(machine.state.excluded, (std::set<std::string>{"engine-c", "engine-d"}));
  EXPECT_EQ(machine.state.phase, Phase::kTransferring) << "no source has said that it is done";
  EXPECT_EQ(Count<ArmDeadline>(machine.last), 1);
  machine.Give(DeadlineEvent{Phase::kTransferring});
  EXPECT_EQ(machine.state.phase, Phase::kAborting);
  EXPECT_TRUE(machine.state.stragglers.empty());
}

TEST(EpochMachine, WhereAllAreRequiredADeadlineExcludesNobody) {
  ThreeOfOneRank three;
  three.spec.quorum = 0;
  Machine machine = three.OneIsStaged();
  machine.ExpectNothingChangesOn(GraceEvent{});
  machine.Give(DeadlineEvent{Phase::kTransferring});
  EXPECT_EQ(machine.state.phase, Phase::kAborting);
}

TEST(EpochMachine, WhoIsStagedWithinTheGraceIsCommittedWithTheOthers) {
  Machine machine(OneIsEnough());
  machine.PrepareAll();
  machine.TransferAll();
  EXPECT_EQ(Count<AppendCommit>(machine.last), 1);
  machine.ExpectNothingChangesOn(GraceEvent{});
}

TEST(EpochMachine, AnEngineThatFailsBesideAQuorumIsNamed) {
  Machine machine(OneIsEnough());
  machine.PrepareAll();
  machine.Give(FailedEvent{kA1, kBroken});
  EXPECT_EQ(machine.state.stragglers, std::set<std::string>{"engine-a"});
  Spec both = TwoEngines();
  both.quorum = 2;
  Machine strict(both);
  strict.PrepareAll();
  strict.Give(FailedEvent{kA1, kBroken});
  EXPECT_TRUE(strict.state.stragglers.empty()) << "the rest is below the quorum";
}

TEST(EpochMachine, ASourceIsNeverLeftBehind) {
  Machine machine(OneIsEnough());
  machine.PrepareAll();
  machine.Give(FailedEvent{kSource1, kBroken});
  EXPECT_TRUE(machine.state.stragglers.empty());
  Machine late(OneIsEnough());
  for (const Member& m : {kSource0, kA0, kA1}) late.Give(PreparedEvent{m});
  late.Give(DeadlineEvent{Phase::kPreparing});
  EXPECT_TRUE(late.state.stragglers.empty());
}

Spec BackToEpoch2() {
  Spec spec = TwoEngines();
  spec.kind = Kind::kRollback;
  spec.held = Epoch(2);
  spec.sources.clear();
  return spec;
}

TEST(EpochMachine, ARollbackAppendsOnceEveryEngineHoldsItAndNothingMoved) {
  Machine machine(BackToEpoch2());
  for (const Member& m : {kA0, kA1, kB0}) machine.Give(PreparedEvent{m});
  EXPECT_EQ(Count<SendTransfer>(machine.last), 1);
  machine.Give(StagedEvent{kA0, {}});
  machine.Give(StagedEvent{kA1, {}});
  EXPECT_TRUE(machine.last.empty());
  machine.Give(StagedEvent{kB0, {}});
  EXPECT_EQ(Count<AppendCommit>(machine.last), 1);
  machine.Give(JournalEvent{});
  EXPECT_EQ(Count<SendCommit>(machine.last), 2);
}

TEST(EpochMachine, ARollbackThatMovedAStreamAborts) {
  Machine machine(BackToEpoch2());
  for (const Member& m : {kA0, kA1, kB0}) machine.Give(PreparedEvent{m});
  machine.Give(StagedEvent{kA0, {}});
  machine.Give(StagedEvent{kA1, {}});
  machine.Give(StagedEvent{kB0, DigestsOf(kB0)});
  EXPECT_EQ(machine.state.phase, Phase::kAborting);
  EXPECT_EQ(machine.state.why.reason(), Reason::kDigestMismatch);
}

TEST(EpochMachine, AbortedEpochChangesNoMore) {
  Machine machine(TwoEngines());
  machine.Give(AbortAskedEvent{kGone});
  machine.DrainAll();
  ASSERT_EQ(machine.state.phase, Phase::kAborted);
  machine.ExpectNothingChangesOn(PreparedEvent{kA0});
  machine.ExpectNothingChangesOn(DrainedEvent{kA0});
  machine.ExpectNothingChangesOn(DeadlineEvent{Phase::kAborted});
}

}  // namespace
}  // namespace weightwire::epoch
