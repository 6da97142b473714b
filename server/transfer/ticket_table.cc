#include "server/transfer/ticket_table.h"

namespace weightwire::transfer {

void TicketTable::Admit(const Ticket& ticket, Incarnation caller) {
  std::lock_guard lock(mutex_);
  auto entry = caller_of_.find(ticket);
  if (entry != caller_of_.end()) Forget(entry);
  caller_of_.emplace(ticket, caller);
  tickets_of_[caller].insert(ticket);
}

Incarnation TicketTable::Withdraw(const Ticket& ticket) {
  std::lock_guard lock(mutex_);
  auto entry = caller_of_.find(ticket);
  if (entry == caller_of_.end()) return {};
  const Incarnation caller = entry->second;
  Forget(entry);
  return caller;
}

void TicketTable::Forget(std::map<Ticket, Incarnation>::iterator entry) {
  auto tickets = tickets_of_.find(entry->second);
  tickets->second.erase(entry->first);
  if (tickets->second.empty()) tickets_of_.erase(tickets);
  caller_of_.erase(entry);
}

void TicketTable::ShutDown() {
  std::lock_guard lock(mutex_);
  shutting_down_ = true;
}

Status TicketTable::Check(const transport::Hello& hello) const {
  std::lock_guard lock(mutex_);
  if (shutting_down_) {
    return Status(Code::kUnavailable, Reason::kShuttingDown, "this agent is shutting down");
  }
  if (hello.callee != self_) {
    return Status(Code::kFailedPrecondition, Reason::kStaleIncarnation,
                  "the session is meant for another incarnation of this agent");
  }
  auto entry = caller_of_.find(hello.ticket);
  if (entry == caller_of_.end() || entry->second != hello.caller) {
    return Status(Code::kUnauthenticated, Reason::kTicketRejected,
                  "the session's ticket is not admitted for this caller");
  }
  return OkStatus();
}

bool TicketTable::Knows(Incarnation caller) const {
  std::lock_guard lock(mutex_);
  return tickets_of_.contains(caller);
}

}  // namespace weightwire::transfer
