#pragma once

#include <functional>
#include <map>
#include <optional>
#include <string>

#include "server/base/clock.h"
#include "server/base/executor.h"
#include "server/daemon/http_server.h"
#include "server/metrics/prometheus_sink.h"
#include "server/tls/identity.h"

namespace boost::asio {
class io_context;
}  // namespace boost::asio

namespace weightwire::daemon {

/// What the roles of one process share.
struct Host {
  boost::asio::io_context& io;  ///< run by the main thread
  Executor& workers;
  Clock& clock;
  metrics::Sink& metrics;
  std::optional<tls::Identity> identity;  ///< of this process; nullopt without TLS
};

/// Writes a document, on any thread, from what was collected on a strand.
using WriteDocument = std::function<HttpReply()>;

using SetGauges = std::function<void(metrics::PrometheusSink&)>;

/// How a role shows itself over HTTP. The functions run on `strand`.
struct Window {
  Executor* strand = nullptr;
  std::function<Status()> ready;
  std::function<std::string()> page;  ///< the role's part of /status
  /// Collects what the document at a path is written from.
  std::map<std::string, std::function<WriteDocument()>> documents{};
  /// Collects, when /metrics is asked for, what gauges of the role are set from.
  std::function<SetGauges()> measure = [] { return [](metrics::PrometheusSink&) {}; };
};

}  // namespace weightwire::daemon
