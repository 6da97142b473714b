#include "server/rpc/log_fields.h"

#include <spdlog/spdlog.h>

#include "server/rpc/trace.h"

namespace weightwire::rpc {
namespace {

/// The default logger writes in the thread that logs, so that its formatter sees this.
thread_local std::string fields_of_thread, text_of_thread;

}  // namespace

void AppendJsonText(std::string_view text, std::string& out) {
  out.push_back('"');
  for (char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      out.push_back('\\');
      out.push_back(c);
    } else if (byte < 0x20) {
      fmt::format_to(std::back_inserter(out), "\\u{:04x}", byte);
    } else {
      out.push_back(c);
    }
  }
  out.push_back('"');
}

LogFields::LogFields(std::initializer_list<std::pair<std::string_view, std::string_view>> fields) {
  for (const auto& [name, value] : fields) {
    if (value.empty()) continue;
    fields_of_thread.append(",\"").append(name).append("\":");
    AppendJsonText(value, fields_of_thread);
    if (name == "trace_id") text_of_thread.append(" trace=").append(value);
  }
}

LogFields::~LogFields() {
  fields_of_thread.clear();
  text_of_thread.clear();
}

const std::string& LogFields::Json() { return fields_of_thread; }

const std::string& LogFields::Text() { return text_of_thread; }

void LogNote(const Note& note) {
  const auto level = note.bad ? spdlog::level::warn : spdlog::level::info;
  if (!spdlog::should_log(level)) return;
  const std::string trace = TraceHex(note.trace_id);
  const std::string epoch = std::to_string(note.epoch.value);
  const std::string version = std::to_string(note.version.value);
  const LogFields fields(
      {{"trace_id", trace}, {"epoch", epoch}, {"version", version}, {"rank", note.rank}});
  spdlog::log(level, "epoch {} (version {}): {}{}{}", epoch, version, note.rank,
              note.rank.empty() ? "" : " ", note.text);
}

}  // namespace weightwire::rpc
