#include "server/metrics/process.h"

#include <dirent.h>
#include <sys/resource.h>
#include <unistd.h>

#include <fstream>
#include <limits>
#include <optional>
#include <sstream>
#include <string>
#include <utility>

namespace weightwire::metrics {
namespace {

prometheus::MetricFamily FamilyOf(std::string name, std::string help, prometheus::MetricType type,
                                  double value) {
  prometheus::ClientMetric metric;
  (type == prometheus::MetricType::Counter ? metric.counter.value : metric.gauge.value) = value;
  return {std::move(name), std::move(help), type, {std::move(metric)}};
}

double SecondsOf(const timeval& time) {
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) / 1e6;
}

/// Seconds since the Unix epoch.
std::optional<double> BootTime() {
  std::ifstream file("/proc/stat");
  for (std::string word; file >> word;) {
    double seconds = 0;
    if (word == "btime" && file >> seconds) return seconds;
  }
  return std::nullopt;
}

std::optional<double> StartTime() {
  std::ifstream file("/proc/self/stat");
  std::string line;
  std::getline(file, line);
  // The second field is the program's name in brackets and may hold anything.
  const size_t name_end = line.rfind(')');
  const std::optional<double> boot = BootTime();
  if (name_end == std::string::npos || !boot) return std::nullopt;
  std::istringstream fields(line.substr(name_end + 1));
  constexpr int kStartField = 22, kFirst = 3;
  std::string skipped;
  for (int field = kFirst; field < kStartField; ++field) fields >> skipped;
  double ticks = 0;
  if (!(fields >> ticks)) return std::nullopt;
  return *boot + ticks / static_cast<double>(sysconf(_SC_CLK_TCK));
}

}  // namespace

int OpenDescriptors() {
  DIR* directory = opendir("/proc/self/fd");
  if (directory == nullptr) return -1;
  int count = -3;  // ".", ".." and the directory itself
  while (readdir(directory) != nullptr) ++count;
  closedir(directory);
  return count;
}

std::vector<prometheus::MetricFamily> ProcessFamilies() {
  using prometheus::MetricType;
  std::vector<prometheus::MetricFamily> families;
  const auto gauge = [&](std::string name, std::string help, double value) {
    families.push_back(FamilyOf(std::move(name), std::move(help), MetricType::Gauge, value));
  };
  rusage used{};
  if (getrusage(RUSAGE_SELF, &used) == 0) {
    families.push_back(FamilyOf("process_cpu_seconds_total",
                                "CPU time that the process used, in seconds", MetricType::Counter,
                                SecondsOf(used.ru_utime) + SecondsOf(used.ru_stime)));
  }
  double total_pages = 0, resident_pages = 0;
  if (std::ifstream("/proc/self/statm") >> total_pages >> resident_pages) {
    const auto page = static_cast<double>(sysconf(_SC_PAGESIZE));
    gauge("process_virtual_memory_bytes", "Virtual memory of the process", total_pages * page);
    gauge("process_resident_memory_bytes", "Resident memory of the process, shared memory included",
          resident_pages * page);
  }
  if (const auto start = StartTime()) {
    gauge("process_start_time_seconds", "Unix time at which the process started", *start);
  }
  if (const int open = OpenDescriptors(); open >= 0) {
    gauge("process_open_fds", "Open file descriptors of the process", open);
  }
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) == 0) {
    const bool none = limit.rlim_cur == RLIM_INFINITY;
    gauge("process_max_fds", "Most file descriptors that the process may open",
          none ? std::numeric_limits<double>::infinity() : static_cast<double>(limit.rlim_cur));
  }
  return families;
}

}  // namespace weightwire::metrics
