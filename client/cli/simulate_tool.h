#pragma once

#include <string>

#include "server/base/status.h"

namespace weightwire::cli {

struct SimulateRequest {
  std::string config_path;
  std::string from;
  std::string to;
  double gigabits_per_second = 0;  ///< of each rank's link, each way
  double latency_us = 0;           ///< per hop
  std::string topology = "star";   ///< star, chain or tree, see plan::Topology
  std::string sharing = "bytes";   ///< bytes or equal, see plan::Sharing
  bool json = false;
};

/// Predicts how long one version takes (plan::Simulate). JSON: seconds, bottleneck,
/// bottleneck_seconds, topology, sharing, classes, target_ranks and timeline: for every rank {rank,
/// sends_bytes, receives_bytes, end_seconds}. The text has the same, ranks that do the same in one
/// line.
Result<std::string> RunSimulate(const SimulateRequest& request);

}  // namespace weightwire::cli
