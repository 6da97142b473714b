#include <gtest/gtest.h>

#include <iostream>

#include "tests/unit/epoch/dice.h"
#include "tests/unit/epoch/member_explorer.h"

namespace weightwire::epoch::testing {
namespace {

#if defined(__SANITIZE_THREAD__)
constexpr uint64_t kSeeds = 8'000;  // one thread: there is nothing for TSan to find
#else
constexpr uint64_t kSeeds = 25'000;
#endif
constexpr uint64_t kSeedsToCatchABug = 3'000;

TEST(MemberExplorer, FindsNoViolationAndReachesEveryBranch) {
  const MemberExploration found = ExploreMember(MemberStep, FirstSeed(), kSeeds);
  std::cout << "seeds " << FirstSeed() << " … +" << kSeeds << ", " << found.steps << " steps\n";
  EXPECT_EQ(found.violation, "");
  for (const char* branch : {"prepare.source",
                             "prepare.target",
                             "transfer",
                             "exclude.before",
                             "exclude.moving",
                             "drain",
                             "drain.superseded",
                             "offer.leader",
                             "offer.rank",
                             "install",
                             "released",
                             "released.given_up",
                             "released.again",
                             "evicted.idle",
                             "evicted.active",
                             "lost",
                             "drained",
                             "repeated",
                             "emptied",
                             "orphan.staged",
                             "orphan.committing",
                             "orphan.stopped",
                             "orphan.quiet",
                             "stranger",
                             "ended",
                             "abort.refused",
                             "failed.stale_epoch",
                             "failed.stale_incarnation",
                             "failed.not_ready",
                             "failed.transport_failed"}) {
    EXPECT_GT(found.reached.contains(branch) ? found.reached.at(branch) : 0, 0u) << branch;
  }
}

TEST(MemberExplorer, IsDeterministic) {
  EXPECT_EQ(ExploreMember(MemberStep, 5, 200).reached, ExploreMember(MemberStep, 5, 200).reached);
}

template <typename T>
const T* CommandOf(const MemberEvent& event) {
  const auto* command = std::get_if<Command>(&event);
  return command == nullptr ? nullptr : std::get_if<T>(command);
}

// ---- planted bugs ----

MemberOutcome IgnoresIncarnation(MemberState state, const MemberEvent& event) {
  MemberEvent mended = event;
  if (auto* command = std::get_if<Command>(&mended)) {
    std::visit([&](auto& c) { c.member = state.self; }, *command);
  }
  return MemberStep(std::move(state), mended);
}

MemberOutcome AcceptsOldEpochs(MemberState state, const MemberEvent& event) {
  const auto* prepare = CommandOf<PrepareCommand>(event);
  const bool old = prepare != nullptr && prepare->epoch <= state.fence;
  const Epoch fence = state.fence;
  if (old) state.fence = Epoch{};
  MemberOutcome outcome = MemberStep(std::move(state), event);
  outcome.state.fence = fence > outcome.state.fence ? fence : outcome.state.fence;
  return outcome;
}

MemberOutcome CommitsBeforeStaged(MemberState state, const MemberEvent& event) {
  const auto* commit = CommandOf<CommitCommand>(event);
  if (commit != nullptr && commit->member == state.self && state.current &&
      commit->epoch == state.current->epoch && state.role == Role::kTarget &&
      state.phase == MemberPhase::kTransferring) {
    state.phase = MemberPhase::kDone;
  }
  return MemberStep(std::move(state), event);
}

MemberOutcome AbortsWhatIsCommitting(MemberState state, const MemberEvent& event) {
  if (CommandOf<AbortCommand>(event) != nullptr && state.phase == MemberPhase::kCommitting) {
    state.phase = MemberPhase::kDone;
  }
  return MemberStep(std::move(state), event);
}

MemberOutcome PreparesWithoutDraining(MemberState state, const MemberEvent& event) {
  const auto* prepare = CommandOf<PrepareCommand>(event);
  if (prepare != nullptr && state.current && prepare->epoch > state.fence &&
      state.phase != MemberPhase::kCommitting && state.phase != MemberPhase::kDraining) {
    state.current.reset();
    state.phase = MemberPhase::kIdle;
  }
  return MemberStep(std::move(state), event);
}

MemberOutcome AcceptsAfterEviction(MemberState state, const MemberEvent& event) {
  const auto* prepare = CommandOf<PrepareCommand>(event);
  if (prepare != nullptr && prepare->member == state.self && prepare->epoch > state.fence) {
    state.evicted = false;
  }
  return MemberStep(std::move(state), event);
}

MemberOutcome RepeatedPrepareStartsAgain(MemberState state, const MemberEvent& event) {
  const auto* prepare = CommandOf<PrepareCommand>(event);
  const bool again = prepare != nullptr && state.current == *prepare &&
                     state.phase == MemberPhase::kPreparing && !state.evicted;
  MemberOutcome outcome = MemberStep(std::move(state), event);
  if (again) outcome.actions.push_back(DoPrepare{});
  return outcome;
}

MemberOutcome RepeatedTransferStartsAgain(MemberState state, const MemberEvent& event) {
  const auto* transfer = CommandOf<TransferCommand>(event);
  if (transfer != nullptr && state.current && transfer->epoch == state.current->epoch &&
      state.phase == MemberPhase::kTransferring) {
    state.phase = MemberPhase::kPrepared;
  }
  return MemberStep(std::move(state), event);
}

MemberOutcome DrainedBeforeItIs(MemberState state, const MemberEvent& event) {
  const auto* abort = CommandOf<AbortCommand>(event);
  MemberOutcome outcome = MemberStep(std::move(state), event);
  if (abort != nullptr && outcome.state.tell_drained) {
    outcome.actions.push_back(SendDrained{abort->epoch});
  }
  return outcome;
}

MemberOutcome ReleasesWhileReadersRead(MemberState state, const MemberEvent& event) {
  const auto* release = CommandOf<ReleaseCommand>(event);
  MemberOutcome outcome = MemberStep(std::move(state), event);
  if (release != nullptr && !release->why.ok() && outcome.actions.empty() &&
      !outcome.state.evicted && release->version > outcome.state.released) {
    outcome.actions.push_back(TellReleased{release->epoch, release->why, release->version});
  }
  return outcome;
}

MemberOutcome ReleasesTwice(MemberState state, const MemberEvent& event) {
  if (CommandOf<ReleaseCommand>(event) != nullptr) state.released = Version{};
  return MemberStep(std::move(state), event);
}

MemberOutcome InstallsBeforeTheLeaderApplied(MemberState state, const MemberEvent& event) {
  const auto* installed = CommandOf<CommittedEverywhereCommand>(event);
  if (installed != nullptr && installed->member == state.self && state.current &&
      installed->epoch == state.current->epoch && state.phase == MemberPhase::kCommitting) {
    state.applied = true;
  }
  return MemberStep(std::move(state), event);
}

MemberOutcome ServesTheEpochInsteadOfTheContent(MemberState state, const MemberEvent& event) {
  const std::optional<PrepareCommand> current = state.current;
  MemberOutcome outcome = MemberStep(std::move(state), event);
  for (const MemberAction& action : outcome.actions) {
    if (std::holds_alternative<DoInstall>(action)) outcome.state.serving = current->epoch;
  }
  return outcome;
}

MemberOutcome SaysPreparedThoughItFailed(MemberState state, const MemberEvent& event) {
  if (const auto* e = std::get_if<LocalPrepared>(&event)) {
    return MemberStep(std::move(state), LocalPrepared{e->epoch, OkStatus()});
  }
  return MemberStep(std::move(state), event);
}

MemberOutcome ForgetsToFenceAnAbortedEpoch(MemberState state, const MemberEvent& event) {
  const Epoch fence = state.fence;
  MemberOutcome outcome = MemberStep(std::move(state), event);
  if (CommandOf<AbortCommand>(event) != nullptr) outcome.state.fence = fence;
  return outcome;
}

MemberOutcome NeverAnswersAnAbortWhileDraining(MemberState state, const MemberEvent& event) {
  MemberOutcome outcome = MemberStep(std::move(state), event);
  if (CommandOf<AbortCommand>(event) != nullptr) outcome.state.tell_drained = false;
  return outcome;
}

MemberOutcome OrphanDropsWhatIsStaged(MemberState state, const MemberEvent& event) {
  if (std::holds_alternative<LocalCutOff>(event) && state.phase == MemberPhase::kDone) {
    state.role = Role::kSource;
  }
  return MemberStep(std::move(state), event);
}

MemberOutcome OrphanGoesOnMoving(MemberState state, const MemberEvent& event) {
  if (std::holds_alternative<LocalCutOff>(event)) return {std::move(state), {}};
  return MemberStep(std::move(state), event);
}

MemberOutcome KeepsItsOldName(MemberState state, const MemberEvent& event) {
  if (std::holds_alternative<LocalRejoined>(event)) return {std::move(state), {}};
  return MemberStep(std::move(state), event);
}

MemberOutcome ForgetsWhoIsExcludedBeforeItMoves(MemberState state, const MemberEvent& event) {
  if (CommandOf<TransferCommand>(event) != nullptr) state.excluded.clear();
  return MemberStep(std::move(state), event);
}

MemberOutcome ExcludesFromAnyEpoch(MemberState state, const MemberEvent& event) {
  const auto* exclude = CommandOf<ExcludeCommand>(event);
  if (exclude == nullptr || !state.current) return MemberStep(std::move(state), event);
  ExcludeCommand mended = *exclude;
  mended.epoch = state.current->epoch;
  return MemberStep(std::move(state), Command(mended));
}

struct PlantedBug {
  const char* name;
  MemberOutcome (*step)(MemberState, const MemberEvent&);
};
class MemberPlantedBug : public ::testing::TestWithParam<PlantedBug> {};

TEST_P(MemberPlantedBug, IsCaught) {
  const MemberExploration found = ExploreMember(GetParam().step, FirstSeed(), kSeedsToCatchABug);
  EXPECT_NE(found.violation, "") << "the explorer does not see this bug";
  std::cout << GetParam().name << ": " << found.violation << "\n";
}

INSTANTIATE_TEST_SUITE_P(
    All, MemberPlantedBug,
    ::testing::Values(
        PlantedBug{"IgnoresIncarnation", IgnoresIncarnation},
        PlantedBug{"AcceptsOldEpochs", AcceptsOldEpochs},
        PlantedBug{"CommitsBeforeStaged", CommitsBeforeStaged},
        PlantedBug{"AbortsWhatIsCommitting", AbortsWhatIsCommitting},
        PlantedBug{"PreparesWithoutDraining", PreparesWithoutDraining},
        PlantedBug{"AcceptsAfterEviction", AcceptsAfterEviction},
        PlantedBug{"RepeatedPrepareStartsAgain", RepeatedPrepareStartsAgain},
        PlantedBug{"RepeatedTransferStartsAgain", RepeatedTransferStartsAgain},
        PlantedBug{"DrainedBeforeItIs", DrainedBeforeItIs},
        PlantedBug{"ReleasesWhileReadersRead", ReleasesWhileReadersRead},
        PlantedBug{"ReleasesTwice", ReleasesTwice},
        PlantedBug{"InstallsBeforeTheLeaderApplied", InstallsBeforeTheLeaderApplied},
        PlantedBug{"ServesTheEpochInsteadOfTheContent", ServesTheEpochInsteadOfTheContent},
        PlantedBug{"SaysPreparedThoughItFailed", SaysPreparedThoughItFailed},
        PlantedBug{"ForgetsToFenceAnAbortedEpoch", ForgetsToFenceAnAbortedEpoch},
        PlantedBug{"NeverAnswersAnAbortWhileDraining", NeverAnswersAnAbortWhileDraining},
        PlantedBug{"OrphanDropsWhatIsStaged", OrphanDropsWhatIsStaged},
        PlantedBug{"OrphanGoesOnMoving", OrphanGoesOnMoving},
        PlantedBug{"KeepsItsOldName", KeepsItsOldName},
        PlantedBug{"ForgetsWhoIsExcludedBeforeItMoves", ForgetsWhoIsExcludedBeforeItMoves},
        PlantedBug{"ExcludesFromAnyEpoch", ExcludesFromAnyEpoch}),
    [](const auto& instance) { return std::string(instance.param.name); });

}  // namespace
}  // namespace weightwire::epoch::testing
