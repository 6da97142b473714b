#include "server/transfer/kept.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "tests/unit/transfer/fleet.h"

// Attempts after each other on the same memory, with what the target knows of it.
namespace weightwire::transfer {
namespace {

using testing::Below;
using testing::BytesKept;
using testing::BytesMoved;
using testing::ExpectBytes;
using testing::Fleet;
using testing::FleetOptions;
using testing::LosingFleet;
using testing::NextAttempt;
using testing::StartAfterLosses;

// Sessions break at three moments by chance: every byte arrives, and none that has come comes
// again.
TEST(Kept, AnAttemptGoesOnWhereTheLastOneWasLost) {
  const uint64_t first = testing::SeedOr(1);
  uint64_t losses = 0;
  uint64_t kept = 0;
  for (uint64_t seed = first; seed < first + 200; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const FleetOptions options = LosingFleet(seed);
    std::mt19937_64 rng(seed);
    Fleet fleet(options);
    losses += StartAfterLosses(fleet, options, rng);
    if (HasFatalFailure()) return;
    ExpectBytes(fleet);
    if (HasFailure()) return;
    const auto planned = static_cast<uint64_t>(fleet.plan.plan.bytes_total) * options.engines;
    // Sums and the padding between segments are all that comes on top, however often it broke.
    EXPECT_LE(fleet.network.bytes_delivered(), planned + planned / 10 + 4'096);
    EXPECT_EQ(static_cast<uint64_t>(BytesMoved(fleet) + BytesKept(fleet)), planned);
    kept += static_cast<uint64_t>(BytesKept(fleet));
  }
  EXPECT_EQ(losses, 600u);
  EXPECT_GT(kept, 0u);
}

// A relay is gone: its reader goes on from the trainer, with what the relay gave it.
TEST(Kept, AReaderOfALostRelayGoesOnFromTheTrainer) {
  uint64_t kept = 0;
  for (uint64_t seed = 1; seed <= 50; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    FleetOptions options = LosingFleet(seed);
    options.engines = 2;
    options.chain = true;
    options.target_agents = 2 * options.shape.target_ranks;
    std::mt19937_64 rng(seed);
    Fleet fleet(options);
    fleet.StartAll();
    const uint32_t steps = Below(rng, 3'000);
    for (uint32_t i = 0; i < steps && fleet.sim.RunOne(); ++i) {
    }
    NextAttempt(fleet, Epoch(6));
    if (HasFatalFailure()) return;
    const size_t ranks = options.shape.target_ranks;
    for (size_t i = 0; i < ranks; ++i) {
      Fleet::Target& relay = fleet.targets[i];
      Fleet::Target& reader = fleet.targets[ranks + i];
      reader.job.slice = std::make_shared<plan::RankSlice>(
          plan::SliceOf(fleet.plan.plan, plan::Side::kTarget, reader.rank));
      // From the trainer, over the sessions that the relay had.
      reader.job.sources = fleet.Direct(reader.agent);
      reader.job.source_participants = relay.job.source_participants;
      relay.result.emplace(Fail(Code::kAborted, Reason::kMemberLost, "lost"));
    }
    for (size_t i = 0; i < fleet.sources.size(); ++i) fleet.StartSource(i);
    for (size_t i = ranks; i < fleet.targets.size(); ++i) fleet.StartTarget(i);
    fleet.RunToResults();
    for (size_t i = ranks; i < fleet.targets.size(); ++i) {
      const Fleet::Target& reader = fleet.targets[i];
      ASSERT_TRUE(reader.result->has_value()) << reader.result->error().ToString();
      ASSERT_EQ(reader.memory.Snapshot(), reader.expected);
      kept += static_cast<uint64_t>((*reader.result)->bytes_kept);
    }
    if (HasFailure()) return;
  }
  EXPECT_GT(kept, 0u);
}

// A new version of which one tensor differs, between two buffers: only that tensor moves.
TEST(Kept, WhatAVersionDidNotChangeIsNotRead) {
  for (const bool map : {false, true}) {
    for (uint64_t seed = 1; seed <= 30; ++seed) {
      SCOPED_TRACE("seed " + std::to_string(seed) + (map ? ", mapped" : ""));
      FleetOptions options;
      options.seed = seed;
      options.map = map;
      options.shape.elements_per_op_max = 20'000;
      Fleet fleet(options);
      std::vector<testing::RankMemory> spare;
      std::vector<std::shared_ptr<Kept>> kept;
      for (auto& target : fleet.targets) {
        spare.push_back(
            testing::MakeMemory(fleet.rng, fleet.plan.target_tensor_bytes[target.rank]));
        kept.push_back(std::make_shared<Kept>());
      }
      // Versions 1, 2, 3; each is written to the buffer that the one before does not live in.
      for (uint64_t version = 1; version <= 3; ++version) {
        const auto& op = fleet.plan.plan.streams[0].ops[0];
        if (version == 2) {
          const auto& tensor =
              fleet.source_memory[fleet.plan.plan.streams[0].source_rank].binding[op.source_tensor];
          tensor.data()[op.source_offset * layout::ElementBytes(op.source_dtype)] ^= std::byte{1};
        }
        for (size_t i = 0; i < fleet.targets.size(); ++i) {
          Fleet::Target& target = fleet.targets[i];
          if (version > 1) {
            std::swap(target.memory, spare[i]);
            std::swap(target.job.kept, kept[i]);
            target.job.binding = target.memory.binding;
            target.job.served = spare[i].binding;
            target.job.served_kept = kept[i];
          }
          target.expected =
              testing::Expected(fleet.plan.plan, target.rank, target.memory, fleet.source_memory);
        }
        if (version > 1) NextAttempt(fleet, Epoch(5 + version));
        fleet.StartAll();
        ExpectBytes(fleet);
        if (HasFailure()) return;
        const int64_t all = fleet.plan.plan.bytes_total;
        EXPECT_EQ(BytesMoved(fleet) + BytesKept(fleet), all);
        if (version == 1) {
          EXPECT_EQ(BytesMoved(fleet), all);
        } else if (!map) {
          // The changed segment and no other; in version 3 none at all.
          EXPECT_LE(BytesMoved(fleet), version == 2 ? options.tuning.segment_bytes_max : 0);
        } else if (version == 3) {
          // A mapped copy costs no more than one from the buffer that is served.
          EXPECT_GT(BytesKept(fleet), 0);
        }
      }
    }
  }
}

// What is gathered lies in one place, whichever buffer is written: floats that a version did not
// change are there, and codes and scales are made of them in the other buffer.
TEST(Kept, WhatIsGatheredServesEveryBuffer) {
  for (const bool map : {false, true}) {
    for (uint64_t seed = 1; seed <= 20; ++seed) {
      SCOPED_TRACE("seed " + std::to_string(seed) + (map ? ", mapped" : ""));
      FleetOptions options;
      options.seed = seed;
      options.map = map;
      options.shape = {.source_ranks = 2, .target_ranks = 1, .gathered_per_target = 3};
      Fleet fleet(options);
      Fleet::Target& target = fleet.targets[0];
      testing::RankMemory spare = testing::MakeMemory(fleet.rng, fleet.plan.target_tensor_bytes[0]);
      auto spare_kept = std::make_shared<Kept>();
      const memory::RegionSpan gathered = target.memory.binding.back();
      const auto shared =
          memory::MemoryRegion::Allocate("what is gathered", gathered.bytes).value();
      const auto with_shared = [&](const testing::RankMemory& memory) {
        Binding binding = memory.binding;
        binding.back() = {shared, 0, gathered.bytes};
        return binding;
      };
      for (uint64_t version = 1; version <= 3; ++version) {
        const plan::CopyOp& op = fleet.plan.plan.streams[0].ops.back();
        ASSERT_EQ(op.target_tensor, target.memory.binding.size() - 1);
        if (version == 3) {
          const auto& tensor = fleet.source_memory[0].binding[op.source_tensor];
          tensor.data()[op.source_offset * layout::ElementBytes(op.source_dtype)] ^= std::byte{64};
        }
        if (version > 1) {
          std::swap(target.memory, spare);
          std::swap(target.job.kept, spare_kept);
          target.job.served = with_shared(spare);
          target.job.served_kept = spare_kept;
          NextAttempt(fleet, Epoch(5 + version));
        }
        target.job.binding = with_shared(target.memory);
        std::vector<std::byte> expected =
            testing::Expected(fleet.plan.plan, 0, target.memory, fleet.source_memory);
        fleet.StartAll();
        fleet.RunToResults();
        ASSERT_TRUE(target.result->has_value()) << target.result->error().ToString();
        std::vector<std::byte> got = target.memory.Snapshot();
        const memory::RegionSpan& own = target.memory.binding.back();  // nobody writes there
        std::fill_n(expected.begin() + static_cast<ptrdiff_t>(own.offset), own.bytes, std::byte{});
        std::fill_n(got.begin() + static_cast<ptrdiff_t>(own.offset), own.bytes, std::byte{});
        ASSERT_EQ(got, expected) << "version " << version;
        if (map || version == 1) continue;
        EXPECT_LE(BytesMoved(fleet), version == 3 ? options.tuning.segment_bytes_max : 0);
      }
    }
  }
}

// Hints that are wrong, or true of bytes that somebody has changed since.
TEST(Kept, AHintThatIsNotTrueCostsNoByte) {
  for (const bool map : {false, true}) {
    FleetOptions options;
    options.map = map;
    Fleet fleet(options);
    fleet.StartAll();
    ExpectBytes(fleet);
    for (auto& target : fleet.targets) {
      for (size_t i = 0; i < target.memory.region->size(); ++i) {
        target.memory.region->data()[i] ^= std::byte{0xff};
      }
      target.expected =
          testing::Expected(fleet.plan.plan, target.rank, target.memory, fleet.source_memory);
    }
    NextAttempt(fleet, Epoch(6));
    fleet.StartAll();
    ExpectBytes(fleet);
    EXPECT_EQ(BytesKept(fleet), 0);
  }
}

TEST(Kept, SumsOfAnotherPlanAreForgotten) {
  Kept kept;
  const PlanId one{1, 2};
  kept.Follow(one);
  kept.Note(7, 3, 99);
  EXPECT_EQ(kept.Of(one, 7, 2, 3), (std::vector<uint64_t>{Kept::kUnknown, 99, Kept::kUnknown}));
  EXPECT_TRUE(kept.Of(one, 7, 4, 2).empty());
  EXPECT_TRUE(kept.Of(one, 8, 0, 4).empty());
  EXPECT_TRUE(kept.Of({1, 3}, 7, 2, 3).empty());
  kept.Follow(one);
  EXPECT_FALSE(kept.Of(one, 7, 2, 3).empty());
  kept.Follow({1, 3});
  kept.Follow(one);
  EXPECT_TRUE(kept.Of(one, 7, 2, 3).empty());
}

}  // namespace
}  // namespace weightwire::transfer
