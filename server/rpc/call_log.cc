#include "server/rpc/call_log.h"

#include <utility>

#include <spdlog/spdlog.h>

#include "server/rpc/log_fields.h"

namespace weightwire::rpc {

TraceId TraceOfCall(const grpc::CallbackServerContext& context) {
  const auto header = context.client_metadata().find("traceparent");
  if (header == context.client_metadata().end()) return {};
  return ParseTraceparent({header->second.data(), header->second.size()}).value_or(TraceId{});
}

CallLog::CallLog(const Runtime& runtime, const grpc::CallbackServerContext& context,
                 const char* method)
    : CallLog(runtime, context.peer(), TraceOfCall(context), method) {}

CallLog::CallLog(const Runtime& runtime, std::string peer, const TraceId& trace_id,
                 const char* method)
    : runtime_(runtime),
      method_(method),
      peer_(std::move(peer)),
      trace_id_(trace_id),
      start_(runtime.clock.Now()) {
  runtime_.metrics.Add("rpc_started_total", 1, {{"method", method_}});
}

CallLog CallLog::Next(const char* method) const { return {runtime_, peer_, trace_id_, method}; }

void CallLog::Ended(const Status& status) const {
  const double seconds = std::chrono::duration<double>(runtime_.clock.Now() - start_).count();
  runtime_.metrics.Add("rpc_handled_total", 1,
                       {{"method", method_}, {"code", std::string(CodeName(status.code()))}});
  runtime_.metrics.Observe("rpc_seconds", seconds, {{"method", method_}});
  // A caller that has seen enough (every wait of a client ends its Watch so) is nothing to look at.
  const bool expected = status.ok() || status.code() == Code::kCancelled;
  const auto level = expected ? spdlog::level::debug : spdlog::level::warn;
  if (!spdlog::should_log(level)) return;
  const std::string trace = trace_id_ == TraceId{} ? "" : TraceHex(trace_id_);
  const LogFields fields({{"trace_id", trace}});
  spdlog::log(level, "rpc {} peer={} seconds={:.6f}: {}", method_, peer_, seconds,
              status.ToString());
}

}  // namespace weightwire::rpc
