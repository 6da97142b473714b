#pragma once

#include <prometheus/metric_family.h>

#include <vector>

namespace weightwire::metrics {

/// Open file descriptors of this process; -1: /proc does not say.
int OpenDescriptors();

/// The process_* families that Prometheus' own clients export, under their names and in their
/// units: CPU, memory, start, file descriptors. A family that /proc does not tell is left out.
std::vector<prometheus::MetricFamily> ProcessFamilies();

}  // namespace weightwire::metrics
