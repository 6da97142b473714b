#include "server/daemon/coordinator_gauges.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

namespace weightwire::daemon {

coordinator::StatusQuery GaugesQuery() {
  return {.epochs_max = 0, .names_bounded = false, .participants_max = 0};
}

void SetCoordinatorGauges(const coordinator::StatusSnapshot& snapshot,
                          metrics::PrometheusSink& sink) {
  // Of a drained engine, and of one that has left, nothing is expected: an alert would be noise.
  std::vector<const coordinator::EngineStatus*> engines;
  double installing = 0;
  for (const coordinator::EngineStatus& engine : snapshot.engines) {
    if (engine.state == coordinator::EngineState::kInstalling) ++installing;
    if (!engine.drained && engine.ranks_present > 0) engines.push_back(&engine);
  }
  const size_t listed = std::min(engines.size(), kEnginesMeasured);
  std::ranges::sort(engines, {}, [](const coordinator::EngineStatus* engine) {
    return std::pair(engine->ready, std::string_view(engine->name));
  });
  std::vector<std::pair<metrics::Labels, double>> ready, version, behind;
  for (size_t i = 0; i < listed; ++i) {
    const coordinator::EngineStatus& engine = *engines[i];
    const metrics::Labels labels = {{"engine", engine.name}};
    ready.emplace_back(labels, engine.ready ? 1 : 0);
    version.emplace_back(labels, static_cast<double>(engine.version.value));
    behind.emplace_back(labels, static_cast<double>(engine.lag.value));
  }
  sink.Replace("engine_ready", ready);
  sink.Replace("engine_version", version);
  sink.Replace("engine_versions_behind", behind);
  sink.Set("engines_unlisted", static_cast<double>(engines.size() - listed), {});
  sink.Set("engines_installing", installing, {});
  sink.Set("waiting_seconds", snapshot.waiting_seconds, {});
}

}  // namespace weightwire::daemon
