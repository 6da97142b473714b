#include "server/coordinator/prepare.h"

#include <algorithm>
#include <set>
#include <utility>

namespace weightwire::coordinator {
namespace {

class Builder {
 public:
  Builder(const PrepareInput& input, const std::function<Ticket()>& random_ticket)
      : input_(input), random_ticket_(random_ticket) {}

  std::vector<epoch::PrepareCommand> Build() && {
    std::vector<epoch::PrepareCommand> targets;
    if (input_.spec.kind == epoch::Kind::kRollback) return Rollback();
    for (const epoch::EngineMembers& engine : input_.spec.engines) AddEngine(engine, targets);
    for (const auto& [plan, engines] : by_plan_) ConnectAll(plan, engines, targets);
    std::vector<epoch::PrepareCommand> all;
    for (uint32_t rank = 0; rank < input_.spec.sources.size(); ++rank) {
      all.push_back(SourceCommand(rank));
    }
    std::move(targets.begin(), targets.end(), std::back_inserter(all));
    return all;
  }

 private:
  epoch::PrepareCommand Common(const epoch::Member& member, epoch::Role role) const {
    epoch::PrepareCommand command;
    command.epoch = input_.spec.epoch;
    command.kind = input_.spec.kind;
    command.version = input_.spec.version;
    command.content = input_.spec.content;
    command.member = member;
    command.role = role;
    command.trace_id = input_.trace_id;
    command.lineage = input_.spec.lineage;
    return command;
  }

  std::vector<epoch::PrepareCommand> Rollback() const {
    std::vector<epoch::PrepareCommand> all;
    for (const epoch::EngineMembers& engine : input_.spec.engines) {
      for (const epoch::Member& member : engine.ranks) {
        all.push_back(Common(member, epoch::Role::kTarget));
        all.back().held = input_.spec.held;
      }
    }
    return all;
  }

  void AddEngine(const epoch::EngineMembers& engine, std::vector<epoch::PrepareCommand>& targets) {
    const plan::TransferPlan& plan = *input_.plans.at(engine.name)->plan;
    by_plan_[plan.id].push_back(&engine);
    first_[&engine] = targets.size();
    for (uint32_t rank = 0; rank < engine.ranks.size(); ++rank) {
      targets.push_back(Common(engine.ranks[rank], epoch::Role::kTarget));
      targets.back().assignments.push_back({plan.id, rank, 1});
    }
  }

  void ConnectAll(const PlanId& id, const std::vector<const epoch::EngineMembers*>& engines,
                  std::vector<epoch::PrepareCommand>& targets) {
    const std::vector<int> parents = ParentsOf(input_, engines);
    readers_[id] = static_cast<uint32_t>(std::ranges::count(parents, -1));
    for (size_t i = 0; i < engines.size(); ++i) {
      const epoch::EngineMembers* parent =
          parents[i] < 0 ? nullptr : engines[static_cast<size_t>(parents[i])];
      for (uint32_t rank = 0; rank < engines[i]->ranks.size(); ++rank) {
        if (parent != nullptr)
          Relay(targets[first_.at(parent) + rank], targets[first_.at(engines[i]) + rank]);
      }
      for (const plan::Stream& stream : input_.plans.at(engines[i]->name)->plan->streams) {
        epoch::PrepareCommand& target = targets[first_.at(engines[i]) + stream.target_rank];
        if (target.sources.contains(stream.source_rank)) continue;
        Connect(target, stream.source_rank,
                parent == nullptr ? input_.spec.sources[stream.source_rank]
                                  : parent->ranks[stream.target_rank]);
      }
    }
  }

  void Relay(epoch::PrepareCommand& parent, epoch::PrepareCommand& child) {
    child.relayed = true;
    ++parent.relay_readers;
    parent.stall_limit = input_.stall_limit;
    const epoch::PeerAddress& reader = input_.addresses.at(child.member);
    parent.admitted.emplace_back(TicketFor(input_.addresses.at(parent.member), reader),
                                 reader.incarnation);
    parent.readers.push_back({child.member.id, child.assignments.front().rank, reader.incarnation});
  }

  Ticket TicketFor(const epoch::PeerAddress& sender, const epoch::PeerAddress& reader) {
    auto [ticket, fresh] = tickets_.try_emplace({sender.agent, reader.agent});
    if (fresh) ticket->second = random_ticket_();
    return ticket->second;
  }

  void Connect(epoch::PrepareCommand& target, uint32_t source_rank, const epoch::Member& sender) {
    epoch::PeerAddress address = input_.addresses.at(sender);
    const epoch::PeerAddress& reader = input_.addresses.at(target.member);
    address.ticket = TicketFor(address, reader);
    if (!target.relayed) {
      admitted_[source_rank].emplace(address.ticket, reader.incarnation);
      ranks_[source_rank].push_back(
          {target.member.id, target.assignments.front().rank, reader.incarnation});
    }
    target.sources.emplace(source_rank, std::move(address));
    target.source_participants.emplace(source_rank, sender.id);
  }

  epoch::PrepareCommand SourceCommand(uint32_t rank) const {
    epoch::PrepareCommand command = Common(input_.spec.sources[rank], epoch::Role::kSource);
    command.stall_limit = input_.stall_limit;
    for (const auto& [plan, readers] : readers_)
      command.assignments.push_back({plan, rank, readers});
    const auto admitted = admitted_.find(rank);
    if (admitted != admitted_.end()) {
      command.admitted.assign(admitted->second.begin(), admitted->second.end());
      command.readers = ranks_.at(rank);
    }
    return command;
  }

  const PrepareInput& input_;
  const std::function<Ticket()>& random_ticket_;
  std::map<PlanId, std::vector<const epoch::EngineMembers*>> by_plan_;
  std::map<const epoch::EngineMembers*, size_t> first_;  ///< of an engine's ranks, in the targets
  std::map<PlanId, uint32_t> readers_;                   ///< from the trainer
  std::map<std::pair<AgentId, AgentId>, Ticket> tickets_;
  std::map<uint32_t, std::set<std::pair<Ticket, Incarnation>>> admitted_;
  std::map<uint32_t, std::vector<epoch::Reader>> ranks_;  ///< that read from a source rank
};

}  // namespace

std::vector<epoch::PrepareCommand> MakePrepares(const PrepareInput& input,
                                                const std::function<Ticket()>& random_ticket) {
  return Builder(input, random_ticket).Build();
}

}  // namespace weightwire::coordinator
