#include <algorithm>
#include <utility>

#include "server/base/failpoint.h"
#include "server/coordinator/driver.h"

// A rollback needs no plan: its engines are those whose every rank still holds the version in a
// buffer, under one committed epoch. Each says so itself when it is prepared; one that does
// not is left out of the next attempt. Once the COMMIT is durable all others serve an older epoch
// than the committed one, which is what fills are for.
namespace weightwire::coordinator {
namespace {

std::string NameOf(const epoch::Content& content) {
  return "version " + std::to_string(content.version.value) + " (epoch " +
         std::to_string(content.epoch.value) + ")";
}

bool Holds(const Group& engine, const epoch::Content& content) {
  const epoch::Contents held = engine.Held();
  return std::find(held.begin(), held.end(), content) != held.end();
}

/// "engine-a serves version 8 (epoch 9) and holds version 7 (epoch 8)".
std::string LineOf(const Group& engine) {
  if (!engine.Complete()) return engine.name + " is not complete";
  if (engine.drained) return engine.name + " is drained";
  std::string line = engine.name + " serves ";
  line += engine.serving == Epoch{} ? "nothing" : NameOf({engine.serving, engine.version});
  std::string holds;
  for (const epoch::Content& held : engine.Held()) {
    holds += (holds.empty() ? "" : ", ") + NameOf(held);
  }
  return line + " and holds " + (holds.empty() ? "nothing else" : holds);
}

}  // namespace

void Driver::Rollback(Version version, control::Reply<RolledBack> reply) {
  if (Status status = CheckRollback(version); !status.ok()) return reply(Fail(status));
  if (!rollback_ && IsCommitted(version)) {
    return reply(RolledBack{committed_.epoch, {}, version, {}, {}});
  }
  if (!rollback_) rollback_ = PendingRollback{version, 0, {}, {}};
  rollback_->replies.push_back(std::move(reply));
  WW_FAILPOINT("coordinator.after_rollback_accepted");
  TryStart();
  changed_();
}

Status Driver::CheckRollback(Version version) const {
  WW_RETURN_IF_ERROR(CheckDecides());
  if (rollback_) {
    if (rollback_->version == version) return OkStatus();
    return Status(Code::kFailedPrecondition, Reason::kNotReady,
                  "a rollback to version " + std::to_string(rollback_->version.value) +
                      " is in progress")
        .Remedy("wait until it has ended");
  }
  if (publish_ != nullptr || publish_draft_ != nullptr) {
    const epoch::Spec& spec = publish_ ? publish_->state.spec : publish_draft_->spec;
    const std::string number = std::to_string(spec.epoch.value);
    return Status(Code::kFailedPrecondition, Reason::kNotReady,
                  "epoch " + number + " (version " + std::to_string(spec.version.value) +
                      ") is in progress")
        .AtEpoch(spec.epoch)
        .Remedy("wait until it has ended, or `wwctl abort " + number + "`");
  }
  const PendingRollback asked{version, 0, {}, {}};
  if (AwaitsSwaps()) return OkStatus();  // who holds it may be among them
  if (!IsCommitted(version) && HeldOf(asked).epoch == Epoch{}) return NoHolder(version);
  return OkStatus();
}

bool Driver::IsCommitted(Version version) const {
  return committed_.epoch != Epoch{} && committed_.version == version;
}

/// The newest epoch under which some engine holds the version; nothing when none does.
epoch::Content Driver::HeldOf(const PendingRollback& rollback) const {
  epoch::Content newest;
  for (const Group* engine : PartakingEngines()) {
    if (rollback.without.contains(engine->name)) continue;
    for (const epoch::Content& held : engine->Held()) {
      if (held.version == rollback.version && newest.epoch < held.epoch) newest = held;
    }
  }
  return newest;
}

Status Driver::NoHolder(Version version) const {
  std::string lost = "it was not committed here";
  for (const EpochStatus& epoch : history_) {
    const bool committed = epoch.phase == epoch::Phase::kCommitted && epoch.version == version;
    if (!committed || epoch.kind == epoch::Kind::kFill) continue;
    lost = "it was committed in epoch " + std::to_string(epoch.epoch.value) + " by";
    for (const std::string& engine : epoch.engines) lost += " " + engine;
    break;
  }
  std::string now;
  for (const auto& [name, group] : s_.membership.groups()) {
    if (group.role == control::GroupRole::kEngine) now += "; " + LineOf(group);
  }
  return Status(Code::kFailedPrecondition, Reason::kStaleVersion,
                "no holder of version " + std::to_string(version.value) + ": " + lost + now)
      .Remedy("push its checkpoint as a new version: `python -m weightwire.checkpoint push`");
}

/// True when an epoch is about to run: nothing else may begin.
bool Driver::StartRollback() {
  if (!rollback_) return false;
  const epoch::Content held = HeldOf(*rollback_);
  if (held.epoch == Epoch{}) {
    AnswerRollback(Fail(NoHolder(rollback_->version)));
    return false;
  }
  if (!FillsGaveWay()) return true;
  const auto number = numbers_.Take();
  if (!number) return true;
  ++rollback_->attempts;
  epoch::Spec spec;
  spec.epoch = spec.content = *number;
  spec.kind = epoch::Kind::kRollback;
  spec.version = held.version;
  spec.held = held.epoch;
  for (const Group* engine : PartakingEngines()) {
    if (!Holds(*engine, held) || rollback_->without.contains(engine->name)) continue;
    spec.engines.push_back({engine->name, engine->Members()});
  }
  const auto draft = NewDraft(std::move(spec));
  draft->attempt = rollback_->attempts;
  Begin(RunFrom(*draft));
  return true;
}

void Driver::WentBack() {
  GiveUpAll(queue_.TakeBelow(Version(committed_.version.value + 1)),
            Status(Code::kAborted, Reason::kStaleVersion,
                   "a rollback committed version " + std::to_string(committed_.version.value)));
  queue_.SetFloor(committed_.version);
}

void Driver::EndRollback(const EpochRun& run) {
  if (!rollback_) return;
  const epoch::Spec& spec = run.state.spec;
  if (run.state.phase != epoch::Phase::kCommitted) {
    const std::string& rank = run.state.why.rank();
    rollback_->without.insert(rank.substr(0, rank.rfind('/')));
    if (run.abort_asked || rollback_->attempts >= s_.options.attempts_max) {
      AnswerRollback(Fail(run.state.why));
    }
    return;
  }
  RolledBack result{spec.epoch, spec.held, spec.version, {}, {}};
  for (const Group* engine : PartakingEngines()) {
    (engine->serving == spec.content ? result.engines : result.filling).push_back(engine->name);
  }
  AnswerRollback(std::move(result));
}

void Driver::GoBackFrom(const EpochRun& refused) {
  epoch::Content before;
  for (const Group* engine : PartakingEngines()) {
    if (engine->serving != refused.state.spec.content) continue;
    for (const epoch::Content& held : engine->Held()) {
      if (before.epoch < held.epoch) before = held;
    }
  }
  const bool wanted = s_.options.rollback_refused;
  if (wanted && before.epoch != Epoch{} && !rollback_) {
    rollback_ = PendingRollback{before.version, 0, {}, {}};
  }
  s_.metrics.Add("versions_refused_total", 1,
                 {{"outcome", !wanted                   ? "kept"
                              : before.epoch == Epoch{} ? "no_holder"
                                                        : "rolled_back"}});
}

void Driver::AnswerRollback(const Result<RolledBack>& result) {
  if (!rollback_) return;
  const PendingRollback ended = *std::exchange(rollback_, std::nullopt);
  for (const auto& reply : ended.replies) reply(result);
}

}  // namespace weightwire::coordinator
