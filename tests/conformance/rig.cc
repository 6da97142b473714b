#include "tests/conformance/rig.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstdlib>
#include <iostream>
#include <utility>

#include "server/transport/cuda_ipc/cuda_ipc_transport.h"
#include "server/transport/shm/shm_transport.h"
#include "server/transport/ucx/ucx_transport.h"
#include "tests/conformance/fake_nccl_transport.h"
#include "tests/conformance/gpu_side.h"
#include "tests/conformance/pattern.h"
#include "tests/support/fake_cuda/fake_gpus.h"
#include "tests/support/tls_for_tests.h"

namespace weightwire::conformance {
namespace {

constexpr auto kDeadline = 30s;

std::vector<size_t> RandomCuts(size_t bytes, size_t count, std::mt19937_64& random) {
  std::vector<size_t> cuts = {0, bytes};
  while (cuts.size() < count + 1) cuts.push_back(random() % (bytes + 1));
  std::sort(cuts.begin(), cuts.end());
  return cuts;
}

/// The limits that all real transports have.
template <typename Options>
Options OptionsOf(const Limits& limits) {
  Options options;
  options.handshake_timeout = limits.handshake_timeout;
  options.inbound_handshakes_max = limits.inbound_handshakes_max;
  options.inbound_sessions_max = limits.inbound_sessions_max;
  options.metrics = limits.metrics;
  options.chunk_bytes_max = limits.chunk_bytes_max;
  options.gets_in_flight_max = limits.gets_in_flight_max;
  options.notifies_queued_max = limits.notifies_queued_max;
  return options;
}

transport::TcpOptions TcpOptionsOf(const Limits& limits) {
  auto options = OptionsOf<transport::TcpOptions>(limits);
  options.handshake_grace = limits.handshake_grace;
  return options;
}

}  // namespace

void PrintTo(const Kind& kind, std::ostream* out) { *out << kind.name; }

bool UcxSurvivesTcp() {
  void* ucp = dlopen("libucp.so.0", RTLD_NOW | RTLD_LOCAL);
  if (ucp == nullptr) return false;
  using Version = void (*)(unsigned* major, unsigned* minor, unsigned* release);
  const auto version = reinterpret_cast<Version>(dlsym(ucp, "ucp_get_version"));
  unsigned number[3] = {};
  version(&number[0], &number[1], &number[2]);
  return std::pair(number[0], number[1]) >= std::pair(1u, 22u);
}

std::vector<Kind> UcxKinds() {
#ifdef WEIGHTWIRE_UCX
  std::vector<Kind> kinds = {{"ucx", "ucx", 1, "tcp,posix,cma"}};
  if (UcxSurvivesTcp()) kinds.push_back({"ucx_tcp", "ucx", 1, "tcp"});
  return kinds;
#else
  return {};
#endif
}

std::vector<Kind> RealKinds() {
  std::vector<Kind> kinds = {{"shm", "shm", 1},
                             {"cuda_ipc", "cuda_ipc", 1},
                             {"tcp1", "tcp", 1},
                             {"tcp4", "tcp", 4},
                             {"tcp4_mac", "tcp", 4, {}, transport::Integrity::kMac},
                             {"tcp4_tls", "tcp", 4, {}, transport::Integrity::kTls}};
  for (const Kind& kind : UcxKinds()) kinds.push_back(kind);
  Kind gpu{"nccl_gpu", "nccl", 1};
  gpu.gpu = true;
  kinds.insert(kinds.end(), {{"nccl", "nccl", 1}, gpu});
  return kinds;
}

std::vector<Kind> AllKinds() {
  std::vector<Kind> kinds = RealKinds();
  Kind gpu{"fake_gpu", "fake", 1};
  gpu.gpu = true;
  kinds.insert(kinds.begin(), {{"fake", "fake", 1}, gpu});
  return kinds;
}

Ticket TheTicket() {
  Ticket ticket;
  for (size_t i = 0; i < ticket.size(); ++i) ticket[i] = static_cast<uint8_t>(7 * i + 1);
  return ticket;
}

Result<Ticket> Recorder::OnHello(const transport::CallerHello& said) {
  rig_.Update([&] {
    hellos.push_back(said);
    threads.insert(std::this_thread::get_id());
  });
  if (NameIn(said) == transport::NameOf(TheTicket())) return TheTicket();
  return Fail(Code::kUnauthenticated, Reason::kTicketRejected, "no such ticket");
}

void Recorder::OnAccepted(std::shared_ptr<Endpoint> endpoint) {
  rig_.Update([&] { accepted.push_back(std::move(endpoint)); });
}

void Recorder::OnNotify(const std::shared_ptr<Endpoint>& endpoint,
                        std::span<const std::byte> message) {
  rig_.Update([&] {
    notifies.emplace_back(reinterpret_cast<const char*>(message.data()), message.size());
    threads.insert(std::this_thread::get_id());
  });
  if (after_notify) after_notify(endpoint);
}

void Recorder::OnClosed(const std::shared_ptr<Endpoint>& endpoint, const Status& why) {
  rig_.Update([&] {
    closed[endpoint->id()] = why;
    ++closed_calls[endpoint->id()];
    threads.insert(std::this_thread::get_id());
  });
}

Rig::Rig(Kind kind) : kind_(std::move(kind)), network_(sim_, sim_, Seed()) {
  if (is_fake()) network_.SetDefaultLink({.latency = 1ms, .get_jitter_max = 3ms});
}

Rig::~Rig() {
  // What callbacks still hold may refer to the test's locals only through their own shared state.
  if (is_fake()) sim_.RunUntilIdle();
}

std::unique_ptr<Side> Rig::MakeSide(Limits limits) {
  const uint64_t number = ++sides_made_;
  auto side = std::make_unique<Side>(*this, Incarnation(1000 + number));
  if (kind_.backend == "fake") {
    transport::FakeOptions options{.map = !kind_.gpu};
    options.gets_device_memory = options.flush_device_writes = kind_.gpu;
    if (kind_.gpu) options.write_device = WriteLate;
    options.chunk_bytes_max = limits.chunk_bytes_max;
    options.gets_in_flight_max = limits.gets_in_flight_max;
    options.notifies_queued_max = limits.notifies_queued_max;
    side->transport = network_.MakeTransport("node-" + std::to_string(number), options);
    if (kind_.gpu) side->transport = ExportsFromGpu(std::move(side->transport));
  } else if (kind_.backend == "tcp") {
    transport::TcpOptions options = TcpOptionsOf(limits);
    options.connections = options.near_connections = kind_.connections;
    options.integrity = kind_.integrity;
    options.tls_peers = testing::TlsPeersFor(kind_.integrity);
    side->transport = transport::MakeTcpTransport(options);
  } else if (kind_.backend == "nccl") {
    side->transport = MakeFakeNccl(TcpOptionsOf(limits), number % 2);
    if (kind_.gpu) side->transport = ExportsFromGpu(std::move(side->transport));
  } else if (kind_.backend == "ucx") {
    auto options = OptionsOf<transport::UcxOptions>(limits);
    options.tls = kind_.tls;
    side->transport = transport::MakeUcxTransport(options);
  } else {
    auto options = OptionsOf<transport::LocalOptions>(limits);
    if (kind_.backend == "cuda_ipc") {
      side->transport = transport::MakeCudaIpcTransport({options, testing::FakeDevices(), {}});
    } else {
      side->transport = transport::MakeShmTransport(options);
    }
  }
  EXPECT_EQ(side->transport->Start(&side->recorder, side->self), OkStatus());
  return side;
}

Hello Rig::HelloFor(const Side& from, Incarnation callee) const {
  Hello hello;
  if (kind_.integrity == transport::Integrity::kMac) hello.features = transport::kFeatureMac;
  hello.caller = from.self;
  hello.callee = callee;
  hello.ticket = TheTicket();
  return hello;
}

void Rig::Record(const std::shared_ptr<Call>& call, const std::function<void(Call&)>& outcome) {
  Update([&] {
    ++call->completions;
    call->thread = std::this_thread::get_id();
    outcome(*call);
  });
}

namespace {

/// Marks a call that completed inside the function that posted it. A completion on another thread
/// may be quicker than the return: that one is no offence.
class PostGuard {
 public:
  PostGuard() { posting_ = true; }
  ~PostGuard() { posting_ = false; }
  static bool posting() { return posting_; }

