#pragma once

#include <string>

#include "server/base/status.h"
#include "weightwire/v1/coordinator.pb.h"

namespace weightwire::cli {

/// The epoch as Chrome's trace events (JSON), which Perfetto and chrome://tracing open: one process
/// for the coordinator and one for each rank, times in microseconds since the Unix epoch. Stretches
/// that overlap without one holding the other lie on threads of their own, so that those of a
/// thread always nest.
std::string TraceEvents(const v1::DescribeEpochResponse& trace);

/// Writes them to `path`. kIoError.
Status WriteTrace(const v1::DescribeEpochResponse& trace, const std::string& path);

}  // namespace weightwire::cli
