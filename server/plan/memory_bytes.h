#pragma once

#include <cstdint>

#include "server/plan/plan.h"

namespace weightwire::plan {

/// About how much memory it takes, for bounds.
uint64_t MemoryBytes(const TransferPlan& plan);
uint64_t MemoryBytes(const RankSlice& slice);

}  // namespace weightwire::plan
