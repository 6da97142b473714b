// Moves one region of BYTES between two processes by one way; bench/transport.py runs several of
// them in turns.
//
//   transport_bench run WAY BYTES    ways: see ways.h
//       prints "ready"; then for each line of stdin one of its own: "run" -> "SECONDS CPU_SECONDS"
//       of both processes; "check" -> "right" or "wrong", after a run into a cleared target
//   transport_bench serve WAY BYTES  started by itself
#include <chrono>
#include <cstring>
#include <ctime>
#include <iostream>
#include <string>
#include <vector>

#include "bench/transport/serve.h"
#include "bench/transport/ways.h"

namespace weightwire::bench {
namespace {

/// CPU time of this process, or of `pid`. Unlike the clock's time it hardly depends on what else
/// the host does.
double CpuSeconds(pid_t pid) {
  clockid_t clock = CLOCK_PROCESS_CPUTIME_ID;
  if (pid > 0) clock_getcpuclockid(pid, &clock);
  timespec time{};
  clock_gettime(clock, &time);
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
}

double CpuSeconds(const Way& way) {
  return CpuSeconds(0) + (way.server() > 0 ? CpuSeconds(way.server()) : 0);
}

int Run(const std::string& name, uint64_t bytes) {
  auto target = memory::MemoryRegion::Allocate("bench", bytes);
  WW_CHECK(target.has_value());
  std::memset((*target)->data(), 0, bytes);
  const std::span<std::byte> into((*target)->data(), bytes);
  auto way = MakeWay(name, into);
  std::cout << "ready" << std::endl;
  for (std::string command; std::getline(std::cin, command);) {
    if (command == "check") {
      std::memset(into.data(), 0, into.size());
      way->Run();
      std::cout << (HoldsPattern(into) ? "right" : "wrong") << std::endl;
      continue;
    }
    const double cpu = CpuSeconds(*way);
    const auto start = std::chrono::steady_clock::now();
    way->Run();
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    std::cout << took.count() << ' ' << CpuSeconds(*way) - cpu << std::endl;
  }
  return 0;
}

}  // namespace
}  // namespace weightwire::bench

int main(int argc, char** argv) {
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  if (arguments.size() != 3 || (arguments[0] != "run" && arguments[0] != "serve")) {
    std::cerr << "usage: transport_bench run|serve WAY BYTES" << std::endl;
    return 64;
  }
  const uint64_t bytes = std::stoull(arguments[2]);
  if (arguments[0] == "serve") weightwire::bench::Serve(arguments[1], bytes);
  return weightwire::bench::Run(arguments[1], bytes);
}
