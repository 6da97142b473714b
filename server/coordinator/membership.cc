#include "server/coordinator/membership.h"

#include <algorithm>
#include <utility>

#include "server/base/failpoint.h"

namespace weightwire::coordinator {
namespace {

constexpr size_t kNameBytesMax = 128;
constexpr size_t kFencedPerSlot = 64;
constexpr size_t kAddressesMax = 16;
constexpr size_t kLeftMax = 64;
constexpr std::chrono::hours kLeftFor(1);
/// Places that groups declare and nobody has taken yet, as a multiple of members_max.
constexpr size_t kDeclaredFactor = 4;

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

Membership::Membership(const Options& options, JournalId history, std::vector<DrainMark> drained,
                       CommandQueue& commands, Observer& observer, metrics::Sink& metrics)
    : options_(options),
      history_(history),
      commands_(commands),
      observer_(observer),
      metrics_(metrics),
      next_agent_(RandomAgentNumber(options)),
      awaited_(drained.begin(), drained.end()) {
  // Who left while nobody coordinated never comes: there are no more of these than places.
  while (awaited_.size() > 2 * options_.members_max) awaited_.erase(awaited_.begin());
}

std::string_view PresenceName(Presence presence) {
  switch (presence) {
    case Presence::kConnected:
      return "connected";
    case Presence::kSuspect:
      return "suspect";
    case Presence::kAbsent:
      return "absent";
  }
  return "unknown";
}

uint32_t Group::present() const {
  return static_cast<uint32_t>(std::ranges::count_if(slots, &Slot::connected));
}

uint32_t Group::taken() const {
  return static_cast<uint32_t>(
      std::ranges::count_if(slots, [](const Slot& slot) { return slot.live.has_value(); }));
}

std::vector<epoch::Member> Group::Members() const {
  std::vector<epoch::Member> members;
  for (const Slot& slot : slots) {
    if (slot.connected()) members.push_back(slot.live->member);
  }
  return members;
}

std::vector<epoch::Member> Group::Holders() const {
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
    EndSession(id,
               Status(Code::kAborted, Reason::kStaleIncarnation,
                      "a newer session of the same agent replaced this one"),
               now);
  }
  if (sessions_.size() >= options_.members_max) {
    return Fail(Code::kResourceExhausted, Reason::kLimitExceeded,
                std::to_string(sessions_.size()) + " agents are here already");
  }
  const AgentId id(next_agent_++);
  auto cell = std::make_shared<Port>(Port{id, port});
  session_of_[hello.incarnation] = id;
  const bool drained = TakeAwaited({hello.name, hello.incarnation});
  sessions_.emplace(id, Session{id, std::move(hello), std::move(cell), now, drained, {}});
  observer_.OnMembershipChanged();
  return control::AgentWelcome{id, protocol, options_.heartbeat, options_.lease, history_};
}

bool Membership::ForgetPorts(AgentId agent) {
  if (PortPtr leaving = commands_.Leaving(agent)) commands_.Forget(leaving);
  const auto session = sessions_.find(agent);
  if (session == sessions_.end()) return false;
  commands_.Forget(session->second.port);
  return true;
}

void Membership::Disconnected(AgentId agent, Nanos now) {
  if (!ForgetPorts(agent)) return;
  Cut(agent, Status(Code::kAborted, Reason::kMemberLost, "its agent's connection ended"),
      Presence::kSuspect, now);
}

void Membership::EndSession(AgentId agent, const Status& why, Nanos now) {
  const auto session = sessions_.find(agent);
  if (session == sessions_.end()) return;
  commands_.EndSession(session->second.port, why);
  Cut(agent, why, Presence::kSuspect, now);
}

void Membership::AgentLeft(AgentId agent) {
  if (!ForgetPorts(agent)) return;
  LoseAgent(agent, Status(Code::kAborted, Reason::kMemberLost, "the agent closed its session"));
}

void Membership::LoseAgent(AgentId agent, const Status& why) {
  session_of_.erase(sessions_.at(agent).hello.incarnation);
  marks_left_ |= sessions_.at(agent).drained;
  sessions_.erase(agent);
  WW_FAILPOINT("coordinator.after_an_agent_is_lost");
  std::set<std::string> lost;
  const auto node = registered_.extract(agent);
  const std::set<ParticipantId> ids = node.empty() ? std::set<ParticipantId>{} : node.mapped();
  for (const ParticipantId id : ids) {
    const auto [place, rank] = places_.at(id);
    Group& group = *place;
    if (!group.slots[rank].live || group.slots[rank].live->agent != agent) continue;
    Vacate(group, rank, why, /*told=*/false);
    lost.insert(group.name);
  }
  for (const std::string& name : lost) AfterLoss(groups_.at(name), why);
  observer_.OnMembershipChanged();
}

void Membership::Cut(AgentId agent, const Status& why, Presence presence, Nanos now) {
  const Session& session = sessions_.at(agent);
  session_of_.erase(session.hello.incarnation);
  // It is drained still when it is back.
  if (session.drained) awaited_.insert({session.hello.name, session.hello.incarnation});
  if (presence == Presence::kSuspect && registered_.contains(agent))
    suspects_[agent] = session.heard;
  sessions_.erase(agent);
  WW_FAILPOINT("coordinator.after_an_agent_is_cut_off");
  SetPresence(agent, why, presence, now);
  observer_.OnMembershipChanged();
}

void Membership::SetPresence(AgentId agent, const Status& why, Presence presence, Nanos now) {
  const auto ids = registered_.find(agent);
  if (ids == registered_.end()) return;
  for (const ParticipantId id : std::set(ids->second)) {
    const auto [place, rank] = places_.at(id);
    Group& group = *place;
    auto& live = group.slots[rank].live;
    if (!live || live->agent != agent) continue;
    if (std::exchange(live->presence, presence) == Presence::kConnected) {
      live->cut_at = now;
      group.last_error = Status(Status(why).AtRank(group.RankName(rank))).ToString();
      observer_.OnCutOff(group, rank, live->member, why);
    }
    if (presence == Presence::kAbsent) {
      metrics_.Add("lease_expiries_total", 1, {{"role", RoleLabel(group.role)}});
    }
  }
  if (presence == Presence::kAbsent) registered_.erase(agent);
}

bool Membership::EndLeases(Nanos now) {
  std::vector<AgentId> silent, ended;
  const auto take = [&](std::vector<AgentId>& from, AgentId id, Nanos heard) {
    if (now - heard >= options_.lease) from.push_back(id);
    return silent.size() + ended.size() < kLeasesAtOnce;
  };
  const bool all =
      std::ranges::all_of(
          sessions_,
          [&](const auto& entry) { return take(silent, entry.first, entry.second.heard); }) &&
      std::ranges::all_of(
          suspects_, [&](const auto& entry) { return take(ended, entry.first, entry.second); });
  for (const AgentId agent : silent) {
    const Session& session = sessions_.at(agent);
    const auto silence = std::chrono::duration_cast<std::chrono::milliseconds>(now - session.heard);
    const Status why =
        Status(Code::kAborted, Reason::kLeaseExpired,
               "agent '" + session.hello.name + "' sent nothing for " +
                   std::to_string(silence.count()) + " ms")
            .Remedy("it resumes its places when it is back, unless others were given them");
    commands_.EndSession(session.port, why);
    Cut(agent, why, Presence::kAbsent, now);
  }
  for (const AgentId agent : ended) {
    suspects_.erase(agent);
    SetPresence(agent,
                Status(Code::kAborted, Reason::kLeaseExpired, "its agent's connection is not back"),
                Presence::kAbsent, now);
  }
  if (!ended.empty()) observer_.OnMembershipChanged();
  return all;
}

void Membership::RenewLeases(Nanos now) {
  for (auto& [id, session] : sessions_) session.heard = now;
  for (auto& [id, heard] : suspects_) heard = now;
}

std::optional<Nanos> Membership::NextLeaseEnd() const {
  std::optional<Nanos> earliest;
  const auto see = [&](Nanos heard) {
    if (!earliest || heard < *earliest) earliest = heard;
  };
  for (const auto& [id, session] : sessions_) see(session.heard);
  for (const auto& [id, heard] : suspects_) see(heard);
  if (earliest) *earliest += options_.lease;
  return earliest;
}

bool Membership::Heard(AgentId agent, Nanos now, control::Beat beat) {
  const auto session = sessions_.find(agent);
  if (session == sessions_.end()) return false;
  session->second.heard = now;
  const control::Beat before = std::exchange(session->second.beat, std::move(beat));
  if (session->second.beat.troubles != before.troubles) observer_.OnMembershipChanged();
  return session->second.beat.receiving != before.receiving;
}

Status Membership::CheckRegister(const control::RegisterRequest& request) {
  if (!sessions_.contains(request.agent)) {  // in the next one it may succeed
    return Status(Code::kUnavailable, Reason::kNotRegistered, "the agent has no session (any more)")
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
      trainer->name != request.group && Occupied(*trainer)) {
    return Invalid("the job's trainer is group '" + trainer->name + "'");
  }
  const auto found = groups_.find(request.group);
  if (found == groups_.end() || !Occupied(found->second)) return OkStatus();
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
  std::optional<Rank> before;
  if (fits) {
    if (auto answer = MakeWay(known->second, request)) return *std::move(answer);
    before = std::exchange(known->second.slots[request.rank].live, std::nullopt);
  } else {
    MakeRoom();
  }
  if (before) {
    CountTaken(before->agent, -1);
  } else {
    if (!fits && !CheckRoom(request, fits).ok()) ForgetDeadGroups();
    WW_FAIL_IF_ERROR(CheckRoom(request, fits));
  }
  Group& group = GroupFor(request);
  Slot& slot = group.slots[request.rank];
  const Session& session = sessions_.at(request.agent);
  slot.live = Rank{};
  slot.live->member = {slot.id, request.incarnation};
  slot.live->agent = request.agent;
  slot.live->agent_name = session.hello.name;
  slot.live->agent_incarnation = session.hello.incarnation;
  CountTaken(request.agent, 1);
  slot.live->pid = request.pid;
  slot.live->published = request.claim.released;
  slot.live->claim = request.claim;
  registered_[request.agent].insert(slot.id);
  if (before) {  // what was agreed holds again when its layout has been submitted again
    slot.live->resumed = true;
    slot.live->last_release = std::move(before->last_release);
    slot.live->published_number = before->published_number;
    group.agreed.reset();
    if (const auto old = registered_.find(before->agent); old != registered_.end()) {
      old->second.erase(slot.id);
      if (old->second.empty()) {
        registered_.erase(old);
        suspects_.erase(before->agent);
      }
    }
    metrics_.Add("members_resumed_total", 1, {{"role", RoleLabel(group.role)}});
  }
  group.drained |= TakeAwaited({group.name, request.incarnation});
  if (group.present() == group.world_size()) {  // whoever is awaited under this name has no place
    marks_left_ |= std::erase_if(awaited_, [&](const auto& m) { return m.name == group.name; }) > 0;
  }
  group.drained |= session.drained;
  observer_.OnMembershipChanged();
  return control::RegisterReply{{slot.id, request.incarnation}};
}

std::optional<Result<control::RegisterReply>> Membership::MakeWay(
    Group& group, const control::RegisterRequest& request) {
  Slot& slot = group.slots[request.rank];
  if (std::ranges::count(slot.fenced, request.incarnation) > 0) {
    return Fail(Code::kFailedPrecondition, Reason::kStaleIncarnation,
                "this incarnation was fenced; register with a new one");
  }
  if (!slot.live) return std::nullopt;
  const Rank& live = *slot.live;
  if (live.member.incarnation == request.incarnation) {
    if (live.presence != Presence::kConnected) return std::nullopt;  // it resumes
    if (live.agent == request.agent) return control::RegisterReply{live.member};
  } else if (live.presence == Presence::kAbsent || live.member.incarnation == request.previous) {
    const Status why(Code::kAborted, Reason::kMemberLost, "another process was given its place");
    Vacate(group, request.rank, why, /*told=*/true);
    AfterLoss(group, why);
    return std::nullopt;
  }
  const std::string pid = std::to_string(live.pid);
  if (live.presence == Presence::kSuspect) {
    return Fail(
        Status(Code::kAlreadyExists, Reason::kDuplicateRank,
               "process " + pid + " holds this rank; its connection ended, its lease has not")
            .Remedy("try again when its lease has ended, or evict the group"));
  }
  return Fail(Status(Code::kAlreadyExists, Reason::kDuplicateRank,
                     "process " + pid + " holds this rank and is alive")
                  .Remedy("end the other process, or evict the group"));
}

bool Membership::AwaitsLease(const control::RegisterRequest& request) const {
  const auto found = groups_.find(request.group);
  if (found == groups_.end() || request.rank >= found->second.world_size()) return false;
  const auto& live = found->second.slots[request.rank].live;
  return live && live->presence == Presence::kSuspect;
}

Group& Membership::GroupFor(const control::RegisterRequest& request) {
  if (request.role == control::GroupRole::kTrainer) trainer_ = request.group;
  Group& group = groups_[request.group];
  if (group.world_size() == request.world_size && group.role == request.role) return group;
  FreePlaces(group);
  group.name = request.group;
  group.role = request.role;
  SetFounder(group, request.agent);
  group.slots.assign(request.world_size, Slot{});
  for (uint32_t rank = 0; rank < request.world_size; ++rank) {
    group.slots[rank].id = ParticipantId(next_participant_++);
    places_[group.slots[rank].id] = {&group, rank};
  }
  return group;
}

/// Looks at all groups, so that it waits until there are a good many more places.
void Membership::MakeRoom() {
  if (places_.size() * 2 < options_.members_max || places_.size() < places_room_) return;
  ForgetDeadGroups();
  places_room_ = places_.size() + options_.members_max / 16;
}

/// Called only when a new group needs room: ids of groups without a process are given up then.
void Membership::ForgetDeadGroups() {
  for (auto it = groups_.begin(); it != groups_.end();) {
    it = Occupied(it->second) ? std::next(it) : Forget(it);
  }
}

void Membership::Forget(Nanos now) {
  std::multimap<Nanos, std::map<std::string, Group>::iterator> left;
  for (auto it = groups_.begin(); it != groups_.end(); ++it) {
    Group& group = it->second;
    const bool here = Occupied(group) || group.name == trainer_;
    group.left = here ? Nanos(0) : group.left == Nanos(0) ? std::max(now, Nanos(1)) : group.left;
    if (!here) left.emplace(group.left, it);
  }
  while (!left.empty() && (left.size() > kLeftMax || now - left.begin()->first >= kLeftFor)) {
    metrics_.Add("engines_forgotten_total", 1);
    ++forgotten_;
    Forget(left.begin()->second);
    left.erase(left.begin());
  }
}

void Membership::SetFounder(Group& group, AgentId founder) {
  const auto before = founded_.find(group.founder);
  if (before != founded_.end() && before->second.erase(group.name) > 0 && before->second.empty()) {
    founded_.erase(before);
  }
  group.founder = founder;
  if (founder != AgentId{}) founded_[founder].insert(group.name);
}

/// One whose ranks are absent is as new when they come back: they say what they hold.
std::map<std::string, Group>::iterator Membership::Forget(
    std::map<std::string, Group>::iterator group) {
  FreePlaces(group->second);
  SetFounder(group->second, AgentId{});
  return groups_.erase(group);
}

/// Of a group that is not occupied.
void Membership::FreePlaces(Group& group) {
  const Status why(Code::kAborted, Reason::kMemberLost, "its places were given to others");
  for (uint32_t rank = 0; rank < group.world_size(); ++rank) {
    if (group.slots[rank].live) Vacate(group, rank, why, /*told=*/false);
  }
  AfterLoss(group, why);
  for (const Slot& slot : group.slots) places_.erase(slot.id);
}

bool Membership::Occupied(const Group& group) {
  return std::ranges::any_of(group.slots, [](const Slot& slot) {
    return slot.live && slot.live->presence != Presence::kAbsent;
  });
}

/// A place counts when it is taken, and no agent takes more than half of them from the others. What
/// groups declare beyond that is bounded for the memory that it costs.
Status Membership::CheckRoom(const control::RegisterRequest& request, bool fits) const {
  const uint32_t limit = options_.members_max;
  auto full = [limit](const std::string& what) {
    return Status(Code::kResourceExhausted, Reason::kLimitExceeded,
                  what + "; members_max is " + std::to_string(limit))
        .Remedy("end what is not needed, or raise members_max");
  };
  if (taken_ >= limit) return full("the job has " + std::to_string(taken_) + " ranks");
  const auto own = taken_of_.find(request.agent);
  if (sessions_.size() > 1 && own != taken_of_.end() && own->second >= (limit + 1) / 2) {
    return full("the rank's agent has " + std::to_string(own->second) +
                " ranks, and one of several may have half");
  }
  if (fits) return OkStatus();
  size_t declared = request.world_size;
  if (const auto founded = founded_.find(request.agent); founded != founded_.end()) {
    for (const std::string& name : founded->second) {
      const Group& group = groups_.at(name);
      declared += group.world_size() - group.taken();
    }
  }
  if (declared > limit) {
    return full("groups of the rank's agent would miss " + std::to_string(declared) + " ranks");
  }
  const size_t missing = places_.size() - taken_ + request.world_size;
  if (missing > kDeclaredFactor * limit) {
    return full("groups would miss " + std::to_string(missing) + " ranks");
  }
  return OkStatus();
}

void Membership::CountTaken(AgentId agent, int change) {
  taken_ += static_cast<uint32_t>(change);
  const auto own = taken_of_.try_emplace(agent).first;
  own->second += static_cast<uint32_t>(change);
  if (own->second == 0) taken_of_.erase(own);
}

void Membership::Vacate(Group& group, uint32_t rank, const Status& why, bool told) {
  Slot& slot = group.slots[rank];
  const epoch::Member member = slot.live->member;
  CountTaken(slot.live->agent, -1);
  if (told) Send(member, epoch::EvictCommand{member, why});
  if (const auto ids = registered_.find(slot.live->agent); ids != registered_.end()) {
    ids->second.erase(slot.id);
  }
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
    const Status evict(Code::kAborted, Reason::kMemberLost,
                       "another rank of " + group.name + " was lost: " + why.message());
    for (uint32_t rank = 0; rank < group.world_size(); ++rank) {
      if (group.slots[rank].live) Vacate(group, rank, evict, /*told=*/true);
    }
  }
  if (group.taken() > 0) return;
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
  if (group == nullptr || group->taken() == 0) return;
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

bool Membership::HasRankAt(const Group& group, const std::string& agent) {
  return std::ranges::any_of(
      group.slots, [&](const Slot& slot) { return slot.live && slot.live->agent_name == agent; });
}

Result<std::vector<std::string>> Membership::Drain(const std::string& name,
                                                   Coordinator::Draining what,
                                                   Coordinator::DrainOf which) {
  const bool drained = what == Coordinator::Draining::kDrain;
  std::vector<Group*> engines;
  bool known = false;
  Group* named = which == Coordinator::DrainOf::kAgent ? nullptr : FindGroup(name);
  if (named != nullptr && named->taken() > 0) {
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
    const std::vector<epoch::Member> members = group.Holders();
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
  Group& group = *place->second.first;
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
  if (!place || place->live->presence != Presence::kConnected) return nullptr;
  const auto session = sessions_.find(place->live->agent);
  return session == sessions_.end() ? nullptr : &session->second;
}

void Membership::Send(const epoch::Member& member, epoch::Command command) {
  const Session* session = SessionOf(member);
  if (session != nullptr) commands_.Send(session->port, std::move(command));
}

void Membership::Release(const epoch::ReleaseCommand& release) {
  if (auto place = Find(release.member)) place->live->last_release = release;
  Send(release.member, release);
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
