#include <algorithm>
#include <chrono>
#include <set>

#include "server/coordinator/driver.h"

namespace weightwire::coordinator {
namespace {

double SecondsOf(Nanos span) { return std::chrono::duration<double>(span).count(); }

std::string Joined(const std::vector<std::string>& lines) {
  constexpr size_t kShown = 4;
  std::string text;
  for (size_t i = 0; i < std::min(lines.size(), kShown); ++i) {
    text += (i == 0 ? "" : ", ") + lines[i];
  }
  if (lines.size() > kShown) text += " and " + std::to_string(lines.size() - kShown) + " more";
  return text;
}

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
         ": " + Joined(status.waiting_for);
}

/// Why the rank's place is not what it should be.
std::string LackOf(const Group& group, uint32_t rank) {
  const Slot& slot = group.slots[rank];
  std::string lack = group.RankName(rank) + ": ";
  if (!slot.live) return lack + "register";
  if (!slot.connected()) {
    return lack + "its connection is " + std::string(PresenceName(slot.live->presence));
  }
  return lack + (slot.live->layout == nullptr ? "layout" : "silent");
}

bool HasEngine(const EpochRun* run, const std::string& name) {
  if (run == nullptr) return false;
  const auto& engines = run->state.spec.engines;
  return std::any_of(engines.begin(), engines.end(),
                     [&](const epoch::EngineMembers& e) { return e.name == name; });
}

bool AllStaged(const epoch::State& state, const std::string& name) {
  for (const epoch::EngineMembers& engine : state.spec.engines) {
    if (engine.name != name) continue;
    return std::all_of(engine.ranks.begin(), engine.ranks.end(),
                       [&](const epoch::Member& m) { return state.staged.contains(m); });
  }
  return false;
}

}  // namespace

std::vector<std::shared_ptr<Draft>> Driver::Drafts() const {
  std::vector<std::shared_ptr<Draft>> drafts = fill_drafts_;
  if (publish_draft_ != nullptr) drafts.insert(drafts.begin(), publish_draft_);
  return drafts;
}

