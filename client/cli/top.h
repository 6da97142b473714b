#pragma once

#include <cstdint>
#include <string>

#include "client/cli/global_options.h"

namespace weightwire::cli {

/// Room on a terminal; 0: without a limit.
struct TopOptions {
  size_t columns = 0;
  size_t lines = 0;
  bool colors = false;
};

/// One screen of a job: what everyone waits for and for how long, engines, epochs. Pure.
/// `now_unix_seconds` by this host's clock.
std::string TopText(const v1::StatusResponse& status, double now_unix_seconds,
                    const TopOptions& screen);

/// Draws the job on standard output again every `interval_ms` until it is stopped (Ctrl-C), also
/// through a coordinator that does not answer. Where standard output is no terminal, or with
/// `once`: once, 80 columns wide unless `output` is wide, and then a coordinator that does not
/// answer is the error.
Status RunTop(Connection connection, uint32_t interval_ms, bool once, Output output);

}  // namespace weightwire::cli
