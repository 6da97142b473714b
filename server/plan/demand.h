#pragma once

#include <cstdint>
#include <vector>

#include "server/plan/min_max_load.h"
#include "server/plan/plan.h"

namespace weightwire::plan {

/// What must move on the wire for `target` to be filled.
struct Demand {
  BytesByHolders egress;
  std::vector<int64_t> ingress;  ///< by target rank
};
/// Read from the layouts alone, with code that the planner does not use: a bound to judge plans by
/// must not repeat their mistakes. Both layouts are valid, and the source covers the target.
Demand DemandOf(const layout::ModelLayout& source, const layout::ModelLayout& target);

}  // namespace weightwire::plan
