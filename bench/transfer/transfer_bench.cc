// Moves a model of 988 MB from four source ranks (TP2 × PP2, one process) to one target rank in
// another process, over shm and over tcp, with all sums checked; and, in turns with it, one
// thread's memcpy, raw sockets over the same bytes, and the same transfers without sums. Prints a
// line for each round and ratios at the end: the machine may be busy, so only figures of one run
// are comparable.
//
//   transfer_bench [rounds=7] [source_workers=1] [target_workers=2] [slot_kib=8192]
//                  [mapped_window=64] [window=8] [chunk_kib=4096] [segment_kib=1024] [gets=16]
//                  [near_chunk_kib=2048] [near_gets=4]
//                  [integrity=1]  (of tcp; 2: a MAC of each frame, 3: TLS)
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <functional>
#include <future>
#include <map>
#include <string>

#include "bench/transfer/baselines.h"
#include "bench/transfer/small_model.h"
#include "bench/transfer/unsummed.h"
#include "server/base/thread_executor.h"
#include "server/transfer/transfer.h"
#include "server/transport/shm/shm_transport.h"
#include "server/transport/tcp/tcp_transport.h"
#include "tests/support/tls_for_tests.h"

namespace weightwire::bench {
namespace {

constexpr Incarnation kSourceSelf(1), kTargetSelf(2);
constexpr ParticipantId kTarget(100);
const Ticket kTicket = {1};

struct Arguments {
  int rounds = 7;
  int source_workers = 1;
  int target_workers = 2;
  transport::Integrity integrity = transport::Integrity::kCrc;
  transfer::Tuning tuning;
};

// Of all threads of this process: on a busy machine it says more than the wall clock.
double CpuSeconds() {
  timespec now{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

class Agent {
 public:
  Agent(Incarnation self, int workers, const Arguments& arguments)
      : strand_("strand", 1), workers_("worker", workers) {
    shm_ = transport::MakeShmTransport({});
    transport::TcpOptions tcp;
    tcp.integrity = arguments.integrity;
    tcp.tls_peers = testing::TlsPeersFor(arguments.integrity);
    tcp_ = transport::MakeTcpTransport(tcp);
    transfer::Options options;
    options.tuning = arguments.tuning;
    options.host = "here";
    options.self = self;
    engine_ = transfer::Engine::Make(options, SystemClock(), strand_, workers_,
                                     {shm_.get(), tcp_.get()}, metrics::Null())
                  .value();
  }
  ~Agent() {
    std::promise<void> shut;
    strand_.Post([&] { engine_->Shutdown([&] { shut.set_value(); }); });
    shut.get_future().wait();
    shm_.reset();
    tcp_.reset();
    workers_.Stop();
    strand_.Stop();
  }
  std::string shm_address() const { return shm_->address(); }
  std::string tcp_address() const { return tcp_->address(); }
  transfer::Engine& engine() { return *engine_; }
  // Runs `call(done)` on the strand and waits until `done` is called.
  template <typename T, typename Call>
  T Await(Call call) {
    std::promise<T> promise;
    strand_.Post([&] { call([&](T value) { promise.set_value(std::move(value)); }); });
    return promise.get_future().get();
  }

 private:
  ThreadExecutor strand_;
  ThreadExecutor workers_;
  std::unique_ptr<transport::Transport> shm_;
  std::unique_ptr<transport::Transport> tcp_;
  std::unique_ptr<transfer::Engine> engine_;
};

// Parent and child talk over two pipes, in fixed records.
struct Order {
  uint64_t epoch = 0;  ///< 0: end
  bool shm = false;
  bool check = false;
  bool sums = true;
};
struct Answer {
  int64_t wrong_elements = 0;
  double cpu_seconds = 0;
  bool ok = false;
};
struct Addresses {
  char shm[128] = {};
  char tcp[128] = {};
};
template <typename T>
void WriteTo(int fd, const T& value) {
  WW_CHECK(write(fd, &value, sizeof(value)) == sizeof(value));
}
template <typename T>
T ReadFrom(int fd) {
  T value;
  WW_CHECK(read(fd, &value, sizeof(value)) == sizeof(value));
  return value;
}

void RunTarget(const Arguments& arguments, int in, int out) {
  const SmallModel model = MakeSmallModel();
  const transfer::Binding binding = Allocate("target", model.target_tensor_bytes);
  Agent agent(kTargetSelf, arguments.target_workers, arguments);
  const auto addresses = ReadFrom<Addresses>(in);
  const auto slice =
      std::make_shared<plan::RankSlice>(plan::SliceOf(model.plan, plan::Side::kTarget, 0));
  WriteTo(out, Answer{});
  for (auto order = ReadFrom<Order>(in); order.epoch != 0; order = ReadFrom<Order>(in)) {
    transfer::TargetJob job;
    job.epoch = Epoch(order.epoch);
    job.participant = kTarget;
    job.name = "engine/0";
    job.slice = slice;
    job.binding = binding;
    transfer::Peer peer;
    peer.incarnation = kSourceSelf;
    peer.host = "here";
    peer.ticket = kTicket;
    const std::string name = order.shm ? "shm" : "tcp";
    peer.addresses = {{name, order.shm ? addresses.shm : addresses.tcp}};
    for (uint32_t rank = 0; rank < kSourceRanks; ++rank) {
      job.sources.emplace(rank, peer);
      job.source_participants.emplace(rank, ParticipantId(1 + rank));
    }
    SetSums(order.sums);
    const double cpu = CpuSeconds();
    const auto result = agent.Await<Result<transfer::TargetReport>>(
        [&](auto done) { agent.engine().StartTarget(job, done); });
    if (!result.has_value()) std::fprintf(stderr, "%s\n", result.error().ToString().c_str());
    Answer answer;
    answer.ok = result.has_value();
    answer.cpu_seconds = CpuSeconds() - cpu;
    WriteTo(out, answer);
    if (!order.check) continue;
    answer.wrong_elements = CheckTarget(model, binding);
    for (const auto& span : binding) std::memset(span.data(), 0, span.bytes);
    WriteTo(out, answer);
  }
}

class Source {
 public:
  Source(const Arguments& arguments, const SmallModel& model, int in, int out)
      : in_(in), out_(out), agent_(kSourceSelf, arguments.source_workers, arguments) {
    for (uint32_t rank = 0; rank < kSourceRanks; ++rank) {
      slices_.push_back(
          std::make_shared<plan::RankSlice>(plan::SliceOf(model.plan, plan::Side::kSource, rank)));
      bindings_.push_back(Allocate("source", model.source_tensor_bytes[rank]));
      FillSource(model, rank, bindings_[rank]);
    }
    agent_.engine().AdmitTicket(kTicket, kTargetSelf);
    Addresses addresses;
    std::strncpy(addresses.shm, agent_.shm_address().c_str(), sizeof(addresses.shm) - 1);
    std::strncpy(addresses.tcp, agent_.tcp_address().c_str(), sizeof(addresses.tcp) - 1);
    WriteTo(out_, addresses);
    ReadFrom<Answer>(in_);
  }

  struct Cost {
    double seconds = 0;  ///< from the start until the target has verified everything
    double source_cpu = 0;
    double target_cpu = 0;
  };
  Cost Run(bool shm, bool check, bool sums = true) {
    SetSums(sums);
    const double cpu = CpuSeconds();
    const auto start = std::chrono::steady_clock::now();
    WriteTo(out_, Order{++epoch_, shm, check, sums});
    const bool ok = agent_.Await<bool>([&](auto done) { StartAll(done); });
    const auto answer = ReadFrom<Answer>(in_);
    WW_CHECK(answer.ok && ok);
    Cost cost;
    cost.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    cost.source_cpu = CpuSeconds() - cpu;
    cost.target_cpu = answer.cpu_seconds;
    if (check) WW_CHECK(ReadFrom<Answer>(in_).wrong_elements == 0);
    return cost;
  }
  void End() { WriteTo(out_, Order{}); }

 private:
  void StartAll(const std::function<void(bool)>& done) {
    auto left = std::make_shared<uint32_t>(kSourceRanks);
    auto all = std::make_shared<bool>(true);
    for (uint32_t rank = 0; rank < kSourceRanks; ++rank) {
      transfer::SourceJob job;
      job.epoch = Epoch(epoch_);
      job.participant = ParticipantId(1 + rank);
      job.assignments = {{slices_[rank], 1}};
      job.binding = bindings_[rank];
      agent_.engine().StartSource(job, [left, all, done](Result<transfer::SourceReport> report) {
        *all = *all && report.has_value();
        if (--*left == 0) done(*all);
      });
    }
  }

  int in_, out_;
  Agent agent_;
  std::vector<std::shared_ptr<plan::RankSlice>> slices_;
  std::vector<transfer::Binding> bindings_;
  uint64_t epoch_ = 0;
};

double Median(std::vector<double> values) {
  std::ranges::sort(values);
  return values[values.size() / 2];
}
double Least(const std::vector<double>& values) { return *std::ranges::min_element(values); }

void Run(const Arguments& arguments) {
  const SmallModel model = MakeSmallModel();
  const auto bytes = static_cast<uint64_t>(model.plan.bytes_total);
  RawSockets raw(4, bytes);
  int to_child[2], to_parent[2];
  WW_CHECK(pipe(to_child) == 0 && pipe(to_parent) == 0);
  const int child = fork();
  WW_CHECK(child >= 0);
  if (child == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    RunTarget(arguments, to_child[0], to_parent[1]);
    _exit(0);
  }
  const auto from = memory::MemoryRegion::Allocate("from", bytes).value();
  const auto to = memory::MemoryRegion::Allocate("to", bytes).value();
  {
    Source source(arguments, model, to_parent[0], to_child[1]);
    std::printf("%zu tensors, %.1f MB\n", model.target_tensor_bytes.size(),
                static_cast<double>(bytes) / 1e6);
    const double first_shm = source.Run(true, true).seconds;
    const double first_tcp = source.Run(false, true).seconds;
    std::printf("first: shm %.3f s, tcp %.3f s; bytes checked\n", first_shm, first_tcp);
    std::vector<double> copy, copy_cpus, shm, shm_cpus, raw_tcp, tcp, bare_shm, bare_tcp;
    for (int round = 0; round < arguments.rounds; ++round) {
      const double copy_cpu = -CpuSeconds();
      copy.push_back(MemcpySeconds(to->data(), from->data(), bytes));
      copy_cpus.push_back(copy_cpu + CpuSeconds());
      const Source::Cost mapped = source.Run(true, false);
      shm.push_back(mapped.seconds);
      shm_cpus.push_back(mapped.source_cpu + mapped.target_cpu);
      raw_tcp.push_back(raw.SendSeconds(from->data()));
      const Source::Cost fetched = source.Run(false, false);
      tcp.push_back(fetched.seconds);
      std::printf(
          "%2d: memcpy %.3f s | shm %.3f s (%.2f), cpu %.3f + %.3f | raw sockets %.3f s | tcp "
          "%.3f s (%.2f), cpu %.3f + %.3f\n",
          round, copy.back(), shm.back(), shm.back() / copy.back(), mapped.source_cpu,
          mapped.target_cpu, raw_tcp.back(), tcp.back(), tcp.back() / raw_tcp.back(),
          fetched.source_cpu, fetched.target_cpu);
      bare_shm.push_back(source.Run(true, false, false).seconds);
      bare_tcp.push_back(source.Run(false, false, false).seconds);
    }
    std::printf("shm / memcpy      median %.2f, least %.2f\n", Median(shm) / Median(copy),
                Least(shm) / Least(copy));
    std::printf("shm / memcpy in cpu time, both processes: median %.2f, least %.2f\n",
                Median(shm_cpus) / Median(copy_cpus), Least(shm_cpus) / Least(copy_cpus));
    std::printf("tcp / raw sockets median %.2f, least %.2f\n", Median(tcp) / Median(raw_tcp),
                Least(tcp) / Least(raw_tcp));
    std::printf(
        "with sums / without: shm %.3f s / %.3f s = %.2f, tcp %.3f s / %.3f s = %.2f (medians)\n",
        Median(shm), Median(bare_shm), Median(shm) / Median(bare_shm), Median(tcp),
        Median(bare_tcp), Median(tcp) / Median(bare_tcp));
    source.Run(true, true);
    source.Run(false, true);
    std::printf("bytes checked again\n");
    source.End();
  }
  waitpid(child, nullptr, 0);
}

// False when it is not understood.
bool Parse(const std::string& argument, Arguments* out) {
  const size_t equals = argument.find('=');
  if (equals == std::string::npos) return false;
  const long value = std::atol(argument.c_str() + equals + 1);
  const std::string name = argument.substr(0, equals);
  transfer::Tuning& tuning = out->tuning;
  const std::map<std::string, std::function<void()>> known = {
      {"rounds", [&] { out->rounds = static_cast<int>(value); }},
      {"source_workers", [&] { out->source_workers = static_cast<int>(value); }},
      {"target_workers", [&] { out->target_workers = static_cast<int>(value); }},
      {"integrity", [&] { out->integrity = static_cast<transport::Integrity>(value); }},
      {"slot_kib", [&] { tuning.slot_bytes = value << 10; }},
      {"mapped_window", [&] { tuning.mapped_window = static_cast<uint32_t>(value); }},
      {"window", [&] { tuning.window = static_cast<uint32_t>(value); }},
      {"chunk_kib", [&] { tuning.chunk_bytes = value << 10; }},
      {"segment_kib", [&] { tuning.segment_bytes_max = value << 10; }},
      {"gets", [&] { tuning.gets_in_flight = static_cast<uint32_t>(value); }},
      {"near_chunk_kib", [&] { tuning.near_chunk_bytes = value << 10; }},
      {"near_gets", [&] { tuning.near_gets_in_flight = static_cast<uint32_t>(value); }},
  };
  auto entry = known.find(name);
  if (entry == known.end()) return false;
  entry->second();
  return true;
}

}  // namespace
}  // namespace weightwire::bench

int main(int argc, char** argv) {
  weightwire::bench::Arguments arguments;
  for (int i = 1; i < argc; ++i) {
    if (weightwire::bench::Parse(argv[i], &arguments)) continue;
    std::fprintf(stderr, "not understood: %s\n", argv[i]);
    return 2;
  }
  weightwire::bench::Run(arguments);
  return 0;
}
