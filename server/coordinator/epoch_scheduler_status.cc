#include <algorithm>
#include <chrono>
#include <functional>

#include "server/coordinator/epoch_scheduler.h"
#include "server/coordinator/waiting.h"

namespace weightwire::coordinator {
namespace {

double SecondsOf(Nanos span) { return std::chrono::duration<double>(span).count(); }

std::string Seconds(Nanos span) {
  const int64_t tenths = span / std::chrono::milliseconds(100);
  return std::to_string(tenths / 10) + "." + std::to_string(tenths % 10) + " s";
}

std::string LineOf(const EpochStatus& status) {
  const std::string kind = status.kind == epoch::Kind::kFill       ? "fill "
                           : status.kind == epoch::Kind::kRollback ? "rollback "
                                                                   : "epoch ";
  return kind + std::to_string(status.epoch.value) + " (version " +
         std::to_string(status.version.value) + ") " + std::string(epoch::PhaseName(status.phase)) +
         ": " + Joined(status.waiting_for, status.waiting_for_left);
}

/// Empty: for none.
std::string LineOf(const AwaitedModel& awaited, Nanos now) {
  if (!awaited.IsAwaited(now)) return "";
  return "no engine of " + awaited.name + " is here; it goes on without one in " +
         Seconds(awaited.until - now);
}

bool HasEngine(const EpochRun* run, const std::string& name) {
  return run != nullptr && epoch::EngineNamed(run->state, name) != nullptr;
}

bool AllStaged(const epoch::State& state, const std::string& name) {
  const epoch::EngineMembers* engine = epoch::EngineNamed(state, name);
  return engine != nullptr && std::ranges::all_of(engine->ranks, [&](const epoch::Member& member) {
           return state.staged.contains(member);
         });
}

}  // namespace

EngineState EpochScheduler::StateOf(const Group& engine) const {
  if (engine.CutOff()) return EngineState::kCutOff;
  if (!engine.Complete()) return engine.dirty ? EngineState::kDirty : EngineState::kIncomplete;
  for (const EpochRun* run : runner_.Runs()) {
    if (!HasEngine(run, engine.name)) continue;
    const epoch::State& state = run->state;
    if (state.phase == epoch::Phase::kCommitting && !state.applied.contains(engine.name)) {
      return state.commit_durable ? EngineState::kInstalling : EngineState::kStaged;
    }
    const bool moving =
        state.phase == epoch::Phase::kTransferring || state.phase == epoch::Phase::kStaged;
    if (moving && AllStaged(state, engine.name)) return EngineState::kStaged;
    if (run->IsFill() && run->CanAbort()) return EngineState::kFilling;
  }
  if (shared_.stragglers.IsAwaited(engine)) return EngineState::kInstalling;
  return engine.serving == Epoch{} ? EngineState::kEmpty : EngineState::kServing;
}

/// After a rollback an engine may be ahead, which is behind, too.
Version EpochScheduler::LagOf(const Group& engine) const {
  if (engine.serving == shared_.decisions.committed.epoch) return Version{};
  const auto [low, high] =
      std::minmax(engine.version.value, shared_.decisions.committed.version.value);
  return Version(std::max<uint64_t>(high - low, 1));
}

std::vector<std::string> EpochScheduler::BusyWith(const Group& engine) const {
  std::vector<std::string> busy;
  auto sources = [&](const epoch::Spec& spec) {
    return spec.kind == epoch::Kind::kFill && spec.sources == engine.Members();
  };
  auto name = [](const epoch::Spec& spec) {
    return "epoch " + std::to_string(spec.epoch.value) + " (version " +
           std::to_string(spec.version.value) + ")";
  };
  if (const Straggler* late = shared_.stragglers.Find(engine.name)) {
    busy.push_back("epoch " + std::to_string(late->epoch.value) + " (version " +
                   std::to_string(late->content.version.value) +
                   "): is decided, and it has not swapped yet");
  }
  for (const EpochRun* run : runner_.Runs()) {
    const std::string phase(epoch::PhaseName(run->state.phase));
    if (HasEngine(run, engine.name) && !run->state.applied.contains(engine.name)) {
      busy.push_back(name(run->state.spec) + ": " + phase);
    }
    if (sources(run->state.spec)) busy.push_back(name(run->state.spec) + ": others read from it");
  }
  for (const auto& pending : planner_.PendingEpochs()) {
    const auto& engines = pending->spec.engines;
    const bool in = std::any_of(engines.begin(), engines.end(),
                                [&](const auto& planned) { return planned.name == engine.name; });
    if (in || sources(pending->spec)) busy.push_back(name(pending->spec) + ": is planned");
  }
  return busy;
}

bool EpochScheduler::IsReady(const Group& engine) const {
  if (!engine.Complete() || engine.serving == Epoch{}) return false;
  if (engine.serving == shared_.decisions.committed.epoch) return true;
  if (shared_.stragglers.IsAwaited(engine) &&
      shared_.stragglers.Find(engine.name)->content.epoch == shared_.decisions.committed.epoch) {
    return true;
  }
  const bool installing = runner_.fleet() != nullptr && runner_.fleet()->state.commit_durable;
  return installing && HasEngine(runner_.fleet(), engine.name);
}

Status EpochScheduler::Readiness() const {
  const auto failed = [](const std::string& what, const Status& why) {
    return Status(Code::kUnavailable, Reason::kJournalFailed, what + why.message())
        .Remedy(std::string(why.remedy()));
  };
  if (!shared_.decisions.deciding)
    return failed("decides nothing until it is started again: ", shared_.decisions.stopped_why);
  if (!shared_.decisions.hindered.ok())
    return failed("waits for its journal: ", shared_.decisions.hindered);
  if (shared_.decisions.committed.epoch != Epoch{} || !shared_.decisions.published)
    return OkStatus();
  return Status(Code::kUnavailable, Reason::kNotReady, "nothing is committed");
}

void EpochScheduler::Describe(const StatusQuery& query, StatusSnapshot& snapshot) const {
  const Nanos now = s_.clock.Now();
  snapshot.committed = shared_.decisions.committed.epoch;
  snapshot.committed_version = shared_.decisions.committed.version;
  snapshot.committed_lineage = shared_.decisions.committed.lineage;
  snapshot.lineage = shared_.decisions.committed.newest;
  for (const auto& [version, pending] : publishes_.versions()) {
    snapshot.lineage = std::max(snapshot.lineage, pending.lineage);
  }
  snapshot.committed_wall = shared_.decisions.committed_wall;
  snapshot.deciding = shared_.decisions.deciding;
  snapshot.journal = shared_.decisions.journal_lost;
  if (shared_.decisions.deciding && !shared_.decisions.hindered.ok()) {
    snapshot.journal =
        "takes no record for now, and goes on by itself: " + shared_.decisions.hindered.ToString() +
        (shared_.decisions.journal_lost.empty() ? "" : "; ") + shared_.decisions.journal_lost;
  }
  DescribeEpochs(query, snapshot);
  snapshot.troubles = TroublesOf(shared_);
  const auto [line, since] = Waiting();
  snapshot.waiting_for = line;
  if (since != Nanos{}) snapshot.waiting_seconds = SecondsOf(now - since);
}

void EpochScheduler::DescribeEpochs(const StatusQuery& query, StatusSnapshot& snapshot) const {
  std::vector<EpochStatus>& epochs = snapshot.epochs;
  const Nanos now = s_.clock.Now();
  for (const auto& pending : planner_.PendingEpochs()) epochs.push_back(StatusOf(*pending, now));
  for (const EpochRun* run : runner_.Runs()) epochs.push_back(StatusOfRun(*run, query.lines_max));
  const auto& ended = shared_.history.epochs();
  epochs.insert(epochs.end(), ended.begin(), ended.end());
  std::ranges::stable_sort(epochs, std::greater<>(), &EpochStatus::epoch);
  if (query.epochs_before != Epoch{}) {
    std::erase_if(epochs, [&](const auto& epoch) { return epoch.epoch >= query.epochs_before; });
  }
  const size_t asked = std::min(epochs.size(), query.epochs_max);
  size_t kept = 0, names = 0;
  for (; kept < asked; ++kept) {
    names += epochs[kept].engines.size();
    const bool many = query.names_bounded && names > s_.options.status_names_max;
    if (many && kept > 0) break;
  }
  snapshot.epochs_left = epochs.size() - kept;
  epochs.resize(kept);
}

/// Members whose agents say nothing, or whose processes are in trouble, come first: the others may
/// be waiting for them.
EpochStatus EpochScheduler::StatusOfRun(const EpochRun& run, size_t lines_max) const {
  EpochStatus status = run.ToStatus(s_.clock.Now(), lines_max, [this](const epoch::Member& member) {
    const Session* session = s_.membership.SessionOf(member);
    return SilentSeconds(member) > 0 ||
           (session != nullptr &&
            std::ranges::find(session->beat.troubles, member, &control::Trouble::member) !=
                session->beat.troubles.end());
  });
  SetProgress(run, status);
  return status;
}

/// What has arrived, of all that moves. It stays unknown while a rank that still receives has not
/// said how far it is: an agent of an earlier release never says.
void EpochScheduler::SetProgress(const EpochRun& run, EpochStatus& status) const {
  if (run.finished || run.state.phase != epoch::Phase::kTransferring) return;
  int64_t done = status.bytes, total = 0;
  for (const epoch::EngineMembers& engine : run.state.spec.engines) {
    const auto plan = run.plans.find(engine.name);
    if (plan == run.plans.end()) return;
    total += plan->second->plan->bytes_total;
    for (const epoch::Member& member : engine.ranks) {
      if (run.staged.contains(member)) continue;
      const Session* session = s_.membership.SessionOf(member);
      if (session == nullptr) return;
      const auto& told = session->beat.receiving;
      const auto said = std::ranges::find_if(told, [&](const control::Receiving& rank) {
        return rank.member == member && rank.epoch == status.epoch;
      });
      if (said == told.end()) return;
      done += std::min(said->bytes_done, plan->second->plan->bytes_total);
    }
  }
  // What an agent said is not checked: no more than all can have arrived.
  status.bytes_done = std::min(done, total);
  status.bytes_total = total;
}

double EpochScheduler::SilentSeconds(const epoch::Member& member) const {
  return coordinator::SilentSeconds(shared_, member);
}

std::pair<std::string, Nanos> EpochScheduler::Waiting() const {
  if (!shared_.decisions.deciding)
    return {"an operator: the journal failed: " + shared_.decisions.stopped_why.message(), {}};
  if (!shared_.decisions.hindered.ok()) {
    return {"the journal, which goes on by itself: " + shared_.decisions.hindered.message(), {}};
  }
  if (runner_.fleet() != nullptr)
    return {LineOf(StatusOfRun(*runner_.fleet(), kLinesJoined)), runner_.fleet()->phase_since};
  const Nanos now = s_.clock.Now();
  if (planner_.publish() != nullptr) {
    return {LineOf(StatusOf(*planner_.publish(), now)), planner_.publish()->started};
  }
  if (rollbacks_.pending()) {
    const std::string model = LineOf(rollbacks_.awaited(), now);
    return {"rollback to version " + std::to_string(rollbacks_.pending()->value) +
                (model.empty() ? "" : ": ") + model,
            {}};
  }
  if (!publishes_.versions().empty()) {
    const PendingVersion& pending = publishes_.versions().begin()->second;
    Nanos since = now;
    for (const auto& [rank, at] : pending.published) since = std::min(since, at);
    return {WaitingVersionLine(pending), since};
  }
  if (std::string members = WaitingMembersLine(); !members.empty()) return {members, {}};
  if (!runner_.fills().empty())
    return {LineOf(StatusOfRun(*runner_.fills().front(), kLinesJoined)),
            runner_.fills().front()->phase_since};
  if (!planner_.fills().empty()) {
    return {LineOf(StatusOf(*planner_.fills().front(), now)), planner_.fills().front()->started};
  }
  return {WaitingFillLine(), {}};
}

std::string EpochScheduler::WaitingMembersLine() const {
  std::vector<std::string> troubles;
  for (const TroubleStatus& trouble : TroublesOf(shared_)) {
    troubles.push_back(trouble.where + ": " + trouble.what);
  }
  for (const auto& lines :
       {SilentLines(shared_), troubles, MissingLines(shared_, control::GroupRole::kTrainer, false),
        MissingLines(shared_, control::GroupRole::kEngine, false)}) {
    if (!lines.empty()) return Joined(lines);
  }
  return "";
}

std::string EpochScheduler::WaitingVersionLine(const PendingVersion& pending) const {
  const std::string version = ToString(pending.id()) + ": ";
  const Group* trainer = s_.membership.Trainer();
  std::vector<std::string> gone, silent, missing;
  for (uint32_t rank = 0; trainer != nullptr && rank < trainer->world_size(); ++rank) {
    if (pending.ranks.contains(rank)) continue;
    const auto& live = trainer->slots[rank].live;
    if (!live) {
      gone.push_back(trainer->RankName(rank) + ": register");
    } else {
      auto& lines = SilentSeconds(live->member) > 0 ? silent : missing;
      lines.push_back(trainer->RankName(rank) + ": publish");
    }
  }
  gone.insert(gone.end(), silent.begin(), silent.end());
  gone.insert(gone.end(), missing.begin(), missing.end());
  if (!gone.empty()) return version + Joined(gone);
  if (trainer != nullptr && !trainer->Complete()) {
    return version + Joined(MissingLines(shared_, control::GroupRole::kTrainer, true));
  }
  const Nanos now = s_.clock.Now();
  if (now < pending.not_before) {
    return version + "attempt " + std::to_string(pending.attempts + 1) + " in " +
           Seconds(pending.not_before - now) + "; the last one: " + pending.last_error.ToString();
  }
  const std::string model = LineOf(pending.awaited, now);
  return version + model + (model.empty() ? "" : "; ") +
         WaitingEnginesLine(shared_, publishes_.EnginesWanted());
}

/// Engines that serve less than what is committed, and why no fill runs for them.
std::string EpochScheduler::WaitingFillLine() const {
  if (shared_.decisions.committed.epoch == Epoch{}) return "";
  bool holder = false;
  std::vector<std::string> behind, why;
  const std::string epoch = std::to_string(shared_.decisions.committed.epoch.value);
  for (const Group* engine : shared_.CompleteEngines()) {
    holder |= engine->serving == shared_.decisions.committed.epoch && !engine->drained;
    if (engine->serving == shared_.decisions.committed.epoch || engine->drained) continue;
    if (shared_.stragglers.Has(*engine)) {
      why.push_back(engine->name + ": has not swapped to epoch " +
                    std::to_string(shared_.stragglers.Find(engine->name)->epoch.value) +
                    "; it is filled when it has");
      continue;
    }
    behind.push_back(engine->name);
    const FillScheduler::Trouble* trouble = fills_.TroubleOf(*engine);
    if (trouble != nullptr) {
      why.push_back(engine->name + ": " +
                    (trouble->fits_nobody
                         ? "fits no holder of epoch " + epoch + "; the next version"
                         : std::to_string(trouble->failures) + " fills of epoch " + epoch +
                               " failed; again in " +
                               Seconds(std::max(Nanos(0), trouble->not_before - s_.clock.Now()))));
    }
  }
  if (!holder && !behind.empty()) {
    return Joined(behind) + ": no holder of epoch " + epoch + "; the next version";
  }
  return Joined(why);
}

Result<EpochTrace> EpochScheduler::Describe(Epoch asked) const {
  const Nanos now = s_.clock.Now();
  for (const EpochRun* run : runner_.Runs()) {
    if (asked == Epoch{} || run->state.spec.epoch == asked) return run->Describe(now);
  }
  for (const auto& pending : planner_.PendingEpochs()) {
    if (asked != Epoch{} && pending->spec.epoch != asked) continue;
    return pending->trace.Describe(StatusOf(*pending, now), {});
  }
  return shared_.history.Describe(asked);
}

}  // namespace weightwire::coordinator
