#include "server/epoch/coordinator_machine.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "server/epoch/digests.h"

// One small function for each event. Each first asks whether the event fits (phase, membership,
// not seen before) and returns without a trace when it does not; then it records the fact; then it
// asks whether the phase is complete. Facts are sets, so that a repeated report counts once.
namespace weightwire::epoch {
namespace {

std::vector<Member> Targets(const Spec& spec) {
  std::vector<Member> all;
  for (const EngineMembers& engine : spec.engines) {
    all.insert(all.end(), engine.ranks.begin(), engine.ranks.end());
  }
  return all;
}

template <typename Done>
std::vector<Member> Missing(const std::vector<Member>& members, const Done& done) {
  std::vector<Member> missing;
  for (const Member& member : members) {
    if (!done.contains(member)) missing.push_back(member);
  }
  return missing;
}

/// Engines of which some rank is not in `done`.
template <typename Done>
std::set<std::string> EnginesMissing(const Spec& spec, const Done& done) {
  std::set<std::string> missing;
  for (const EngineMembers& engine : spec.engines) {
    if (!Missing(engine.ranks, done).empty()) missing.insert(engine.name);
  }
  return missing;
}

/// So many engines are some, and the others as many as a quorum.
bool ManyEnoughWithout(const Spec& spec, size_t engines) {
  return spec.quorum > 0 && engines > 0 && engines + spec.quorum <= spec.engines.size();
}

/// The others are a quorum.
bool EnoughWithout(const State& state, const std::set<std::string>& engines) {
  return ManyEnoughWithout(state.spec, engines.size()) &&
         state.roster.HasEveryModelWithout(engines);
}

bool EngineOver(const State& state, const std::string& engine) {
  return state.applied.contains(engine) || state.evicted.contains(engine);
}

const EngineMembers* EngineOf(const State& state, const Member& member) {
  const auto index = state.roster.EngineOf(member);
  return index ? &state.spec.engines[*index] : nullptr;
}

/// "trainer/0" or "engine-a/1", from the member's place in the spec.
std::string PlaceOf(const State& state, const Member& member) {
  if (!state.roster.Has(member)) return "nobody";
  const EngineMembers* engine = EngineOf(state, member);
  const std::vector<Member>& ranks = engine == nullptr ? state.spec.sources : engine->ranks;
  const auto rank = std::ranges::find(ranks, member) - ranks.begin();
  return (engine == nullptr ? state.spec.source_group : engine->name) + "/" + std::to_string(rank);
}

Status DeadlineStatus(const State& state) {
  constexpr size_t kNamesMax = 8;
  const std::vector<Member> missing = WaitingFor(state);
  std::string names;
  for (size_t i = 0; i < std::min(missing.size(), kNamesMax); ++i) {
    names += (i == 0 ? "" : ", ") + PlaceOf(state, missing[i]);
  }
  if (missing.size() > kNamesMax) {
    names += " and " + std::to_string(missing.size() - kNamesMax) + " more";
  }
  if (missing.empty()) names = "Commit()";
  return Status(Code::kDeadlineExceeded, Reason::kDeadlineExceeded,
                "the deadline of " + std::string(PhaseName(state.phase)) +
                    " passed; still waiting for " + names)
      .AtRank(missing.empty() ? "" : PlaceOf(state, missing.front()))
      .AtEpoch(state.spec.epoch);
}

class Stepper {
 public:
  explicit Stepper(State state) : state_(std::move(state)) {
    if (!state_.roster.made()) state_.roster = Roster(state_);
  }
  Outcome Finished() && { return {std::move(state_), std::move(actions_)}; }

  void On(const PreparedEvent& event) {
    if (state_.phase != Phase::kPreparing || !state_.roster.Has(event.member)) return;
    if (state_.prepared.insert(event.member).second) TransferWhenPrepared();
  }

  void On(const SourceDoneEvent& event) {
    if (state_.phase != Phase::kTransferring || !state_.roster.IsSource(event.member)) return;
    if (state_.sourced.emplace(event.member, event.digests).second) EnterStagedWhenComplete();
  }

  void On(const StagedEvent& event) {
    if (state_.phase != Phase::kTransferring || EngineOf(state_, event.member) == nullptr) {
      return;
    }
    if (!state_.staged.emplace(event.member, event.digests).second) return;
    state_.roster.CountStaged(event.member);
    EnterStagedWhenComplete();
    if (state_.phase == Phase::kTransferring) ArmGraceOnce();
  }

