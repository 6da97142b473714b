#include "server/coordinator/rollback_scheduler.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "server/base/failpoint.h"

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

void RollbackScheduler::Ask(Version version, control::Reply<RolledBack> reply) {
  if (Status status = Check(version); !status.ok()) return reply(Fail(status));
  if (!pending_ && IsCommitted(version)) {
    const CommitRecord& committed = shared_.decisions.committed;
    return reply(RolledBack{committed.epoch, {}, version, {}, {}, committed.lineage});
  }
  if (!pending_) pending_ = Pending{version, 0, {}, {}, {}};
  pending_->replies.push_back(std::move(reply));
  WW_FAILPOINT("coordinator.after_rollback_accepted");
  shared_.try_start();
  shared_.changed();
}

Status RollbackScheduler::Check(Version version) const {
  WW_RETURN_IF_ERROR(shared_.decisions.Check());
  if (pending_) {
    if (pending_->version == version) return OkStatus();
    return Status(Code::kFailedPrecondition, Reason::kNotReady,
                  "a rollback to version " + std::to_string(pending_->version.value) +
                      " is in progress")
        .Remedy("wait until it has ended");
  }
  if (runner_.fleet() != nullptr || planner_.publish() != nullptr) {
    const epoch::Spec& spec =
        runner_.fleet() ? runner_.fleet()->state.spec : planner_.publish()->spec;
    const std::string number = std::to_string(spec.epoch.value);
    return Status(Code::kFailedPrecondition, Reason::kNotReady,
                  "epoch " + number + " (version " + std::to_string(spec.version.value) +
                      ") is in progress")
        .AtEpoch(spec.epoch)
        .Remedy("wait until it has ended, or `wwctl abort " + number + "`");
  }
  const Pending asked{version, 0, {}, {}, {}};
  if (shared_.stragglers.AnyAwaited()) return OkStatus();  // who holds it may be among them
  if (!IsCommitted(version) && HeldOf(asked).epoch == Epoch{}) return NoHolder(version);
  return OkStatus();
}

bool RollbackScheduler::IsCommitted(Version version) const {
  return shared_.decisions.committed.epoch != Epoch{} &&
         shared_.decisions.committed.version == version;
}

/// What engines hold of every model that is served, newest first: going back to what only the
/// engines of one model hold would leave the others at another version.
epoch::Contents RollbackScheduler::HeldTogether(const std::set<std::string>& without) const {
  std::set<std::string> served;
  std::map<Epoch, std::pair<epoch::Content, std::set<std::string>>> held_by;  // content, models
  for (const Group* engine : shared_.PartakingEngines()) {
    const std::vector<std::string>& models = engine->agreed->models;
    served.insert(models.begin(), models.end());
    if (without.contains(engine->name)) continue;
    for (const epoch::Content& held : engine->Held()) {
      auto& [content, of] = held_by[held.epoch];
      content = held;
      of.insert(models.begin(), models.end());
    }
  }
  epoch::Contents together;
  for (auto it = held_by.rbegin(); it != held_by.rend(); ++it) {
    if (it->second.second == served) together.push_back(it->second.first);
  }
  return together;
}

/// The newest epoch under which the version is held; nothing when it is not.
epoch::Content RollbackScheduler::HeldOf(const Pending& rollback) const {
  const epoch::Contents together = HeldTogether(rollback.without);
  const auto newest = std::ranges::find(together, rollback.version, &epoch::Content::version);
  return newest == together.end() ? epoch::Content{} : *newest;
}

