#include "server/transfer/ticket_table.h"

namespace weightwire::transfer {

void TicketTable::Admit(const Ticket& ticket, Incarnation caller) {
  const transport::TicketName name = transport::NameOf(ticket);
  std::lock_guard lock(mutex_);
  auto entry = admitted_.find(name);
  if (entry != admitted_.end()) {
    if (entry->second.caller == caller) {
      ++entry->second.uses;
      return;
    }
    Forget(entry);
  }
  admitted_.emplace(name, Admitted{ticket, caller});
  tickets_of_[caller].insert(name);
}

void TicketTable::Withdraw(const Ticket& ticket, Incarnation caller) {
  std::lock_guard lock(mutex_);
  auto entry = admitted_.find(transport::NameOf(ticket));
  if (entry == admitted_.end() || entry->second.caller != caller) return;
  if (--entry->second.uses == 0) Forget(entry);
}

void TicketTable::Forget(Entry entry) {
  auto tickets = tickets_of_.find(entry->second.caller);
  tickets->second.erase(entry->first);
  if (tickets->second.empty()) tickets_of_.erase(tickets);
  admitted_.erase(entry);
}

void TicketTable::ShutDown() {
  std::lock_guard lock(mutex_);
  shutting_down_ = true;
}

Result<Ticket> TicketTable::Check(const transport::CallerHello& said) const {
  const transport::TicketName name = transport::NameIn(said);
  std::lock_guard lock(mutex_);
  if (shutting_down_) {
    return Fail(Code::kUnavailable, Reason::kShuttingDown, "this agent is shutting down");
  }
  if (said.callee != self_) {
    return Fail(Code::kFailedPrecondition, Reason::kStaleIncarnation,
                "the session is meant for another incarnation of this agent");
  }
  if (proof_required_ && !said.proves()) {
    return Fail(Code::kFailedPrecondition, Reason::kProtocolVersion,
                "the caller shows its ticket, and with TLS it must prove it");
  }
  auto entry = admitted_.find(name);
  if (entry == admitted_.end() || entry->second.caller != said.caller) {
    return Fail(Code::kUnauthenticated, Reason::kTicketRejected,
                "the session's ticket is not admitted for this caller");
  }
  return entry->second.ticket;
}

bool TicketTable::Knows(Incarnation caller) const {
  std::lock_guard lock(mutex_);
  return tickets_of_.contains(caller);
}

}  // namespace weightwire::transfer
