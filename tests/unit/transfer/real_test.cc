#include <gtest/gtest.h>

#include <algorithm>
#include <future>
#include <memory>
#include <optional>

#include "server/base/thread_executor.h"
#include "server/transfer/transfer.h"
#include "server/transport/cuda_ipc/cuda_ipc_transport.h"
#include "server/transport/shm/shm_transport.h"
#include "server/transport/tcp/tcp_transport.h"
#include "tests/support/fake_cuda/fake_gpus.h"
#include "tests/support/tls_for_tests.h"
#include "tests/unit/transfer/random_plan.h"

// The same conversations over real transports and threads: one strand and two workers per agent.
namespace weightwire::transfer {
namespace {

using testing::RankMemory;
using testing::Rng;

class RealAgent {
 public:
  RealAgent(Incarnation self, const std::vector<std::string>& preference, const Tuning& tuning,
            transport::Integrity integrity, const std::vector<size_t>& gpus = {0, 1})
      : self_(self), strand_("strand", 1), workers_("worker", 2) {
    shm_ = transport::MakeShmTransport({});
    transport::TcpOptions tcp;
    tcp.integrity = integrity;
    tcp.tls_peers = weightwire::testing::TlsPeersFor(integrity);
    tcp_ = transport::MakeTcpTransport(tcp);
    transport::CudaIpcOptions ipc;
    for (size_t gpu : gpus) {
      const auto device = weightwire::testing::FakeDevice(gpu);
      ipc.devices.emplace(device->uuid(), device);
    }
    ipc_ = transport::MakeCudaIpcTransport(ipc);
    Options options;
    options.tuning = tuning;
    options.host = "here";
    options.self = self;
    options.preference = preference;
    engine_ = Engine::Make(options, SystemClock(), strand_, workers_,
                           {shm_.get(), tcp_.get(), ipc_.get()}, metrics::Null())
                  .value();
  }
  ~RealAgent() {
    std::promise<void> shut;
    OnStrand([&] { engine_->Shutdown([&] { shut.set_value(); }); });
    shut.get_future().wait();
    shm_.reset();
    tcp_.reset();
    ipc_.reset();
    workers_.Stop();
    strand_.Stop();
  }

  void OnStrand(Task task) { strand_.Post(std::move(task)); }
  Engine& engine() { return *engine_; }
  Peer AsPeer(const std::string& host, const Ticket& ticket) const {
    Peer peer;
    peer.incarnation = self_;
    peer.host = host;
    peer.addresses = {
        {"shm", shm_->address()}, {"tcp", tcp_->address()}, {"cuda_ipc", ipc_->address()}};
    peer.ticket = ticket;
    return peer;
  }

 private:
  const Incarnation self_;
  ThreadExecutor strand_;
  ThreadExecutor workers_;
  std::unique_ptr<transport::Transport> shm_;
  std::unique_ptr<transport::Transport> tcp_;
  std::unique_ptr<transport::Transport> ipc_;
  std::unique_ptr<Engine> engine_;
};

const Ticket kTicket = {3, 1, 4};
constexpr transport::Integrity kCrc = transport::Integrity::kCrc;

enum class Agents { kOne, kTwo };

/// Where both ranks of a side lie: in host memory, on the GPU of an index, or their tensors in turn
/// here and there.
using On = std::optional<size_t>;
constexpr On kHost = std::nullopt;
constexpr On kMixed = 99;

// Two source ranks on one agent, two target ranks on another, or all on one.
class RealPair {
 public:
  RealPair(uint64_t seed, const std::vector<std::string>& preference,
           const std::string& source_host, int64_t elements_per_op_max = 8'000,
           Agents agents = Agents::kTwo,
           transport::Integrity integrity = transport::Integrity::kCrc, On sources_on = kHost,
           On targets_on = kHost, int quantized_ops_per_stream = 4)
      : rng_(seed),
        plan_(testing::MakeRandomPlan(rng_, {2, 2, 6, elements_per_op_max, quantized_ops_per_stream,
                                             quantized_ops_per_stream == 0 ? 0 : 3})) {
    tuning_.segment_bytes_max = 5'000;
    tuning_.slot_bytes = 4'096 * 4;
    tuning_.slots_in_pool = 3;
    tuning_.chunk_bytes = 9'000;
    tuning_.direct_run_bytes_min = tuning_.through_run_bytes_min = 200;
    source_agent_ = std::make_shared<RealAgent>(Incarnation(1), preference, tuning_, integrity);
    target_agent_ = agents == Agents::kOne ? source_agent_
                                           : std::make_shared<RealAgent>(Incarnation(2), preference,
                                                                         tuning_, integrity);
    peer_ = source_agent_->AsPeer(source_host, kTicket);
    source_agent_->engine().AdmitTicket(kTicket, Incarnation(agents == Agents::kOne ? 1 : 2));
    for (uint32_t rank = 0; rank < 2; ++rank) {
      sources_.push_back(testing::MakeMemory(rng_, plan_.source_tensor_bytes[rank]));
      testing::TameFloats(rng_, plan_.plan, rank, sources_[rank]);
      targets_.push_back(testing::MakeMemory(rng_, plan_.target_tensor_bytes[rank]));
    }
    for (uint32_t rank = 0; rank < 2; ++rank) {
      before_.push_back(targets_[rank].Snapshot());
      expected_.push_back(testing::Expected(plan_.plan, rank, targets_[rank], sources_));
    }
    for (uint32_t rank = 0; rank < 2; ++rank) {
      Move(sources_[rank], sources_on);
      Move(targets_[rank], targets_on);
    }
  }

