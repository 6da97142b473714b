#pragma once

#include <cstddef>
#include <memory>

#include "server/base/clock.h"
#include "server/base/executor.h"
#include "server/metrics/metrics.h"
#include "server/tls/token.h"

namespace weightwire::rpc {

/// What the services of one role share. Everything outlives the gRPC server.
struct Runtime {
  Executor& strand;  ///< of the Coordinator or Agent behind the service
  Clock& clock;
  metrics::Sink& metrics;
  size_t message_bytes_max = 16 << 20;
  /// Messages that may wait for one stream's reader; one more ends the stream.
  size_t stream_queue_max = 4'096;
  std::shared_ptr<tls::TokenKeys> tokens = {};  ///< of the authorizer; null: it takes none
};

}  // namespace weightwire::rpc
