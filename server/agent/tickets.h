#pragma once

#include <map>
#include <utility>

#include "server/base/ids.h"
#include "server/transfer/transfer.h"

namespace weightwire::agent {

/// Tickets admitted in the transfer engine. Local ranks that serve the same peer share one, so it
/// is withdrawn only when the last of them lets go. Belongs to the agent's strand.
class Tickets {
 public:
  explicit Tickets(transfer::Engine& transfers) : transfers_(transfers) {}

  void Admit(const Ticket& ticket, Incarnation caller) {
    if (++users_[{ticket, caller}] == 1) transfers_.AdmitTicket(ticket, caller);
  }
  void Withdraw(const Ticket& ticket, Incarnation caller) {
    auto user = users_.find({ticket, caller});
    if (user == users_.end() || --user->second > 0) return;
    users_.erase(user);
    transfers_.WithdrawTicket(ticket);
  }

 private:
  transfer::Engine& transfers_;
  std::map<std::pair<Ticket, Incarnation>, int> users_;
};

}  // namespace weightwire::agent
