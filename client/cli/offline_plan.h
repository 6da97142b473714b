#pragma once

#include <string>

#include "server/base/status.h"

namespace weightwire::cli {

struct OfflinePlan {
  std::string config_path;
  std::string from;
  std::string to;
  std::string tensor;  ///< canonical name to explain; empty: none
  bool json = false;
};

/// Plans without a running service, proves the plan and renders it. JSON fields: plan_id, seconds
/// (layouts, plan and proof), peak_rss_bytes (of this process), bytes_total, copies, streams, proof
/// ("exact"), egress_over_bound, ingress_over_bound, simulated_over_bound, egress, ingress.
Result<std::string> RunOfflinePlan(const OfflinePlan& request);

}  // namespace weightwire::cli