  void On(const GraceEvent&) {
    if (state_.phase != Phase::kTransferring || !state_.grace_armed) return;
    const auto late = EnginesMissing(state_.spec, state_.staged);
    state_.grace_armed = false;
    if (!EnoughWithout(state_, late)) return;
    const Status why = GraceStatus(late);
    if (MayExclude(late)) return Exclude(late, why);
    state_.stragglers = late;
    Abort(why);
  }

  void On(const SwappedEvent& event) {
    if (state_.phase != Phase::kCommitting || !state_.commit_durable) return;
    const EngineMembers* engine = EngineOf(state_, event.member);
    if (engine == nullptr || engine->ranks.front() != event.member) return;
    if (EngineOver(state_, engine->name)) return;
    state_.applied.insert(engine->name);
    Do(SendCommittedEverywhere{engine->name});
    FinishWhenCommitted();
  }

  void On(const DrainedEvent& event) {
    if (state_.phase != Phase::kAborting || !state_.roster.Has(event.member)) return;
    if (!state_.drained.insert(event.member).second) return;
    if (!state_.lost.contains(event.member)) state_.roster.CountGone();
    FinishWhenDrained();
  }

  void On(const FailedEvent& event) {
    if (!state_.roster.Has(event.member)) return;
    if (CanAbort()) {
      const EngineMembers* failed = EngineOf(state_, event.member);
      const bool released = state_.phase == Phase::kStaged;
      const bool spare = failed != nullptr && EnoughWithout(state_, {failed->name});
      const bool enough = failed != nullptr && (released || spare);
      if (enough && MayExclude({failed->name})) {
        return Exclude({failed->name}, NamedFailure(event.member, event.why));
      }
      if (!released && spare) {
        state_.stragglers = {failed->name};
      }
      return Abort(NamedFailure(event.member, event.why));
    }
    if (!Driving()) return;
    const EngineMembers* engine = EngineOf(state_, event.member);
    if (engine == nullptr || EngineOver(state_, engine->name)) return;
    if (event.refused) {
      if (!state_.commit_durable || engine->ranks.front() != event.member) return;
      state_.refused = true;
    }
    Evict(engine->name, event.why);
    FinishWhenCommitted();
  }

  void On(const LostEvent& event) {
    if (!state_.roster.Has(event.member)) return;
    if (CanAbort()) {
      state_.lost.insert(event.member);
      const EngineMembers* engine = EngineOf(state_, event.member);
      const Status why = LossStatus(event);
      if (engine != nullptr && MayExclude({engine->name})) return Exclude({engine->name}, why);
      return Abort(why);
    }
    if (state_.phase == Phase::kAborting) {
      if (!state_.lost.insert(event.member).second) return;
      if (!state_.drained.contains(event.member)) state_.roster.CountGone();
      return FinishWhenDrained();
    }
    if (Driving() && state_.lost.insert(event.member).second) LoseAfterDecision(event);
  }

  void On(const JournalEvent& event) {
    if (state_.phase != Phase::kCommitting || state_.commit_durable || !state_.why.ok()) return;
    if (!event.why.ok()) {
      state_.why = event.why;
      Do(Halt{event.why});
      return;
    }
    CommitEverywhere();
  }

  void On(const CommitAskedEvent&) {
    if (state_.phase != Phase::kStaged) return;
    state_.commit_asked = true;
    SubmitCommit();
  }

  void On(const AbortAskedEvent& event) {
    if (CanAbort()) Abort(event.why, event.cause);
  }

  void On(const DeadlineEvent& event) {
    if (event.phase != state_.phase) return;
    if (CanAbort()) {
      const auto late = LateEngines();
      const Status why = DeadlineStatus(state_);
      if (!late.empty() && MayExclude(late)) {
        Exclude(late, why);
        // The sources have yet to hear that nobody else reads: they have a deadline, too.
        if (state_.phase == event.phase) Do(ArmDeadline{state_.phase});
        return;
      }
      state_.stragglers = late;
      return Abort(why, AbortCause::kDeadline);
    }
    if (state_.phase == Phase::kAborting) return GiveUpDraining();
    if (state_.phase != Phase::kCommitting || !state_.commit_durable) return;
    const Status why = DeadlineStatus(state_);
    for (const EngineMembers& engine : state_.spec.engines) {
      if (EngineOver(state_, engine.name)) continue;
      state_.evicted.insert(engine.name);
      Do(MarkStale{engine.name, why});
    }
    FinishWhenCommitted();
  }

