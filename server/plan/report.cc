#include <algorithm>

#include "server/plan/demand.h"
#include "server/plan/fluid.h"
#include "server/plan/min_max_load.h"
#include "server/plan/plan.h"

namespace weightwire::plan {

PlanReport Report(const TransferPlan& plan, const layout::ModelLayout& source,
                  const layout::ModelLayout& target) {
  PlanReport report;
  report.bytes_total = plan.bytes_total;
  report.copies = plan.copies_total;
  report.streams = static_cast<uint32_t>(plan.streams.size());
  report.egress.assign(plan.source_ranks, 0);
  report.ingress.assign(plan.target_ranks, 0);
  for (const Stream& stream : plan.streams) {
    report.egress[stream.source_rank] += stream.bytes;
    report.ingress[stream.target_rank] += stream.bytes;
  }
  for (int64_t bytes : report.egress) report.egress_max = std::max(report.egress_max, bytes);
  for (int64_t bytes : report.ingress) report.ingress_max = std::max(report.ingress_max, bytes);
  if (plan.bytes_total == 0) {
    report.egress_over_bound = report.ingress_over_bound = report.simulated_over_bound = 1.0;
    return report;
  }
  const Demand demand = DemandOf(source, target);
  report.egress_bound = LeastGreatestLoad(demand.egress, plan.source_ranks);
  report.ingress_bound =
      static_cast<double>(*std::max_element(demand.ingress.begin(), demand.ingress.end()));
  report.egress_over_bound = static_cast<double>(report.egress_max) / report.egress_bound;
  report.ingress_over_bound = static_cast<double>(report.ingress_max) / report.ingress_bound;
  report.simulated_over_bound =
      RunFluid(plan, Sharing::kByBytes).end / std::max(report.egress_bound, report.ingress_bound);
  return report;
}

}  // namespace weightwire::plan
