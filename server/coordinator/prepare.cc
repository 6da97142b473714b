#include "server/coordinator/prepare.h"

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
    for (const epoch::EngineMembers& engine : input_.spec.engines) AddEngine(engine, targets);
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
    return command;
  }

  void AddEngine(const epoch::EngineMembers& engine, std::vector<epoch::PrepareCommand>& targets) {
    const plan::TransferPlan& plan = *input_.plans.at(engine.name)->plan;
    ++readers_[plan.id];
    const size_t first = targets.size();
    for (uint32_t rank = 0; rank < engine.ranks.size(); ++rank) {
      targets.push_back(Common(engine.ranks[rank], epoch::Role::kTarget));
      targets.back().legs.push_back({plan.id, rank, 1});
    }
    for (const plan::Stream& stream : plan.streams) {
      epoch::PrepareCommand& target = targets[first + stream.target_rank];
      if (target.sources.contains(stream.source_rank)) continue;
      Connect(target, stream.source_rank);
    }
  }

  void Connect(epoch::PrepareCommand& target, uint32_t source_rank) {
    const epoch::Member& source = input_.spec.sources[source_rank];
    epoch::PeerAddress address = input_.addresses.at(source);
    const epoch::PeerAddress& reader = input_.addresses.at(target.member);
    auto [ticket, fresh] = tickets_.try_emplace({address.agent, reader.agent});
    if (fresh) ticket->second = random_ticket_();
    address.ticket = ticket->second;
    admitted_[source_rank].emplace(ticket->second, reader.incarnation);
    target.sources.emplace(source_rank, std::move(address));
    target.source_participants.emplace(source_rank, source.id);
  }

  epoch::PrepareCommand SourceCommand(uint32_t rank) const {
    epoch::PrepareCommand command = Common(input_.spec.sources[rank], epoch::Role::kSource);
    for (const auto& [plan, readers] : readers_) command.legs.push_back({plan, rank, readers});
    const auto admitted = admitted_.find(rank);
    if (admitted != admitted_.end()) {
      command.admitted.assign(admitted->second.begin(), admitted->second.end());
    }
    return command;
  }

  const PrepareInput& input_;
  const std::function<Ticket()>& random_ticket_;
  std::map<PlanId, uint32_t> readers_;
  std::map<std::pair<AgentId, AgentId>, Ticket> tickets_;
  std::map<uint32_t, std::set<std::pair<Ticket, Incarnation>>> admitted_;
};

}  // namespace

std::vector<epoch::PrepareCommand> MakePrepares(const PrepareInput& input,
                                                const std::function<Ticket()>& random_ticket) {
  return Builder(input, random_ticket).Build();
}

}  // namespace weightwire::coordinator