EngineState Driver::StateOf(const Group& engine) const {
  if (engine.CutOff()) return EngineState::kCutOff;
  if (!engine.Complete()) return engine.dirty ? EngineState::kDirty : EngineState::kIncomplete;
  for (const EpochRun* run : Runs()) {
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
  if (IsAwaited(engine)) return EngineState::kInstalling;
  return engine.serving == Epoch{} ? EngineState::kEmpty : EngineState::kServing;
}

/// After a rollback an engine may be ahead, which is behind, too.
Version Driver::LagOf(const Group& engine) const {
  if (engine.serving == committed_.epoch) return Version{};
  const auto [low, high] = std::minmax(engine.version.value, committed_.version.value);
  return Version(std::max<uint64_t>(high - low, 1));
}

std::vector<std::string> Driver::BusyWith(const Group& engine) const {
  std::vector<std::string> busy;
  auto sources = [&](const epoch::Spec& spec) {
    return spec.kind == epoch::Kind::kFill && spec.sources == engine.Members();
  };
  auto name = [](const epoch::Spec& spec) {
    return "epoch " + std::to_string(spec.epoch.value) + " (version " +
           std::to_string(spec.version.value) + ")";
  };
  if (const Straggler* late = stragglers_.Find(engine.name)) {
    busy.push_back("epoch " + std::to_string(late->epoch.value) + " (version " +
                   std::to_string(late->content.version.value) +
                   "): is decided, and it has not swapped yet");
  }
  for (const EpochRun* run : Runs()) {
    const std::string phase(epoch::PhaseName(run->state.phase));
    if (HasEngine(run, engine.name) && !run->state.applied.contains(engine.name)) {
      busy.push_back(name(run->state.spec) + ": " + phase);
    }
    if (sources(run->state.spec)) busy.push_back(name(run->state.spec) + ": others read from it");
  }
  for (const auto& draft : Drafts()) {
    const auto& engines = draft->spec.engines;
    const bool in = std::any_of(engines.begin(), engines.end(),
                                [&](const auto& planned) { return planned.name == engine.name; });
    if (in || sources(draft->spec)) busy.push_back(name(draft->spec) + ": is planned");
  }
  return busy;
}

bool Driver::IsReady(const Group& engine) const {
  if (!engine.Complete() || engine.serving == Epoch{}) return false;
  if (engine.serving == committed_.epoch) return true;
  if (IsAwaited(engine) && stragglers_.Find(engine.name)->content.epoch == committed_.epoch) {
    return true;
  }
  const bool installing = publish_ != nullptr && publish_->state.commit_durable;
  return installing && HasEngine(publish_.get(), engine.name);
}

Status Driver::Readiness() const {
  const auto failed = [](const std::string& what, const Status& why) {
    return Status(Code::kUnavailable, Reason::kJournalFailed, what + why.message())
        .Remedy(std::string(why.remedy()));
  };
  if (!deciding_) return failed("decides nothing until it is started again: ", stopped_why_);
  if (!hindered_.ok()) return failed("waits for its journal: ", hindered_);
  if (committed_.epoch != Epoch{} || !published_) return OkStatus();
  return Status(Code::kUnavailable, Reason::kNotReady, "nothing is committed");
}

void Driver::Describe(StatusSnapshot& snapshot) const {
  const Nanos now = s_.clock.Now();
  snapshot.committed = committed_.epoch;
  snapshot.committed_version = committed_.version;
  snapshot.committed_wall = committed_wall_;
  snapshot.deciding = deciding_;
  snapshot.journal = journal_lost_;
  if (deciding_ && !hindered_.ok()) {
    snapshot.journal = "takes no record for now, and goes on by itself: " + hindered_.ToString() +
                       (journal_lost_.empty() ? "" : "; ") + journal_lost_;
  }
  for (const auto& draft : Drafts()) snapshot.epochs.push_back(StatusOf(*draft, now));
  for (const EpochRun* run : Runs()) snapshot.epochs.push_back(StatusOfRun(*run));
  snapshot.epochs.insert(snapshot.epochs.end(), history_.begin(), history_.end());
  std::stable_sort(snapshot.epochs.begin(), snapshot.epochs.end(),
                   [](const EpochStatus& a, const EpochStatus& b) { return a.epoch > b.epoch; });
  const auto [line, since] = Waiting();
  snapshot.waiting_for = line;
  if (since != Nanos{}) snapshot.waiting_seconds = SecondsOf(now - since);
}

double Driver::SilentSeconds(const epoch::Member& member) const {
  const auto place = s_.membership.Find(member);
  if (!place) return 0;
  if (place->live->presence != Presence::kConnected) {
    return std::max(0.001, SecondsOf(s_.clock.Now() - place->live->cut_at));
  }
  const Session* session = s_.membership.SessionOf(member);
  const Nanos silent = session == nullptr ? Nanos{} : s_.clock.Now() - session->heard;
  return silent > s_.options.heartbeat * 5 / 2 ? SecondsOf(silent) : 0;
}

/// Members whose agents say nothing come first: the others may be waiting for them.
EpochStatus Driver::StatusOfRun(const EpochRun& run) const {
  EpochStatus status = run.ToStatus(s_.clock.Now());
  std::set<std::string> silent;
  for (const auto& [member, name] : run.names) {
    if (SilentSeconds(member) > 0) silent.insert(name);
  }
  if (silent.empty()) return status;
  std::ranges::stable_partition(status.waiting_for, [&](const std::string& line) {
    return silent.contains(line.substr(0, line.find(':')));
  });
  return status;
}

std::pair<std::string, Nanos> Driver::Waiting() const {
  if (!deciding_) return {"an operator: the journal failed: " + stopped_why_.message(), {}};
  if (!hindered_.ok()) {
    return {"the journal, which goes on by itself: " + hindered_.message(), {}};
  }
  if (publish_ != nullptr) return {LineOf(StatusOfRun(*publish_)), publish_->phase_since};
  const Nanos now = s_.clock.Now();
  if (publish_draft_ != nullptr) {
    return {LineOf(StatusOf(*publish_draft_, now)), publish_draft_->started};
  }
  if (rollback_) return {"rollback to version " + std::to_string(rollback_->version.value), {}};
  if (!queue_.versions().empty()) {
    const PendingVersion& pending = queue_.versions().begin()->second;
    Nanos since = now;
    for (const auto& [rank, at] : pending.published) since = std::min(since, at);
    return {WaitingVersionLine(pending), since};
  }
  if (std::string members = WaitingMembersLine(); !members.empty()) return {members, {}};
  if (!fills_.empty()) return {LineOf(StatusOfRun(*fills_.front())), fills_.front()->phase_since};
  if (!fill_drafts_.empty()) {
    return {LineOf(StatusOf(*fill_drafts_.front(), now)), fill_drafts_.front()->started};
  }
  return {WaitingFillLine(), {}};
}

/// "engine-a/0: silent", of ranks whose agents have said nothing for a while, or are cut off.
std::vector<std::string> Driver::SilentLines() const {
  std::vector<std::string> lines;
  for (const auto& [name, group] : s_.membership.groups()) {
    for (uint32_t rank = 0; rank < group.world_size(); ++rank) {
      const Slot& slot = group.slots[rank];
      if (slot.live && SilentSeconds(slot.live->member) > 0) lines.push_back(LackOf(group, rank));
    }
  }
  return lines;
}

/// What groups lack. One that is gone altogether counts only where somebody waits for it.
std::vector<std::string> Driver::MissingLines(control::GroupRole role, bool gone_too) const {
  std::vector<std::string> lines;
  for (const auto& [name, group] : s_.membership.groups()) {
    if (group.role != role || group.Complete()) continue;
    if (!gone_too && (group.present() == 0 || group.drained)) continue;
    for (uint32_t rank = 0; rank < group.world_size(); ++rank) {
      const Slot& slot = group.slots[rank];
      if (!slot.connected() || slot.live->layout == nullptr) lines.push_back(LackOf(group, rank));
    }
  }
  return lines;
}

std::string Driver::WaitingMembersLine() const {
  for (const auto& lines : {SilentLines(), MissingLines(control::GroupRole::kTrainer, false),
                            MissingLines(control::GroupRole::kEngine, false)}) {
    if (!lines.empty()) return Joined(lines);
  }
  return "";
}

std::string Driver::WaitingVersionLine(const PendingVersion& pending) const {
  const std::string version = "version " + std::to_string(pending.version.value) + ": ";
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
    return version + Joined(MissingLines(control::GroupRole::kTrainer, true));
  }
  const Nanos now = s_.clock.Now();
  if (now < pending.not_before) {
    return version + "attempt " + std::to_string(pending.attempts + 1) + " in " +
           Seconds(pending.not_before - now) + "; the last one: " + pending.last_error.ToString();
  }
  return version + WaitingEnginesLine();
}

