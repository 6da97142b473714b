#pragma once

#include <functional>

#include "server/base/executor.h"
#include "server/coordinator/scheduling.h"
#include "server/coordinator/version_queue.h"
#include "server/epoch/coordinator_machine.h"

/// Whether and when what came to nothing is tried again: versions and fills.
namespace weightwire::coordinator {

/// Somebody left, was left out or could not be reached: another attempt may well go through. One
/// that took the whole of a phase's deadline is a failure. `aborted`: an epoch that is over.
bool IsPassing(const epoch::State& aborted);

/// Of a version whose attempt ended so; `holds`: every rank that published it still holds it.
bool MayRetry(const epoch::State& aborted, const PendingVersion& pending, bool holds,
              const Shared& shared);

/// Who is lost or left out is not in the way of the next attempt, which follows at once; any other
/// follows after a pause.
void PauseAfter(const epoch::State& aborted, PendingVersion& pending, Shared& shared);

/// A fill of an engine that failed so often before; returns when the next may begin.
Nanos PauseOfFill(uint32_t failures, Shared& shared);

}  // namespace weightwire::coordinator
