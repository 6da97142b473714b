// A coordinator and a fleet of stand-ins in one process, without sockets: what the pure coordinator
// takes for more members than one machine has connections for. Prints one line of JSON.
#include <malloc.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <ctime>
#include <string>

#include "bench/load/epoch_ends.h"
#include "bench/load/fake_members.h"
#include "server/base/clock.h"
#include "server/base/strand_call.h"
#include "server/coordinator/coordinator.h"
#include "server/metrics/metrics.h"
#include "server/rpc/local_coordinator_port.h"
#include "server/rpc/random.h"
#include "server/rpc/status_message.h"
#include "server/store/sqlite_journal.h"

namespace weightwire::load {
namespace {

double Since(Nanos start) {
  return std::chrono::duration<double>(SystemClock().Now() - start).count();
}

/// Of the thread that asks.
double ProcessorSeconds() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

/// What the process has allocated.
int64_t HeapBytes() {
  const struct mallinfo2 all = mallinfo2();
  return static_cast<int64_t>(all.uordblks + all.hblkhd);
}

/// Leases are long, so that nobody's beats are what is measured.
coordinator::Options OptionsFor(uint32_t engines, uint32_t ranks) {
  coordinator::Options options;
  options.heartbeat = std::chrono::seconds(30);
  options.lease = std::chrono::seconds(600);
  options.prepare_deadline = options.commit_deadline = std::chrono::seconds(300);
  options.transfer_deadline = std::chrono::seconds(300);
  options.min_engines = engines;
  options.members_max = 2 * (engines + 1) * ranks;
  options.random_ticket = [] {
    Ticket ticket;
    rpc::RandomBytes(ticket.data(), ticket.size());
    return ticket;
  };
  return options;
}

class Bench {
 public:
  Bench(std::string journal, uint32_t engines, uint32_t ranks)
      : path_(std::move(journal)), options_(OptionsFor(engines, ranks)) {
    Start();
  }
  ~Bench() {
    OnStrand(strand_, [this] { coordinator_.reset(); });
    journal_.reset();
  }

  std::unique_ptr<control::CoordinatorPort> Connect() {
    return rpc::MakeLocalCoordinatorPort(*coordinator_, strand_, clients_);
  }
  ThreadExecutor& clients() { return clients_; }

  double StrandSeconds() { return OnStrand(strand_, ProcessorSeconds); }

  /// The end of so many epochs in all.
  void Await(uint32_t count) { ends_.Await(count); }
  /// It must have been committed.
  coordinator::EpochStatus Newest() {
    coordinator::EpochStatus newest =
        OnStrand(strand_, [this] { return coordinator_->Describe(Epoch{})->status; });
    if (newest.phase != epoch::Phase::kCommitted) Die(newest.why);
    return newest;
  }

  /// As `wwctl status` asks for it, until its bytes lie there; and so many they are.
  std::pair<double, size_t> Status() {
    v1::StatusRequest request;
    request.set_epochs_max(5);
    request.set_engine_runs(true);
    request.set_no_participants(true);
    const Nanos start = SystemClock().Now();
    const std::string bytes = OnStrand(strand_, [&] {
      const coordinator::StatusSnapshot snapshot = coordinator_->Snapshot(rpc::QueryOf(request));
      return rpc::StatusMessageOf(snapshot, rpc::FormOf(request)).SerializeAsString();
    });
    return {Since(start), bytes.size()};
  }

  /// What it gives back.
  int64_t Drop() {
    OnStrand(strand_, [] {});
    const int64_t before = HeapBytes();
    OnStrand(strand_, [this] { coordinator_.reset(); });
    return before - HeapBytes();
  }

  /// Another one on the same journal, in seconds.
  double Recover() {
    journal_.reset();
    const Nanos start = SystemClock().Now();
    Start();
    return Since(start);
  }

