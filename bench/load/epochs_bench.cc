// Epochs of a large fleet that moves no byte: what the coordinator and the messages take. Prints
// "ready" and how many seconds it took when everyone is registered; then publishes a version for
// each line that comes on stdin, and prints the seconds from the call until the trainer is
// released. Ends with stdin; exits 1 at the first thing that is not as it should be.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <iostream>
#include <string>

#include "bench/load/fake_members.h"
#include "server/rpc/coordinator_client.h"

namespace weightwire::load {
namespace {

int Run(const std::string& coordinator, uint32_t engines, uint32_t ranks) {
  ThreadExecutor strand("load", 1);
  const auto connect = [&] {
    rpc::CoordinatorClientOptions options;
    options.addresses = {coordinator};
    options.call_deadline = std::chrono::seconds(60);
    return rpc::MakeGrpcCoordinatorClient(std::move(options), strand);
  };
  FakeMembers fleet(connect, strand, engines, ranks);
  std::printf("ready %.6f\n", fleet.Open());
  std::fflush(stdout);
  for (std::string line; std::getline(std::cin, line);) {
    const auto released = fleet.Publish();
    if (!released) return 1;
    std::printf("%.6f\n", *released);
    std::fflush(stdout);
  }
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
