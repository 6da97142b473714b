// Epochs of a large fleet that moves no byte: what the coordinator and the messages take. Prints
// "ready" when everyone is registered; then publishes `--epochs` versions, one after another, each
// when a line comes on stdin, and prints the seconds from the call until the trainer is released.
// Ends with stdin; exits 1 at the first thing that is not as it should be.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <future>
#include <iostream>
#include <string>

#include "bench/load/stand_in.h"
#include "server/base/clock.h"

namespace weightwire::load {
namespace {

int Run(const std::string& coordinator, uint32_t engines, uint32_t ranks) {
  ThreadExecutor strand("load", 1);
  std::vector<std::unique_ptr<StandIn>> fleet;
  for (uint32_t i = 0; i <= engines; ++i) {
    const auto role = i == 0 ? control::GroupRole::kTrainer : control::GroupRole::kEngine;
    fleet.push_back(std::make_unique<StandIn>(coordinator, strand, role,
                                              i == 0 ? "trainer" : "engine-" + std::to_string(i),
                                              ranks, i + 1));
  }
  std::promise<void> ready;
  size_t open = fleet.size();
  strand.Post([&] {
    for (const auto& each : fleet) {
      each->Open([&] {
        if (--open == 0) ready.set_value();
      });
    }
  });
  ready.get_future().get();
  std::printf("ready\n");
  std::fflush(stdout);
  uint64_t version = 0;
  for (std::string line; std::getline(std::cin, line);) {
    std::promise<Status> released;
    const Nanos start = SystemClock().Now();
    strand.Post([&, number = Version{++version}] {
      fleet[0]->Publish(number, [&](Status why) { released.set_value(std::move(why)); });
    });
    if (const Status why = released.get_future().get(); !why.ok()) return 1;
    std::printf("%.6f\n", std::chrono::duration<double>(SystemClock().Now() - start).count());
    std::fflush(stdout);
  }
  std::promise<void> gone;
  strand.Post([&] {
    fleet.clear();
    gone.set_value();
  });
  gone.get_future().get();
  return 0;
}

}  // namespace
}  // namespace weightwire::load

int main(int argc, char** argv) {
  CLI::App app(
      "Epochs of a large fleet that moves no byte: `./dev bench control --epochs N` runs it");
  std::string coordinator;
  uint32_t engines = 124, ranks = 8;
  app.add_option("--coordinator", coordinator, "HOST:PORT")->required();
  app.add_option("--engines", engines, "beside the trainer")->capture_default_str();
  app.add_option("--ranks", ranks, "of the trainer and of each engine")->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  return weightwire::load::Run(coordinator, engines, ranks);
}
