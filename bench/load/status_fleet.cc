// A coordinator as weightwired runs it, with its gRPC and HTTP, and a fleet of stand-ins in the
// same process, without sockets: for what people and programs ask of a job that is larger than one
// machine has connections for. Publishes the versions, prints "ready GRPC HTTP" and serves until
// stdin ends.
#include <CLI/CLI.hpp>
#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/io_context.hpp>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <string>
#include <thread>

#include "bench/load/epoch_ends.h"
#include "bench/load/fake_members.h"
#include "server/base/strand_call.h"
#include "server/daemon/coordinator_role.h"
#include "server/daemon/http_pages.h"
#include "server/daemon/logging.h"
#include "server/metrics/prometheus_sink.h"
#include "server/rpc/local_coordinator_port.h"

namespace weightwire::load {
namespace {

/// Leases are long, so that nobody's beats are what is measured.
daemon::Config ConfigFor(std::string state_dir, uint32_t engines, uint32_t ranks) {
  daemon::Config config;
  config.role = daemon::Role::kCoordinator;
  config.listen = config.http = "127.0.0.1:0";
  config.state_dir = std::move(state_dir);
  config.log_level = "warn";
  config.heartbeat_ms = 30'000;
  config.lease_ms = 600'000;
  config.prepare_deadline_ms = config.transfer_deadline_ms = config.commit_deadline_ms = 300'000;
  config.min_engines = engines;
  config.members_max = 2 * (engines + 1) * ranks;
  return config;
}

[[noreturn]] void Die(const Status& why) {
  std::fprintf(stderr, "status_fleet: %s\n", why.ToString().c_str());
  std::_Exit(1);
}

/// The event loop of the listeners.
class Loop {
 public:
  ~Loop() { Stop(); }
  /// Before what it serves is taken down.
  void Stop() {
    io_.stop();
    if (thread_.joinable()) thread_.join();
  }
  boost::asio::io_context& io() { return io_; }

 private:
  boost::asio::io_context io_{1};
  boost::asio::executor_work_guard<boost::asio::io_context::executor_type> stays_{
      io_.get_executor()};
  std::thread thread_{[this] { io_.run(); }};
};

int Run(const daemon::Config& config, uint32_t engines, uint32_t ranks, uint32_t epochs) {
  daemon::StartLogging(config);
  EpochEnds ends;
  metrics::PrometheusSink metrics;
  ThreadExecutor workers("workers", 1), clients("clients", 1);
  Loop loop;
  const daemon::Host host{loop.io(), workers, SystemClock(), ends, std::nullopt};
  auto role = daemon::CoordinatorRole::Start(config, host, nullptr);
  if (!role) Die(role.error());
  auto windows = std::make_shared<std::vector<daemon::Window>>();
  windows->push_back((*role)->window());
  const auto http = daemon::HttpServer::Make(
      loop.io(),
      daemon::Pages({windows, true, workers, metrics, config, [] { return OkStatus(); }}), nullptr);
  auto listener = rpc::Acceptor::ListenTcp(
      loop.io(), config.http, ends,
      [&](memory::UniqueFd connection) { http->Serve(std::move(connection)); });
  if (!listener) Die(listener.error());

  coordinator::Coordinator& coordinator = (*role)->coordinator();
  const auto connect = [&] {
    return rpc::MakeLocalCoordinatorPort(coordinator, (*role)->strand(), clients);
  };
  auto fleet = std::make_unique<FakeMembers>(connect, clients, engines, ranks);
  fleet->Open();
  for (uint32_t version = 1; version <= epochs; ++version) {
    if (auto released = fleet->Publish(); !released) Die(released.error());
    ends.Await(version);
    const auto newest =
        OnStrand((*role)->strand(), [&] { return coordinator.Describe(Epoch{})->status; });
    if (newest.phase != epoch::Phase::kCommitted) Die(newest.why);
  }
  std::printf("ready %s %s\n", (*role)->address().c_str(), (*listener)->address().c_str());
  std::fflush(stdout);
  for (std::string line; std::getline(std::cin, line);) {
  }
  fleet.reset();
  loop.Stop();
  (*role)->Stop();
  return 0;
}

}  // namespace
}  // namespace weightwire::load

int main(int argc, char** argv) {
  CLI::App app("A coordinator, with its pages, of a fleet in one process");
  std::string state_dir;
  uint32_t engines = 10'000, ranks = 1, epochs = 210;
  app.add_option("--state-dir", state_dir, "of the coordinator")->required();
  app.add_option("--engines", engines, "beside the trainer")->capture_default_str();
  app.add_option("--ranks", ranks, "of the trainer and of each engine")->capture_default_str();
  app.add_option("--epochs", epochs, "that are committed first")->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  return weightwire::load::Run(weightwire::load::ConfigFor(state_dir, engines, ranks), engines,
                               ranks, epochs);
}
