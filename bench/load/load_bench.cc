// Registers thousands of members with a running coordinator, keeps them alive, and asks it things
// meanwhile. Prints one line of JSON; exits 1 when a session was lost, a call failed or a member
// was told anything but its welcome.
#include <sys/resource.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <future>

#include "bench/load/load_clients.h"
#include "server/base/clock.h"

namespace weightwire::load {
namespace {

double Seconds(Nanos span) { return std::chrono::duration<double>(span).count(); }

template <typename Ask>
auto OnStrand(ThreadExecutor& strand, Ask ask) {
  std::promise<decltype(ask())> answer;
  strand.Post([&] { answer.set_value(ask()); });
  return answer.get_future().get();
}

/// As many connections as the hard limit allows.
void RaiseDescriptors() {
  rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  limit.rlim_cur = limit.rlim_max;
  setrlimit(RLIMIT_NOFILE, &limit);
}

float Quantile(std::vector<float>& sorted, double part) {
  return sorted.empty()
             ? 0
             : sorted[static_cast<size_t>(part * static_cast<double>(sorted.size() - 1))];
}

int Run(const Shape& shape, uint32_t hold, uint32_t calls_for, uint32_t in_flight) {
  RaiseDescriptors();
  ThreadExecutor strand("load", 1);
  LoadClients clients(shape, strand);
  const Nanos start = SystemClock().Now();
  std::promise<void> opened;
  strand.Post([&] { clients.Open([&] { opened.set_value(); }); });
  if (opened.get_future().wait_for(std::chrono::seconds(300)) != std::future_status::ready) {
    const auto [registered, trouble] =
        OnStrand(strand, [&] { return std::pair(clients.registered(), clients.trouble()); });
    std::fprintf(stderr, "load_bench: after 300 s %u of %u members are registered; %s\n",
                 registered, shape.agents * shape.ranks, trouble.first.c_str());
    return 1;
  }
  const double opening = Seconds(SystemClock().Now() - start);
  std::promise<void> over;
  strand.PostAfter(std::chrono::seconds(hold), [&] { over.set_value(); });
  over.get_future().get();
  std::promise<void> called;
  const Nanos before = SystemClock().Now();
  strand.Post([&] { clients.Call(in_flight); });
  strand.PostAfter(std::chrono::seconds(calls_for), [&] {
    clients.Stop();
    called.set_value();
  });
  called.get_future().get();
  const double calling = Seconds(SystemClock().Now() - before);
  auto [trouble, seconds] =
      OnStrand(strand, [&] { return std::pair(clients.trouble(), clients.call_seconds()); });
  std::sort(seconds.begin(), seconds.end());
  std::printf(
      "{\"agents\": %u, \"members\": %u, \"register_seconds\": %.3f, \"held_seconds\": %u, "
      "\"calls\": %zu, \"calls_per_second\": %.0f, \"call_min_ms\": %.3f, "
      "\"call_p50_ms\": %.3f, \"call_p99_ms\": %.3f, \"call_max_ms\": %.3f, "
      "\"sessions_lost\": %llu, \"calls_failed\": %llu, \"evictions\": %llu}\n",
      shape.agents, shape.agents * shape.ranks, opening, hold, seconds.size(),
      calls_for == 0 ? 0 : static_cast<double>(seconds.size()) / calling,
      1e3 * static_cast<double>(Quantile(seconds, 0)),
      1e3 * static_cast<double>(Quantile(seconds, 0.5)),
      1e3 * static_cast<double>(Quantile(seconds, 0.99)),
      1e3 * static_cast<double>(Quantile(seconds, 1)),
      static_cast<unsigned long long>(trouble.sessions_lost),
      static_cast<unsigned long long>(trouble.calls_failed),
      static_cast<unsigned long long>(trouble.evictions));
  std::fflush(stdout);
  // The driver looks at the coordinator while everybody is still there, then closes our stdin.
  while (std::getchar() != EOF) {
  }
  if (!trouble.first.empty()) std::fprintf(stderr, "load_bench: %s\n", trouble.first.c_str());
  return trouble.first.empty() ? 0 : 1;
}

}  // namespace
}  // namespace weightwire::load

int main(int argc, char** argv) {
  CLI::App app(
      "Thousands of members of one coordinator: `./dev bench control` runs it and looks at the "
      "coordinator");
  weightwire::load::Shape shape;
  uint32_t hold = 10, calls_for = 5, in_flight = 64;
  app.add_option("--coordinator", shape.coordinator, "HOST:PORT")->required();
  app.add_option("--tls-cert", shape.tls.cert, "of all agents (PEM); none: plaintext");
  app.add_option("--tls-key", shape.tls.key, "its key");
  app.add_option("--tls-ca", shape.tls.ca, "of the coordinator");
  app.add_option("--agents", shape.agents, "sessions, each on its own connection")
      ->capture_default_str();
  app.add_option("--ranks", shape.ranks, "members behind each agent")->capture_default_str();
  app.add_option("--hold", hold, "seconds of heartbeats and nothing else")->capture_default_str();
  app.add_option("--calls", calls_for, "seconds of unary calls afterwards")->capture_default_str();
  app.add_option("--in-flight", in_flight, "calls at a time")->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  return weightwire::load::Run(shape, hold, calls_for, in_flight);
}
