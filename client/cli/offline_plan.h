#pragma once

#include <string>

#include "server/base/status.h"

namespace weightwire::cli {

struct OfflinePlan {
  std::string config_path;
  std::string from;
  std::string to;
  /// Plan for one rank per layout class (relays feed the others), else for every rank.
  bool per_class = true;
  bool explain = false;
  std::string tensor;       ///< canonical name to explain; empty: none
  std::string out_path;     ///< write the plan there (plan_bytes.h); empty: nowhere
  std::string verify_path;  ///< prove the plan of this file instead of making one; empty: make one
  std::string svg_path;     ///< draw the source × target bytes there; empty: nowhere
  bool egress = false;      ///< also what a coordinator sends for it (egress_report.h)
  bool json = false;
};

/// Plans without a running service, proves the plan and renders it. JSON fields: plan_id, seconds
/// (layouts, plan and proof), peak_rss_bytes (of this process), bytes_total, copies, proof
/// ("exact"), egress_over_bound, ingress_over_bound, simulated_over_bound; then from, to, per,
/// streams, egress_max, egress_bound, ingress_max, ingress_bound, classes (size → how many) and
/// staging (memory of agents: slots_bytes, scratch_bytes, gpu_bytes, and {source, target}_{max,
/// mean} of an agent with one rank); with `egress` also egress (bytes: slices, slice_max, names,
/// old_slices, first_prepares, next_prepares, old_prepares); with `explain` also ranks ({egress,
/// ingress} bytes by rank, and the classes' ranks) and staging.ranks ({source, target} by rank).
///
/// With verify_path the plan comes from the file, and layouts from the specs: nothing but the
/// proof stands between the two. A plan that is not right is kFailedPrecondition / kInvalidRequest.
Result<std::string> RunOfflinePlan(const OfflinePlan& request);

}  // namespace weightwire::cli
