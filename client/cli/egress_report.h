#pragma once

#include <cstdint>

#include "server/plan/plan.h"

namespace weightwire::cli {

/// What a coordinator sends for one engine that the plan is for, in serialised bytes of messages:
/// slices once for each plan and rank, Prepares with every version. Agents are taken to hold eight
/// ranks each and to have addresses of tcp and ucx. `old`: to agents that understand neither names
/// that share their beginnings nor addresses that are told once.
struct EgressReport {
  uint64_t slices = 0;     ///< of all ranks of both sides
  uint64_t slice_max = 0;  ///< of one rank
  uint64_t names = 0;      ///< of `slices`
  uint64_t old_slices = 0;
  uint64_t first_prepares = 0;  ///< of all sessions, for the first version
  uint64_t next_prepares = 0;   ///< and for each one after that
  uint64_t old_prepares = 0;
};
EgressReport EgressOf(const plan::TransferPlan& plan);

}  // namespace weightwire::cli
