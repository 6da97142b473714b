#include "server/daemon/logging.h"

#include <grpc/support/log.h>
#include <spdlog/details/os.h>
#include <spdlog/fmt/chrono.h>
#include <spdlog/formatter.h>
#include <spdlog/pattern_formatter.h>
#include <spdlog/sinks/stdout_color_sinks.h>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <cstdlib>
#include <memory>
#include <string>
#include <string_view>

#include "server/rpc/log_fields.h"

namespace weightwire::daemon {
namespace {

class JsonFormatter final : public spdlog::formatter {
 public:
  explicit JsonFormatter(std::string fields) : fields_(std::move(fields)) {}

  void format(const spdlog::details::log_msg& message, spdlog::memory_buf_t& out) override {
    const auto since = message.time.time_since_epoch();
    const auto micros = std::chrono::duration_cast<std::chrono::microseconds>(since).count();
    const std::tm utc = spdlog::details::os::gmtime(static_cast<std::time_t>(micros / 1'000'000));
    fmt::format_to(std::back_inserter(out), "{{\"time\":\"{:%Y-%m-%dT%H:%M:%S}.{:06}Z\"", utc,
                   micros % 1'000'000);
    std::string text;
    rpc::AppendJsonText({message.payload.data(), message.payload.size()}, text);
    fmt::format_to(std::back_inserter(out),
                   ",\"level\":\"{}\",\"thread\":{}{}{},\"message\":{}}}\n",
                   spdlog::level::to_string_view(message.level), message.thread_id, fields_,
                   rpc::LogFields::Json(), text);
  }

  std::unique_ptr<spdlog::formatter> clone() const override {
    return std::make_unique<JsonFormatter>(fields_);
  }

 private:
  const std::string fields_;  ///< constant fields, ready to be inserted
};

/// In a pattern: what the thread's lines carry behind their message.
class FieldsFlag final : public spdlog::custom_flag_formatter {
 public:
  void format(const spdlog::details::log_msg&, const std::tm&, spdlog::memory_buf_t& out) override {
    const std::string& text = rpc::LogFields::Text();
    out.append(text.data(), text.data() + text.size());
  }
  std::unique_ptr<spdlog::custom_flag_formatter> clone() const override {
    return std::make_unique<FieldsFlag>();
  }
};

std::unique_ptr<spdlog::formatter> TextFormatter() {
  auto text = std::make_unique<spdlog::pattern_formatter>();
  text->add_flag<FieldsFlag>('*').set_pattern("%Y-%m-%d %H:%M:%S.%e %^%-8l%$ %v%*");
  return text;
}

/// https://no-color.org
spdlog::color_mode Colours() {
  const char* no = std::getenv("NO_COLOR");
  return no != nullptr && *no != '\0' ? spdlog::color_mode::never : spdlog::color_mode::automatic;
}

std::string ConstantFields(const Config& config) {
  std::string out;
  auto add = [&out](std::string_view name, std::string_view value) {
    out.append(",\"").append(name).append("\":");
    rpc::AppendJsonText(value, out);
  };
  add("role", RoleName(config.role));
  add("job", config.job);
  add("name", config.name);
  return out;
}

void LogFromGrpc(gpr_log_func_args* args) {
  const auto level = args->severity == GPR_LOG_SEVERITY_ERROR  ? spdlog::level::err
                     : args->severity == GPR_LOG_SEVERITY_INFO ? spdlog::level::info
                                                               : spdlog::level::debug;
  spdlog::log(level, "grpc: {}", args->message);
}

}  // namespace

void StartLogging(const Config& config) {
  auto logger = std::make_shared<spdlog::logger>(
      "weightwire", std::make_shared<spdlog::sinks::stderr_color_sink_mt>(Colours()));
  const bool people = config.log_format == LogFormat::kAuto ? isatty(STDERR_FILENO) != 0
                                                            : config.log_format == LogFormat::kText;
  if (!people) {
    logger->set_formatter(std::make_unique<JsonFormatter>(ConstantFields(config)));
  } else {
    logger->set_formatter(TextFormatter());
  }
  logger->set_level(spdlog::level::from_str(config.log_level));
  logger->flush_on(spdlog::level::info);
  spdlog::set_default_logger(std::move(logger));
  gpr_set_log_function(LogFromGrpc);
}

}  // namespace weightwire::daemon