 private:
  static thread_local bool posting_;
};
thread_local bool PostGuard::posting_ = false;

}  // namespace

std::shared_ptr<Call> Rig::Connect(Side& from, const std::string& address, const Hello& hello,
                                   Nanos timeout) {
  auto call = std::make_shared<Call>();
  PostGuard guard;
  from.transport->Connect(address, hello, timeout,
                          [this, call](Result<std::shared_ptr<Endpoint>> result) {
                            Record(call, [&](Call& outcome) {
                              outcome.inside_post |= PostGuard::posting();
                              if (result.has_value()) {
                                outcome.endpoint = *result;
                              } else {
                                outcome.status = result.error();
                              }
                            });
                          });
  return call;
}

std::shared_ptr<Endpoint> Rig::Open(Side& from, Side& to) {
  auto call = Connect(from, to.transport->address(), HelloFor(from, to.self));
  EXPECT_TRUE(WaitFor(call));
  EXPECT_EQ(call->status, OkStatus());
  return call->endpoint;
}

std::shared_ptr<Call> Rig::Get(const std::shared_ptr<Endpoint>& endpoint, RegionKey key,
                               uint64_t offset, std::vector<MutableSpan> into, Nanos timeout,
                               std::shared_ptr<void> hold) {
  auto call = std::make_shared<Call>();
  std::shared_ptr<GpuTargets> on_gpu;
  if (kind_.gpu) {
    on_gpu = std::make_shared<GpuTargets>(std::move(into));
    into = on_gpu->spans();
  }
  PostGuard guard;
  endpoint->Get(key, offset, std::move(into), timeout, std::move(hold),
                [this, call, on_gpu](Status status) {
                  if (on_gpu) on_gpu->Fetch();
                  Record(call, [&](Call& outcome) {
                    outcome.inside_post |= PostGuard::posting();
                    outcome.status = status;
                  });
                });
  return call;
}

std::shared_ptr<Call> Rig::Map(const std::shared_ptr<Endpoint>& endpoint, RegionKey key,
                               Nanos timeout) {
  auto call = std::make_shared<Call>();
  PostGuard guard;
  endpoint->Map(key, timeout, [this, call](Result<transport::MappedList> result) {
    Record(call, [&](Call& outcome) {
      outcome.inside_post |= PostGuard::posting();
      if (result.has_value()) {
        outcome.mapped = *result;
      } else {
        outcome.status = result.error();
      }
    });
  });
  return call;
}

std::shared_ptr<Call> Rig::Revoke(Side& side, RegionKey key) {
  auto call = std::make_shared<Call>();
  PostGuard guard;
  side.transport->Revoke(key, [this, call] {
    Record(call, [&](Call& outcome) { outcome.inside_post |= PostGuard::posting(); });
  });
  return call;
}

bool Rig::Wait(const std::function<bool()>& condition) {
  if (is_fake()) {
    return sim_.RunUntil(condition, 3600s);
  }
  std::unique_lock lock(mutex_);
  return changed_.wait_for(lock, kDeadline, condition);
}

bool Rig::WaitFor(const std::shared_ptr<Call>& call) {
  return Wait([call] { return call->completions > 0; });
}

void Rig::Update(const std::function<void()>& change) {
  std::lock_guard lock(mutex_);
  change();
  changed_.notify_all();
}

void Rig::SetFakeLink(Side& from, Side& to, transport::FakeLink link) {
  if (is_fake()) network_.SetLink(from.transport->address(), to.transport->address(), link);
}

std::shared_ptr<memory::MemoryRegion> PatternRegion(uint64_t bytes, uint64_t first_index) {
  auto region = memory::MemoryRegion::Allocate("conformance", bytes);
  EXPECT_TRUE(region.has_value());
  FillPattern({(*region)->data(), bytes}, first_index);
  return *region;
}

std::shared_ptr<memory::MemoryRegion> PatternSlab(size_t gpu, uint64_t bytes,
                                                  uint64_t first_index) {
  auto region = testing::FakeSlabs(gpu)->Allocate("conformance", bytes).value();
  std::vector<std::byte> content(bytes);
  FillPattern(content, first_index);
  EXPECT_EQ(device::CopyRun(region->bytes(), content.data(), bytes), OkStatus());
  return region;
}

std::vector<std::byte> BytesOf(const transport::MappedPiece& piece) {
  std::vector<std::byte> bytes(piece.bytes);
  EXPECT_EQ(device::CopyRun({bytes.data()}, piece.at, piece.bytes), OkStatus());
  return bytes;
}

GatherList CutPieces(const std::shared_ptr<memory::MemoryRegion>& region, size_t count,
                     std::mt19937_64& random) {
  const std::vector<size_t> cuts = RandomCuts(region->size(), count, random);
  GatherList pieces;
  for (size_t i = 0; i + 1 < cuts.size(); ++i) {
    pieces.push_back({region, cuts[i], cuts[i + 1] - cuts[i]});
  }
  return pieces;
}

std::vector<MutableSpan> CutSpans(std::span<std::byte> buffer, size_t count,
                                  std::mt19937_64& random) {
  const std::vector<size_t> cuts = RandomCuts(buffer.size(), count, random);
  std::vector<MutableSpan> spans;
  for (size_t i = 0; i + 1 < cuts.size(); ++i) {
    spans.push_back(buffer.subspan(cuts[i], cuts[i + 1] - cuts[i]));
  }
  return spans;
}

uint64_t Seed() {
  const char* text = std::getenv("WEIGHTWIRE_SEED");
  const uint64_t seed = text != nullptr ? std::strtoull(text, nullptr, 10) : 1;
  static const bool printed = [seed] {
    std::cout << "WEIGHTWIRE_SEED=" << seed << std::endl;
    return true;
  }();
  static_cast<void>(printed);
  return seed;
}

}  // namespace weightwire::conformance
