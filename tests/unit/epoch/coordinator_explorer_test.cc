#include <gtest/gtest.h>

#include <algorithm>
#include <iostream>
#include <utility>

#include "tests/unit/epoch/coordinator_explorer.h"
#include "tests/unit/epoch/dice.h"

namespace weightwire::epoch::testing {
namespace {

#if defined(__SANITIZE_THREAD__)
constexpr uint64_t kSeeds = 8'000;  // one thread: there is nothing for TSan to find
#else
constexpr uint64_t kSeeds = 25'000;
#endif
constexpr uint64_t kSeedsToCatchABug = 8'000;

TEST(CoordinatorExplorer, FindsNoViolationAndReachesEveryBranch) {
  const Exploration found = Explore(Step, FirstSeed(), kSeeds);
  std::cout << "seeds " << FirstSeed() << " … +" << kSeeds << ", " << found.steps << " steps\n";
  EXPECT_EQ(found.violation, "");
  for (const char* branch : {"preparing->transferring",
                             "preparing->aborting",
                             "transferring->staged",
                             "transferring->committing",
                             "transferring->aborting",
                             "staged->committing",
                             "staged->aborting",
                             "committing->committed",
                             "aborting->aborted",
                             "abort.member_lost",
                             "abort.deadline_exceeded",
                             "abort.abort_requested",
                             "abort.digest_mismatch",
                             "abort.transport_failed",
                             "evict.aborting",
                             "left.lost",
                             "refused.leader",
                             "behind",
                             "excluded.preparing",
                             "excluded.transferring",
                             "excluded.staged",
                             "excluded.preparing.failed",
                             "excluded.transferring.failed",
                             "excluded.staged.failed",
                             "excluded.preparing.late",
                             "excluded.transferring.late",
                             "evict.failed",
                             "left.applied",
                             "evict.source",
                             "finish.committed",
                             "finish.committed.fill",
                             "finish.aborted",
                             "finish.aborted.fill",
                             "finish.committed.rollback",
                             "finish.aborted.rollback",
                             "stop",
                             "forged",
                             "grace",
                             "stragglers.failed",
                             "stragglers.late",
                             "commit.sent",
                             "deadline.aborting"}) {
    EXPECT_GT(found.reached.contains(branch) ? found.reached.at(branch) : 0, 0u) << branch;
  }
}

TEST(CoordinatorExplorer, IsDeterministic) {
  const Exploration first = Explore(Step, 77, 200);
  const Exploration second = Explore(Step, 77, 200);
  EXPECT_EQ(first.steps, second.steps);
  EXPECT_EQ(first.reached, second.reached);
}

/// What reports are counted by follows from the rest of the state.
std::string Miscounted(const State& state) {
  const Roster &kept = state.roster, counted(state);
  if (kept.members() != counted.members() || kept.sources() != counted.sources()) return "members";
  if (kept.engines_staged() != counted.engines_staged()) return "staged engines";
  if (state.phase == Phase::kAborting && kept.gone() != counted.gone()) return "who is gone";
  for (size_t index = 0; index < state.spec.engines.size(); ++index) {
    const EngineMembers& engine = state.spec.engines[index];
    if (kept.EngineNamed(engine.name) != index) return engine.name;
    for (const Member& member : engine.ranks) {
      if (kept.EngineOf(member) != index || kept.IsSource(member))
        return "a rank of " + engine.name;
    }
  }
  for (const Member& member : state.spec.sources) {
    if (!kept.IsSource(member) || kept.EngineOf(member)) return "a source";
  }
  for (const std::string& name : state.excluded) {
    if (kept.EngineNamed(name)) return name + ", which is excluded";
  }
  return "";
}

TEST(CoordinatorExplorer, CountsWhatIsThere) {
  std::string wrong;
  const auto step = [&wrong](State state, const Event& event) {
    Outcome outcome = Step(std::move(state), event);
    if (wrong.empty()) wrong = Miscounted(outcome.state);
    return outcome;
  };
  Explore(step, FirstSeed(), kSeedsToCatchABug);
  EXPECT_EQ(wrong, "");
}

template <typename T>
bool Has(const Outcome& outcome) {
  for (const Action& action : outcome.actions) {
    if (std::holds_alternative<T>(action)) return true;
  }
  return false;
}
template <typename T>
void Remove(Outcome& outcome) {
  std::erase_if(outcome.actions, [](const Action& a) { return std::holds_alternative<T>(a); });
}

std::vector<Member> MembersOf(const Spec& spec) {
  std::vector<Member> all = spec.sources;
  for (const auto& engine : spec.engines) {
    all.insert(all.end(), engine.ranks.begin(), engine.ranks.end());
  }
  return all;
}

// ---- planted bugs: each is a believable mistake in the machine ----

Outcome CommitSentBeforeDurable(State state, const Event& event) {
  Outcome outcome = Step(std::move(state), event);
  if (Has<AppendCommit>(outcome)) {
    for (const auto& engine : outcome.state.spec.engines) {
      outcome.actions.push_back(SendCommit{engine.name});
    }
  }
  return outcome;
}

Outcome AbortAfterSubmit(State state, const Event& event) {
  const auto* lost = std::get_if<LostEvent>(&event);
  if (lost != nullptr && state.phase == Phase::kCommitting && !state.commit_durable) {
    state.phase = Phase::kStaged;
  }
  return Step(std::move(state), event);
}

Outcome StagedWithoutDigestEquality(State state, const Event& event) {
  if (const auto* e = std::get_if<SourceDoneEvent>(&event)) {
    return Step(std::move(state), SourceDoneEvent{e->member, {}});
  }
  if (const auto* e = std::get_if<StagedEvent>(&event)) {
    return Step(std::move(state), StagedEvent{e->member, {}});
  }
  return Step(std::move(state), event);
}

/// A repeated report is counted for somebody who has not reported.
Outcome CountsInsteadOfASet(State state, const Event& event) {
  const auto* e = std::get_if<PreparedEvent>(&event);
  if (e == nullptr || state.phase != Phase::kPreparing || !state.prepared.contains(e->member)) {
    return Step(std::move(state), event);
  }
  const Member missing = WaitingFor(state).front();
  return Step(std::move(state), PreparedEvent{missing});
}

Outcome IgnoresIncarnation(State state, const Event& event) {
  Event mended = event;
  std::visit(
      [&](auto& e) {
        if constexpr (requires { e.member; }) {
          for (const Member& m : MembersOf(state.spec)) {
            if (m.id == e.member.id) e.member = m;
          }
        }
      },
      mended);
  return Step(std::move(state), mended);
}

Outcome ReleaseBeforeStaged(State state, const Event& event) {
  Outcome outcome = Step(std::move(state), event);
  if (Has<SendTransfer>(outcome)) outcome.actions.push_back(SendRelease{});
  return outcome;
}

Outcome AbortedBeforeDrained(State state, const Event& event) {
  const bool fresh = state.phase != Phase::kAborting;
  Outcome outcome = Step(std::move(state), event);
  if (fresh && outcome.state.phase == Phase::kAborting) {
    outcome.state.phase = Phase::kAborted;
    Remove<ArmDeadline>(outcome);
    outcome.actions.push_back(Finish{Phase::kAborted, outcome.state.why});
  }
  return outcome;
}

Outcome FillAppends(State state, const Event& event) {
  Outcome outcome = Step(std::move(state), event);
  if (outcome.state.spec.kind == Kind::kFill && Has<SendRelease>(outcome)) {
    outcome.actions.insert(outcome.actions.begin() + 1, AppendCommit{});
  }
  return outcome;
}

Outcome TransfersWhenSourcesArePrepared(State state, const Event& event) {
  Outcome outcome = Step(std::move(state), event);
  if (outcome.state.phase != Phase::kPreparing) return outcome;
  for (const Member& m : outcome.state.spec.sources) {
    if (!outcome.state.prepared.contains(m)) return outcome;
  }
  outcome.state.phase = Phase::kTransferring;
  outcome.actions = {SendTransfer{}, ArmDeadline{Phase::kTransferring}};
  return outcome;
}

Outcome DecidesWhenLeadersStaged(State state, const Event& event) {
  Outcome outcome = Step(std::move(state), event);
  State& next = outcome.state;
  if (next.phase != Phase::kTransferring || next.spec.kind == Kind::kFill) return outcome;
  if (next.sourced.size() < next.spec.sources.size()) return outcome;
  for (const auto& engine : next.spec.engines) {
    if (!next.staged.contains(engine.ranks[0])) return outcome;
  }
  next.phase = Phase::kCommitting;
  outcome.actions = {SendRelease{}, AppendCommit{}};
  return outcome;
}

Outcome TakesAFailedAppendForDurable(State state, const Event& event) {
  if (std::holds_alternative<JournalEvent>(event)) return Step(std::move(state), JournalEvent{});
  return Step(std::move(state), event);
}

Outcome AppendsTwice(State state, const Event& event) {
  const bool again = std::holds_alternative<CommitAskedEvent>(event) &&
                     state.phase == Phase::kCommitting && !state.commit_durable;
  Outcome outcome = Step(std::move(state), event);
  if (again) outcome.actions.push_back(AppendCommit{});
  return outcome;
}

Outcome AnyRankMayApply(State state, const Event& event) {
  if (const auto* e = std::get_if<SwappedEvent>(&event)) {
    for (const auto& engine : state.spec.engines) {
      for (const Member& m : engine.ranks) {
        if (m == e->member) return Step(std::move(state), SwappedEvent{engine.ranks[0]});
      }
    }
  }
  return Step(std::move(state), event);
}

Outcome ForgetsLostMembersAfterTheDecision(State state, const Event& event) {
  if (std::holds_alternative<LostEvent>(event) && state.phase == Phase::kCommitting) {
    return {std::move(state), {}};
  }
  return Step(std::move(state), event);
}

Outcome WaitsForTheDeadToDrain(State state, const Event& event) {
  if (std::holds_alternative<LostEvent>(event) && state.phase == Phase::kAborting) {
    return {std::move(state), {}};
  }
  return Step(std::move(state), event);
}

Outcome CommitsWithoutWaitingForApplied(State state, const Event& event) {
  Outcome outcome = Step(std::move(state), event);
  if (Has<SendCommit>(outcome) && outcome.state.phase == Phase::kCommitting) {
    outcome.state.phase = Phase::kCommitted;
    Remove<ArmDeadline>(outcome);
    outcome.actions.push_back(Finish{Phase::kCommitted, OkStatus()});
  }
  return outcome;
}

Outcome IgnoresManualCommit(State state, const Event& event) {
  Outcome outcome = Step(std::move(state), event);
  if (outcome.state.phase != Phase::kStaged) return outcome;
  Outcome next = Step(std::move(outcome.state), CommitAskedEvent{});
  Remove<ArmDeadline>(outcome);
  outcome.actions.insert(outcome.actions.end(), next.actions.begin(), next.actions.end());
  outcome.state = std::move(next.state);
  return outcome;
}

Outcome NeverTimesOut(State state, const Event& event) {
  if (std::holds_alternative<DeadlineEvent>(event)) return {std::move(state), {}};
  return Step(std::move(state), event);
}

Outcome CountsRanksAsEngines(State state, const Event& event) {
  Outcome outcome = Step(std::move(state), event);
  State& next = outcome.state;
  const bool enough = next.spec.quorum > 0 && next.staged.size() >= next.spec.quorum;
  if (next.phase == Phase::kTransferring && enough && !next.grace_armed) {
    next.grace_armed = true;
    outcome.actions.push_back(ArmGrace{});
  }
  return outcome;
}

Outcome GoesOnBelowTheQuorum(State state, const Event& event) {
  const bool fresh = state.phase == Phase::kPreparing || state.phase == Phase::kTransferring;
  Outcome outcome = Step(std::move(state), event);
  const auto* failed = std::get_if<FailedEvent>(&event);
  if (failed == nullptr || !fresh || outcome.state.spec.quorum == 0) return outcome;
  for (const auto& engine : outcome.state.spec.engines) {
    const auto& ranks = engine.ranks;
    const bool its = std::find(ranks.begin(), ranks.end(), failed->member) != ranks.end();
    if (its) outcome.state.stragglers = {engine.name};
  }
  return outcome;
}

Outcome LeavesOutWhoIsStaged(State state, const Event& event) {
  Outcome outcome = Step(std::move(state), event);
  if (!outcome.state.stragglers.empty()) {
    outcome.state.stragglers = {outcome.state.spec.engines.front().name};
  }
  return outcome;
}

Outcome WaitsOnAfterTheGrace(State state, const Event& event) {
  if (std::holds_alternative<GraceEvent>(event)) return {std::move(state), {}};
  return Step(std::move(state), event);
}

bool ExcludedNow(const State& before, const State& after) {
  return before.excluded.size() < after.excluded.size();
}

Outcome StillWaitsForTheExcluded(State state, const Event& event) {
  State before = state;
  Outcome outcome = Step(std::move(state), event);
  if (ExcludedNow(before, outcome.state)) outcome.state.spec = before.spec;
  return outcome;
}

Outcome ExcludesARelay(State state, const Event& event) {
  const auto parents = std::exchange(state.spec.parents, {});
  Outcome outcome = Step(std::move(state), event);
  outcome.state.spec.parents = parents;
  return outcome;
}

Outcome ExcludesBelowThePolicy(State state, const Event& event) {
  const uint32_t wanted = std::exchange(state.spec.engines_min, 0);
  Outcome outcome = Step(std::move(state), event);
  outcome.state.spec.engines_min = wanted;
  return outcome;
}

Outcome DoesNotTellSourcesWhoIsExcluded(State state, const Event& event) {
  Outcome outcome = Step(std::move(state), event);
  Remove<ExcludeEngine>(outcome);
  return outcome;
}

Outcome LeavesRanksOfTheExcludedRunning(State state, const Event& event) {
  State before = state;
  Outcome outcome = Step(std::move(state), event);
  if (ExcludedNow(before, outcome.state)) Remove<SendAbort>(outcome);
  return outcome;
}

/// What is staged does not count again, so that the epoch never ends.
Outcome ForgetsToGoOnAfterAnExclusion(State state, const Event& event) {
  State before = state;
  Outcome outcome = Step(std::move(state), event);
  if (!ExcludedNow(before, outcome.state) || outcome.state.phase == before.phase) return outcome;
  outcome.state.phase = before.phase;
  std::erase_if(outcome.actions, [](const Action& a) {
    return !std::holds_alternative<ExcludeEngine>(a) && !std::holds_alternative<SendAbort>(a);
  });
  return outcome;
}

Outcome AbortsAReleasedVersionForALostEngine(State state, const Event& event) {
  const auto* lost = std::get_if<LostEvent>(&event);
  if (lost == nullptr || state.phase != Phase::kStaged) return Step(std::move(state), event);
  return Step(std::move(state), AbortAskedEvent{lost->why});
}

Outcome AbortsAReleasedVersionBelowThePolicy(State state, const Event& event) {
  if (state.phase != Phase::kStaged || state.spec.engines.size() > state.spec.engines_min) {
    return Step(std::move(state), event);
  }
  return AbortsAReleasedVersionForALostEngine(std::move(state), event);
}

/// Whoever fails while the others are a quorum ends the attempt.
Outcome AbortsForWhoFailsBesideAQuorum(State state, const Event& event) {
  const auto* failed = std::get_if<FailedEvent>(&event);
  if (failed == nullptr) return Step(std::move(state), event);
  const bool drops = std::exchange(state.spec.drops_readers, false);
  Outcome outcome = Step(std::move(state), event);
  outcome.state.spec.drops_readers = drops;
  return outcome;
}

/// An engine that is late beside a quorum ends the attempt.
Outcome AbortsForWhoIsLateBesideAQuorum(State state, const Event& event) {
  const bool late =
      std::holds_alternative<GraceEvent>(event) || std::holds_alternative<DeadlineEvent>(event);
  if (!late) return Step(std::move(state), event);
  const bool drops = std::exchange(state.spec.drops_readers, false);
  Outcome outcome = Step(std::move(state), event);
  outcome.state.spec.drops_readers = drops;
  return outcome;
}

/// Of several that are late the first one only.
Outcome ExcludesOneOfTheLate(State state, const Event& event) {
  State before = state;
  Outcome outcome = Step(std::move(state), event);
  if (outcome.state.excluded.size() < before.excluded.size() + 2) return outcome;
  return Step(std::move(before), LostEvent{before.spec.engines.front().ranks.front(), {}});
}

/// The sources that are left have for ever.
Outcome ArmsNoDeadlineAfterAnExclusion(State state, const Event& event) {
  State before = state;
  Outcome outcome = Step(std::move(state), event);
  const bool stays = outcome.state.phase == before.phase;
  if (ExcludedNow(before, outcome.state) && stays) Remove<ArmDeadline>(outcome);
  return outcome;
}

Outcome FencesWhoIsLateToSwap(State state, const Event& event) {
  Outcome outcome = Step(std::move(state), event);
  for (Action& action : outcome.actions) {
    if (const auto* late = std::get_if<MarkStale>(&action)) {
      action = EvictEngine{late->engine, late->why};
    }
  }
  return outcome;
}

/// The word of any rank that it is not wanted counts for the engine's.
Outcome AnyRankMayRefuse(State state, const Event& event) {
  const auto* failed = std::get_if<FailedEvent>(&event);
  if (failed == nullptr || !failed->refused) return Step(std::move(state), event);
  Outcome outcome = Step(std::move(state), FailedEvent{failed->member, failed->why});
  outcome.state.refused |= !outcome.actions.empty() && outcome.state.commit_durable;
  return outcome;
}

Outcome ForgetsThatItReleased(State state, const Event& event) {
  Outcome outcome = Step(std::move(state), event);
  if (outcome.state.phase == Phase::kAborting) outcome.state.released = false;
  return outcome;
}

/// A version that somebody took back would be tried again.
Outcome TakesAnAskedAbortForAFault(State state, const Event& event) {
  Outcome outcome = Step(std::move(state), event);
  if (outcome.state.cause == AbortCause::kAsked) outcome.state.cause = AbortCause::kFault;
  return outcome;
}

struct PlantedBug {
  const char* name;
  Outcome (*step)(State, const Event&);
};
class CoordinatorPlantedBug : public ::testing::TestWithParam<PlantedBug> {};

TEST_P(CoordinatorPlantedBug, IsCaught) {
  const Exploration found = Explore(GetParam().step, FirstSeed(), kSeedsToCatchABug);
  EXPECT_NE(found.violation, "") << "the explorer does not see this bug";
  std::cout << GetParam().name << ": " << found.violation << "\n";
}

INSTANTIATE_TEST_SUITE_P(
    All, CoordinatorPlantedBug,
    ::testing::Values(
        PlantedBug{"CommitSentBeforeDurable", CommitSentBeforeDurable},
        PlantedBug{"AbortAfterSubmit", AbortAfterSubmit},
        PlantedBug{"StagedWithoutDigestEquality", StagedWithoutDigestEquality},
        PlantedBug{"CountsInsteadOfASet", CountsInsteadOfASet},
        PlantedBug{"IgnoresIncarnation", IgnoresIncarnation},
        PlantedBug{"ReleaseBeforeStaged", ReleaseBeforeStaged},
        PlantedBug{"AbortedBeforeDrained", AbortedBeforeDrained},
        PlantedBug{"FillAppends", FillAppends},
        PlantedBug{"TransfersWhenSourcesArePrepared", TransfersWhenSourcesArePrepared},
        PlantedBug{"DecidesWhenLeadersStaged", DecidesWhenLeadersStaged},
        PlantedBug{"TakesAFailedAppendForDurable", TakesAFailedAppendForDurable},
        PlantedBug{"AppendsTwice", AppendsTwice}, PlantedBug{"AnyRankMayApply", AnyRankMayApply},
        PlantedBug{"ForgetsLostMembersAfterTheDecision", ForgetsLostMembersAfterTheDecision},
        PlantedBug{"WaitsForTheDeadToDrain", WaitsForTheDeadToDrain},
        PlantedBug{"CommitsWithoutWaitingForApplied", CommitsWithoutWaitingForApplied},
        PlantedBug{"IgnoresManualCommit", IgnoresManualCommit},
        PlantedBug{"NeverTimesOut", NeverTimesOut},
        PlantedBug{"CountsRanksAsEngines", CountsRanksAsEngines},
        PlantedBug{"GoesOnBelowTheQuorum", GoesOnBelowTheQuorum},
        PlantedBug{"LeavesOutWhoIsStaged", LeavesOutWhoIsStaged},
        PlantedBug{"WaitsOnAfterTheGrace", WaitsOnAfterTheGrace},
        PlantedBug{"StillWaitsForTheExcluded", StillWaitsForTheExcluded},
        PlantedBug{"ExcludesARelay", ExcludesARelay},
        PlantedBug{"ExcludesBelowThePolicy", ExcludesBelowThePolicy},
        PlantedBug{"DoesNotTellSourcesWhoIsExcluded", DoesNotTellSourcesWhoIsExcluded},
        PlantedBug{"LeavesRanksOfTheExcludedRunning", LeavesRanksOfTheExcludedRunning},
        PlantedBug{"ForgetsToGoOnAfterAnExclusion", ForgetsToGoOnAfterAnExclusion},
        PlantedBug{"AbortsAReleasedVersionForALostEngine", AbortsAReleasedVersionForALostEngine},
        PlantedBug{"AbortsAReleasedVersionBelowThePolicy", AbortsAReleasedVersionBelowThePolicy},
        PlantedBug{"AbortsForWhoFailsBesideAQuorum", AbortsForWhoFailsBesideAQuorum},
        PlantedBug{"AbortsForWhoIsLateBesideAQuorum", AbortsForWhoIsLateBesideAQuorum},
        PlantedBug{"ExcludesOneOfTheLate", ExcludesOneOfTheLate},
        PlantedBug{"ArmsNoDeadlineAfterAnExclusion", ArmsNoDeadlineAfterAnExclusion},
        PlantedBug{"FencesWhoIsLateToSwap", FencesWhoIsLateToSwap},
        PlantedBug{"AnyRankMayRefuse", AnyRankMayRefuse},
        PlantedBug{"ForgetsThatItReleased", ForgetsThatItReleased},
        PlantedBug{"TakesAnAskedAbortForAFault", TakesAnAskedAbortForAFault}),
    [](const auto& instance) { return std::string(instance.param.name); });

}  // namespace
}  // namespace weightwire::epoch::testing
