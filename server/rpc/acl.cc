#include "server/rpc/acl.h"

#include <utility>

namespace weightwire::rpc {
namespace {

Status Denied(const std::string& message) {
  return Status(Code::kPermissionDenied, Reason::kPermissionDenied, message);
}

bool MayTake(tls::Role role, control::GroupRole place) {
  if (role == tls::Role::kAgent) return true;
  return role == (place == control::GroupRole::kTrainer ? tls::Role::kTrainer : tls::Role::kEngine);
}

}  // namespace

Status Acl::CheckOpen(const Caller& caller, Incarnation agent, const std::string& token) const {
  for (const auto& [id, other] : agents_) {
    if (token.empty() || other.token != token || other.incarnation == agent) continue;
    return Denied("the job token of " + caller->Uri() + " is in use by agent incarnation " +
                  std::to_string(other.incarnation.value))
        .Remedy(
            "make a token of its own for each agent; one that has died is forgotten after its "
            "lease");
  }
  const auto known = by_incarnation_.find(agent);
  return known == by_incarnation_.end() ? OkStatus() : Check(caller, known->second);
}

Status Acl::Renew(const Caller& caller, AgentId agent, const std::string& token) {
  const auto known = agents_.find(agent);
  if (known == agents_.end()) return OkStatus();
  WW_RETURN_IF_ERROR(Check(caller, agent));
  WW_RETURN_IF_ERROR(CheckOpen(caller, known->second.incarnation, token));
  known->second.token = token;
  return OkStatus();
}

void Acl::Opened(const Caller& caller, const std::string& name, Incarnation incarnation,
                 AgentId agent, const std::string& token) {
  if (!caller) return;
  agents_[agent] = {caller->Uri(), name, incarnation, token};
  by_incarnation_[incarnation] = agent;
}

void Acl::Ended(AgentId agent) {
  const auto ended = agents_.find(agent);
  if (ended == agents_.end()) return;
  const auto current = by_incarnation_.find(ended->second.incarnation);
  if (current->second == agent) by_incarnation_.erase(current);
  agents_.erase(ended);
}

void Acl::Registered(AgentId agent, const epoch::Member& member) {
  if (agents_.contains(agent)) members_[member.id] = {member.incarnation, agent};
}

Status Acl::Check(const Caller& caller, AgentId agent) const {
  const auto known = agents_.find(agent);
  if (!caller || known == agents_.end() || known->second.owner == caller->Uri()) return OkStatus();
  return Denied(caller->Uri() + " names agent " + std::to_string(agent.value) + ", which is of " +
                known->second.owner);
}

Status Acl::Check(const Caller& caller, const epoch::Member& member) const {
  const auto known = members_.find(member.id);
  if (known == members_.end() || known->second.first != member.incarnation) return OkStatus();
  return Check(caller, known->second.second);
}

Status Acl::CheckAgents(const Caller& caller, const std::string& name) const {
  bool found = !caller;
  for (const auto& [id, agent] : agents_) {
    if (agent.name != name) continue;
    found = true;
    if (Status own = Check(caller, id); !own.ok()) return own;
  }
  return found ? OkStatus()
               : Status(Code::kNotFound, Reason::kNotRegistered,
                        caller->Uri() + " has brought no agent '" + name + "'");
}

Status CheckPlace(const Caller& caller, const control::RegisterRequest& request) {
  if (!caller) return OkStatus();
  const std::string place = request.group + "/" + std::to_string(request.rank);
  if (!MayTake(caller->role, request.role)) {
    const bool trainer = request.role == control::GroupRole::kTrainer;
    return Denied(caller->Uri() + ": role " + std::string(tls::RoleName(caller->role)) +
                  " cannot register " + (trainer ? "trainer" : "engine") + " ranks")
        .AtRank(place)
        .Remedy("give the agent a certificate or token of that role, or of role agent");
  }
  if (!caller->Covers(request.rank)) {
    return Denied(caller->Uri() + " registers another rank than its own")
        .AtRank(place)
        .Remedy("give each rank's agent a certificate or token of its own, or leave the rank out");
  }
  return OkStatus();
}

}  // namespace weightwire::rpc
