#pragma once

#include "server/base/status.h"
#include "server/epoch/coordinator_machine.h"

namespace weightwire::epoch {

/// Compares what the sources of an epoch say that they sent with what its engines say that they
/// wrote, both complete.
///
/// OK only when no stream of a plan is reported by two sources or twice by one engine, every engine
/// reports exactly the streams of the plans that it names, each plan of the sources was read by
/// some engine, an engine reports nothing only when the sources do too, and every stream's digest
/// is equal on both sides.
///   kDataLoss / kDigestMismatch  names rank, plan and stream
Status CompareDigests(const State& state);

}  // namespace weightwire::epoch
