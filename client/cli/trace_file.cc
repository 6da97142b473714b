#include "client/cli/trace_file.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <vector>

namespace weightwire::cli {
namespace {

using nlohmann::json;
using Trace = v1::DescribeEpochResponse;

constexpr int kCoordinator = 1;

/// One process of the trace: stretches, sorted into threads.
class Process {
 public:
  Process(int pid, std::string name, double epoch_start)
      : pid_(pid), start_us_(std::llround(1e6 * epoch_start)) {
    out_.push_back({{"ph", "M"},
                    {"pid", pid},
                    {"tid", 0},
                    {"name", "process_name"},
                    {"args", {{"name", std::move(name)}}}});
    out_.push_back({{"ph", "M"},
                    {"pid", pid},
                    {"tid", 0},
                    {"name", "process_sort_index"},
                    {"args", {{"sort_index", pid}}}});
  }

  void Add(const std::string& name, double begin, double seconds, json arguments) {
    spans_.push_back({Micros(begin), Micros(begin + seconds), name, std::move(arguments)});
  }

  void Instant(const std::string& name, double at, json arguments) {
    out_.push_back({{"ph", "i"},
                    {"s", "p"},
                    {"pid", pid_},
                    {"tid", 0},
                    {"ts", Micros(at)},
                    {"name", name},
                    {"args", std::move(arguments)}});
  }

  /// The events of all of it.
  std::vector<json> Events() && {
    std::ranges::stable_sort(spans_, [](const Span& a, const Span& b) {
      return a.begin != b.begin ? a.begin < b.begin : a.end > b.end;
    });
    std::vector<std::vector<int64_t>> open;  // by thread, the ends of those that are not over
    for (Span& span : spans_) {
      out_.push_back({{"ph", "X"},
                      {"pid", pid_},
                      {"tid", ThreadFor(span, open)},
                      {"ts", span.begin},
                      {"dur", span.end - span.begin},
                      {"name", span.name},
                      {"args", std::move(span.arguments)}});
    }
    return std::move(out_);
  }

 private:
  struct Span {
    int64_t begin = 0, end = 0;
    std::string name;
    json arguments;
  };

  int64_t Micros(double seconds) const { return start_us_ + std::llround(1e6 * seconds); }

  /// The first thread in which it lies within what is open there, or after it.
  static size_t ThreadFor(const Span& span, std::vector<std::vector<int64_t>>& open) {
    for (size_t thread = 0; thread < open.size(); ++thread) {
      std::vector<int64_t>& ends = open[thread];
      while (!ends.empty() && ends.back() <= span.begin) ends.pop_back();
      if (!ends.empty() && ends.back() < span.end) continue;
      ends.push_back(span.end);
      return thread;
    }
    open.push_back({span.end});
    return open.size() - 1;
  }

  const int pid_;
  const int64_t start_us_;
  std::vector<Span> spans_;
  std::vector<json> out_;
};

json WhyOf(const v1::Outcome& why) {
  return why.code() == 0 ? json::object() : json{{"why", why.message()}};
}

Process CoordinatorOf(const Trace& trace) {
  const auto& epoch = trace.epoch();
  Process process(kCoordinator, "coordinator", epoch.started_unix_seconds());
  double end = epoch.total_seconds();  // it may be rounded otherwise than its phases
  for (const auto& step : trace.steps()) end = std::max(end, step.begin() + step.seconds());
  process.Add("epoch " + std::to_string(epoch.epoch()), 0, end,
              {{"version", epoch.version()}, {"trace_id", epoch.trace_id()}});
  for (const auto& step : trace.steps()) {
    process.Add(step.name() == "phase" ? step.about() : step.name(), step.begin(), step.seconds(),
                step.name() == "phase" ? json::object() : json{{"about", step.about()}});
  }
  return process;
}

}  // namespace

std::string TraceEvents(const Trace& trace) {
  const auto& epoch = trace.epoch();
  std::vector<Process> processes{CoordinatorOf(trace)};
  std::map<std::string, size_t> by_rank;
  for (const auto& track : trace.tracks()) {
    by_rank[track.rank()] = processes.size();
    Process& process = processes.emplace_back(kCoordinator + static_cast<int>(processes.size()),
                                              track.rank() + " (agent " + track.agent() + ")",
                                              epoch.started_unix_seconds());
    for (const auto& span : track.stretches()) {
      process.Add(span.name() + (span.about().empty() ? "" : " " + span.about()), span.begin(),
                  span.seconds(),
                  {{"bytes", span.bytes()}, {"clock_error_us", 1e6 * track.error_seconds()}});
    }
  }
  for (const auto& event : trace.events()) {
    const auto rank = by_rank.find(event.who());
    const bool own = rank != by_rank.end();
    processes[own ? rank->second : 0].Instant(own ? event.what() : event.who() + " " + event.what(),
                                              event.at(), WhyOf(event.why()));
  }
  json events = json::array();
  for (Process& process : processes) {
    for (json& event : std::move(process).Events()) events.push_back(std::move(event));
  }
  return json{{"traceEvents", std::move(events)},
              {"displayTimeUnit", "ms"},
              {"otherData",
               {{"epoch", epoch.epoch()},
                {"version", epoch.version()},
                {"trace_id", epoch.trace_id()},
                {"left_off", trace.left_off()}}}}
             .dump() +
         "\n";
}

Status WriteTrace(const Trace& trace, const std::string& path) {
  std::ofstream file(path, std::ios::trunc);
  file << TraceEvents(trace) << std::flush;
  if (file.good()) return OkStatus();
  return Status(Code::kUnavailable, Reason::kIoError, "the trace cannot be written to " + path)
      .Remedy("is its folder there and writable, with room left?");
}

}  // namespace weightwire::cli
