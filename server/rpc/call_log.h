#pragma once

#include <memory>
#include <string>

#include <grpcpp/server_context.h>

#include "server/base/status.h"
#include "server/rpc/runtime.h"
#include "server/rpc/trace.h"

namespace weightwire::rpc {

/// The trace id of the call's `traceparent`; zeros when it has none.
TraceId TraceOfCall(const grpc::CallbackServerContext& context);

/// Counts one call (rpc_started_total, rpc_handled_total, rpc_seconds) and logs its end: failures
/// as warnings, the rest (a caller that went away too) at debug level, with method, peer, code,
/// reason, seconds and trace id.
/// Thread-safe; Ended is called once.
class CallLog {
 public:
  /// `method` is a literal. The trace id is that of the call's `traceparent`, if any.
  CallLog(const Runtime& runtime, const grpc::CallbackServerContext& context, const char* method);
  /// The same caller's next message on a stream, which counts as a call of `method`.
  CallLog Next(const char* method) const;
  void Ended(const Status& status) const;
  const TraceId& trace_id() const { return trace_id_; }

 private:
  CallLog(const Runtime& runtime, std::string peer, const TraceId& trace_id, const char* method);

  const Runtime& runtime_;
  const char* method_;
  std::string peer_;
  TraceId trace_id_{};
  Nanos start_;
};

}  // namespace weightwire::rpc
