#pragma once

#include <map>
#include <mutex>
#include <set>

#include "server/base/ids.h"
#include "server/base/status.h"
#include "server/transport/session.h"

namespace weightwire::transfer {

/// Which peers may open data-plane sessions. Thread-safe: transports ask on their own threads.
class TicketTable {
 public:
  explicit TicketTable(Incarnation self) : self_(self) {}

  /// Idempotent.
  void Admit(const Ticket& ticket, Incarnation caller);
  /// The caller that the ticket belonged to; 0 when it was not admitted.
  Incarnation Withdraw(const Ticket& ticket);
  /// From now on every hello is refused.
  void ShutDown();

  ///   kUnavailable / kShuttingDown
  ///   kFailedPrecondition / kStaleIncarnation  the caller means an earlier life of this process
  ///   kUnauthenticated / kTicketRejected       not admitted, withdrawn, or another caller's
  Status Check(const transport::Hello& hello) const;
  /// Whether any ticket of the caller is admitted: a session outlives the ticket that opened it.
  bool Knows(Incarnation caller) const;

 private:
  void Forget(std::map<Ticket, Incarnation>::iterator entry);

  const Incarnation self_;
  mutable std::mutex mutex_;
  bool shutting_down_ = false;
  std::map<Ticket, Incarnation> caller_of_;
  std::map<Incarnation, std::set<Ticket>> tickets_of_;
};

}  // namespace weightwire::transfer
