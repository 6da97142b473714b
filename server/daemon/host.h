#pragma once

#include <functional>
#include <string>

#include "server/base/clock.h"
#include "server/base/executor.h"
#include "server/metrics/metrics.h"

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
};

/// How a role shows itself over HTTP. Both functions run on `strand`.
struct Window {
  Executor* strand = nullptr;
  std::function<Status()> ready;
  std::function<std::string()> page;
};

}  // namespace weightwire::daemon
