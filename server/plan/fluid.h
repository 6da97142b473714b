#pragma once

#include <cstdint>
#include <span>

#include "server/plan/plan.h"

namespace weightwire::plan {

/// Time in which all streams end when they start together, every source rank sends and every target
/// rank receives at most one byte per unit of time (full duplex; the two sides are apart), and
/// streams share links max-min fairly: no stream can get more without taking from one that has as
/// little. Rates are set anew whenever streams end; in plans so large that this would cost more
/// than about 50 million steps, only after several have ended, which can only lengthen the answer.
double FluidTime(std::span<const Stream> streams, uint32_t source_ranks, uint32_t target_ranks);

}  // namespace weightwire::plan
