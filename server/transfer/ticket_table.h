#pragma once

#include <map>
#include <mutex>
#include <set>

#include "server/base/ids.h"
#include "server/base/status.h"
#include "server/transport/proof.h"

namespace weightwire::transfer {

/// Which peers may open data-plane sessions. Thread-safe: transports ask on their own threads.
class TicketTable {
 public:
  /// `proof_required`: a caller that shows its ticket instead of proving it is refused.
  TicketTable(Incarnation self, bool proof_required)
      : self_(self), proof_required_(proof_required) {}

  /// Ranks that serve the same peer share a ticket: it holds until each use was withdrawn. Admitted
  /// for another caller it is no longer the former caller's.
  void Admit(const Ticket& ticket, Incarnation caller);
  /// Ends one use. Changes nothing where the ticket is not this caller's.
  void Withdraw(const Ticket& ticket, Incarnation caller);
  /// From now on every hello is refused.
  void ShutDown();

  ///   kUnavailable / kShuttingDown
  ///   kFailedPrecondition / kStaleIncarnation  the caller means an earlier life of this process
  ///   kUnauthenticated / kTicketRejected       not admitted, withdrawn, or another caller's
  ///   kFailedPrecondition / kProtocolVersion   the ticket itself was shown, and that will not do
  /// The ticket that the caller must have.
  Result<Ticket> Check(const transport::CallerHello& said) const;
  /// Whether any ticket of the caller is admitted: a session outlives the ticket that opened it.
  bool Knows(Incarnation caller) const;

 private:
  struct Admitted {
    Ticket ticket;
    Incarnation caller;
    int uses = 1;
  };
  using Entry = std::map<transport::TicketName, Admitted>::iterator;
  void Forget(Entry entry);

  const Incarnation self_;
  const bool proof_required_;
  mutable std::mutex mutex_;
  bool shutting_down_ = false;
  std::map<transport::TicketName, Admitted> admitted_;
  std::map<Incarnation, std::set<transport::TicketName>> tickets_of_;
};

}  // namespace weightwire::transfer