 private:
  void Do(Action action) { actions_.push_back(std::move(action)); }

  bool CanAbort() const {
    return state_.phase == Phase::kPreparing || state_.phase == Phase::kTransferring ||
           state_.phase == Phase::kStaged;
  }
  /// Decided, and still allowed to act on it.
  bool Driving() const { return state_.phase == Phase::kCommitting && state_.why.ok(); }

  void ArmGraceOnce() {
    const size_t late = state_.spec.engines.size() - state_.roster.engines_staged();
    if (state_.grace_armed || !ManyEnoughWithout(state_.spec, late)) return;
    if (!state_.roster.models_staged()) return;
    state_.grace_armed = true;
    Do(ArmGrace{});
  }

  /// Who alone is missing when the phase's deadline passes; nobody when it is not for engines only.
  std::set<std::string> LateEngines() const {
    const Spec& spec = state_.spec;
    const bool preparing = state_.phase == Phase::kPreparing;
    if (!preparing && state_.phase != Phase::kTransferring) return {};
    if (preparing && !Missing(spec.sources, state_.prepared).empty()) return {};
    const auto late =
        preparing ? EnginesMissing(spec, state_.prepared) : EnginesMissing(spec, state_.staged);
    return EnoughWithout(state_, late) ? late : std::set<std::string>{};
  }

  Status GraceStatus(const std::set<std::string>& late) const {
    std::string names;
    for (const std::string& name : late) names += (names.empty() ? "" : ", ") + name;
    const size_t staged = state_.spec.engines.size() - late.size();
    return Status(Code::kDeadlineExceeded, Reason::kDeadlineExceeded,
                  std::to_string(staged) + " of " + std::to_string(state_.spec.engines.size()) +
                      " engines are staged, a quorum; left behind: " + names)
        .AtRank(*late.begin())
        .AtEpoch(state_.spec.epoch);
  }

  Status NamedFailure(const Member& member, const Status& why) const {
    return Status(why)
        .AtRank(why.rank().empty() ? PlaceOf(state_, member) : why.rank())
        .AtEpoch(state_.spec.epoch);
  }

  Status LossStatus(const LostEvent& event) const {
    return Status(Code::kAborted, Reason::kMemberLost, "a member was lost: " + event.why.message())
        .AtRank(event.why.rank().empty() ? PlaceOf(state_, event.member) : event.why.rank())
        .AtEpoch(state_.spec.epoch);
  }

  /// All of them at once; some may read from others of them.
  bool MayExclude(const std::set<std::string>& names) const {
    const Spec& spec = state_.spec;
    const size_t others = spec.engines.size() - names.size();
    if (spec.every_model && !state_.roster.HasEveryModelWithout(names)) return false;
    // Its sources may have changed their bytes: it is this attempt or none, and enough were staged.
    if (state_.phase == Phase::kStaged) return others > 0;
    if (others < std::max(1U, spec.engines_min)) return false;
    return spec.drops_readers && std::ranges::none_of(spec.engines, [&](const auto& other) {
             const auto parent = spec.parents.find(other.name);
             return !names.contains(other.name) && parent != spec.parents.end() &&
                    names.contains(parent->second);
           });
  }

  void Exclude(const std::set<std::string>& names, const Status& why) {
    for (const std::string& name : names) TakeOut(*EngineNamed(state_, name), why);
    if (state_.phase == Phase::kPreparing) return TransferWhenPrepared();
    if (state_.phase != Phase::kTransferring) return;
    EnterStagedWhenComplete();
    if (state_.phase == Phase::kTransferring) ArmGraceOnce();
  }

  void TakeOut(EngineMembers engine, const Status& why) {
    state_.roster.Exclude(engine);
    std::erase_if(state_.spec.engines, [&](const auto& e) { return e.name == engine.name; });
    state_.excluded.insert(engine.name);
    for (const Member& member : engine.ranks) {
      state_.prepared.erase(member);
      state_.staged.erase(member);
      // What ends the attempt later is not this loss.
      if (state_.lost.erase(member) == 0) Do(SendAbort{member, why});
    }
    Do(ExcludeEngine{std::move(engine), why});
  }

  void TransferWhenPrepared() {
    if (state_.prepared.size() < state_.roster.members()) return;
    state_.phase = Phase::kTransferring;
    Do(SendTransfer{});
    Do(ArmDeadline{Phase::kTransferring});
  }