std::string Driver::WaitingEnginesLine() const {
  const std::vector<std::string> missing = MissingLines(control::GroupRole::kEngine, true);
  std::vector<std::string> drained, stragglers;
  for (const Group* engine : CompleteEngines()) {
    if (engine->drained) drained.push_back(engine->name);
    if (stragglers_.Has(*engine)) stragglers.push_back(engine->name);
  }
  return std::to_string(PartakingEngines().size()) + " of " + std::to_string(EnginesWanted()) +
         " engines are complete" + (missing.empty() ? "" : "; " + Joined(missing)) +
         (drained.empty() ? "" : "; drained: " + Joined(drained)) +
         (stragglers.empty() ? "" : "; have not swapped yet: " + Joined(stragglers));
}

/// Engines that serve less than what is committed, and why no fill runs for them.
std::string Driver::WaitingFillLine() const {
  if (committed_.epoch == Epoch{}) return "";
  bool holder = false;
  std::vector<std::string> behind, why;
  const std::string epoch = std::to_string(committed_.epoch.value);
  for (const Group* engine : CompleteEngines()) {
    holder |= engine->serving == committed_.epoch && !engine->drained;
    if (engine->serving == committed_.epoch || engine->drained) continue;
    if (stragglers_.Has(*engine)) {
      why.push_back(engine->name + ": has not swapped to epoch " +
                    std::to_string(stragglers_.Find(engine->name)->epoch.value) +
                    "; it is filled when it has");
      continue;
    }
    behind.push_back(engine->name);
    const FillTrouble* trouble = TroubleOf(*engine);
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

}  // namespace weightwire::coordinator
