#include "server/transfer/gpu_direct.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "server/plan/segments.h"
#include "server/transfer/fetch.h"
#include "server/transfer/staging.h"
#include "tests/support/fake_cuda/fake_gpus.h"
#include "tests/unit/transfer/fleet.h"

// Payload between GPUs that never passes host memory, over the fake transport and fake GPUs: what
// the host touches there is a SIGSEGV. What must not get lost: gpu_direct_faults_test.cc.
namespace weightwire::transfer {
namespace {

using testing::Below;
using testing::ExpectArrived;
using testing::Fleet;
using testing::FleetOptions;
using testing::kPlain;
using testing::Placement;
using testing::RandomFleet;

constexpr Placement kFirstGpu{.gpu = 0};
constexpr Placement kSecondGpu{.gpu = 1};

std::string Bytes(const char* direction, const char* path, const char* transport = "fake") {
  return std::string("gpu_transfer_bytes_total{direction=") + direction + ",path=" + path +
         ",transport=" + transport + "}";
}

FleetOptions Direct(uint64_t seed, Placement sources_on = kFirstGpu,
                    Placement targets_on = kSecondGpu) {
  FleetOptions options;
  options.seed = seed;
  options.sources_on = sources_on;
  options.targets_on = targets_on;
  return options;
}

/// Of all slots that all engines read.
uint64_t SumsBytes(const Fleet& fleet, const FleetOptions& options) {
  uint64_t segments = 0;
  for (const plan::Stream& stream : fleet.plan.plan.streams) {
    segments +=
        plan::ScheduleOf(stream, options.tuning.segment_bytes_max, options.tuning.slot_bytes)
            .segments.size();
  }
  return sizeof(uint64_t) * segments * options.engines;
}

// Every pair of host memory, one GPU and another one, with transports that reach GPU memory or not,
// beside readers over one that never does.
TEST(GpuDirect, EveryByteArrivesWhereverTheSidesLie) {
  const uint64_t first = testing::SeedOr(1);
  double direct = 0, staged = 0;
  for (uint64_t seed = first; seed < first + 120; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 rng(seed * 31);
    FleetOptions options = RandomFleet(seed);
    for (auto* side : {&options.sources_on, &options.targets_on}) {
      side->emplace();
      if (const uint32_t gpu = Below(rng, 4); gpu < 3) (*side)->gpu = gpu % 2;
      (*side)->gets_device_memory = Below(rng, 4) > 0;
    }
    options.odd_targets_read_plain = Below(rng, 3) == 0;
    options.flush_device_writes = options.late_nic = Below(rng, 2) == 0;
    Fleet fleet(options);
    fleet.StartAll();
    ExpectArrived(fleet, options.engines);
    if (HasFailure()) return;
    direct += fleet.metrics.Count(Bytes("in", "direct"));
    staged += fleet.metrics.Count(Bytes("in", "staged"));
  }
  EXPECT_GT(direct, 0);
  EXPECT_GT(staged, 0);
}

// Gathered, packed, cast, scattered and unpacked, and nothing but sums and padding was ever in
// host memory: neither did the transport carry it there, nor any copy over the bus.
TEST(GpuDirect, NoPayloadByteLiesInHostMemory) {
  const auto over_bus = FAKE_CALL(fake_cuda_host_bytes);
  for (uint64_t seed = 1; seed <= 40; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    FleetOptions options = RandomFleet(seed);
    options.map = false;
    options.sources_on = kFirstGpu;
    options.targets_on = seed % 2 == 0 ? kFirstGpu : kSecondGpu;
    Fleet fleet(options);
    const uint64_t before = over_bus();
    fleet.StartAll();
    fleet.RunToResults();
    const auto payload = static_cast<uint64_t>(fleet.plan.plan.bytes_total) * options.engines;
    EXPECT_EQ(fleet.network.bytes_delivered() - fleet.network.bytes_through_host(), payload);
    // Sums are read from host memory to host memory, padding from slots on the GPU.
    const uint64_t padding = fleet.network.bytes_through_host() - SumsBytes(fleet, options);
    EXPECT_EQ(over_bus() - before, padding);
    EXPECT_EQ(fleet.metrics.Count(Bytes("in", "direct")), static_cast<double>(payload));
    fleet.sim.RunFor(std::chrono::seconds(1));  // the last credits of relays
    EXPECT_EQ(fleet.metrics.Count(Bytes("out", "direct")), static_cast<double>(payload));
    for (auto& target : fleet.targets) {
      ASSERT_TRUE(target.result->has_value()) << target.result->error().ToString();
      const std::map<std::string, int64_t> path = {{"fake-gpu", (*target.result)->bytes}};
      EXPECT_EQ((*target.result)->bytes_by_transport, path);
      for (const WorkSpan& span : (*target.result)->spans) {
        if (std::string_view(span.what) != "read") continue;
        EXPECT_EQ(span.transport, "fake-gpu");
      }
    }
    ExpectArrived(fleet, options.engines);
    if (HasFailure()) return;
  }
}

// Nothing is packed that needs no cast, and nothing comes to scratch that fits where it belongs.
TEST(GpuDirect, LongRunsGoStraightFromWhereTheyLieToWhereTheyBelong) {
  FleetOptions options = Direct(2);
  options.stream_bytes = {{20'111, 7'203}, {4'999, 30'113}};
  options.shape.quantized_ops_per_stream = 0;
  Fleet fleet(options);
  for (const auto& target : fleet.targets) {
    for (const plan::Stream& stream : target.job.slice->streams) {
      const plan::StreamSchedule schedule =
          plan::ScheduleOf(stream, options.tuning.segment_bytes_max, options.tuning.slot_bytes);
      for (const Chunk& chunk : ChunksOf(schedule, 0, options.tuning.chunk_bytes)) {
        const int64_t runs = options.tuning.direct_run_bytes_min;
        EXPECT_EQ(ScratchBytes(stream, schedule, chunk, target.job.binding, {runs, true}), 0u);
        EXPECT_GT(ScratchBytes(stream, schedule, chunk, target.job.binding, {runs, false}), 0u);
      }
    }
  }
  fleet.StartAll();
  ExpectArrived(fleet, options.engines);
  for (const auto& source : fleet.sources) EXPECT_EQ((*source.result)->bytes_packed, 0);
}

// A reader that maps reads nothing by Gets, whatever these could reach.
TEST(GpuDirect, WhatIsMappedIsNotCountedAsRead) {
  FleetOptions options = Direct(3, {}, kFirstGpu);  // only a source in host memory can be mapped
  options.map = true;
  Fleet fleet(options);
  fleet.StartAll();
  ExpectArrived(fleet, options.engines);
  for (const auto& target : fleet.targets) {
    const std::map<std::string, int64_t> path = {{"fake", (*target.result)->bytes}};
    EXPECT_EQ((*target.result)->bytes_by_transport, path);
  }
  EXPECT_EQ(fleet.metrics.Count(Bytes("in", "direct")), 0);
  EXPECT_EQ(fleet.metrics.Count(Bytes("in", "staged")), 0);
}

TEST(GpuDirect, EachSideDecidesForItself) {
  struct Case {
    Placement sources_on, targets_on;
    const char *out, *in;  ///< path; null: that side lies in host memory
  };
  const Placement host{};
  const Placement blind{.gpu = 0, .gets_device_memory = false};
  for (const Case& c :
       {Case{kFirstGpu, host, "direct", nullptr}, Case{host, kFirstGpu, nullptr, "direct"},
        Case{kFirstGpu, blind, "direct", "staged"}, Case{blind, kSecondGpu, "staged", "direct"},
        Case{blind, blind, "staged", "staged"}}) {
    const FleetOptions options = Direct(3, c.sources_on, c.targets_on);
    Fleet fleet(options);
    fleet.StartAll();
    ExpectArrived(fleet, options.engines);
    const auto bytes = static_cast<double>(fleet.plan.plan.bytes_total);
    for (const char* path : {"direct", "staged"}) {
      const auto expected = [&](const char* chosen) {
        return chosen != nullptr && std::string_view(chosen) == path ? bytes : 0;
      };
      EXPECT_EQ(fleet.metrics.Count(Bytes("out", path)), expected(c.out)) << path;
      EXPECT_EQ(fleet.metrics.Count(Bytes("in", path)), expected(c.in)) << path;
    }
  }
}

// One of two readers of every slot comes over what carries host memory only.
TEST(GpuDirect, OneReaderThatReachesNoGpuMemoryHasTheSlotsInHostMemory) {
  FleetOptions options = Direct(4);
  options.engines = 2;
  options.shape.target_ranks = 1;
  options.target_agents = 2;
  options.odd_targets_read_plain = true;
  Fleet fleet(options);
  fleet.StartAll();
  ExpectArrived(fleet, options.engines);
  const auto bytes = static_cast<double>(fleet.plan.plan.bytes_total);
  EXPECT_EQ(fleet.metrics.Count(Bytes("out", "direct")), 0);
  EXPECT_EQ(fleet.metrics.Count(Bytes("out", "staged")), bytes);
  EXPECT_EQ(fleet.metrics.Count(Bytes("out", "staged", kPlain)), bytes);
  EXPECT_EQ(fleet.metrics.Count(Bytes("in", "direct")), bytes);
  EXPECT_EQ(fleet.metrics.Count(Bytes("in", "staged", kPlain)), bytes);
}

// What the one reader took with it when it left does not change what the other one is told.
TEST(GpuDirect, AReaderThatLeavesDoesNotMoveTheSlots) {
  FleetOptions options = Direct(5);
  options.engines = 2;
  options.shape = {
      .source_ranks = 1, .target_ranks = 1, .ops_per_stream_max = 6, .elements_per_op_max = 40'000};
  options.target_agents = 2;
  options.odd_targets_read_plain = true;
  options.link.bytes_per_second = 1 << 20;
  Fleet fleet(options);
  fleet.StartAll();
  ASSERT_TRUE(
      fleet.sim.RunUntil([&] { return fleet.metrics.Count(Bytes("out", "staged", kPlain)) > 0; },
                         std::chrono::minutes(1)));
  fleet.DrainTarget(1);
  fleet.RunToResults();
  ASSERT_TRUE(fleet.targets[0].result->has_value());
  EXPECT_EQ(fleet.targets[0].memory.Snapshot(), fleet.targets[0].expected);
  EXPECT_EQ(fleet.metrics.Count(Bytes("out", "direct")), 0);
}

// ---- bounds ------------------------------------------------------------------------------------

TEST(GpuDirect, PoolsAreTakenOfTheSlabAsForetold) {
  FleetOptions options = Direct(6);
  options.source_agents = options.target_agents = 1;
  options.tuning.slots_in_pool = 5;
  options.tuning.chunk_bytes = 5'000;
  const Fleet fleet(options);
  const PoolSize slots = SlotPoolSize(options.tuning), scratch = ScratchPoolSize(options.tuning);
  EXPECT_EQ(GpuPoolBytes(options.tuning), slots.bytes() + scratch.bytes());
  uint64_t ranks = 0;
  for (const auto& memory : fleet.source_memory) ranks += (memory.region->size() + 511) / 512 * 512;
  EXPECT_EQ(fleet.source_agents[0].gpu_pools.by_device.begin()->second->bytes_used(),
            GpuPoolBytes(options.tuning) + ranks);
}

TEST(GpuDirect, NothingIsTakenWhereNoTransportReachesGpuMemory) {
  FleetOptions options = Direct(6, {.gpu = std::nullopt, .gets_device_memory = false});
  const Fleet fleet(options);
  EXPECT_EQ(fleet.source_agents[0].gpu_pools.by_device.begin()->second->bytes_used(), 0u);
}

// One slot and one scratch slot on the GPU, for all streams of all ranks of an agent.
TEST(GpuDirect, OneSlotServesManyStreamsAndReaders) {
  for (uint64_t seed = 1; seed <= 10; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    FleetOptions options = Direct(seed);
    options.shape = {.source_ranks = 3, .target_ranks = 5, .ops_per_stream_max = 8};
    options.engines = 2;
    options.source_agents = 1;
    options.tuning.slots_in_pool = 1;
    Fleet fleet(options);
    fleet.StartAll();
    ExpectArrived(fleet, options.engines);
    EXPECT_EQ(fleet.metrics.Count(Bytes("in", "staged")), 0);
    if (HasFailure()) return;
  }
}

TEST(GpuDirect, WhereTheSlabHasNoRoomForSlotsPayloadPassesHostMemory) {
  FleetOptions options = Direct(7);
  options.sources_on->slab_bytes = options.targets_on->slab_bytes = 4 << 20;
  options.tuning.slot_bytes = 8 << 20;
  Fleet fleet(options);
  fleet.StartAll();
  ExpectArrived(fleet, options.engines);
  const auto bytes = static_cast<double>(fleet.plan.plan.bytes_total);
  EXPECT_EQ(fleet.metrics.Count(Bytes("out", "staged")), bytes);
  EXPECT_EQ(fleet.metrics.Count(Bytes("in", "staged")), bytes);
}

// ---- required ----------------------------------------------------------------------------------

Status TargetFailure(Fleet& fleet) {
  fleet.StartAll();
  fleet.RunToResults();
  EXPECT_FALSE(fleet.targets[0].result->has_value());
  return fleet.targets[0].result->error();
}

void ExpectRefusal(const Status& why, const std::string& rank, const std::string& cause) {
  EXPECT_EQ(why.code(), Code::kFailedPrecondition);
  EXPECT_EQ(why.reason(), Reason::kTransportFailed);
  EXPECT_EQ(why.rank(), rank);
  EXPECT_NE(why.message().find("gpu_direct is required"), std::string::npos) << why.ToString();
  EXPECT_NE(why.message().find(cause), std::string::npos) << why.ToString();
  EXPECT_NE(why.remedy().find("gpu_direct"), std::string::npos) << why.ToString();
}

FleetOptions Required(Placement sources_on = kFirstGpu, Placement targets_on = kSecondGpu) {
  FleetOptions options = Direct(8, sources_on, targets_on);
  options.gpu_direct_required = true;
  return options;
}

/// The second engine reads over a transport that reaches no GPU memory.
FleetOptions RequiredWithAPlainReader() {
  FleetOptions options = Required();
  options.engines = 2;
  options.shape.target_ranks = 1;
  options.target_agents = 2;
  options.odd_targets_read_plain = true;
  return options;
}

TEST(GpuDirectRequired, IsMetWithoutAWord) {
  FleetOptions options = Required();
  options.engines = 3;
  options.chain = true;
  Fleet fleet(options);
  fleet.StartAll();
  ExpectArrived(fleet, options.engines);
  EXPECT_EQ(fleet.metrics.Count(Bytes("in", "direct")),
            3.0 * static_cast<double>(fleet.plan.plan.bytes_total));
}

TEST(GpuDirectRequired, RefusesATargetWhoseTensorsLieInHostMemory) {
  Fleet fleet(Required(kFirstGpu, {}));
  ExpectRefusal(TargetFailure(fleet), "engine-0/0", "its tensors lie in host memory");
}

TEST(GpuDirectRequired, RefusesASourceWhoseTensorsLieInHostMemory) {
  Fleet fleet(Required({}));
  fleet.StartAll();
  fleet.RunToResults();
  ASSERT_FALSE(fleet.sources[0].result->has_value());
  ExpectRefusal(fleet.sources[0].result->error(), "trainer/0", "its tensors lie in host memory");
}

TEST(GpuDirectRequired, RefusesATransportThatReachesNoGpuMemoryOnBothSides) {
  FleetOptions options = RequiredWithAPlainReader();
  Fleet fleet(options);
  fleet.StartAll();
  fleet.RunToResults();
  ASSERT_FALSE(fleet.targets[1].result->has_value());
  ExpectRefusal(fleet.targets[1].result->error(), "engine-1/0", "plain does not reach the memory");
}

// The reader does not ask for it, its source does.
TEST(GpuDirectRequired, ASourceRefusesAReaderOverATransportThatReachesNoGpuMemory) {
  FleetOptions options = RequiredWithAPlainReader();
  options.targets_require_gpu_direct = false;
  Fleet fleet(options);
  fleet.StartAll();
  fleet.RunToResults();
  ASSERT_FALSE(fleet.sources[0].result->has_value());
  ExpectRefusal(fleet.sources[0].result->error(), "trainer/0", "plain does not reach the memory");
  for (auto& target : fleet.targets) EXPECT_FALSE(target.result->has_value());
}

TEST(GpuDirectRequired, TakesWhatIsQuantizedForThatHappensOnTheGpu) {
  FleetOptions options = Required();
  options.shape.quantized_ops_per_stream = 3;
  Fleet fleet(options);
  fleet.StartAll();
  ExpectArrived(fleet, options.engines);
}

TEST(GpuDirectRequired, RefusesToStartWithoutRoomForSlotsOrATransport) {
  weightwire::testing::SimExecutor sim;
  transport::FakeNetwork network(sim, sim, 1);
  const auto gpu = weightwire::testing::FakeDevice(0);
  for (const bool reaches : {true, false}) {
    Options options;
    options.tuning = testing::SmallTuning();
    options.gpu_direct_required = true;
    options.gpu_pools.by_device.emplace(gpu->uuid(),
                                        memory::GpuMemoryPool::Make(gpu, 4'096).value());
    const auto transport = network.MakeTransport("a", {.gets_device_memory = reaches});
    const auto engine = Engine::Make(options, sim, sim, sim, {transport.get()}, metrics::Null());
    ASSERT_FALSE(engine.has_value());
    const std::string words = engine.error().ToString();
    EXPECT_NE(words.find(reaches ? "slots for GPU-direct needs" : "no transport here"),
              std::string::npos)
        << words;
  }
}

}  // namespace
}  // namespace weightwire::transfer
