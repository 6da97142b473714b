#pragma once

#include "server/metrics/metrics.h"

namespace weightwire::rpc {

/// While it lives gRPC's own log goes where ours goes, and failed TLS handshakes, of which nothing
/// else tells, are counted as auth_failures_total{reason="handshake"}. One at a time; `metrics`
/// outlives it.
class GrpcLog {
 public:
  explicit GrpcLog(metrics::Sink& metrics);
  ~GrpcLog();
  GrpcLog(const GrpcLog&) = delete;
  GrpcLog& operator=(const GrpcLog&) = delete;
};

}  // namespace weightwire::rpc
