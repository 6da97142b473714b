#pragma once

#include "server/coordinator/coordinator.h"
#include "server/metrics/prometheus_sink.h"

namespace weightwire::daemon {

/// Engines that have series of their own in /metrics; a fleet may have thousands.
inline constexpr size_t kEnginesMeasured = 256;

/// What a snapshot for SetCoordinatorGauges need have.
coordinator::StatusQuery GaugesQuery();
/// The gauges that change by time alone or come and go with engines. Any thread.
void SetCoordinatorGauges(const coordinator::StatusSnapshot& snapshot,
                          metrics::PrometheusSink& sink);

}  // namespace weightwire::daemon
