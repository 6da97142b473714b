#include "server/coordinator/epoch_scheduler.h"

#include <algorithm>
#include <set>
#include <string_view>
#include <utility>

namespace weightwire::coordinator {
namespace {

Status NotInProgress(Epoch epoch) {
  return Status(Code::kNotFound, Reason::kNotRegistered, "no such epoch is in progress")
      .AtEpoch(epoch)
      .Remedy("`wwctl epochs` says how each one ended");
}

}  // namespace

EpochScheduler::EpochScheduler(Services services, CommitRecord committed, Epoch first,
                               JournalId history, std::function<void()> changed)
    : shared_(
          services, std::move(committed), first, history, [this] { TryStart(); },
          std::move(changed), [this](const Status& why) { Halt(why); }),
      s_(shared_.s),
      planner_(shared_, *this),
      runner_(shared_, *this),
      fills_(shared_, planner_, runner_),
      rollbacks_(shared_, planner_, runner_, fills_),
      publishes_(shared_, planner_, runner_, fills_) {
  TellCommitted();
  s_.metrics.Set("journal_failing", 0);
  s_.journal.OnHindered(cancel_.Bind([this](const Status& why) { OnHindered(why); }));
}

// ---- beginnings ----

void EpochScheduler::TryStart() {
  const Decisions& decisions = shared_.decisions;
  if (!decisions.deciding || decisions.stopping) return;
  if (runner_.fleet() != nullptr || planner_.publish() != nullptr) return;
  const bool waits = shared_.stragglers.AnyAwaited();
  if (waits || (!rollbacks_.Start() && !publishes_.Start())) fills_.Start();
}

void EpochScheduler::OnPlanned(const PendingEpoch& pending) {
  if (pending.spec.kind == epoch::Kind::kPublish) newest_plans_ = pending.plans;
  runner_.Begin(planner_.RunFrom(pending));
}

void EpochScheduler::OnVoid(const PendingEpoch& pending) {
  if (pending.spec.kind == epoch::Kind::kPublish) publishes_.OnVoid(pending);
  TryStart();
}

/// Layouts that do not fit together fit no better at the next attempt.
void EpochScheduler::OnPlanFailed(const PendingEpoch& pending) {
  EpochStatus status = StatusOf(pending, s_.clock.Now());
  status.phase = epoch::Phase::kAborted;
  status.waiting_for.clear();
  shared_.history.Remember(status);
  Trace trace = pending.trace;
  trace.Happened(s_.clock.Now(), pending.failed_engine, "no plan", pending.failure);
  shared_.history.Keep(pending.spec.epoch, {std::move(trace), {}, {}});
  if (Group* engine = s_.membership.FindGroup(pending.failed_engine)) {
    engine->last_error = pending.failure.ToString();
    fills_.FitsNobody(*engine);
  }
  const bool publish = pending.spec.kind == epoch::Kind::kPublish;
  s_.metrics.Add("epochs_total", 1, {{"outcome", publish ? "aborted" : "fill_aborted"}});
  s_.metrics.Add("epoch_aborts_total", 1,
                 {{"reason", std::string(ReasonName(pending.failure.reason()))}});
  if (publish) publishes_.OnPlanFailed(pending);
  TryStart();
  shared_.changed();
}

// ---- decisions and ends ----

void EpochScheduler::TellCommitted() {
  const CommitRecord& committed = shared_.decisions.committed;
  s_.metrics.Set("epoch_committed", static_cast<double>(committed.epoch.value));
  s_.metrics.Set("version_committed", static_cast<double>(committed.version.value));
  s_.metrics.Set("last_commit_timestamp_seconds", shared_.decisions.committed_wall);
  s_.metrics.Set("lineage", static_cast<double>(committed.newest));
}

/// Engines without which the newest epoch was committed are not ready from now on.
void EpochScheduler::OnDurable(const EpochRun& run) {
  const CommitRecord& committed = shared_.decisions.committed;
  TellCommitted();
  fills_.ForgetAll();
  if (committed.held != Epoch{}) {  // a rollback: versions go on from here
    publishes_.GiveUpTo(
        {committed.lineage, committed.version},
        Status(Code::kAborted, Reason::kStaleVersion,
               "a rollback committed version " + std::to_string(committed.version.value)));
    publishes_.SetFloor(shared_.decisions.Floor());
  }
  publishes_.GiveUpTo({committed.newest - 1, Version(UINT64_MAX)},
                      Status(Code::kAborted, Reason::kStaleIncarnation,
                             "its lineage has ended: lineage " + std::to_string(committed.newest) +
                                 " was committed"));
  std::set<std::string_view> required;
  for (const epoch::EngineMembers& engine : run.state.spec.engines) required.insert(engine.name);
  for (const auto& [name, group] : s_.membership.groups()) {
    if (group.role != control::GroupRole::kEngine || required.contains(name)) continue;
    shared_.SendStale(group);
  }
  shared_.stragglers.OnDurable(committed.epoch);
}

void EpochScheduler::OnEnded(const EpochRun& run) {
  switch (run.state.spec.kind) {
    case epoch::Kind::kPublish:
      if (publishes_.End(run)) {
        served_ = run.state.spec.epoch;
        if (run.state.refused) rollbacks_.GoBackFrom(run);
      }
      break;
    case epoch::Kind::kFill:
      fills_.End(run);
      break;
    case epoch::Kind::kRollback:
      rollbacks_.End(run);
      break;
  }
  FinishShutdownWhenIdle();
}

void EpochScheduler::OnLost(const Group& group, uint32_t rank, const epoch::Member& member,
                            const Status& why) {
  shared_.stragglers.Erase(group.name);
  LeaveRuns(group, rank, member, why);
  if (group.role != control::GroupRole::kTrainer) return;
  publishes_.OnLost(group, rank, why);
}

void EpochScheduler::OnCutOff(const Group& group, uint32_t rank, const epoch::Member& member,
                              const Status& why) {
  shared_.absent_models.CutOff(group, s_.clock.Now() + s_.options.lease);
  LeaveRuns(group, rank, member, why);
  // A version that is decided and that it has staged, it serves when it is back.
  for (const EpochRun* run : runner_.Runs()) {
    if (run->state.phase != epoch::Phase::kCommitting) continue;
    const epoch::Spec& spec = run->state.spec;
    const auto engine = std::ranges::find(spec.engines, group.name, &epoch::EngineMembers::name);
    if (engine == spec.engines.end() || run->state.applied.contains(group.name)) continue;
    if (std::ranges::find(engine->ranks, member) == engine->ranks.end()) continue;
    shared_.stragglers.Put(group.name, {engine->ranks,
                                        spec.epoch,
                                        {spec.content, spec.version},
                                        run->keeps,
                                        run->phase_since + s_.options.commit_deadline});
  }
}

void EpochScheduler::LeaveRuns(const Group& group, uint32_t rank, const epoch::Member& member,
                               const Status& why) {
  fills_.Forget(group.name);
  runner_.OnLost(member, Status(Status(why).AtRank(group.RankName(rank))));
}

// ---- what operators ask ----

Status EpochScheduler::Commit(Epoch epoch) {
  EpochRun* run = runner_.RunOf(epoch);
  if (run == nullptr || run->state.spec.kind != epoch::Kind::kPublish) {
    return NotInProgress(epoch);
  }
  if (run->state.phase != epoch::Phase::kStaged) {
    return Status(Code::kFailedPrecondition, Reason::kStaleEpoch,
                  "the epoch is " + std::string(epoch::PhaseName(run->state.phase)) +
                      "; only a staged one can be committed")
        .AtEpoch(epoch);
  }
  runner_.Dispatch(epoch, epoch::CommitAskedEvent{});
  return OkStatus();
}

Status EpochScheduler::Abort(Epoch epoch, const std::string& why) {
  const Status asked =
      Status(Code::kAborted, Reason::kAbortRequested, "aborted by request: " + why).AtEpoch(epoch);
  if (planner_.publish() != nullptr && planner_.publish()->spec.epoch == epoch) {
    publishes_.Abandon(asked);
    TryStart();
    return OkStatus();
  }
  EpochRun* run = runner_.RunOf(epoch);
  if (run == nullptr) {
    return NotInProgress(epoch);
  }
  if (!run->CanAbort()) {
    return Status(Code::kFailedPrecondition, Reason::kStaleEpoch,
                  "too late: the epoch is " + std::string(epoch::PhaseName(run->state.phase)))
        .AtEpoch(epoch);
  }
  runner_.Dispatch(epoch, epoch::AbortAskedEvent{asked});
  return OkStatus();
}

// ---- the end ----

void EpochScheduler::AbortRuns(const Status& why) {
  planner_.DropFills();
  std::vector<Epoch> all;
  for (const EpochRun* run : runner_.Runs()) all.push_back(run->state.spec.epoch);
  runner_.GiveWay(all, why);
}

void EpochScheduler::Halt(const Status& why) {
  if (!shared_.decisions.deciding) return;
  shared_.decisions.deciding = false;
  shared_.decisions.stopped_why = why;
  s_.metrics.Set("journal_failing", 1);
  const Status told = Status(Code::kUnavailable, Reason::kJournalFailed,
                             "the coordinator stopped deciding: " + why.message())
                          .Remedy("repair the journal's storage and restart the coordinator");
  publishes_.Abandon(told);
  publishes_.GiveUpWaiting(told);
  rollbacks_.Answer(Fail(told));
  AbortRuns(told);
  publishes_.ArmTimer();
  FinishShutdownWhenIdle();
  shared_.changed();
}

/// Nothing is lost and nothing is given up: what waits for the journal waits on.
void EpochScheduler::OnHindered(const Status& why) {
  shared_.decisions.hindered = why;
  s_.metrics.Set("journal_failing", why.ok() && shared_.decisions.deciding ? 0 : 1);
  s_.options.notes({Epoch{},
                    Version{},
                    {},
                    "",
                    !why.ok(),
                    why.ok() ? "the journal takes records again"
                             : "the journal takes no record for now: " + why.ToString()});
  FinishShutdownWhenIdle();
  shared_.changed();
}

void EpochScheduler::Shutdown(std::function<void()> done) {
  shared_.decisions.stopping = true;
  stopped_ = std::move(done);
  const Status why(Code::kUnavailable, Reason::kShuttingDown, "the coordinator is shutting down");
  publishes_.Abandon(why);
  publishes_.GiveUpWaiting(why);
  rollbacks_.Answer(Fail(why));
  AbortRuns(why);
  FinishShutdownWhenIdle();
}

/// An epoch whose decision has an unknown fate never ends: it is not waited for.
void EpochScheduler::FinishShutdownWhenIdle() {
  if (!shared_.decisions.stopping || !stopped_ || !runner_.fills().empty()) return;
  const EpochRun* run = runner_.fleet();
  const bool decides = shared_.decisions.deciding && shared_.decisions.hindered.ok();
  const bool endless = run != nullptr && !decides && run->state.phase == epoch::Phase::kCommitting;
  if (run != nullptr && !endless) return;
  std::exchange(stopped_, {})();
}

}  // namespace weightwire::coordinator