  void EnterStagedWhenComplete() {
    if (state_.sourced.size() < state_.roster.sources()) return;
    if (state_.staged.size() < state_.roster.targets()) return;
    if (Status why = CompareDigests(state_); !why.ok()) return Abort(std::move(why));
    state_.phase = Phase::kStaged;
    state_.released = true;
    Do(SendRelease{});
    if (state_.spec.kind == Kind::kFill) {
      state_.phase = Phase::kCommitting;
      return CommitEverywhere();
    }
    if (!state_.spec.manual_commit) return SubmitCommit();
    Do(ArmDeadline{Phase::kStaged});
  }

  /// From here on there is no abort.
  void SubmitCommit() {
    state_.phase = Phase::kCommitting;
    Do(AppendCommit{});
  }

  void CommitEverywhere() {
    state_.commit_durable = true;
    for (const EngineMembers& engine : state_.spec.engines) {
      if (!EngineOver(state_, engine.name)) Do(SendCommit{engine.name});
    }
    FinishWhenCommitted();
    if (state_.phase == Phase::kCommitting) Do(ArmDeadline{Phase::kCommitting});
  }

  void LoseAfterDecision(const LostEvent& event) {
    const EngineMembers* engine = EngineOf(state_, event.member);
    if (engine == nullptr || EngineOver(state_, engine->name)) return;
    state_.evicted.insert(engine->name);
    FinishWhenCommitted();
  }

  void Evict(const std::string& engine, const Status& why) {
    state_.evicted.insert(engine);
    Do(EvictEngine{engine, why});
  }

  void FinishWhenCommitted() {
    if (state_.phase != Phase::kCommitting || !state_.commit_durable) return;
    // No engine is in both, and none of them is excluded: there is no such thing any more.
    if (state_.applied.size() + state_.evicted.size() < state_.spec.engines.size()) return;
    state_.phase = Phase::kCommitted;
    Do(Finish{Phase::kCommitted, OkStatus()});
  }

  void Abort(Status why, AbortCause cause = AbortCause::kFault) {
    state_.phase = Phase::kAborting;
    state_.cause = cause;
    state_.why = std::move(why);
    for (const Member& member : state_.lost) {
      if (state_.roster.Has(member)) state_.roster.CountGone();
    }
    for (const Member& member : AllMembers(state_.spec)) {
      if (!state_.lost.contains(member)) Do(SendAbort{member, state_.why});
    }
    FinishWhenDrained();
    if (state_.phase == Phase::kAborting) Do(ArmDeadline{Phase::kAborting});
  }

  void GiveUpDraining() {
    const Status why = DeadlineStatus(state_);
    std::set<std::string> engines;
    for (const Member& member : WaitingFor(state_)) {
      state_.lost.insert(member);
      state_.roster.CountGone();
      const EngineMembers* engine = EngineOf(state_, member);
      if (engine == nullptr) {
        Do(EvictSource{member, why});
      } else if (engines.insert(engine->name).second) {
        Do(EvictEngine{engine->name, why});
      }
    }
    FinishWhenDrained();
  }

  void FinishWhenDrained() {
    if (state_.roster.gone() < state_.roster.members()) return;
    state_.phase = Phase::kAborted;
    Do(Finish{Phase::kAborted, state_.why});
  }

