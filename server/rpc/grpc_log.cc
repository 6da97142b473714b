#include "server/rpc/grpc_log.h"

#include <grpc/support/log.h>
#include <spdlog/spdlog.h>

#include <mutex>
#include <string_view>

namespace weightwire::rpc {
namespace {

std::mutex mutex;                  // gRPC's threads may log while the sink goes
metrics::Sink* counted = nullptr;  // under the mutex

/// gRPC 1.51 says so, on the side that refuses.
constexpr std::string_view kHandshakeFailed = "Handshake failed with fatal error";

void OnLine(gpr_log_func_args* line) {
  if (std::string_view(line->message).substr(0, kHandshakeFailed.size()) == kHandshakeFailed) {
    std::lock_guard lock(mutex);
    if (counted != nullptr) counted->Add("auth_failures_total", 1, {{"reason", "handshake"}});
  }
  const auto level =
      line->severity == GPR_LOG_SEVERITY_ERROR ? spdlog::level::warn : spdlog::level::debug;
  spdlog::log(level, "grpc: {}", line->message);
}

void Count(metrics::Sink* sink) {
  std::lock_guard lock(mutex);
  counted = sink;
}

}  // namespace

GrpcLog::GrpcLog(metrics::Sink& metrics) {
  Count(&metrics);
  gpr_set_log_function(OnLine);
}

GrpcLog::~GrpcLog() {
  gpr_set_log_function(nullptr);
  Count(nullptr);
}

}  // namespace weightwire::rpc
