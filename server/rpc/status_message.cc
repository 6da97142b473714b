#include "server/rpc/status_message.h"

#include <optional>
#include <string_view>
#include <unordered_map>

#include "server/rpc/trace.h"
#include "server/wire/checks.h"
#include "server/wire/control.h"
#include "server/wire/limits.h"
#include "server/wire/slice.h"
#include "server/wire/status.h"

namespace weightwire::rpc {
namespace {

std::string Text(const std::string& text) { return wire::CleanText(text, wire::kTextBytesMax); }

void SetParticipant(const coordinator::ParticipantStatus& from,
                    v1::StatusResponse::Participant* to) {
  *to->mutable_member() = wire::ToProto(from.member);
  to->set_role(wire::ToProto(from.role));
  to->set_group(from.group);
  to->set_rank(from.rank);
  to->set_world_size(from.world_size);
  to->set_agent(from.agent.value);
  to->set_agent_name(Text(from.agent_name));
  to->set_pid(from.pid);
  to->set_spec(Text(from.spec));
  to->set_has_layout(from.has_layout);
  to->set_tensors(from.tensors);
  to->set_bytes(from.bytes);
  to->set_presence(from.presence);
  to->set_cut_seconds(from.cut_seconds);
  to->set_silent_seconds(from.silent_seconds);
}

void SetEngine(const coordinator::EngineStatus& from, v1::StatusResponse::Engine* to) {
  to->set_name(from.name);
  to->set_state(static_cast<v1::EngineState>(from.state));
  to->set_serving_epoch(from.serving.value);
  to->set_version(from.version.value);
  to->set_lineage(from.lineage);
  to->set_ranks_present(from.ranks_present);
  to->set_world_size(from.world_size);
  to->set_lag_versions(from.lag.value);
  to->set_last_error(Text(from.last_error));
  to->set_ready(from.ready);
  if (!from.held.empty()) {
    to->set_held_epoch(from.held.front().epoch.value);
    to->set_held_version(from.held.front().version.value);
  }
  wire::SetContents(from.held, 1, to->mutable_held_beyond());
  to->set_drained(from.drained);
  for (const std::string& busy : from.busy_with) to->add_busy_with(Text(busy));
}

/// Names in epochs as numbers, each once in the whole message.
class EngineNumbers {
 public:
  explicit EngineNumbers(v1::StatusResponse& message) : message_(message) {
    for (const auto& engine : message.engines()) Number(engine.name());
  }

  /// What `epoch`, the last one of the message, is of.
  void Set(const coordinator::EpochStatus& from, v1::StatusResponse::Epoch* epoch) {
    const auto [same, fresh] = seen_.emplace(from.engines.id(), message_.epochs_size() - 1);
    if (fresh) {
      AddRuns(from.engines, epoch->mutable_engine_runs());
    } else {
      *epoch->mutable_engine_runs() = message_.epochs(same->second).engine_runs();
    }
    AddRuns(from.left_out, epoch->mutable_left_out_runs());
  }

 private:
  uint32_t Number(const std::string& name) {
    const auto next = static_cast<uint32_t>(numbers_.size());
    return numbers_.emplace(name, next).first->second;
  }

  template <typename List>
  void AddRuns(const List& names, google::protobuf::RepeatedField<uint32_t>* runs) {
    for (const std::string& name : names) {
      const auto known = numbers_.find(name);
      const uint32_t number = known != numbers_.end() ? known->second : Append(name);
      const int last = runs->size() - 2;
      if (last >= 0 && runs->Get(last) + runs->Get(last + 1) == number) {
        runs->Set(last + 1, runs->Get(last + 1) + 1);
      } else {
        runs->Add(number);
        runs->Add(1);
      }
    }
  }

  uint32_t Append(const std::string& name) {
    message_.add_engine_names(name);
    return Number(message_.engine_names(message_.engine_names_size() - 1));
  }

