#pragma once

#include <string>

#include "weightwire/v1/coordinator.pb.h"

namespace weightwire::cli {

/// What happened in one epoch, for people: its phases, whom each waited for last, who was left out,
/// what went wrong. `status` adds the other attempts at its version.
std::string EpochTraceText(const v1::DescribeEpochResponse& trace,
                           const v1::StatusResponse& status);

}  // namespace weightwire::cli