Status RollbackScheduler::NoHolder(Version version) const {
  std::set<Version> held;
  for (const epoch::Content& content : HeldTogether({})) held.insert(content.version);
  std::set<std::string> models, of;
  for (const Group* engine : shared_.PartakingEngines()) {
    models.insert(engine->agreed->models.begin(), engine->agreed->models.end());
    const epoch::Contents its = engine->Held();
    const bool holds = std::ranges::find(its, version, &epoch::Content::version) != its.end();
    if (holds) of.insert(engine->agreed->models.begin(), engine->agreed->models.end());
  }
  std::string lacking;
  for (const std::string& model : models) {
    if (of.empty() || of.contains(model)) continue;
    lacking += (lacking.empty() ? "" : ", ") + model;
  }
  std::string available;
  for (const Version one : held) {
    available += (available.empty() ? "; available: " : ", ") + std::to_string(one.value);
  }
  std::string lost = "it was not committed here";
  for (const EpochStatus& epoch : shared_.history.epochs()) {
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
                (lacking.empty() ? "no engine still holds version "
                                 : "no engine of " + lacking + " still holds version ") +
                    std::to_string(version.value) + available + "; " + lost + now)
      .Remedy("push its checkpoint as a new version: `python -m weightwire.checkpoint push`");
}

bool RollbackScheduler::Start() {
  if (!pending_) return false;
  const std::vector<const Group*> engines = shared_.PartakingEngines();
  if (shared_.AwaitsAModel(engines, pending_->awaited)) return true;
  const epoch::Content held = HeldOf(*pending_);
  if (held.epoch == Epoch{}) {
    Answer(Fail(NoHolder(pending_->version)));
    return false;
  }
  if (!fills_.GaveWay()) return true;
  const auto number = shared_.numbers.Take();
  if (!number) return true;
  ++pending_->attempts;
  epoch::Spec spec;
  spec.epoch = spec.content = *number;
  spec.kind = epoch::Kind::kRollback;
  spec.version = held.version;
  spec.held = held.epoch;
  spec.lineage = shared_.decisions.LineageOf(held.epoch);
  for (const Group* engine : engines) {
    if (!Holds(*engine, held) || pending_->without.contains(engine->name)) continue;
    spec.engines.push_back({engine->name, engine->Members(), engine->agreed->models.front()});
  }
  const auto pending = planner_.NewPending(std::move(spec));
  pending->attempt = pending_->attempts;
  runner_.Begin(planner_.RunFrom(*pending));
  return true;
}

void RollbackScheduler::End(const EpochRun& run) {
  if (!pending_) return;
  const epoch::Spec& spec = run.state.spec;
  if (run.state.phase != epoch::Phase::kCommitted) {
    // One that was cut off may hold it still when it is back.
    const std::string& rank = run.state.why.rank();
    if (run.state.lost.empty()) pending_->without.insert(rank.substr(0, rank.rfind('/')));
    if (run.state.cause == epoch::AbortCause::kAsked ||
        pending_->attempts >= s_.options.attempts_max) {
      Answer(Fail(run.state.why));
    }
    return;
  }
  RolledBack result{spec.epoch, spec.held, spec.version, {}, {}, spec.lineage};
  for (const Group* engine : shared_.PartakingEngines()) {
    (engine->serving == spec.content ? result.engines : result.filling).push_back(engine->name);
  }
  Answer(std::move(result));
}

void RollbackScheduler::GoBackFrom(const EpochRun& refused) {
  std::vector<const Group*> serving = shared_.PartakingEngines();
  std::erase_if(serving,
                [&](const Group* engine) { return engine->serving != refused.state.spec.content; });
  const epoch::Contents together = HeldTogether({});
  const auto newest = std::ranges::find_if(together, [&](const epoch::Content& held) {
    return std::ranges::any_of(serving, [&](const Group* engine) { return Holds(*engine, held); });
  });
  const epoch::Content before = newest == together.end() ? epoch::Content{} : *newest;
  const bool wanted = s_.options.rollback_refused;
  if (wanted && before.epoch != Epoch{} && !pending_) {
    pending_ = Pending{before.version, 0, {}, {}, {}};
  }
  s_.metrics.Add("versions_refused_total", 1,
                 {{"outcome", !wanted                   ? "kept"
                              : before.epoch == Epoch{} ? "no_holder"
                                                        : "rolled_back"}});
}

void RollbackScheduler::Answer(const Result<RolledBack>& result) {
  if (!pending_) return;
  const Pending ended = *std::exchange(pending_, std::nullopt);
  for (const auto& reply : ended.replies) reply(result);
}

}  // namespace weightwire::coordinator
