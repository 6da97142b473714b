#include "server/coordinator/membership.h"

#include <algorithm>
#include <utility>

#include "server/base/failpoint.h"

namespace weightwire::coordinator {
namespace {

constexpr size_t kNameBytesMax = 128;
constexpr size_t kFencedPerSlot = 64;
constexpr size_t kAddressesMax = 16;

Status Invalid(std::string message) {
  return Status(Code::kInvalidArgument, Reason::kInvalidRequest, std::move(message));
}

const char* RoleLabel(control::GroupRole role) {
  return role == control::GroupRole::kTrainer ? "trainer" : "engine";
}

Status CheckHello(const control::AgentHello& hello, const std::string& job) {
  if (hello.job != job) return Invalid("this is job '" + job + "', not '" + hello.job + "'");
  if (hello.incarnation == Incarnation{}) return Invalid("the agent's incarnation is 0");
  if (hello.name.size() > kNameBytesMax || hello.host.size() > kNameBytesMax ||
      hello.addresses.size() > kAddressesMax) {
    return Invalid("the agent's name, host or address list is too long");
  }
  if (hello.protocol_max < control::kProtocolMin || hello.protocol_min > control::kProtocolMax ||
      hello.protocol_min > hello.protocol_max) {
    return Status(Code::kFailedPrecondition, Reason::kProtocolVersion,
                  "no common protocol: the agent speaks " + std::to_string(hello.protocol_min) +
                      " to " + std::to_string(hello.protocol_max) + ", the coordinator " +
                      std::to_string(control::kProtocolMin) + " to " +
                      std::to_string(control::kProtocolMax))
        .Remedy("run versions that are at most one minor apart");
  }
  return OkStatus();
}

uint32_t RandomAgentNumber(const Options& options) {
  const Ticket random = options.random_ticket();
  uint32_t number = 0;
  for (size_t i = 0; i < 4; ++i) number = number << 8 | random[i];
  return number / 2 + 1;
}

}  // namespace

Membership::Membership(const Options& options, History history, std::vector<DrainMark> drained,
                       Outbox& outbox, Observer& observer, metrics::Sink& metrics)
    : options_(options),
      history_(history),
      outbox_(outbox),
      observer_(observer),
      metrics_(metrics),
      next_agent_(RandomAgentNumber(options)),
      awaited_(drained.begin(), drained.end()) {
  // Who left while nobody coordinated never comes: there are no more of these than places.
  while (awaited_.size() > 2 * options_.members_max) awaited_.erase(awaited_.begin());
}

uint32_t Group::present() const {
  return static_cast<uint32_t>(
      std::count_if(slots.begin(), slots.end(), [](const Slot& s) { return s.live.has_value(); }));
}

std::vector<epoch::Member> Group::Members() const {
  std::vector<epoch::Member> members;
  for (const Slot& slot : slots) {
    if (slot.live) members.push_back(slot.live->member);
  }
  return members;
}

epoch::Contents Group::Held() const {
  if (!Complete()) return {};
  epoch::Contents common = slots.front().live->held;
  std::erase_if(common, [this](const epoch::Content& content) {
    return std::any_of(slots.begin(), slots.end(), [&](const Slot& slot) {
      const epoch::Contents& held = slot.live->held;
      return std::find(held.begin(), held.end(), content) == held.end();
    });
  });
  return common;
}

Result<control::AgentWelcome> Membership::Open(control::AgentHello hello, control::AgentPort* port,
                                               Nanos now) {
  WW_FAIL_IF_ERROR(CheckHello(hello, options_.job));
  const uint16_t protocol = std::min(hello.protocol_max, control::kProtocolMax);
  if (const auto known = session_of_.find(hello.incarnation); known != session_of_.end()) {
    const AgentId id = known->second;
    const Session& session = sessions_.at(id);
    if (session.port->target == port && session.hello == hello) {
      return control::AgentWelcome{id, protocol, options_.heartbeat, options_.lease, history_};
    }
    EndSession(id, Status(Code::kAborted, Reason::kStaleIncarnation,
                          "a newer session of the same agent replaced this one"));
  }
  if (sessions_.size() >= options_.members_max) {
    return Fail(Code::kResourceExhausted, Reason::kLimitExceeded,
                std::to_string(sessions_.size()) + " agents are here already");
  }
  const AgentId id(next_agent_++);
  auto cell = std::make_shared<Port>(Port{id, port});
  session_of_[hello.incarnation] = id;
  const bool drained = TakeAwaited({hello.name, hello.incarnation});
  sessions_.emplace(id, Session{id, std::move(hello), std::move(cell), now, drained});
  observer_.OnMembershipChanged();
  return control::AgentWelcome{id, protocol, options_.heartbeat, options_.lease, history_};
}

void Membership::EndSession(AgentId agent, const Status& why) {
  const auto session = sessions_.find(agent);
  if (session == sessions_.end()) return;
  outbox_.EndSession(session->second.port, why);
  LoseAgent(agent, why);
}

void Membership::AgentLeft(AgentId agent) {
  if (PortPtr leaving = outbox_.Leaving(agent)) outbox_.Forget(leaving);
  const auto session = sessions_.find(agent);
  if (session == sessions_.end()) return;
  outbox_.Forget(session->second.port);
  LoseAgent(agent, Status(Code::kAborted, Reason::kMemberLost, "the agent closed its session"));
}

void Membership::LoseAgent(AgentId agent, const Status& why) {
  session_of_.erase(sessions_.at(agent).hello.incarnation);
  marks_left_ |= sessions_.at(agent).drained;
  sessions_.erase(agent);
  WW_FAILPOINT("coordinator.after_an_agent_is_lost");
  for (auto& [name, group] : groups_) {
    bool lost = false;
    for (uint32_t rank = 0; rank < group.world_size(); ++rank) {
      if (!group.slots[rank].live || group.slots[rank].live->agent != agent) continue;
      if (why.reason() == Reason::kLeaseExpired) {
        metrics_.Add("lease_expiries_total", 1, {{"role", RoleLabel(group.role)}});
      }
      Vacate(group, rank, why, /*told=*/false);
      lost = true;
    }
    if (lost) AfterLoss(group, why);
  }
  observer_.OnMembershipChanged();
}

void Membership::Heard(AgentId agent, Nanos now) {
  const auto session = sessions_.find(agent);
  if (session != sessions_.end()) session->second.heard = now;
}

Status Membership::CheckRegister(const control::RegisterRequest& request) {
  if (!sessions_.contains(request.agent)) {
    return Status(Code::kFailedPrecondition, Reason::kNotRegistered,
                  "the agent has no session (any more)")
        .Remedy("open a session and register again");
  }
  if (request.job != options_.job) return Invalid("this is job '" + options_.job + "'");
  if (request.role != control::GroupRole::kTrainer && request.role != control::GroupRole::kEngine) {
    return Invalid("the role is neither trainer nor engine");
  }
  if (request.group.empty() || request.group.size() > kNameBytesMax) {
    return Invalid("a group's name has 1 to " + std::to_string(kNameBytesMax) + " bytes");
  }
  if (request.incarnation == Incarnation{}) return Invalid("the incarnation is 0");
  if (request.world_size > options_.members_max) {
    return Status(Code::kResourceExhausted, Reason::kLimitExceeded,
                  "world_size " + std::to_string(request.world_size) + " is over the limit of " +
                      std::to_string(options_.members_max));
  }
  if (request.rank >= request.world_size) {
    return Invalid("rank " + std::to_string(request.rank) + " is outside of world_size " +
                   std::to_string(request.world_size));
  }
  return CheckGroup(request);
}

Status Membership::CheckGroup(const control::RegisterRequest& request) {
  const Group* trainer = Trainer();
  if (request.role == control::GroupRole::kTrainer && trainer != nullptr &&
      trainer->name != request.group && trainer->present() > 0) {
    return Invalid("the job's trainer is group '" + trainer->name + "'");
  }
  const auto found = groups_.find(request.group);
  if (found == groups_.end() || found->second.present() == 0) return OkStatus();
  const Group& group = found->second;
  if (group.role != request.role) {
    return Invalid("group '" + group.name + "' is registered as " + RoleLabel(group.role));
  }
  if (group.world_size() != request.world_size) {
    return Invalid("group '" + group.name + "' has world_size " +
                   std::to_string(group.world_size()) + ", this rank says " +
                   std::to_string(request.world_size));
  }
  return OkStatus();
}

Result<control::RegisterReply> Membership::Register(const control::RegisterRequest& request) {
  const std::string name = request.group + "/" + std::to_string(request.rank);
  auto reply = [&]() -> Result<control::RegisterReply> {
    WW_FAIL_IF_ERROR(CheckRegister(request));
    return TakePlace(request);
  }();
  const std::string result = reply ? "ok" : std::string(ReasonName(reply.error().reason()));
  metrics_.Add("registrations_total", 1, {{"role", RoleLabel(request.role)}, {"result", result}});
  if (!reply) return Fail(Status(std::move(reply.error()).AtRank(name)));
  return reply;
}

Result<control::RegisterReply> Membership::TakePlace(const control::RegisterRequest& request) {
  const auto known = groups_.find(request.group);
  const bool fits = known != groups_.end() && known->second.world_size() == request.world_size &&
                    known->second.role == request.role;
  if (fits) {
    const Slot& slot = known->second.slots[request.rank];
    if (slot.live && slot.live->member.incarnation == request.incarnation &&
        slot.live->agent == request.agent) {
      return control::RegisterReply{slot.live->member};
    }
    if (slot.live) {
      return Fail(
          Status(Code::kAlreadyExists, Reason::kDuplicateRank,
                 "process " + std::to_string(slot.live->pid) + " holds this rank and is alive")
              .Remedy("end the other process, or evict the group"));
    }
    if (std::count(slot.fenced.begin(), slot.fenced.end(), request.incarnation) > 0) {
      return Fail(Code::kFailedPrecondition, Reason::kStaleIncarnation,
                  "this incarnation was fenced; register with a new one");
    }
  } else {
    ForgetDeadGroups();
    if (SlotCount() + request.world_size > options_.members_max) {
      return Fail(Code::kResourceExhausted, Reason::kLimitExceeded,
                  "the job has " + std::to_string(SlotCount()) + " ranks; the limit is " +
                      std::to_string(options_.members_max));
    }
  }
  Group& group = GroupFor(request);
  Slot& slot = group.slots[request.rank];
  slot.live = Rank{};
  slot.live->member = {slot.id, request.incarnation};
  slot.live->agent = request.agent;
  slot.live->pid = request.pid;
  slot.live->published = request.claim.released;
  slot.live->claim = request.claim;
  group.drained |= TakeAwaited({group.name, request.incarnation});
  if (group.present() == group.world_size()) {  // whoever is awaited under this name has no place
    marks_left_ |= std::erase_if(awaited_, [&](const auto& m) { return m.name == group.name; }) > 0;
  }
  group.drained |= sessions_.at(request.agent).drained;
  observer_.OnMembershipChanged();
  return control::RegisterReply{{slot.id, request.incarnation}};
}

Group& Membership::GroupFor(const control::RegisterRequest& request) {
  if (request.role == control::GroupRole::kTrainer) trainer_ = request.group;
  Group& group = groups_[request.group];
  if (group.world_size() == request.world_size && group.role == request.role) return group;
  for (const Slot& slot : group.slots) places_.erase(slot.id);
  group.name = request.group;
  group.role = request.role;
  group.slots.assign(request.world_size, Slot{});
  for (uint32_t rank = 0; rank < request.world_size; ++rank) {
    group.slots[rank].id = ParticipantId(next_participant_++);
    places_[group.slots[rank].id] = {group.name, rank};
  }
  return group;
}

/// Called only when a new group needs room: ids of groups without a process are given up then.
void Membership::ForgetDeadGroups() {
  if (SlotCount() * 2 < options_.members_max) return;
  for (auto it = groups_.begin(); it != groups_.end();) {
    if (it->second.present() > 0) {
      ++it;
      continue;
    }
    for (const Slot& slot : it->second.slots) places_.erase(slot.id);
    it = groups_.erase(it);
  }
}

size_t Membership::SlotCount() const { return places_.size(); }

void Membership::Vacate(Group& group, uint32_t rank, const Status& why, bool told) {
  Slot& slot = group.slots[rank];
  const epoch::Member member = slot.live->member;
  if (told) Send(member, epoch::EvictCommand{member, why});
  slot.live.reset();
  slot.fenced.push_back(member.incarnation);
  if (slot.fenced.size() > kFencedPerSlot) slot.fenced.pop_front();
  group.agreed.reset();
  group.last_error = why.ToString();
  observer_.OnLost(group, rank, member, why);
}

void Membership::AfterLoss(Group& group, const Status& why) {
  if (group.role == control::GroupRole::kEngine) {
    group.dirty = true;
    group.serving = {};
    group.version = {};
    group.unfinished = {};
    const Status evict(Code::kAborted, Reason::kMemberLost,
                       "another rank of " + group.name + " was lost: " + why.message());
    for (uint32_t rank = 0; rank < group.world_size(); ++rank) {
      if (group.slots[rank].live) Vacate(group, rank, evict, /*told=*/true);
    }
  }
  if (group.present() > 0) return;
  marks_left_ |= std::exchange(group.drained, false);
  ++group.generation;
  group.was_complete = false;
  group.canonical.reset();
}

void Membership::Hold(const epoch::Member& member, epoch::Contents held) {
  const auto place = Find(member);
  if (place) place->live->held = std::move(held);
}

void Membership::Lose(const epoch::Member& member, const Status& why) {
  const auto place = Find(member);
  if (!place) return;
  Vacate(*place->group, place->rank, why, /*told=*/false);
  AfterLoss(*place->group, why);
  observer_.OnMembershipChanged();
}

void Membership::EvictGroup(const std::string& name, const Status& why) {
  Group* group = FindGroup(name);
  if (group == nullptr || group->present() == 0) return;
  for (uint32_t rank = 0; rank < group->world_size(); ++rank) {
    if (group->slots[rank].live) Vacate(*group, rank, why, /*told=*/true);
  }
  AfterLoss(*group, why);
  observer_.OnMembershipChanged();
}

void Membership::Evict(const epoch::Member& member, const Status& why) {
  const auto place = Find(member);
  if (!place) return;
  if (place->group->role == control::GroupRole::kEngine) {
    return EvictGroup(std::string(place->group->name), why);
  }
  Vacate(*place->group, place->rank, why, /*told=*/true);
  AfterLoss(*place->group, why);
  observer_.OnMembershipChanged();
}

bool Membership::HasRankAt(const Group& group, const std::string& agent) const {
  return std::any_of(group.slots.begin(), group.slots.end(), [&](const Slot& slot) {
    return slot.live && sessions_.at(slot.live->agent).hello.name == agent;
  });
}

Result<std::vector<std::string>> Membership::Drain(const std::string& name,
                                                   Coordinator::Draining what,
                                                   Coordinator::DrainOf which) {
  const bool drained = what == Coordinator::Draining::kDrain;
  std::vector<Group*> engines;
  bool known = false;
  Group* named = which == Coordinator::DrainOf::kAgent ? nullptr : FindGroup(name);
  if (named != nullptr && named->present() > 0) {
    known = named->role == control::GroupRole::kEngine;
    if (known) engines.push_back(named);
  } else {
    for (auto& [group_name, group] : groups_) {
      if (!HasRankAt(group, name)) continue;
      if (group.role == control::GroupRole::kTrainer) {
        return Fail(Status(Code::kFailedPrecondition, Reason::kNotReady,
                           "a rank of the trainer, " + group_name + ", is at agent " + name +
                               ", and no version moves without it")
                        .Remedy("drain the agent's engines by their names"));
      }
      engines.push_back(&group);
    }
    for (auto& [id, session] : sessions_) {
      if (session.hello.name != name) continue;
      known = true;
      session.drained = drained;
    }
  }
  if (!known) {
    return Fail(Status(Code::kNotFound, Reason::kNotRegistered,
                       "neither an engine nor an agent '" + name + "' is here")
                    .Remedy("`wwctl participants` lists engines and agents"));
  }
  std::vector<std::string> names;
  for (Group* engine : engines) {
    engine->drained = drained;
    names.push_back(engine->name);
  }
  observer_.OnMembershipChanged();
  return names;
}

/// One rank stands for an engine, for when one leaves all do.
std::vector<DrainMark> Membership::Marks() const {
  std::set<DrainMark> marks = awaited_;
  for (const auto& [id, session] : sessions_) {
    if (session.drained) marks.insert({session.hello.name, session.hello.incarnation});
  }
  for (const auto& [name, group] : groups_) {
    const std::vector<epoch::Member> members = group.Members();
    if (group.drained) marks.insert({name, members.front().incarnation});
  }
  return {marks.begin(), marks.end()};
}

Result<Membership::Place> Membership::Find(const epoch::Member& member) {
  const auto place = places_.find(member.id);
  if (place == places_.end()) {
    return Fail(Code::kFailedPrecondition, Reason::kNotRegistered,
                "participant " + std::to_string(member.id.value) + " is not known");
  }
  Group& group = groups_.at(place->second.first);
  const uint32_t rank = place->second.second;
  Slot& slot = group.slots[rank];
  if (!slot.live || slot.live->member != member) {
    return Fail(Status(Code::kFailedPrecondition, Reason::kStaleIncarnation,
                       "this incarnation is not registered any more")
                    .AtRank(group.RankName(rank))
                    .Remedy("register again with a new incarnation"));
  }
  return Place{&group, rank, &*slot.live};
}

const Session* Membership::SessionOf(const epoch::Member& member) {
  const auto place = Find(member);
  if (!place) return nullptr;
  const auto session = sessions_.find(place->live->agent);
  return session == sessions_.end() ? nullptr : &session->second;
}

void Membership::Send(const epoch::Member& member, epoch::Command command) {
  const Session* session = SessionOf(member);
  if (session != nullptr) outbox_.Send(session->port, std::move(command));
}

Group* Membership::FindGroup(const std::string& name) {
  const auto group = groups_.find(name);
  return group == groups_.end() ? nullptr : &group->second;
}

Group* Membership::Trainer() {
  Group* group = FindGroup(trainer_);
  return group != nullptr && group->role == control::GroupRole::kTrainer ? group : nullptr;
}

}  // namespace weightwire::coordinator
