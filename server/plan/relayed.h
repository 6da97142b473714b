#pragma once

#include "server/plan/plan.h"

namespace weightwire::plan {

/// The streams of a target rank when another rank of an equal layout passes them on: every copy
/// reads where it writes, in the dtype in which it was written, and keeps its box, order and
/// stream; what was quantized is passed on as it is, and what was gathered as floats, of which
/// every rank makes the same. Segments, slots and sums are therefore those of `target`. Pure.
///
/// side: kSource for the rank that passes them on, kTarget for the one that reads from it.
RankSlice RelayedSlice(const RankSlice& target, Side side);

}  // namespace weightwire::plan
