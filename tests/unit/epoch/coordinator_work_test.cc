#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "server/epoch/coordinator_machine.h"
#include "tests/support/instructions.h"

/// What an event costs the machine, in instructions, in a small fleet and in a larger one.
namespace weightwire::epoch::testing {
namespace {

constexpr size_t kFew = 8, kTimes = 8;
constexpr PlanId kPlan{7, 7};

/// Half of the engines are a quorum.
Spec SpecOf(size_t engines) {
  uint32_t id = 1;
  const auto member = [&id] { return Member{ParticipantId(id++), Incarnation(1000 + id)}; };
  Spec spec;
  spec.epoch = spec.content = Epoch(5);
  spec.version = Version(3);
  spec.sources = {member(), member()};
  for (size_t e = 0; e < engines; ++e) {
    spec.engines.push_back({"engine-" + std::to_string(e), {member(), member()}});
  }
  spec.quorum = static_cast<uint32_t>(engines / 2);
  spec.drops_readers = true;
  return spec;
}

std::vector<Event> Reports(const Spec& spec, Phase phase) {
  std::vector<Event> events;
  const std::vector<Digest> both = {{kPlan, 0, 10}, {kPlan, 1, 11}};
  for (size_t rank = 0; rank < 2; ++rank) {
    const Member& source = spec.sources[rank];
    if (phase == Phase::kPreparing) events.emplace_back(PreparedEvent{source});
    if (phase == Phase::kTransferring) events.emplace_back(SourceDoneEvent{source, {both[rank]}});
    if (phase == Phase::kAborting) events.emplace_back(DrainedEvent{source});
  }
  for (const EngineMembers& engine : spec.engines) {
    for (size_t rank = 0; rank < 2; ++rank) {
      const Member& target = engine.ranks[rank];
      if (phase == Phase::kPreparing) events.emplace_back(PreparedEvent{target});
      if (phase == Phase::kTransferring) events.emplace_back(StagedEvent{target, {both[rank]}});
      if (phase == Phase::kAborting) events.emplace_back(DrainedEvent{target});
    }
    if (phase == Phase::kCommitting) events.emplace_back(SwappedEvent{engine.ranks.front()});
  }
  return events;
}

struct Work {
  uint64_t report = 0;  ///< of one in the middle of the phase
  uint64_t last = 0;    ///< of the one that ends it
};

/// Of the phase's reports; `state` is what they lead to.
std::optional<Work> Play(State& state) {
  const std::vector<Event> events = Reports(state.spec, state.phase);
  Work work;
  for (size_t i = 0; i < events.size(); ++i) {
    const bool middle = i == events.size() / 2, last = i + 1 == events.size();
    if (middle || last) {
      Outcome outcome;
      const auto steps =
          weightwire::testing::InstructionsOf([&] { outcome = Step(std::move(state), events[i]); });
      if (!steps) return std::nullopt;
      (middle ? work.report : work.last) = *steps;
    }
    state = Step(std::move(state), events[i]).state;
  }
  return work;
}

/// PREPARING, TRANSFERRING, COMMITTING, and of another epoch ABORTING.
std::optional<std::vector<Work>> Epochs(size_t engines) {
  std::vector<Work> all;
  const auto play = [&all](State& state) {
    const auto work = Play(state);
    if (work) all.push_back(*work);
    return work.has_value();
  };
  State state = Begin(SpecOf(engines)).state;
  if (!play(state) || !play(state)) return std::nullopt;
  EXPECT_EQ(state.phase, Phase::kCommitting);
  state = Step(std::move(state), JournalEvent{}).state;
  if (!play(state)) return std::nullopt;
  EXPECT_EQ(state.phase, Phase::kCommitted);
  state = Step(Begin(SpecOf(engines)).state, AbortAskedEvent{}).state;
  if (!play(state)) return std::nullopt;
  EXPECT_EQ(state.phase, Phase::kAborted);
  return all;
}

TEST(CoordinatorWork, OfAReportDoesNotGrowWithTheFleetAndOfNoEventMoreThanIt) {
  const auto few = Epochs(kFew), many = Epochs(kFew * kTimes);
  if (!few || !many) GTEST_SKIP() << "this process may not trace its child";
  for (size_t phase = 0; phase < few->size(); ++phase) {
    const Work &small = (*few)[phase], &large = (*many)[phase];
    std::printf("phase %zu: a report %lu to %lu instructions, the last one %lu to %lu\n", phase,
                small.report, large.report, small.last, large.last);
    // Sets are trees: three more levels.
    EXPECT_LT(large.report, 2 * small.report + 500) << phase;
    EXPECT_LT(large.last, 3 * kTimes / 2 * small.last) << phase;
  }
}

}  // namespace
}  // namespace weightwire::epoch::testing
