#pragma once

#include <map>
#include <optional>
#include <string>

#include "server/base/status.h"
#include "server/control/control.h"
#include "server/tls/identity.h"

namespace weightwire::rpc {

/// Who calls; nullopt without TLS, where nobody proves anything and everything may be named.
using Caller = std::optional<tls::Identity>;

/// What a call may name, beyond its right to the method: the agents and members that the same
/// identity brought here. Refusals are kPermissionDenied and name both. What is not here is not
/// refused: the coordinator says that. Belongs to the coordinator's strand.
class Acl {
 public:
  /// A session may replace one of the same agent incarnation, if that is of the same identity.
  /// `token`: the id of the token that names the caller, where that names one rank: it is bound to
  /// the agent incarnation that opened a session with it for as long as that lives.
  Status CheckOpen(const Caller& caller, Incarnation agent, const std::string& token = {}) const;
  void Opened(const Caller& caller, const std::string& name, Incarnation incarnation, AgentId agent,
              const std::string& token = {});
  /// The agent's session goes on with another token, under the same rule.
  Status Renew(const Caller& caller, AgentId agent, const std::string& token);
  void Ended(AgentId agent);
  void Registered(AgentId agent, const epoch::Member& member);

  Status Check(const Caller& caller, AgentId agent) const;
  Status Check(const Caller& caller, const epoch::Member& member) const;
  /// All agents of this name. kNotFound / kNotRegistered: nobody has proved to have brought one.
  Status CheckAgents(const Caller& caller, const std::string& name) const;

 private:
  struct Agent {
    std::string owner, name;
    Incarnation incarnation{};
    std::string token;  ///< bound to it; empty: none
  };
  std::map<AgentId, Agent> agents_;
  std::map<Incarnation, AgentId> by_incarnation_;
  /// By the participant, which is a rank's place: as many as there are ranks.
  std::map<ParticipantId, std::pair<Incarnation, AgentId>> members_;
};

/// A rank may be registered by its own side, and where the identity names a rank, by that one.
Status CheckPlace(const Caller& caller, const control::RegisterRequest& request);

}  // namespace weightwire::rpc