  v1::StatusResponse& message_;
  std::unordered_map<std::string_view, uint32_t> numbers_;  ///< keys are the message's own
  std::unordered_map<const void*, int> seen_;               ///< lists, and the epoch that has one
};

void SetNames(const coordinator::EpochStatus& from, v1::StatusResponse::Epoch* to) {
  for (const std::string& engine : from.engines) to->add_engines(engine);
  for (const std::string& engine : from.left_out) to->add_left_out(engine);
}

/// But for the engines that it is of.
void SetEpoch(const coordinator::EpochStatus& from, v1::StatusResponse::Epoch* to) {
  to->set_epoch(from.epoch.value);
  to->set_kind(static_cast<v1::EpochKind>(from.kind));
  to->set_version(from.version.value);
  to->set_lineage(from.lineage);
  to->set_phase(static_cast<v1::EpochPhase>(from.phase));
  to->set_attempt(from.attempt);
  *to->mutable_why() = wire::OutcomeOf(from.why);
  for (const std::string& waiting : from.waiting_for) to->add_waiting_for(Text(waiting));
  to->set_waiting_for_left(static_cast<uint32_t>(from.waiting_for_left));
  to->set_started_unix_seconds(from.started_wall);
  to->set_prepare_seconds(from.prepare_seconds);
  to->set_transfer_seconds(from.transfer_seconds);
  to->set_commit_seconds(from.commit_seconds);
  to->set_total_seconds(from.total_seconds);
  to->set_bytes(from.bytes);
  to->set_bytes_done(from.bytes_done);
  to->set_bytes_total(from.bytes_total);
  to->mutable_bytes_by_transport()->insert(from.bytes_by_transport.begin(),
                                           from.bytes_by_transport.end());
  to->set_bytes_kept(from.bytes_kept);
  to->set_delta_bytes(from.delta.bytes);
  to->set_delta_code_bytes(from.delta.code_bytes);
  to->set_delta_elements(from.delta.elements);
  to->set_delta_changed(from.delta.changed);
  to->set_flip_seconds_max(from.flip_seconds_max);
  for (const PlanId& plan : from.plans) *to->add_plans() = wire::ToProto(plan);
  to->set_content_root(from.content_root);
  to->set_trace_id(TraceHex(from.trace_id));
}

}  // namespace

coordinator::StatusQuery QueryOf(const v1::StatusRequest& request) {
  coordinator::StatusQuery query;
  if (request.epochs_max() > 0) query.epochs_max = request.epochs_max();
  query.epochs_before = Epoch(request.epochs_before());
  query.names_bounded = !request.engine_runs();
  if (request.engine_runs()) query.lines_max = kWaitingLinesMax;
  if (request.no_participants()) query.participants_max = 0;
  return query;
}

v1::StatusResponse StatusMessageOf(const coordinator::StatusSnapshot& snapshot, EngineForm form) {
  v1::StatusResponse out;
  out.set_job(snapshot.job);
  out.set_committed_epoch(snapshot.committed.value);
  out.set_committed_version(snapshot.committed_version.value);
  out.set_committed_lineage(snapshot.committed_lineage);
  out.set_lineage(snapshot.lineage);
  out.set_committed_unix_seconds(snapshot.committed_wall);
  out.set_deciding(snapshot.deciding);
  out.set_journal(Text(snapshot.journal));
  out.set_waiting_for(Text(snapshot.waiting_for));
  out.set_waiting_seconds(snapshot.waiting_seconds);
  for (const auto& participant : snapshot.participants) {
    SetParticipant(participant, out.add_participants());
  }
  for (const auto& engine : snapshot.engines) SetEngine(engine, out.add_engines());
  out.set_agents(snapshot.agents);
  out.set_engines_forgotten(snapshot.engines_forgotten);
  for (const auto& from : snapshot.troubles) {
    v1::StatusResponse::Trouble* to = out.add_troubles();
    to->set_where(Text(from.where));
    to->set_agent_name(Text(from.agent_name));
    to->set_what(Text(from.what));
    to->set_remedy(Text(from.remedy));
  }
  out.set_participants_total(static_cast<uint32_t>(snapshot.participants_total));
  out.set_trainers_total(static_cast<uint32_t>(snapshot.trainers_total));
  size_t bytes = out.ByteSizeLong();
  std::optional<EngineNumbers> numbers;
  if (form == EngineForm::kRuns) numbers.emplace(out);
  for (const auto& epoch : snapshot.epochs) {
    const int named = out.engine_names_size();
    v1::StatusResponse::Epoch* added = out.add_epochs();
    SetEpoch(epoch, added);
    if (numbers) {
      numbers->Set(epoch, added);
    } else {
      SetNames(epoch, added);
    }
    bytes += added->ByteSizeLong();
    for (int i = named; i < out.engine_names_size(); ++i) bytes += out.engine_names(i).size() + 3;
    if (bytes <= wire::kStatusBytesMax || out.epochs_size() == 1) continue;
    out.mutable_epochs()->RemoveLast();
    break;
  }
  out.set_epochs_left(static_cast<uint32_t>(snapshot.epochs_left + snapshot.epochs.size()) -
                      static_cast<uint32_t>(out.epochs_size()));
  return out;
}

v1::DescribeEpochResponse StoryMessageOf(const coordinator::EpochTrace& trace) {
  v1::DescribeEpochResponse out;
  SetEpoch(trace.status, out.mutable_epoch());
  SetNames(trace.status, out.mutable_epoch());
  for (const auto& from : trace.steps) {
    v1::DescribeEpochResponse::Step* to = out.add_steps();
    to->set_name(from.name);
    to->set_about(from.about);
    to->set_begin(from.begin);
    to->set_seconds(from.seconds);
  }
  for (const auto& from : trace.events) {
    v1::DescribeEpochResponse::Event* to = out.add_events();
    to->set_at(from.at);
    to->set_who(from.who);
    to->set_what(from.what);
    *to->mutable_why() = wire::OutcomeOf(from.why);
  }
  for (const auto& from : trace.tracks) {
    v1::DescribeEpochResponse::Track* to = out.add_tracks();
    to->set_rank(from.rank);
    to->set_agent(Text(from.agent));
    to->set_error_seconds(from.error_seconds);
    for (const auto& stretch : from.stretches) {
      auto* part = to->add_stretches();
      part->set_name(stretch.name);
      part->set_about(stretch.about);
      part->set_begin(stretch.begin);
      part->set_seconds(stretch.seconds);
      part->set_bytes(stretch.bytes);
    }
  }
  out.set_left_off(trace.left_off);
  return out;
}

v1::VerifyResponse VerifyMessageOf(const coordinator::IntegrityReport& result) {
  v1::VerifyResponse out;
  out.set_equal(result.equal);
  out.set_differences_total(result.differences_total);
  out.set_seconds(result.seconds);
  for (const coordinator::EngineContent& from : result.engines) {
    v1::VerifyResponse::Engine* to = out.add_engines();
    to->set_name(from.name);
    to->set_epoch(from.epoch.value);
    to->set_version(from.version.value);
    *to->mutable_why() = wire::OutcomeOf(from.why);
    to->set_superseded(from.superseded);
    if (!from.why.ok()) continue;
    to->set_content_class(from.content_class.ToHex());
    to->set_root(from.root.ToHex());
    to->set_tensors(from.tensors);
    to->set_tensors_partial(from.tensors_partial);
    to->set_bytes(from.bytes);
    to->set_seconds(from.seconds);
  }
  for (const coordinator::ContentDifference& from : result.differences) {
    v1::VerifyResponse::Difference* to = out.add_differences();
    to->set_engine(from.engine);
    to->mutable_ranks()->Assign(from.ranks.begin(), from.ranks.end());
    to->set_tensor(from.tensor);
    to->set_text(Text(from.text));
  }
  return out;
}

v1::RollbackResponse RollbackMessageOf(const coordinator::RolledBack& result) {
  v1::RollbackResponse out;
  out.set_epoch(result.epoch.value);
  out.set_held_epoch(result.held.value);
  out.set_version(result.version.value);
  out.set_lineage(result.lineage);
  for (const std::string& engine : result.engines) out.add_engines(engine);
  for (const std::string& engine : result.filling) out.add_filling(engine);
  return out;
}

}  // namespace weightwire::rpc
