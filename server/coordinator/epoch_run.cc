#include "server/coordinator/epoch_run.h"

#include <algorithm>
#include <set>

namespace weightwire::coordinator {
namespace {

double Seconds(Nanos span) { return std::chrono::duration<double>(span).count(); }

const char* Awaited(const epoch::State& state, const epoch::Member& member) {
  switch (state.phase) {
    case epoch::Phase::kPreparing:
      return "prepared";
    case epoch::Phase::kTransferring:
      return state.roster.IsSource(member) ? "sourced" : "staged";
    case epoch::Phase::kCommitting:
      return "swapped";
    default:
      return "drained";
  }
}

std::vector<std::string> EngineNames(const epoch::Spec& spec) {
  std::vector<std::string> names;
  for (const auto& engine : spec.engines) names.push_back(engine.name);
  return names;
}

std::vector<PlanId> PlanIds(const std::map<std::string, PlannedPairPtr>& plans) {
  std::set<PlanId> ids;
  for (const auto& [engine, pair] : plans) ids.insert(pair->plan->id);
  return {ids.begin(), ids.end()};
}

}  // namespace

bool EpochRun::CanAbort() const {
  return state.phase == epoch::Phase::kPreparing || state.phase == epoch::Phase::kTransferring ||
         state.phase == epoch::Phase::kStaged;
}

double EpochRun::LeavePhase(epoch::Phase left, Nanos now) {
  const double seconds = Seconds(now - phase_since);
  phase_seconds[left] += seconds;
  phase_since = now;
  return seconds;
}

void EpochRun::SetWaiting(EpochStatus& status, size_t lines_max,
                          const std::function<bool(const epoch::Member&)>& first) const {
  std::vector<epoch::Member> members = epoch::WaitingFor(state);
  if (first) std::ranges::stable_partition(members, first);
  const size_t shown = std::min(members.size(), lines_max);
  for (size_t i = 0; i < shown; ++i) {
    status.waiting_for.push_back(names.at(members[i]) + ": " + Awaited(state, members[i]));
  }
  status.waiting_for_left = members.size() - shown;
  if (!members.empty()) return;
  if (state.phase == epoch::Phase::kStaged) status.waiting_for.emplace_back("operator: commit");
  if (state.phase == epoch::Phase::kCommitting) status.waiting_for.emplace_back("journal: durable");
}

EpochStatus EpochRun::ToStatus(Nanos now, size_t lines_max,
                               const std::function<bool(const epoch::Member&)>& first) const {
  EpochStatus status;
  status.epoch = state.spec.epoch;
  status.kind = state.spec.kind;
  status.version = state.spec.version;
  status.lineage = state.spec.lineage;
  status.phase = state.phase;
  status.attempt = attempt;
  status.why = state.why;
  status.engines = EngineNames(state.spec);
  status.left_out = left_out;
  if (!finished) SetWaiting(status, lines_max, first);
  status.started_wall = started_wall;
  auto spent = [&](epoch::Phase phase) {
    const auto known = phase_seconds.find(phase);
    const double before = known == phase_seconds.end() ? 0 : known->second;
    return state.phase == phase && !finished ? before + Seconds(now - phase_since) : before;
  };
  status.prepare_seconds = spent(epoch::Phase::kPreparing);
  status.transfer_seconds = spent(epoch::Phase::kTransferring);
  status.commit_seconds = spent(epoch::Phase::kCommitting);
  status.total_seconds = Seconds(now - started);
  for (const auto& [member, figures] : staged) {
    status.bytes += figures.bytes;
    status.bytes_kept += figures.bytes_kept;
    status.delta += figures.delta;
    for (const auto& [transport, bytes] : figures.bytes_by_transport) {
      status.bytes_by_transport[transport] += bytes;
    }
  }
  status.flip_seconds_max = flip_seconds_max;
  status.plans = PlanIds(plans);
  status.trace_id = trace_id;
  return status;
}

std::map<ParticipantId, std::string> EpochRun::ParticipantNames() const {
  std::map<ParticipantId, std::string> by_id;
  for (const auto& [member, name] : names) by_id.emplace(member.id, name);
  return by_id;
}

EpochTrace EpochRun::Describe(Nanos now) const {
  Trace told = trace;
  if (!finished) {
    told.Step("phase", std::string(epoch::PhaseName(state.phase)), phase_since, now);
  }
  return told.Describe(ToStatus(now), ParticipantNames());
}

EpochStatus StatusOf(const PendingEpoch& pending, Nanos now) {
  EpochStatus status;
  status.epoch = pending.spec.epoch;
  status.kind = pending.spec.kind;
  status.version = pending.spec.version;
  status.lineage = pending.spec.lineage;
  status.phase = epoch::Phase::kPreparing;
  status.attempt = pending.attempt;
  status.why = pending.failure;
  status.engines = EngineNames(pending.spec);
  status.left_out = pending.left_out;
  status.waiting_for = {"coordinator: plans"};
  status.started_wall = pending.started_wall;
  status.prepare_seconds = status.total_seconds = Seconds(now - pending.started);
  status.plans = PlanIds(pending.plans);
  status.trace_id = pending.trace_id;
  return status;
}

}  // namespace weightwire::coordinator
