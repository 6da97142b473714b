#pragma once

#include "server/plan/min_max_load.h"
#include "server/plan/plan.h"

namespace weightwire::plan {

/// What must leave the source for `target` to be filled, on the wire, by who holds it. Read from
/// the layouts alone, with code that the planner does not use: a bound to judge plans by must not
/// repeat their mistakes. Both layouts are valid, and the source covers the target.
BytesByHolders EgressDemand(const layout::ModelLayout& source, const layout::ModelLayout& target);

}  // namespace weightwire::plan
