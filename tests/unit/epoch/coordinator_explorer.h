#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>

#include "server/epoch/coordinator_machine.h"

namespace weightwire::epoch::testing {

using StepFn = std::function<Outcome(State, const Event&)>;

struct Exploration {
  std::string violation;  ///< empty: none. Names rule, seed and step
  uint64_t seed = 0;      ///< of the violation
  uint64_t steps = 0;
  /// How often each branch was seen; a branch that is missing was never reached.
  std::map<std::string, uint64_t> reached;
};

/// Plays `seeds` epochs against `step`, each with members that answer actions by reports which are
/// reordered, repeated, dropped, forged or late, with lost members, deadlines and journal failures;
/// after the faults everyone answers and the epoch must end. Keeps its own record of what was
/// really delivered, and judges every action by that record alone. Stops at the first violation.
Exploration Explore(const StepFn& step, uint64_t first_seed, uint64_t seeds);

}  // namespace weightwire::epoch::testing
