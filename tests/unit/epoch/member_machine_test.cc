#include "server/epoch/member_machine.h"

#include <gtest/gtest.h>

namespace weightwire::epoch {
namespace {

const Member kSelf{ParticipantId(3), Incarnation(30)};
const Member kOld{ParticipantId(3), Incarnation(29)};
const Status kBad(Code::kUnavailable, Reason::kTransportFailed, "test");

PrepareCommand Prepare(uint64_t epoch, Role role = Role::kTarget) {
  PrepareCommand command;
  command.epoch = Epoch(epoch);
  command.content = Epoch(epoch);
  command.version = Version(epoch);
  command.member = kSelf;
  command.role = role;
  return command;
}

/// Drives the machine; `last` holds the actions of the last event.
struct Machine {
  Machine() { state.self = kSelf; }
  const std::vector<MemberAction>& Give(const MemberEvent& event) {
    MemberOutcome outcome = MemberStep(state, event);
    state = std::move(outcome.state);
    last = std::move(outcome.actions);
    return last;
  }
  const std::vector<MemberAction>& Tell(const Command& command) { return Give(command); }
  void ToDone(uint64_t epoch, Role role) {
    Tell(Prepare(epoch, role));
    Give(LocalPrepared{Epoch(epoch), {}});
    Tell(TransferCommand{Epoch(epoch), kSelf});
    Give(LocalTransferred{Epoch(epoch), {}});
    ASSERT_EQ(state.phase, MemberPhase::kDone);
  }
  void ExpectRefused(const Command& command, Reason reason) {
    const MemberState before = state;
    Tell(command);
    EXPECT_EQ(state, before);
    ASSERT_EQ(last.size(), 1u);
    EXPECT_EQ(std::get<SendFailed>(last[0]).why.reason(), reason);
  }
  template <typename T>
  bool Only() const {
    return last.size() == 1 && std::holds_alternative<T>(last[0]);
  }
  MemberState state;
  std::vector<MemberAction> last;
};

TEST(MemberMachine, TargetGoesFromPrepareToInstalled) {
  Machine m;
  m.Tell(Prepare(4));
  EXPECT_TRUE(m.Only<DoPrepare>());
  m.Give(LocalPrepared{Epoch(4), {}});
  EXPECT_TRUE(m.Only<SendPrepared>());
  m.Tell(TransferCommand{Epoch(4), kSelf});
  EXPECT_TRUE(m.Only<DoTransfer>());
  m.Give(LocalTransferred{Epoch(4), {}});
  EXPECT_TRUE(m.Only<SendTransferred>());
  m.Tell(CommitCommand{Epoch(4), Version(4), Epoch(4), kSelf, true});
  EXPECT_TRUE(m.Only<OfferSwap>());
  m.Tell(CommittedEverywhereCommand{Epoch(4), kSelf});
  EXPECT_TRUE(m.last.empty()) << "not before the leader applied";
  m.Give(LocalSwapped{Epoch(4)});
  EXPECT_TRUE(m.Only<SendSwapped>());
  EXPECT_EQ(m.state.serving, Epoch{});
  m.Tell(CommittedEverywhereCommand{Epoch(4), kSelf});
  EXPECT_TRUE(m.Only<DoInstall>());
  EXPECT_EQ(m.state.serving, Epoch(4));
  EXPECT_EQ(m.state.phase, MemberPhase::kIdle);
}

TEST(MemberMachine, RankThatIsNotLeaderInstallsWithoutApplying) {
  Machine m;
  m.ToDone(4, Role::kTarget);
  m.Tell(CommitCommand{Epoch(4), Version(4), Epoch(4), kSelf, false});
  EXPECT_FALSE(std::get<OfferSwap>(m.last.at(0)).leader);
  m.Give(LocalSwapped{Epoch(4)});
  EXPECT_TRUE(m.last.empty());
  m.Tell(CommittedEverywhereCommand{Epoch(4), kSelf});
  EXPECT_TRUE(m.Only<DoInstall>());
}

TEST(MemberMachine, SourceServesUntilReleaseThenDrainsQuietly) {
  Machine m;
  m.ToDone(4, Role::kSource);
  m.Tell(ReleaseCommand{Epoch(4), Version(4), kSelf, {}});
  ASSERT_EQ(m.last.size(), 2u);
  EXPECT_EQ(std::get<TellReleased>(m.last[0]).version, Version(4));
  EXPECT_TRUE(std::holds_alternative<DoDrain>(m.last[1]));
  m.Give(LocalDrained{Epoch(4)});
  EXPECT_TRUE(m.last.empty());
  EXPECT_EQ(m.state.phase, MemberPhase::kIdle);
}

TEST(MemberMachine, AbortDuringTheQuietDrainIsAnsweredWhenDrained) {
  Machine m;
  m.ToDone(4, Role::kSource);
  m.Tell(ReleaseCommand{Epoch(4), Version(4), kSelf, {}});
  m.Tell(AbortCommand{Epoch(4), kSelf, kBad});
  EXPECT_TRUE(m.last.empty());
  m.Give(LocalDrained{Epoch(4)});
  EXPECT_TRUE(m.Only<SendDrained>());
}

TEST(MemberMachine, SourceIsReleasedEarlyByNobody) {
  Machine m;
  m.Tell(Prepare(4, Role::kSource));
  EXPECT_TRUE(m.Tell(ReleaseCommand{Epoch(4), Version(4), kSelf, {}}).empty());
  EXPECT_TRUE(m.Tell(ReleaseCommand{Epoch(4), Version(4), kSelf, kBad}).empty());
}

TEST(MemberMachine, GivenUpVersionIsReleasedOnceAfterTheDrain) {
  Machine m;
  m.Tell(Prepare(4, Role::kSource));
  m.Tell(AbortCommand{Epoch(4), kSelf, kBad});
  EXPECT_TRUE(m.Only<DoDrain>());
  EXPECT_TRUE(m.Tell(ReleaseCommand{Epoch(4), Version(4), kSelf, kBad}).empty());
  m.Give(LocalDrained{Epoch(4)});
  m.Tell(ReleaseCommand{Epoch(4), Version(4), kSelf, kBad});
  ASSERT_TRUE(m.Only<TellReleased>());
  EXPECT_EQ(std::get<TellReleased>(m.last[0]).why, kBad);
  EXPECT_TRUE(m.Tell(ReleaseCommand{Epoch(4), Version(4), kSelf, kBad}).empty());
}

TEST(MemberMachine, VersionThatNeverSawAnEpochCanBeReleased) {
  Machine m;
  m.Tell(ReleaseCommand{Epoch(9), Version(5), kSelf, kBad});
  EXPECT_TRUE(m.Only<TellReleased>());
}

TEST(MemberMachine, RetryUnderAHigherEpochFollowsTheAbort) {
  Machine m;
  m.ToDone(4, Role::kSource);
  m.Tell(AbortCommand{Epoch(4), kSelf, kBad});
  m.Tell(Prepare(5, Role::kSource));
  EXPECT_TRUE(m.last.empty()) << "waits for the drain";
  m.Give(LocalDrained{Epoch(4)});
  ASSERT_EQ(m.last.size(), 2u);
  EXPECT_EQ(std::get<SendDrained>(m.last[0]).epoch, Epoch(4));
  EXPECT_TRUE(std::holds_alternative<DoPrepare>(m.last[1]));
}

TEST(MemberMachine, NewerPrepareDrainsTheOlderFirst) {
  Machine m;
  m.ToDone(4, Role::kTarget);
  m.Tell(Prepare(6));
  ASSERT_TRUE(m.Only<DoDrain>());
  EXPECT_EQ(std::get<DoDrain>(m.last[0]).epoch, Epoch(4));
  m.Tell(Prepare(7));
  EXPECT_TRUE(m.last.empty());
  m.ExpectRefused(Prepare(6), Reason::kStaleEpoch);
  m.Give(LocalDrained{Epoch(4)});
  EXPECT_TRUE(m.Only<DoPrepare>());
  EXPECT_EQ(m.state.current->epoch, Epoch(7));
}

TEST(MemberMachine, EpochThatWaitsForADrainCanBeAborted) {
  Machine m;
  m.ToDone(4, Role::kTarget);
  m.Tell(Prepare(6));
  m.Tell(AbortCommand{Epoch(6), kSelf, kBad});
  EXPECT_TRUE(m.Only<SendDrained>());
  m.Give(LocalDrained{Epoch(4)});
  EXPECT_TRUE(m.last.empty());
  EXPECT_EQ(m.state.phase, MemberPhase::kIdle);
}

TEST(MemberMachine, OlderEpochsAreFenced) {
  Machine m;
  m.Tell(Prepare(4));
  m.ExpectRefused(Prepare(3), Reason::kStaleEpoch);
  m.ExpectRefused(TransferCommand{Epoch(3), kSelf}, Reason::kStaleEpoch);
  m.ExpectRefused(CommitCommand{Epoch(3), Version(3), Epoch(3), kSelf, true}, Reason::kStaleEpoch);
}

TEST(MemberMachine, SameEpochWithAnotherPlanIsRefused) {
  Machine m;
  m.Tell(Prepare(4));
  PrepareCommand other = Prepare(4);
  other.assignments.push_back({PlanId{1, 2}, 0, 1});
  m.ExpectRefused(other, Reason::kStaleEpoch);
}

TEST(MemberMachine, AbortThatOvertakesItsPrepareFencesIt) {
  Machine m;
  m.Tell(AbortCommand{Epoch(4), kSelf, kBad});
  EXPECT_TRUE(m.Only<SendDrained>());
  m.ExpectRefused(Prepare(4), Reason::kStaleEpoch);
}

TEST(MemberMachine, OtherIncarnationIsRefused) {
  Machine m;
  PrepareCommand prepare = Prepare(4);
  prepare.member = kOld;
  m.ExpectRefused(prepare, Reason::kStaleIncarnation);
  m.ExpectRefused(AbortCommand{Epoch(4), kOld, kBad}, Reason::kStaleIncarnation);
  const MemberState before = m.state;
  EXPECT_TRUE(m.Tell(EvictCommand{kOld, kBad}).empty());
  EXPECT_EQ(m.state, before);
}

TEST(MemberMachine, CommitNeedsStagedBytes) {
  Machine m;
  m.Tell(Prepare(4));
  const CommitCommand commit{Epoch(4), Version(4), Epoch(4), kSelf, true};
  m.ExpectRefused(commit, Reason::kNotReady);
  m.Give(LocalPrepared{Epoch(4), {}});
  m.Tell(TransferCommand{Epoch(4), kSelf});
  m.ExpectRefused(commit, Reason::kNotReady);
}

TEST(MemberMachine, SourceRefusesCommit) {
  Machine m;
  m.ToDone(4, Role::kSource);
  m.ExpectRefused(CommitCommand{Epoch(4), Version(4), Epoch(4), kSelf, true}, Reason::kStaleEpoch);
}

TEST(MemberMachine, CommittingEpochIsNeitherAbortedNorReplaced) {
  Machine m;
  m.ToDone(4, Role::kTarget);
  m.Tell(CommitCommand{Epoch(4), Version(4), Epoch(4), kSelf, true});
  m.ExpectRefused(AbortCommand{Epoch(4), kSelf, kBad}, Reason::kStaleEpoch);
  m.ExpectRefused(Prepare(5), Reason::kNotReady);
}

TEST(MemberMachine, RepeatedCommandsRepeatTheirAnswers) {
  Machine m;
  m.Tell(Prepare(4));
  EXPECT_TRUE(m.Tell(Prepare(4)).empty()) << "the answer will come";
  m.Give(LocalPrepared{Epoch(4), {}});
  m.Tell(Prepare(4));
  EXPECT_TRUE(m.Only<SendPrepared>());
  m.Tell(TransferCommand{Epoch(4), kSelf});
  EXPECT_TRUE(m.Tell(TransferCommand{Epoch(4), kSelf}).empty());
  m.Give(LocalTransferred{Epoch(4), {}});
  m.Tell(TransferCommand{Epoch(4), kSelf});
  EXPECT_TRUE(m.Only<SendTransferred>());
  const CommitCommand commit{Epoch(4), Version(4), Epoch(4), kSelf, true};
  m.Tell(commit);
  EXPECT_TRUE(m.Tell(commit).empty());
  m.Give(LocalSwapped{Epoch(4)});
  m.Tell(commit);
  EXPECT_TRUE(m.Only<SendSwapped>());
  m.Tell(CommittedEverywhereCommand{Epoch(4), kSelf});
  EXPECT_TRUE(m.Tell(CommittedEverywhereCommand{Epoch(4), kSelf}).empty());
}

TEST(MemberMachine, LocalFailureIsReportedAndDrained) {
  Machine m;
  m.Tell(Prepare(4));
  m.Give(LocalPrepared{Epoch(4), kBad});
  ASSERT_EQ(m.last.size(), 2u);
  EXPECT_EQ(std::get<SendFailed>(m.last[0]).why, kBad);
  EXPECT_EQ(std::get<DoDrain>(m.last[1]).epoch, Epoch(4));
  EXPECT_TRUE(m.Tell(AbortCommand{Epoch(4), kSelf, kBad}).empty());
  m.Give(LocalDrained{Epoch(4)});
  EXPECT_TRUE(m.Only<SendDrained>());
  m.ExpectRefused(Prepare(4), Reason::kStaleEpoch);
}

TEST(MemberMachine, OlderContentThanServedIsRefused) {
  Machine m;
  m.ToDone(4, Role::kTarget);
  m.Tell(CommitCommand{Epoch(4), Version(4), Epoch(4), kSelf, false});
  m.Tell(CommittedEverywhereCommand{Epoch(4), kSelf});
  PrepareCommand fill = Prepare(5);
  fill.kind = Kind::kFill;
  fill.content = Epoch(3);
  m.ExpectRefused(fill, Reason::kStaleEpoch);
}

TEST(MemberMachine, WhoGaveUpWhatItServedTakesOlderContent) {
  Machine m;
  m.ToDone(4, Role::kTarget);
  m.Tell(CommitCommand{Epoch(4), Version(4), Epoch(4), kSelf, false});
  m.Tell(CommittedEverywhereCommand{Epoch(4), kSelf});
  m.Tell(Prepare(5));
  EXPECT_TRUE(m.Give(LocalEmptied{}).empty());
  EXPECT_EQ(m.state.serving, Epoch{});
  EXPECT_EQ(m.state.phase, MemberPhase::kPreparing);
  m.Tell(AbortCommand{Epoch(5), kSelf, kBad});
  m.Give(LocalDrained{Epoch(5)});
  PrepareCommand fill = Prepare(6);
  fill.kind = Kind::kFill;
  fill.content = Epoch(3);
  m.Tell(fill);
  EXPECT_TRUE(m.Only<DoPrepare>());
}

TEST(MemberMachine, EvictedMemberDrainsServesNothingAndAcceptsNothing) {
  Machine m;
  m.ToDone(4, Role::kTarget);
  m.Tell(EvictCommand{kSelf, kBad});
  ASSERT_EQ(m.last.size(), 2u);
  EXPECT_TRUE(std::holds_alternative<TellEvicted>(m.last[0]));
  EXPECT_TRUE(std::holds_alternative<DoDrain>(m.last[1]));
  m.ExpectRefused(Prepare(5), Reason::kStaleIncarnation);
  m.ExpectRefused(AbortCommand{Epoch(4), kSelf, kBad}, Reason::kStaleIncarnation);
  EXPECT_TRUE(m.Give(LocalDrained{Epoch(4)}).empty());
  EXPECT_TRUE(m.Tell(EvictCommand{kSelf, kBad}).empty());
  EXPECT_TRUE(m.Give(LocalLost{kBad}).empty());
}

TEST(MemberMachine, LostApplicationIsReportedAndDrained) {
  Machine m;
  m.ToDone(4, Role::kSource);
  m.Give(LocalLost{kBad});
  ASSERT_EQ(m.last.size(), 2u);
  EXPECT_TRUE(std::holds_alternative<SendLost>(m.last[0]));
  EXPECT_TRUE(std::holds_alternative<DoDrain>(m.last[1]));
  EXPECT_TRUE(m.Give(LocalLost{kBad}).empty());
}

TEST(MemberMachine, LateLocalNewsOfAnOldEpochChangesNothing) {
  Machine m;
  m.Tell(Prepare(4));
  m.Tell(AbortCommand{Epoch(4), kSelf, kBad});
  m.Give(LocalDrained{Epoch(4)});
  m.Tell(Prepare(5));
  const MemberState before = m.state;
  m.Give(LocalPrepared{Epoch(4), {}});
  m.Give(LocalDrained{Epoch(4)});
  m.Give(LocalTransferred{Epoch(4), {}});
  m.Give(LocalSwapped{Epoch(4)});
  EXPECT_EQ(m.state, before);
}

}  // namespace
}  // namespace weightwire::epoch
