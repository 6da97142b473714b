#pragma once

#include "server/daemon/config.h"

namespace weightwire::daemon {

/// Sends spdlog, and gRPC's own messages through it, to stderr: one JSON object a line with time,
/// level, thread, role, job, name and message, or plain text, in colours on a terminal.
void StartLogging(const Config& config);

}  // namespace weightwire::daemon
