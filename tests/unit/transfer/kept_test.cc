#include "server/transfer/kept.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>

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
using testing::Versions;

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
      Versions versions(options);
      Fleet& fleet = versions.fleet;
      for (uint64_t version = 1; version <= 3; ++version) {
        const plan::Stream& stream = fleet.plan.plan.streams[0];
        if (version == 2) versions.Touch(stream, stream.ops[0]);
        versions.Next(fleet.source_memory);
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

// By chance, over five versions: what changed is told, all else is not, and every byte arrives.
TEST(Served, WhatIsToldToHaveChangedArrives) {
  const uint64_t first = testing::SeedOr(1);
  for (const bool map : {false, true}) {
    for (uint64_t seed = first; seed < first + 40; ++seed) {
      SCOPED_TRACE("seed " + std::to_string(seed) + (map ? ", mapped" : ""));
      FleetOptions options;
      options.seed = seed;
      options.map = map;
      options.shape.elements_per_op_max = 5'000;
      Versions versions(options);
      versions.TellGenerations();
      Fleet& fleet = versions.fleet;
      std::mt19937_64 rng(seed);
      for (int version = 0; version < 5; ++version) {
        for (const plan::Stream& stream : fleet.plan.plan.streams) {
          for (const plan::CopyOp& op : stream.ops) {
            if (Below(rng, 3) != 0) continue;
            versions.Touch(stream, op);
            ++fleet.sources[stream.source_rank].job.generations[op.source_tensor];
          }
        }
        versions.Next(fleet.source_memory);
        if (HasFailure()) return;
      }
    }
  }
}

// Nobody reads what is not told to have changed: not even where it has, all the same.
TEST(Served, WhatIsNotToldIsNotRead) {
  for (const bool map : {false, true}) {
    SCOPED_TRACE(map ? "mapped" : "");
    FleetOptions options;
    options.map = map;
    options.tuning.direct_run_bytes_min = 1;  // else it is packed, whether it is wanted or not
    options.stream_bytes = {{10'007, 3}, {9'001, 4'096}};
    options.shape = {.source_ranks = 2, .target_ranks = 2};
    Versions versions(options);
    versions.TellGenerations();
    Fleet& fleet = versions.fleet;
    versions.Next(fleet.source_memory);
    versions.Next(fleet.source_memory);
    ASSERT_FALSE(HasFailure());
    std::vector<testing::RankMemory> then;
    for (size_t rank = 0; rank < fleet.source_memory.size(); ++rank) {
      then.push_back(testing::MakeMemory(fleet.rng, fleet.plan.source_tensor_bytes[rank]));
      for (size_t i = 0; i < then[rank].binding.size(); ++i) {
        const memory::RegionSpan& now = fleet.source_memory[rank].binding[i];
        std::memcpy(then[rank].binding[i].data(), now.data(), now.bytes);
      }
    }
    for (const plan::Stream& stream : fleet.plan.plan.streams)
      versions.Touch(stream, stream.ops[0]);
    const plan::Stream& told = fleet.plan.plan.streams[1];
    ++fleet.sources[told.source_rank].job.generations[told.ops[0].source_tensor];
    then[told.source_rank].binding[told.ops[0].source_tensor].data()[told.ops[0].source_offset] ^=
        std::byte{1};
    versions.Next(then);
    ASSERT_FALSE(HasFailure());
    // Who does not hold it finds out, and takes nothing that has another sum.
    fleet.targets[0].job.kept = std::make_shared<Kept>();
    fleet.targets[0].job.served_kept = nullptr;
    NextAttempt(fleet, Epoch(20));
    fleet.StartAll();
    fleet.RunToResults();
    ASSERT_FALSE(fleet.targets[0].result->has_value());
    EXPECT_EQ(fleet.targets[0].result->error().reason(), Reason::kDigestMismatch);
  }
}

TEST(Served, ASumIsOfOneGeneration) {
  ServedSums served;
  served.Note(7, 3, 2, 99);
  EXPECT_EQ(served.Of(7, 3, 2), 99u);
  EXPECT_EQ(served.Of(7, 3, 1), std::nullopt);
  EXPECT_EQ(served.Of(7, 3, 3), std::nullopt);
  EXPECT_EQ(served.Of(7, 2, 0), std::nullopt) << "nothing was served";
  EXPECT_EQ(served.Of(7, 4, 2), std::nullopt);
  EXPECT_EQ(served.Of(8, 3, 2), std::nullopt);
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