  State state_;
  std::vector<Action> actions_;
};

std::vector<Member> WaitingForSwap(const State& state) {
  std::vector<Member> leaders;
  if (!state.commit_durable) return leaders;
  for (const EngineMembers& engine : state.spec.engines) {
    if (!EngineOver(state, engine.name)) leaders.push_back(engine.ranks.front());
  }
  return leaders;
}

/// A source is done when its readers are: whoever reads is named first.
std::vector<Member> WaitingForBytes(const State& state) {
  std::vector<Member> missing = Missing(Targets(state.spec), state.staged);
  const std::vector<Member> sources = Missing(state.spec.sources, state.sourced);
  missing.insert(missing.end(), sources.begin(), sources.end());
  return missing;
}

}  // namespace

std::string_view PhaseName(Phase phase) {
  switch (phase) {
    case Phase::kPreparing:
      return "preparing";
    case Phase::kTransferring:
      return "transferring";
    case Phase::kStaged:
      return "staged";
    case Phase::kCommitting:
      return "committing";
    case Phase::kCommitted:
      return "committed";
    case Phase::kAborting:
      return "aborting";
    case Phase::kAborted:
      return "aborted";
  }
  return "unknown";
}

Roster::Roster(const State& state) : made_(true) {
  const Spec& spec = state.spec;
  places_.reserve(spec.sources.size());
  for (const Member& member : spec.sources) places_.emplace(member, kSource);
  sources_ = places_.size();
  std::map<std::string_view, uint32_t> models;
  for (size_t index = 0; index < spec.engines.size(); ++index) {
    const auto number = static_cast<uint32_t>(index);
    const auto [model, fresh] =
        models.try_emplace(spec.engines[index].model, static_cast<uint32_t>(models_.size()));
    if (fresh) {
      models_.emplace_back();
      ++models_unstaged_;
    }
    ++models_[model->second].engines;
    Engine& engine = engines_.emplace_back(Engine{index, model->second, 0});
    for (const Member& member : spec.engines[index].ranks) {
      if (!places_.emplace(member, number).second || state.staged.contains(member)) continue;
      ++engine.unstaged;
    }
    if (engine.unstaged == 0) CountEngineStaged(engine);
    numbers_.emplace(spec.engines[index].name, number);
  }
  for (const auto& [member, number] : places_) {
    gone_ += state.drained.contains(member) || state.lost.contains(member) ? 1 : 0;
  }
  if (state.phase != Phase::kAborting) gone_ = 0;
}

bool Roster::IsSource(const Member& member) const {
  const auto place = places_.find(member);
  return place != places_.end() && place->second == kSource;
}

std::optional<size_t> Roster::EngineOf(const Member& member) const {
  const auto place = places_.find(member);
  if (place == places_.end() || place->second == kSource) return std::nullopt;
  return engines_[place->second].index;
}

std::optional<size_t> Roster::EngineNamed(const std::string& name) const {
  const auto number = numbers_.find(name);
  if (number == numbers_.end()) return std::nullopt;
  return engines_[number->second].index;
}

void Roster::CountEngineStaged(const Engine& engine) {
  ++engines_staged_;
  models_unstaged_ -= models_[engine.model].staged++ == 0 ? 1 : 0;
}

void Roster::CountStaged(const Member& target) {
  Engine& engine = engines_[places_.at(target)];
  if (--engine.unstaged == 0) CountEngineStaged(engine);
}

bool Roster::HasEveryModelWithout(const std::set<std::string>& engines) const {
  std::map<uint32_t, size_t> fewer;
  for (const std::string& name : engines) ++fewer[engines_[numbers_.at(name)].model];
  return std::ranges::all_of(
      fewer, [this](const auto& model) { return model.second < models_[model.first].engines; });
}

void Roster::Exclude(const EngineMembers& engine) {
  const auto number = numbers_.extract(engine.name);
  const Engine& excluded = engines_[number.mapped()];
  Model& model = models_[excluded.model];
  if (excluded.unstaged == 0) {
    --engines_staged_;
    models_unstaged_ += --model.staged == 0 ? 1 : 0;
  }
  // The last one of its model: nobody waits for the model any more.
  if (--model.engines == 0) --models_unstaged_;
  for (Engine& other : engines_) {
    if (other.index > excluded.index) --other.index;
  }
  for (const Member& member : engine.ranks) places_.erase(member);
}

std::vector<Member> AllMembers(const Spec& spec) {
  std::vector<Member> all = spec.sources;
  const std::vector<Member> targets = Targets(spec);
  all.insert(all.end(), targets.begin(), targets.end());
  return all;
}

Outcome Begin(Spec spec) {
  State state;
  state.spec = std::move(spec);
  state.roster = Roster(state);
  return {std::move(state), {SendPrepare{}, ArmDeadline{Phase::kPreparing}}};
}

Outcome Step(State state, const Event& event) {
  Stepper stepper(std::move(state));
  std::visit([&](const auto& e) { stepper.On(e); }, event);
  return std::move(stepper).Finished();
}

std::vector<Member> WaitingFor(const State& state) {
  switch (state.phase) {
    case Phase::kPreparing:
      return Missing(AllMembers(state.spec), state.prepared);
    case Phase::kTransferring:
      return WaitingForBytes(state);
    case Phase::kCommitting:
      return WaitingForSwap(state);
    case Phase::kAborting:
      return Missing(Missing(AllMembers(state.spec), state.drained), state.lost);
    case Phase::kStaged:
    case Phase::kCommitted:
    case Phase::kAborted:
      return {};
  }
  return {};
}

const EngineMembers* EngineNamed(const State& state, const std::string& name) {
  const auto index = state.roster.EngineNamed(name);
  return index ? &state.spec.engines[*index] : nullptr;
}

}  // namespace weightwire::epoch
