#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "server/base/executor.h"
#include "server/daemon/config.h"
#include "server/daemon/host.h"
#include "server/daemon/http_server.h"
#include "server/metrics/prometheus_sink.h"

namespace weightwire::daemon {

/// What the pages of a process are made from. References outlive the server.
struct PageSources {
  /// Of the roles; those of a standby come later.
  std::shared_ptr<const std::vector<Window>> windows;
  bool coordinates = false;  ///< leading or standing by
  Executor& workers;
  metrics::PrometheusSink& sink;
  const Config& config;              ///< outlives the pages
  std::function<Status()> standing;  ///< asked while there is no window: why not
};

/// Pages by path: /metrics, /healthz, /readyz, /status as text, and of a coordinator the status
/// page at / with its documents, which a standby answers with 503. An agent's / is its text.
std::map<std::string, HttpPage> Pages(const PageSources& sources);

}  // namespace weightwire::daemon