  using SourceResult = std::future<Result<SourceReport>>;
  using TargetResult = std::future<Result<TargetReport>>;

  SourceResult StartSource(Epoch epoch, uint32_t rank) {
    auto promise = std::make_shared<std::promise<Result<SourceReport>>>();
    SourceJob job;
    job.epoch = epoch;
    job.participant = ParticipantId(10 + rank);
    job.assignments = {
        {std::make_shared<plan::RankSlice>(plan::SliceOf(plan_.plan, plan::Side::kSource, rank)),
         1}};
    job.binding = sources_[rank].binding;
    job.heads = heads_[rank];
    source_agent_->OnStrand([this, promise, job = std::move(job)] {
      source_agent_->engine().StartSource(
          job, [promise](Result<SourceReport> result) { promise->set_value(std::move(result)); });
    });
    return promise->get_future();
  }
  /// `kept`: what its buffer is known to hold.
  TargetResult StartTarget(Epoch epoch, uint32_t rank, std::shared_ptr<Kept> kept = nullptr) {
    auto promise = std::make_shared<std::promise<Result<TargetReport>>>();
    TargetJob job;
    job.epoch = epoch;
    job.participant = ParticipantId(20 + rank);
    job.name = "engine/" + std::to_string(rank);
    job.slice =
        std::make_shared<plan::RankSlice>(plan::SliceOf(plan_.plan, plan::Side::kTarget, rank));
    job.sources = {{0, peer_}, {1, peer_}};
    job.source_participants = {{0, ParticipantId(10)}, {1, ParticipantId(11)}};
    job.binding = targets_[rank].binding;
    if (kept) job.kept = std::move(kept);
    target_agent_->OnStrand([this, promise, job = std::move(job)] {
      target_agent_->engine().StartTarget(
          job, [promise](Result<TargetReport> result) { promise->set_value(std::move(result)); });
    });
    return promise->get_future();
  }
  void ChangeSources() {
    testing::ChangeAll(rng_, plan_.plan, sources_);
    for (uint32_t rank = 0; rank < 2; ++rank) {
      expected_[rank] = testing::Expected(plan_.plan, rank, targets_[rank], sources_);
    }
  }
  /// Nobody listens where the source is said to be.
  void Mislead(const std::string& transport) { peer_.addresses[transport] += "0"; }
  /// From now on the target's agent sees these GPUs only, and is not told which ones its peer has.
  void Blind(const std::vector<std::string>& preference, const std::vector<size_t>& gpus) {
    target_agent_ = std::make_shared<RealAgent>(Incarnation(2), preference, tuning_, kCrc, gpus);
    std::string& address = peer_.addresses["cuda_ipc"];
    address = address.substr(0, address.find('?'));
  }
  void DrainTarget(Epoch epoch, uint32_t rank) {
    std::promise<void> drained;
    target_agent_->OnStrand([&] {
      target_agent_->engine().Drain(epoch, ParticipantId(20 + rank), [&] { drained.set_value(); });
    });
    drained.get_future().wait();
  }
  void DrainSource(Epoch epoch, uint32_t rank) {
    std::promise<void> drained;
    source_agent_->OnStrand([&] {
      source_agent_->engine().Drain(epoch, ParticipantId(10 + rank), [&] { drained.set_value(); });
    });
    drained.get_future().wait();
  }
  // Returns when every task that the target's strand had was run.
  void LetTargetStrandRun() {
    std::promise<void> ran;
    target_agent_->OnStrand([&] { ran.set_value(); });
    ran.get_future().wait();
  }
  void ShutDown() {
    target_agent_.reset();
    source_agent_.reset();
  }

