#include "server/coordinator/epoch_planner.h"

#include <algorithm>
#include <set>
#include <utility>

#include "server/base/failpoint.h"
#include "server/coordinator/prepare.h"

namespace weightwire::coordinator {
namespace {

/// What makes weights quantized on the way, and what an agent without it cannot.
constexpr std::pair<uint64_t, const char*> kFeaturesToMake[] = {
    {control::kFeatureQuantize, "quantize on the way"},
    {control::kFeatureScaleRules, "make scales by the engine's rule"},
    {control::kFeatureFourBits, "make weights of four bits"},
    {control::kFeatureOwnQuotient, "make fp8 of whole tensors as modelopt does"}};

/// The engine that an engine reads from, of those that do not read from the sources.
std::map<std::string, std::string> EnginesReadFrom(
    const std::vector<epoch::PrepareCommand>& prepares, const epoch::Spec& spec) {
  std::map<ParticipantId, std::string> names;
  for (const epoch::EngineMembers& engine : spec.engines) {
    for (const epoch::Member& member : engine.ranks) names[member.id] = engine.name;
  }
  std::map<std::string, std::string> parents;
  for (const epoch::PrepareCommand& command : prepares) {
    if (!command.relayed || command.source_participants.empty()) continue;
    parents[names.at(command.member.id)] = names.at(command.source_participants.begin()->second);
  }
  return parents;
}

}  // namespace

std::shared_ptr<PendingEpoch> EpochPlanner::NewPending(epoch::Spec spec) const {
  auto pending = std::make_shared<PendingEpoch>();
  pending->spec = std::move(spec);
  pending->started = s_.clock.Now();
  pending->started_wall = s_.clock.WallSeconds();
  pending->trace_id = OwnTraceId(shared_.decisions.history, pending->spec.epoch);
  pending->trace = Trace(pending->started);
  return pending;
}

void EpochPlanner::Plan(const std::shared_ptr<PendingEpoch>& pending, const Group& source,
                        const std::vector<const Group*>& engines) {
  if (pending->spec.kind == epoch::Kind::kPublish) {
    publish_ = pending;
  } else {
    fills_.push_back(pending);
  }
  pending->awaited = engines.size();
  for (const Group* engine : engines) {
    const size_t planned = pending->spec.engines.size();
    pending->spec.engines.push_back(
        {engine->name, engine->Members(), engine->agreed->models.front()});
    s_.plans.Get(source.agreed, engine->agreed,
                 cancel_.Bind([this, pending, planned](const Result<PlannedPairPtr>& pair) {
                   Planned(pending, planned, pair);
                 }));
  }
  shared_.changed();
}

void EpochPlanner::Planned(const std::shared_ptr<PendingEpoch>& pending, size_t number,
                           const Result<PlannedPairPtr>& pair) {
  const bool filling = std::ranges::find(fills_, pending) != fills_.end();
  if (pending != publish_ && !filling) return;
  WW_FAILPOINT("coordinator.after_plan_made");
  const epoch::EngineMembers& engine = pending->spec.engines[number];
  const Status status = pair ? CheckQuantizes(pending->spec, engine, **pair) : pair.error();
  if (status.ok()) {
    pending->plans[engine.name] = *pair;
  } else if (pending->failure.ok()) {
    const std::string& name = pending->failed_engine = engine.name;
    const std::string rank = status.rank().empty() ? name : name + ", " + status.rank();
    pending->failure = Status(status).AtRank(rank).AtEpoch(pending->spec.epoch);
  }
  if (--pending->awaited == 0) Finish(pending);
}

void EpochPlanner::Finish(const std::shared_ptr<PendingEpoch>& pending) {
  pending->trace.Step("plan", "", pending->started, s_.clock.Now());
  if (pending == publish_) publish_.reset();
  std::erase(fills_, pending);
  LeaveOutTheLost(*pending);
  if (!StillComplete(pending->spec)) return owner_.OnVoid(*pending);
  if (!pending->failure.ok()) return owner_.OnPlanFailed(*pending);
  owner_.OnPlanned(*pending);
}

std::vector<const PendingEpoch*> EpochPlanner::PendingEpochs() const {
  std::vector<const PendingEpoch*> all_pending;
  if (publish_ != nullptr) all_pending.push_back(publish_.get());
  for (const auto& pending : fills_) all_pending.push_back(pending.get());
  return all_pending;
}

bool EpochPlanner::IsStill(const std::string& name, const std::vector<epoch::Member>& ranks) const {
  const Group* group = s_.membership.FindGroup(name);
  return group != nullptr && group->Complete() && group->Members() == ranks &&
         !shared_.stragglers.Has(*group);
}

/// Of a pending epoch whose plans were made meanwhile, as long as enough are left.
void EpochPlanner::LeaveOutTheLost(PendingEpoch& pending) const {
  auto& engines = pending.spec.engines;
  const auto lost = [&](const epoch::EngineMembers& e) { return !IsStill(e.name, e.ranks); };
  const auto gone = static_cast<size_t>(std::ranges::count_if(engines, lost));
  if (engines.size() < gone + std::max(1U, pending.spec.engines_min)) return;
  std::set<std::string> models, left;
  for (const epoch::EngineMembers& engine : engines) {
    models.insert(engine.model);
    if (!lost(engine)) left.insert(engine.model);
  }
  if (pending.spec.every_model && left != models) return;
  for (const epoch::EngineMembers& engine : engines) {
    // Another plan that cannot be made may hide behind its one.
    if (lost(engine) && engine.name == pending.failed_engine) return;
  }
  for (const epoch::EngineMembers& engine : engines) {
    if (!lost(engine)) continue;
    pending.plans.erase(engine.name);
    pending.left_out.push_back(engine.name);
  }
  std::erase_if(engines, lost);
}

bool EpochPlanner::StillComplete(const epoch::Spec& spec) const {
  return IsStill(spec.source_group, spec.sources) &&
         std::ranges::all_of(spec.engines, [this](const epoch::EngineMembers& engine) {
           return IsStill(engine.name, engine.ranks);
         });
}

std::unique_ptr<EpochRun> EpochPlanner::RunFrom(const PendingEpoch& pending) const {
  auto run = std::make_unique<EpochRun>();
  const epoch::Spec& spec = pending.spec;
  const bool spares = spec.quorum > 0 && spec.quorum < spec.engines.size();
  PrepareInput input{spec,
                     pending.plans,
                     {},
                     pending.trace_id,
                     pending.star ? Fanout::kStar : s_.options.fanout,
                     spares ? s_.options.commit_policy.Patience() : Nanos(0),
                     s_.options.slot_bytes,
                     pending.direct};
  auto add = [&](const epoch::Member& member, const std::string& name) {
    const Session& session = *s_.membership.SessionOf(member);
    input.addresses[member] = {
        session.id, session.hello.incarnation, session.hello.host, session.hello.addresses, {}};
    run->names[member] = name;
  };
  for (size_t rank = 0; rank < pending.spec.sources.size(); ++rank) {
    add(pending.spec.sources[rank], pending.spec.source_group + "/" + std::to_string(rank));
  }
  for (const epoch::EngineMembers& engine : pending.spec.engines) {
    for (size_t rank = 0; rank < engine.ranks.size(); ++rank) {
      add(engine.ranks[rank], engine.name + "/" + std::to_string(rank));
    }
  }
  run->prepares = MakePrepares(input, s_.options.random_ticket);
  run->plans = pending.plans;
  run->trace_id = pending.trace_id;
  run->trace = pending.trace;
  run->left_out = pending.left_out;
  run->attempt = pending.attempt;
  run->started = pending.started;
  run->phase_since = pending.started;
  run->started_wall = pending.started_wall;
  run->state.spec = pending.spec;
  run->state.spec.parents = EnginesReadFrom(run->prepares, pending.spec);
  run->state.spec.drops_readers = DropsReaders(run->state.spec);
  for (epoch::PrepareCommand& command : run->prepares) {
    command.drops_readers = command.role == epoch::Role::kSource && run->state.spec.drops_readers;
  }
  return run;
}

/// Whoever is read from knows ExcludeCommand.
bool EpochPlanner::DropsReaders(const epoch::Spec& spec) const {
  const auto knows = [this](const epoch::Member& member) {
    const Session* session = s_.membership.SessionOf(member);
    return session != nullptr && (session->hello.features & control::kFeatureExclude) != 0;
  };
  return std::ranges::all_of(spec.sources, knows) &&
         std::ranges::all_of(spec.engines, [&](const epoch::EngineMembers& engine) {
           const bool relays = std::ranges::any_of(
               spec.parents, [&](const auto& child) { return child.second == engine.name; });
           return !relays || std::ranges::all_of(engine.ranks, knows);
         });
}

Status EpochPlanner::CheckQuantizes(const epoch::Spec& spec, const epoch::EngineMembers& engine,
                                    const PlannedPair& pair) const {
  if (pair.features == 0) return OkStatus();
  if (spec.kind == epoch::Kind::kFill) {
    return Status(Code::kFailedPrecondition, Reason::kDtypeMismatch,
                  "its fp8 weights would be made of those of " + spec.source_group +
                      ", which may have been rounded before")
        .Remedy(
            "publish the next version, or start another engine with the same "
            "quantization_config that can fill it");
  }
  const auto lacks = [this](const epoch::Member& member, uint64_t feature) {
    const Session* session = s_.membership.SessionOf(member);
    return session != nullptr && (session->hello.features & feature) == 0;
  };
  const auto refused = [](const std::string& group, size_t rank, std::string what) {
    return Status(Code::kFailedPrecondition, Reason::kProtocolVersion, std::move(what))
        .AtRank(group + "/" + std::to_string(rank))
        .Remedy("run the coordinator's version of weightwired beside it");
  };
  const auto check = [&](const std::string& group, const std::vector<epoch::Member>& ranks) {
    for (size_t rank = 0; rank < ranks.size(); ++rank) {
      for (const auto& [feature, what] : kFeaturesToMake) {
        if ((pair.features & feature) != 0 && lacks(ranks[rank], feature)) {
          return refused(group, rank, std::string("its agent cannot ") + what);
        }
      }
    }
    return OkStatus();
  };
  WW_RETURN_IF_ERROR(check(spec.source_group, spec.sources));
  WW_RETURN_IF_ERROR(check(engine.name, engine.ranks));
  for (const auto& [rank, gathered] : pair.plan->gathered) {
    if (!lacks(engine.ranks[rank], control::kFeatureGather)) continue;
    return refused(engine.name, rank,
                   "its agent cannot quantize blocks of which no trainer rank holds all");
  }
  return OkStatus();
}

}  // namespace weightwire::coordinator
