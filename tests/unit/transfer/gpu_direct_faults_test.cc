#include <gtest/gtest.h>

#include <algorithm>

#include "tests/support/fake_cuda/fake_gpus.h"
#include "tests/unit/transfer/fleet.h"

// GPU-direct when something goes wrong: writes that the GPU does not see yet, damaged bytes,
// sessions that break, ranks that stop, GPUs that fail.
namespace weightwire::transfer {
namespace {

using testing::Below;
using testing::BytesKept;
using testing::BytesMoved;
using testing::ExpectArrived;
using testing::ExpectBytes;
using testing::Fleet;
using testing::FleetOptions;
using testing::LosingFleet;
using testing::NextAttempt;
using testing::Placement;
using testing::RandomFleet;
using testing::StartAfterLosses;

FleetOptions OnGpus(FleetOptions options) {
  options.map = false;
  options.sources_on = Placement{.gpu = 0};
  options.targets_on = Placement{.gpu = 1};
  options.late_nic = options.flush_device_writes = true;
  return options;
}

// ---- what a NIC has written --------------------------------------------------------------------

TEST(GpuDirectFlush, ComesBeforeEveryUnpackAndSum) {
  const auto flushes = FAKE_CALL(fake_cuda_flushes);
  for (uint64_t seed = 1; seed <= 30; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const FleetOptions options = OnGpus(RandomFleet(seed));
    Fleet fleet(options);
    const uint64_t before = flushes();
    fleet.StartAll();
    fleet.RunToResults();
    EXPECT_GT(flushes(), before);
    ExpectArrived(fleet, options.engines);
    if (HasFailure()) return;
    EXPECT_EQ(fleet.metrics.Count("digest_failures_total{transport=fake}"), 0);
  }
}

// The planted mistake: a transport that does not say that its writes come late. The sums of what
// was written notice, and no rank ever takes such bytes for a version.
TEST(GpuDirectFlush, WhatIsSummedWithoutOneIsNeverTakenForTheVersion) {
  for (uint64_t seed = 1; seed <= 10; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    FleetOptions options = OnGpus(RandomFleet(seed));
    options.chain = false;
    options.flush_device_writes = false;
    Fleet fleet(options);
    fleet.StartAll();
    fleet.RunToResults();
    for (auto& target : fleet.targets) {
      ASSERT_FALSE(target.result->has_value());
      EXPECT_EQ(target.result->error().reason(), Reason::kDigestMismatch)
          << target.result->error().ToString();
    }
    EXPECT_GT(fleet.metrics.Count("digest_failures_total{transport=fake}"), 0);
  }
}

TEST(GpuDirectFlush, IsLeftOutWhereTheTransportDoesNotAskForIt) {
  const auto flushes = FAKE_CALL(fake_cuda_flushes);
  FleetOptions options = OnGpus(RandomFleet(2));
  options.late_nic = options.flush_device_writes = false;
  Fleet fleet(options);
  const uint64_t before = flushes();
  fleet.StartAll();
  ExpectArrived(fleet, options.engines);
  EXPECT_EQ(flushes(), before);
}

// Host-staged bytes reach the GPU by its own copies.
TEST(GpuDirectFlush, IsLeftOutWhereNothingWasWrittenToAGpu) {
  const auto flushes = FAKE_CALL(fake_cuda_flushes);
  FleetOptions options = OnGpus(RandomFleet(2));
  options.targets_on->gets_device_memory = false;
  Fleet fleet(options);
  const uint64_t before = flushes();
  fleet.StartAll();
  ExpectArrived(fleet, options.engines);
  EXPECT_EQ(flushes(), before);
}

TEST(GpuDirectFlush, ThatFailsEndsTheTransferAndNamesTheGpu) {
  FleetOptions options = OnGpus({});
  Fleet fleet(options);
  FAKE_CALL(fake_cuda_fail)("ww_cuda_flush_writes", 2);
  fleet.StartAll();
  fleet.RunToResults();
  const auto failed =
      std::ranges::find_if(fleet.targets, [](auto& target) { return !target.result->has_value(); });
  ASSERT_NE(failed, fleet.targets.end());
  const Status why = failed->result->error();
  EXPECT_EQ(why.reason(), Reason::kIoError);
  EXPECT_NE(why.message().find(weightwire::testing::FakeDevice(1)->name()), std::string::npos)
      << why.ToString();
}

// ---- bytes and sessions ------------------------------------------------------------------------

TEST(GpuDirectFaults, CorruptedGetsAreReadAgain) {
  uint32_t rereads = 0;
  for (uint64_t seed = 1; seed <= 10; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    FleetOptions options = OnGpus({});
    options.seed = seed;
    options.shape.elements_per_op_max = 20'000;
    options.link.corrupt_every_get = 1;
    options.link.corrupt_probability = 0.04;
    Fleet fleet(options);
    fleet.StartAll();
    ExpectBytes(fleet);
    if (HasFailure()) return;
    for (auto& target : fleet.targets) rereads += (*target.result)->rereads;
  }
  EXPECT_GT(rereads, 10u);
}

// Sessions break at three moments by chance: every byte arrives, and none that has come comes
// again.
TEST(GpuDirectFaults, AnAttemptGoesOnWhereTheLastOneWasLost) {
  const uint64_t first = testing::SeedOr(1);
  uint64_t kept = 0;
  for (uint64_t seed = first; seed < first + 60; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const FleetOptions options = OnGpus(LosingFleet(seed));
    std::mt19937_64 rng(seed);
    Fleet fleet(options);
    StartAfterLosses(fleet, options, rng);
    if (HasFatalFailure()) return;
    ExpectBytes(fleet);
    if (HasFailure()) return;
    const auto planned = static_cast<uint64_t>(fleet.plan.plan.bytes_total) * options.engines;
    EXPECT_LE(fleet.network.bytes_delivered(), planned + planned / 10 + 4'096);
    EXPECT_EQ(static_cast<uint64_t>(BytesMoved(fleet) + BytesKept(fleet)), planned);
    kept += static_cast<uint64_t>(BytesKept(fleet));
  }
  EXPECT_GT(kept, 0u);
}

// Whoever is drained in the middle is never written, or read, again; the others have the right
// bytes or say that they have not.
TEST(GpuDirectFaults, ADrainedRankIsTouchedNoMore) {
  for (uint64_t seed = 1; seed <= 60; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    FleetOptions options = OnGpus(LosingFleet(seed));
    options.chain = false;
    std::mt19937_64 rng(seed);
    Fleet fleet(options);
    fleet.StartAll();
    const uint32_t steps = Below(rng, 1'500);
    for (uint32_t i = 0; i < steps && fleet.sim.RunOne(); ++i) {
    }
    const bool source = Below(rng, 2) == 0;
    const uint32_t rank = Below(
        rng, source ? options.shape.source_ranks : static_cast<uint32_t>(fleet.targets.size()));
    bool& drained = source ? fleet.sources[rank].drained : fleet.targets[rank].drained;
    source ? fleet.DrainSource(rank) : fleet.DrainTarget(rank);
    ASSERT_TRUE(fleet.sim.RunUntil([&] { return drained; }, std::chrono::minutes(1)));
    // Its memory is somebody else's now.
    const testing::RankMemory& memory =
        source ? fleet.source_memory[rank] : fleet.targets[rank].memory;
    const bool was_done = !source && fleet.targets[rank].result->has_value();
    if (was_done) {
      EXPECT_EQ(memory.Snapshot(), fleet.targets[rank].expected);
    }
    const std::vector<std::byte> others(memory.region->size(), std::byte{0xee});
    memory.Write(others);
    fleet.RunToResults();
    EXPECT_EQ(memory.Snapshot(), others);
    for (size_t i = 0; i < fleet.targets.size(); ++i) {
      if (!source && i == rank) continue;
      if (!fleet.targets[i].result->has_value()) continue;
      EXPECT_EQ(fleet.targets[i].memory.Snapshot(), fleet.targets[i].expected);
    }
    if (HasFailure()) return;
  }
}

TEST(GpuDirectFaults, AGpuThatFailsOnceEndsBothSidesAndTheNextAttemptArrives) {
  const auto fail = FAKE_CALL(fake_cuda_fail);
  for (const char* call : {"ww_cuda_copy", "ww_cuda_sum"}) {
    for (const uint32_t calls : {1u, 7u, 40u}) {
      SCOPED_TRACE(std::string(call) + " " + std::to_string(calls));
      FleetOptions options = OnGpus({});
      options.shape.quantized_ops_per_stream = 1;
      Fleet fleet(options);
      fail(call, calls);
      fleet.StartAll();
      fleet.RunToResults();
      const bool failed = std::ranges::any_of(
          fleet.targets, [](auto& target) { return !target.result->has_value(); });
      EXPECT_TRUE(failed);
      NextAttempt(fleet, Epoch(6));
      fleet.StartAll();
      ExpectBytes(fleet);
      if (HasFailure()) return;
    }
  }
}

}  // namespace
}  // namespace weightwire::transfer
