#pragma once

#include <array>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "server/coordinator/fanout.h"
#include "server/coordinator/plan_cache.h"
#include "server/epoch/coordinator_machine.h"
#include "server/epoch/messages.h"

namespace weightwire::coordinator {

/// Everything that the members of one epoch are told before it starts.
struct PrepareInput {
  epoch::Spec spec;
  std::map<std::string, PlannedPairPtr> plans;  ///< by engine
  /// Agent, its incarnation, host and data-plane addresses of each member; no ticket.
  std::map<epoch::Member, epoch::PeerAddress> addresses;
  std::array<uint8_t, 16> trace_id{};
  Fanout fanout = Fanout::kAuto;
  Nanos stall_limit{0};          ///< PrepareCommand's, for sources and relays
  int64_t slot_bytes = 8 << 20;  ///< about what a relay must have before it passes anything on
  std::set<std::string> direct;  ///< engines that read from the sources, whatever `fanout` says
};

/// One PrepareCommand for each member.
///
/// A source gets one assignment for each distinct plan, with the number of engines that read it
/// from there, and admits the ticket of each agent that will read from it, and names the ranks that
/// do. A target gets its engine's plan and the addresses of exactly those sources from which it has
/// a stream; where another engine passes the bytes on, that engine's rank stands for all of them.
/// Tickets are minted by `random_ticket`, one for each (source agent, target agent) that share a
/// stream. A rollback has neither plans nor addresses: its targets are told what they hold.
std::vector<epoch::PrepareCommand> MakePrepares(const PrepareInput& input,
                                                const std::function<Ticket()>& random_ticket);

}  // namespace weightwire::coordinator