  Rng rng_;
  testing::RandomPlan plan_;
  std::vector<RankMemory> sources_;
  std::vector<std::shared_ptr<Heads>> heads_ = {std::make_shared<Heads>(),
                                                std::make_shared<Heads>()};
  std::vector<RankMemory> targets_;
  std::vector<std::vector<std::byte>> before_;
  std::vector<std::vector<std::byte>> expected_;

 private:
  static void Move(RankMemory& memory, On where) {
    using weightwire::testing::FakeSlabs;
    if (where == kMixed) {
      memory = testing::Mixed(memory, {FakeSlabs(0).get(), FakeSlabs(1).get()});
    } else if (where) {
      memory = testing::OnDevice(memory, *FakeSlabs(*where));
    }
  }

  Tuning tuning_;
  std::shared_ptr<RealAgent> source_agent_;
  std::shared_ptr<RealAgent> target_agent_;
  Peer peer_;
};

struct Way {
  std::string name;
  std::string transport;
  Agents agents = Agents::kTwo;
  transport::Integrity integrity = transport::Integrity::kCrc;
  On sources_on = kHost;
  On targets_on = kHost;
};
class RealTransfer : public ::testing::TestWithParam<Way> {
 protected:
  RealPair MakePair(uint64_t seed, int64_t elements_per_op_max = 8'000) {
    return {seed,
            {GetParam().transport},
            "here",
            elements_per_op_max,
            GetParam().agents,
            GetParam().integrity,
            GetParam().sources_on,
            GetParam().targets_on};
  }
};

std::map<uint32_t, uint64_t> ByStream(const std::vector<StreamDigest>& digests) {
  std::map<uint32_t, uint64_t> by_stream;
  for (const StreamDigest& digest : digests) by_stream[digest.stream] = digest.digest;
  return by_stream;
}

TEST_P(RealTransfer, EveryByteArrivesInEveryEpoch) {
  const uint64_t first = testing::SeedOr(1);
  for (uint64_t seed = first; seed < first + 4; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    RealPair pair = MakePair(seed, 40'000);
    for (uint64_t e = 1; e <= 3; ++e) {
      for (uint32_t rank = 0; rank < 2; ++rank) {
        pair.targets_[rank].Write(pair.before_[rank]);
      }
      auto s0 = pair.StartSource(Epoch(e), 0);
      auto t0 = pair.StartTarget(Epoch(e), 0);
      auto t1 = pair.StartTarget(Epoch(e), 1);
      auto s1 = pair.StartSource(Epoch(e), 1);
      int64_t bytes = 0;
      std::map<uint32_t, uint64_t> written, held;
      for (auto* t : {&t0, &t1}) {
        auto result = t->get();
        ASSERT_TRUE(result.has_value()) << result.error().ToString();
        const std::map<std::string, int64_t> expected = {{GetParam().transport, result->bytes}};
        EXPECT_EQ(result->bytes_by_transport, expected);
        bytes += result->bytes;
        written.merge(ByStream(result->digests));
      }
      EXPECT_EQ(bytes, pair.plan_.plan.bytes_total);
      for (auto* s : {&s0, &s1}) {
        auto result = s->get();
        ASSERT_TRUE(result.has_value()) << result.error().ToString();
        held.merge(ByStream(result->digests));
      }
      EXPECT_EQ(written, held);
      for (uint32_t rank = 0; rank < 2; ++rank) {
        ASSERT_EQ(pair.targets_[rank].Snapshot(), pair.expected_[rank]);
      }
    }
  }
}

TEST_P(RealTransfer, DrainedTargetIsNeverWritten) {
  for (int steps = 0; steps < 12; ++steps) {
    RealPair pair = MakePair(7);
    std::vector<RealPair::SourceResult> sources;
    for (uint32_t rank = 0; rank < 2; ++rank) sources.push_back(pair.StartSource(Epoch(1), rank));
    auto t0 = pair.StartTarget(Epoch(1), 0);
    auto t1 = pair.StartTarget(Epoch(1), 1);
    for (int i = 0; i < steps; ++i) pair.LetTargetStrandRun();
    pair.DrainTarget(Epoch(1), 0);
    auto drained = t0.get();
    if (drained.has_value()) {
      EXPECT_EQ(pair.targets_[0].Snapshot(), pair.expected_[0]);
    }
    pair.targets_[0].Write(std::vector(pair.targets_[0].region->size(), std::byte{0xee}));
    auto other = t1.get();
    ASSERT_TRUE(other.has_value()) << other.error().ToString();
    EXPECT_EQ(pair.targets_[1].Snapshot(), pair.expected_[1]);
    pair.DrainSource(Epoch(1), 0);
    pair.DrainSource(Epoch(1), 1);
    pair.ShutDown();
    const auto bytes = pair.targets_[0].Snapshot();
    EXPECT_TRUE(std::ranges::all_of(bytes, [](std::byte b) { return b == std::byte{0xee}; }));
  }
}

TEST_P(RealTransfer, DrainedSourceMayChangeItsMemory) {
  for (int steps = 0; steps < 12; ++steps) {
    RealPair pair = MakePair(8);
    auto s0 = pair.StartSource(Epoch(1), 0);
    auto s1 = pair.StartSource(Epoch(1), 1);
    auto t0 = pair.StartTarget(Epoch(1), 0);
    auto t1 = pair.StartTarget(Epoch(1), 1);
    for (int i = 0; i < steps; ++i) pair.LetTargetStrandRun();
    pair.DrainSource(Epoch(1), 0);
    pair.sources_[0].Write(std::vector(pair.sources_[0].region->size(), std::byte{0xee}));
    for (auto* t : {&t0, &t1}) {
      auto result = t->get();
      const auto& rank = t == &t0 ? 0 : 1;
      if (result.has_value()) {
        EXPECT_EQ(pair.targets_[rank].Snapshot(), pair.expected_[rank]);
      } else {
        EXPECT_EQ(result.error().code(), Code::kAborted) << result.error().ToString();
      }
    }
  }
}

// All segments' sums are made as they leave, on the transport's threads.
TEST(RealTransferTcp, VersionsThatChangeEverythingArriveWhole) {
  for (const auto integrity :
       {transport::Integrity::kCrc, transport::Integrity::kMac, transport::Integrity::kTls}) {
    RealPair pair(13, {"tcp"}, "here", 20'000, Agents::kTwo, integrity, kHost, kHost, 0);
    std::vector<std::shared_ptr<Kept>> kept = {std::make_shared<Kept>(), std::make_shared<Kept>()};
    for (uint64_t e = 1; e <= 4; ++e) {
      SCOPED_TRACE("epoch " + std::to_string(e));
      if (e > 1) pair.ChangeSources();
      auto s0 = pair.StartSource(Epoch(e), 0);
      auto s1 = pair.StartSource(Epoch(e), 1);
      auto t0 = pair.StartTarget(Epoch(e), 0, kept[0]);
      auto t1 = pair.StartTarget(Epoch(e), 1, kept[1]);
      std::vector<StreamDigest> sent, came;
      for (auto* s : {&s0, &s1}) {
        const auto result = s->get();
        ASSERT_TRUE(result.has_value()) << result.error().ToString();
        sent.insert(sent.end(), result->digests.begin(), result->digests.end());
      }
      for (auto* t : {&t0, &t1}) {
        const auto result = t->get();
        ASSERT_TRUE(result.has_value()) << result.error().ToString();
        EXPECT_EQ(result->bytes_kept, 0);
        came.insert(came.end(), result->digests.begin(), result->digests.end());
      }
      EXPECT_EQ(ByStream(sent), ByStream(came));
      for (uint32_t rank = 0; rank < 2; ++rank) {
        ASSERT_EQ(pair.targets_[rank].Snapshot(), pair.expected_[rank]);
        kept[rank]->Settle();
      }
    }
  }
}

TEST_P(RealTransfer, WhatIsThereAlreadyIsNotReadAgain) {
  RealPair pair = MakePair(12);
  std::vector<std::shared_ptr<Kept>> kept = {std::make_shared<Kept>(), std::make_shared<Kept>()};
  for (uint64_t e = 1; e <= 3; ++e) {
    // In the last epoch one byte of what was kept is wrong: its segment is read, and no other.
    if (e == 3) {
      const auto& now = pair.expected_[0];
      const auto at =
          static_cast<uint64_t>(std::ranges::mismatch(now, pair.before_[0]).in1 - now.begin());
      const std::byte wrong = ~now.at(at);
      for (const memory::RegionSpan& tensor : pair.targets_[0].binding) {
        if (at < tensor.offset || at >= tensor.offset + tensor.bytes) continue;
        ASSERT_EQ(device::CopyRun(tensor.at() + (at - tensor.offset), &wrong, 1), OkStatus());
      }
    }
    auto s0 = pair.StartSource(Epoch(e), 0);
    auto s1 = pair.StartSource(Epoch(e), 1);
    auto t0 = pair.StartTarget(Epoch(e), 0, kept[0]);
    auto t1 = pair.StartTarget(Epoch(e), 1, kept[1]);
    int64_t bytes = 0, bytes_kept = 0;
    for (auto* t : {&t0, &t1}) {
      auto result = t->get();
      ASSERT_TRUE(result.has_value()) << result.error().ToString();
      bytes += result->bytes;
      bytes_kept += result->bytes_kept;
    }
    EXPECT_GE(bytes_kept, e == 1 ? 0 : e == 2 ? bytes : bytes / 2);
    EXPECT_LE(bytes_kept, e == 1 ? 0 : e == 2 ? bytes : bytes - 1);
    for (uint32_t rank = 0; rank < 2; ++rank) {
      ASSERT_EQ(pair.targets_[rank].Snapshot(), pair.expected_[rank]) << "epoch " << e;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Over, RealTransfer,
    ::testing::Values(Way{"shm", "shm"}, Way{"tcp", "tcp"},
                      Way{"tcp_mac", "tcp", Agents::kTwo, transport::Integrity::kMac},
                      Way{"tcp_tls", "tcp", Agents::kTwo, transport::Integrity::kTls},
                      Way{"shm_in_one_agent", "shm", Agents::kOne},
                      Way{"tcp_from_gpu", "tcp", Agents::kTwo, kCrc, 0},
                      Way{"tcp_to_gpu", "tcp", Agents::kTwo, kCrc, kHost, 0},
                      Way{"tcp_from_gpu_to_gpu", "tcp", Agents::kTwo, kCrc, 0, 1},
                      Way{"shm_from_gpu", "shm", Agents::kTwo, kCrc, 1},
                      Way{"shm_to_gpu", "shm", Agents::kTwo, kCrc, kHost, 1},
                      Way{"shm_from_gpu_to_gpu", "shm", Agents::kTwo, kCrc, 0, 1},
                      Way{"shm_on_one_gpu_in_one_agent", "shm", Agents::kOne, kCrc, 0, 0},
                      Way{"shm_to_gpu_in_one_agent", "shm", Agents::kOne, kCrc, kHost, 0},
                      Way{"shm_mixed", "shm", Agents::kTwo, kCrc, kMixed, kMixed},
                      Way{"tcp_mixed", "tcp", Agents::kTwo, kCrc, kMixed, kMixed},
                      Way{"ipc", "cuda_ipc"},
                      Way{"ipc_from_gpu", "cuda_ipc", Agents::kTwo, kCrc, 0},
                      Way{"ipc_to_gpu", "cuda_ipc", Agents::kTwo, kCrc, kHost, 1},
                      Way{"ipc_on_one_gpu", "cuda_ipc", Agents::kTwo, kCrc, 0, 0},
                      Way{"ipc_from_gpu_to_gpu", "cuda_ipc", Agents::kTwo, kCrc, 0, 1},
                      Way{"ipc_mixed", "cuda_ipc", Agents::kTwo, kCrc, kMixed, kMixed},
                      Way{"ipc_on_one_gpu_in_one_agent", "cuda_ipc", Agents::kOne, kCrc, 1, 1},
                      Way{"ipc_from_gpu_to_gpu_in_one_agent", "cuda_ipc", Agents::kOne, kCrc, 1, 0},
                      Way{"ipc_mixed_in_one_agent", "cuda_ipc", Agents::kOne, kCrc, kMixed,
                          kMixed}),
    [](const auto& param) { return param.param.name; });

// What the library counts is all that there is: the host cannot read the fake's memory itself.
TEST(RealTransferGpu, NoByteOfAPayloadGoesByTheHost) {
  const auto counted = FAKE_CALL(fake_cuda_host_bytes);
  struct Case {
    const char* transport;
    Agents agents;
    size_t from, to;
    bool by_host;
  };
  for (const Case& c :
       {Case{"cuda_ipc", Agents::kTwo, 0, 0, false}, Case{"cuda_ipc", Agents::kTwo, 0, 1, false},
        Case{"cuda_ipc", Agents::kOne, 1, 1, false}, Case{"cuda_ipc", Agents::kOne, 1, 0, false},
        Case{"shm", Agents::kTwo, 0, 0, true}}) {
    SCOPED_TRACE(std::string(c.transport) + " from " + std::to_string(c.from) + " to " +
                 std::to_string(c.to));
    // No fp8: it is quantized on the host.
    RealPair pair(11, {c.transport}, "here", 8'000, c.agents, kCrc, c.from, c.to, 0);
    const uint64_t before = counted();
    auto s0 = pair.StartSource(Epoch(1), 0);
    auto s1 = pair.StartSource(Epoch(1), 1);
    auto t0 = pair.StartTarget(Epoch(1), 0);
    auto t1 = pair.StartTarget(Epoch(1), 1);
    for (auto* t : {&t0, &t1}) {
      auto result = t->get();
      ASSERT_TRUE(result.has_value()) << result.error().ToString();
    }
    for (auto* s : {&s0, &s1}) ASSERT_TRUE(s->get().has_value());
    const uint64_t bytes = counted() - before;
    if (c.by_host) {
      EXPECT_GE(bytes, 2 * static_cast<uint64_t>(pair.plan_.plan.bytes_total));
    } else {
      EXPECT_EQ(bytes, 0u);
    }
    for (uint32_t rank = 0; rank < 2; ++rank) {
      ASSERT_EQ(pair.targets_[rank].Snapshot(), pair.expected_[rank]);
    }
  }
}

// The GPU fails in the middle, once: on whichever side, both sides hear of it, and nothing hangs.
TEST(RealTransferGpu, FailureEndsBothSidesAndNamesTheGpu) {
  const auto fail = FAKE_CALL(fake_cuda_fail);
  for (const char* transport : {"tcp", "cuda_ipc"}) {
    for (const auto& [call, at_source] :
         {std::pair("ww_cuda_copy", true), std::pair("ww_cuda_copy", false),
          std::pair("ww_cuda_sum", true), std::pair("ww_cuda_sum", false),
          std::pair("ww_cuda_quantize", true), std::pair("ww_cuda_quantize", false),
          std::pair("ww_cuda_quantize_four_bit", true),
          std::pair("ww_cuda_quantize_four_bit", false)}) {
      SCOPED_TRACE(std::string(call) + " over " + transport +
                   (at_source ? " at the source" : " at the target"));
      RealPair pair(9, {transport}, "here", 8'000, Agents::kTwo, kCrc, at_source ? On(0) : kHost,
                    at_source ? kHost : On(0));
      fail(call, 2);
      auto s0 = pair.StartSource(Epoch(1), 0);
      auto s1 = pair.StartSource(Epoch(1), 1);
      auto target = pair.StartTarget(Epoch(1), 0);
      const auto result = target.get();
      ASSERT_FALSE(result.has_value());
      if (!at_source) {
        EXPECT_NE(result.error().message().find(weightwire::testing::FakeDevice(0)->name()),
                  std::string::npos)
            << result.error().ToString();
      }
      EXPECT_EQ(result.error().reason(), Reason::kIoError) << result.error().ToString();
      pair.DrainTarget(Epoch(1), 0);
      for (uint32_t rank = 0; rank < 2; ++rank) pair.DrainSource(Epoch(1), rank);
      pair.targets_[0].Write(pair.before_[0]);
      auto again0 = pair.StartSource(Epoch(2), 0);
      auto again1 = pair.StartSource(Epoch(2), 1);
      const auto second = pair.StartTarget(Epoch(2), 0).get();
      ASSERT_TRUE(second.has_value()) << second.error().ToString();
      EXPECT_EQ(pair.targets_[0].Snapshot(), pair.expected_[0]);
    }
  }
}

// A GPU that the peer has and we do not see: the attempt that finds out fails by its name, the next
// one takes the next transport.
TEST(RealTransferChoice, AfterMemoryThatCannotBeMappedTheNextAttemptTakesTheNextTransport) {
  RealPair pair(13, {"cuda_ipc", "shm"}, "here", 8'000, Agents::kTwo, kCrc, 0, 1);
  pair.Blind({"cuda_ipc", "shm"}, {1});
  for (uint64_t epoch : {1, 2}) {
    auto s0 = pair.StartSource(Epoch(epoch), 0);
    auto s1 = pair.StartSource(Epoch(epoch), 1);
    const auto result = pair.StartTarget(Epoch(epoch), 0).get();
    if (epoch == 1) {
      ASSERT_FALSE(result.has_value());
      EXPECT_EQ(result.error().reason(), Reason::kTransportFailed);
      EXPECT_NE(result.error().message().find(weightwire::testing::FakeDevice(0)->name() +
                                              " is not visible here"),
                std::string::npos)
          << result.error().ToString();
      pair.DrainTarget(Epoch(1), 0);
      for (uint32_t rank = 0; rank < 2; ++rank) pair.DrainSource(Epoch(1), rank);
      continue;
    }
    ASSERT_TRUE(result.has_value()) << result.error().ToString();
    const std::map<std::string, int64_t> expected = {{"shm", result->bytes}};
    EXPECT_EQ(result->bytes_by_transport, expected);
    EXPECT_EQ(pair.targets_[0].Snapshot(), pair.expected_[0]);
  }
}

TEST(RealTransferChoice, TakesShmOnOneHostAndTcpToAnother) {
  for (bool same : {true, false}) {
    RealPair pair(5, {"shm", "tcp"}, same ? "here" : "there");
    auto s0 = pair.StartSource(Epoch(1), 0);
    auto s1 = pair.StartSource(Epoch(1), 1);
    auto t0 = pair.StartTarget(Epoch(1), 0);
    auto t1 = pair.StartTarget(Epoch(1), 1);
    for (auto* t : {&t0, &t1}) {
      auto result = t->get();
      ASSERT_TRUE(result.has_value()) << result.error().ToString();
      const std::map<std::string, int64_t> expected = {{same ? "shm" : "tcp", result->bytes}};
      EXPECT_EQ(result->bytes_by_transport, expected);
    }
  }
}

TEST(RealTransferChoice, AfterAFailureTheNextAttemptTakesTheNextTransport) {
  RealPair pair(6, {"shm", "tcp"}, "here");
  pair.Mislead("shm");
  for (uint64_t epoch : {1, 2}) {
    auto s0 = pair.StartSource(Epoch(epoch), 0);
    auto s1 = pair.StartSource(Epoch(epoch), 1);
    auto target = pair.StartTarget(Epoch(epoch), 0);
    const auto result = target.get();
    if (epoch == 1) {
      ASSERT_FALSE(result.has_value());
      EXPECT_EQ(result.error().reason(), Reason::kTransportFailed);
      pair.DrainTarget(Epoch(1), 0);
      for (uint32_t rank = 0; rank < 2; ++rank) pair.DrainSource(Epoch(1), rank);
      continue;
    }
    ASSERT_TRUE(result.has_value()) << result.error().ToString();
    const std::map<std::string, int64_t> expected = {{"tcp", result->bytes}};
    EXPECT_EQ(result->bytes_by_transport, expected);
    EXPECT_EQ(pair.targets_[0].Snapshot(), pair.expected_[0]);
  }
}

}  // namespace
}  // namespace weightwire::transfer