 private:
  void Start() {
    auto journal = store::SqliteJournal::Open(path_, strand_, ends_);
    if (!journal) return Die(journal.error());
    journal_ = std::move(*journal);
    auto made = OnStrand(strand_, [this] {
      return coordinator::Coordinator::Make(options_, clock_, strand_, workers_, *journal_, ends_);
    });
    if (!made) return Die(made.error());
    coordinator_ = std::move(*made);
  }
  static void Die(const weightwire::Status& why) {
    std::fprintf(stderr, "scale_bench: %s\n", why.ToString().c_str());
    std::exit(1);
  }

  const std::string path_;
  const coordinator::Options options_;
  EpochEnds ends_;
  Clock& clock_ = SystemClock();
  ThreadExecutor workers_{"workers", 1};
  ThreadExecutor clients_{"clients", 1};
  ThreadExecutor strand_{"coordinator", 1};
  std::unique_ptr<coordinator::Journal> journal_;
  std::unique_ptr<coordinator::Coordinator> coordinator_;
};

struct Figures {
  double least, median, most;
  explicit Figures(std::vector<double> values) {
    std::ranges::sort(values);
    least = values.front();
    median = values[values.size() / 2];
    most = values.back();
  }
};

int Run(const std::string& journal, uint32_t engines, uint32_t ranks, uint32_t epochs) {
  Bench bench(journal, engines, ranks);
  const double before = bench.StrandSeconds();
  auto fleet = std::make_unique<FakeMembers>([&] { return bench.Connect(); }, bench.clients(),
                                             engines, ranks);
  const double registration = fleet->Open();
  const double registration_cpu = bench.StrandSeconds() - before;
  std::vector<double> processor, commits, totals;
  for (uint32_t version = 1; version <= epochs + 2; ++version) {
    if (version == epochs + 2) fleet->CountBytes();
    const double start = bench.StrandSeconds();
    if (auto released = fleet->Publish(); !released) return 1;
    bench.Await(version);
    const double took = bench.StrandSeconds() - start;
    const coordinator::EpochStatus epoch = bench.Newest();
    if (version == 1 || version == epochs + 2) continue;
    commits.push_back(epoch.commit_seconds);
    totals.push_back(epoch.total_seconds);
    processor.push_back(took);
  }
  const auto [status, status_bytes] = bench.Status();
  const int64_t egress = fleet->bytes();
  fleet.reset();
  const auto members = static_cast<double>(engines + 1) * ranks;
  const double heap = static_cast<double>(bench.Drop()) / members;
  const double recovery = bench.Recover();
  const Figures commit(commits), total(totals), strand(processor);
  std::printf(
      "{\"registration_seconds\": %.3f, \"registration_strand_cpu_seconds\": %.3f, "
      "\"commit_overhead_seconds\": %.4f, \"commit_min\": %.4f, \"commit_max\": %.4f, "
      "\"epoch_seconds\": %.3f, \"strand_cpu_seconds\": %.4f, \"strand_cpu_max\": %.4f, "
      "\"rss_bytes_per_member\": %.0f, \"status_seconds\": %.4f, \"status_bytes\": %zu, "
      "\"coordinator_egress_bytes\": %lld, \"journal_recovery_seconds\": %.4f}\n",
      registration, registration_cpu, commit.median, commit.least, commit.most, total.median,
      strand.median, strand.most, heap, status, status_bytes, static_cast<long long>(egress),
      recovery);
  return 0;
}

}  // namespace
}  // namespace weightwire::load

int main(int argc, char** argv) {
  CLI::App app(
      "A coordinator and a fleet in one process, without sockets: `./dev bench scale` runs it");
  std::string journal;
  uint32_t engines = 1'000, ranks = 8, epochs = 3;
  app.add_option("--journal", journal, "file, which must not be there yet")->required();
  app.add_option("--engines", engines, "beside the trainer")->capture_default_str();
  app.add_option("--ranks", ranks, "of the trainer and of each engine")->capture_default_str();
  app.add_option("--epochs", epochs, "that are timed")->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  return weightwire::load::Run(journal, engines, ranks, epochs);
}
