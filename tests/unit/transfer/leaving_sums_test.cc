#include "server/transfer/leaving_sums.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <thread>

#include "server/transfer/pack.h"
#include "server/transfer/segment_copy.h"
#include "tests/unit/transfer/fleet.h"

namespace weightwire::transfer {
namespace {

using testing::Below;
using testing::Fleet;
using testing::FleetOptions;

constexpr int64_t kSegmentBytes = 704, kSlotBytes = 4'096, kRunBytes = 64;
const std::atomic<bool> kGoOn = false;

/// A slot, packed with all its sums at once, and once more with sums that are left.
struct TwoWays {
  TwoWays(const plan::Stream& stream, const plan::StreamSchedule& schedule, uint32_t slot,
          const Binding& binding, testing::Rng& rng)
      : span(schedule.slots[slot]),
        plain(testing::MakeMemory(rng, {static_cast<uint64_t>(span.bytes)})),
        late(testing::MakeMemory(rng, {static_cast<uint64_t>(span.bytes)})),
        sums(span.segment_count),
        leaving(stream, schedule, slot, binding, late.binding[0].data()) {
    // What nobody writes is alike.
    std::memset(plain.binding[0].data(), 0, plain.binding[0].bytes);
    std::memset(late.binding[0].data(), 0, late.binding[0].bytes);
    at_once = PackSlot(stream, schedule, slot, binding, kRunBytes, {plain.binding[0], {}}, {}, sums,
                       nullptr, kGoOn);
    std::vector<uint64_t> untouched(sums.size(), 7);
    left = PackSlot(stream, schedule, slot, binding, kRunBytes, {late.binding[0], {}}, {},
                    untouched, &leaving, kGoOn);
    EXPECT_EQ(untouched, std::vector<uint64_t>(sums.size(), 7));
  }
  static std::vector<std::byte> Bytes(const PackedSlot& packed) {
    std::vector<std::byte> bytes;
    for (const memory::RegionSpan& piece : packed.pieces) {
      bytes.insert(bytes.end(), piece.data(), piece.data() + piece.bytes);
    }
    return bytes;
  }

  const plan::SlotSpan& span;
  testing::RankMemory plain, late;
  std::vector<uint64_t> sums;
  LeavingSums leaving;
  PackedSlot at_once, left;
};

template <typename Check>
void ForEachSlot(testing::Rng& rng, int rounds, Check&& check) {
  for (int round = 0; round < rounds; ++round) {
    const auto random = round % 3 == 2 ? testing::MakeSizedPlan({{10'000 + round}})
                                       : testing::MakeRandomPlan(rng, {1, 1, 6, 4'000, 0});
    const auto slice = plan::SliceOf(random.plan, plan::Side::kSource, 0);
    const auto source = testing::MakeMemory(rng, random.source_tensor_bytes[0]);
    testing::TameFloats(rng, random.plan, 0, source);
    for (const plan::Stream& stream : slice.streams) {
      const auto schedule = plan::ScheduleOf(stream, kSegmentBytes, kSlotBytes);
      for (uint32_t slot = 0; slot < schedule.slots.size(); ++slot) {
        check(stream, schedule, slot, source.binding);
      }
    }
  }
}

TEST(LeavingSums, AreThoseOfAPlainSlotHoweverItIsRead) {
  testing::Rng rng(testing::SeedOr(20261125));
  ForEachSlot(rng, 30,
              [&](const auto& stream, const auto& schedule, uint32_t slot, const Binding& binding) {
                TwoWays two(stream, schedule, slot, binding, rng);
                EXPECT_EQ(two.left.bytes_packed, two.at_once.bytes_packed);
                std::vector<uint64_t> taken(two.sums.size());
                const auto bytes = static_cast<uint32_t>(two.span.bytes);
                const auto sums_end = static_cast<uint32_t>(sizeof(uint64_t) * two.sums.size());
                for (uint32_t reads = Below(rng, 6); reads > 0; --reads) {
                  const uint32_t offset = sums_end + Below(rng, bytes - sums_end);
                  two.leaving.Leave(offset, 1 + Below(rng, bytes - offset));
                  EXPECT_FALSE(two.leaving.Take(taken)) << "nobody has asked for the sums";
                }
                // Any of them: a reader that reads one again asks for that one.
                const uint32_t offset = Below(rng, sums_end);
                two.leaving.Leave(offset, 1);
                ASSERT_TRUE(two.leaving.Take(taken));
                EXPECT_EQ(taken, two.sums);
                EXPECT_EQ(TwoWays::Bytes(two.left), TwoWays::Bytes(two.at_once));
              });
}

// Several connections of one reader: what they ask for overlaps.
TEST(LeavingSums, AreMadeBySeveralThreads) {
  testing::Rng rng(testing::SeedOr(20261126));
  ForEachSlot(rng, 6,
              [&](const auto& stream, const auto& schedule, uint32_t slot, const Binding& binding) {
                TwoWays two(stream, schedule, slot, binding, rng);
                const auto bytes = static_cast<uint64_t>(two.span.bytes);
                std::vector<std::thread> threads;
                for (uint64_t part = 0; part < 3; ++part) {
                  threads.emplace_back([&two, bytes, part] {
                    two.leaving.Leave(bytes * (2 - part) / 4, bytes / 2);
                    two.leaving.Leave(0, sizeof(uint64_t));
                    std::vector<uint64_t> taken(two.sums.size());
                    EXPECT_TRUE(two.leaving.Take(taken));
                    EXPECT_EQ(taken, two.sums);
                  });
                }
                for (std::thread& thread : threads) thread.join();
                EXPECT_EQ(TwoWays::Bytes(two.left), TwoWays::Bytes(two.at_once));
              });
}

TEST(Heads, ChangeWithTheFirstBytesOfASegmentAndWithNothingElseOfTheSource) {
  testing::Rng rng(testing::SeedOr(20261127));
  uint64_t known = 0;
  ForEachSlot(rng, 12,
              [&](const auto& stream, const auto& schedule, uint32_t slot, const Binding& binding) {
                const plan::SlotSpan& span = schedule.slots[slot];
                const auto before = HeadsOf(stream, schedule, slot, binding);
                ASSERT_EQ(before.size(), span.segment_count);
                EXPECT_EQ(HeadsOf(stream, schedule, slot, binding), before);
                EXPECT_FALSE(AllDiffer(before, before));
                for (uint32_t i = 0; i < span.segment_count; ++i) {
                  if (before[i] == Kept::kUnknown) continue;
                  ++known;
                  const plan::Segment& segment = schedule.segments[span.first_segment + i];
                  const plan::CopyOp& op = stream.ops[segment.op_index];
                  const SegmentCopy copy = CopyOf(op, segment);
                  std::byte& first = binding[op.source_tensor].data()[copy.source_offset];
                  first ^= std::byte{1};
                  auto after = HeadsOf(stream, schedule, slot, binding);
                  first ^= std::byte{1};
                  EXPECT_NE(after[i], before[i]);
                  after[i] = before[i];
                  EXPECT_EQ(after, before);
                }
              });
  EXPECT_GT(known, 100u);
}

TEST(Heads, AllDifferOnlyWhereEveryOneIsKnownAndAnother) {
  EXPECT_TRUE(AllDiffer(std::vector<uint64_t>{1, 2}, std::vector<uint64_t>{2, 1}));
  EXPECT_FALSE(AllDiffer(std::vector<uint64_t>{1, 2}, std::vector<uint64_t>{3, 2}));
  EXPECT_FALSE(AllDiffer(std::vector<uint64_t>{1, Kept::kUnknown}, std::vector<uint64_t>{2, 1}));
  EXPECT_FALSE(AllDiffer(std::vector<uint64_t>{1, 2}, std::vector<uint64_t>{2, Kept::kUnknown}));
  EXPECT_FALSE(AllDiffer(std::vector<uint64_t>{1, 2}, {}));
  EXPECT_FALSE(AllDiffer({}, {}));
}

/// Versions of a fleet, one after another on the same buffers.
class Versions : public ::testing::Test {
 protected:
  static FleetOptions Options(uint64_t seed) {
    FleetOptions options = testing::RandomFleet(seed);
    options.map = false;
    options.engines = 1;
    // Nothing is made of floats, so that every segment's bytes are the source's own.
    options.shape.quantized_ops_per_stream = 0;
    options.shape.gathered_per_target = 0;
    return options;
  }
  void Run(Fleet& fleet) {
    if (epoch_ > 5) testing::NextAttempt(fleet, Epoch(epoch_));
    ++epoch_;
    fleet.StartAll();
    testing::ExpectArrived(fleet, 1);
  }
  static void Settle(Fleet& fleet) {
    for (auto& target : fleet.targets) target.job.kept->Settle();
  }
  static void Change(Fleet& fleet) {
    testing::ChangeAll(fleet.rng, fleet.plan.plan, fleet.source_memory);
    for (auto& target : fleet.targets) {
      target.expected =
          testing::Expected(fleet.plan.plan, target.rank, target.memory, fleet.source_memory);
    }
  }

  uint64_t epoch_ = 5;
};

// Every version differs in every segment, and slots are read bytes first.
TEST_F(Versions, ThatChangeEverythingArriveWhole) {
  for (uint64_t seed = 1; seed <= 60; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    epoch_ = 5;
    Fleet fleet(Options(seed));
    for (int version = 0; version < 3; ++version) {
      if (version > 0) Change(fleet);
      Run(fleet);
      if (HasFailure()) return;
      Settle(fleet);
      EXPECT_EQ(testing::BytesMoved(fleet), fleet.plan.plan.bytes_total);
    }
  }
}

// A source that takes over has served the version before, so that all it has is new to it; the
// target has the bytes from the one that was lost. Only where nothing was cut short are they read.
TEST_F(Versions, AreNotSentAgainByASourceThatTakesOver) {
  for (uint64_t seed = 1; seed <= 60; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    for (const bool settled : {false, true}) {
      epoch_ = 5;
      Fleet fleet(Options(seed));
      Run(fleet);
      std::vector<Heads> before;
      for (const auto& source : fleet.sources) before.push_back(*source.job.heads);
      Settle(fleet);
      Change(fleet);
      Run(fleet);
      if (HasFailure()) return;
      for (size_t i = 0; i < before.size(); ++i) *fleet.sources[i].job.heads = before[i];
      if (settled) Settle(fleet);
      Run(fleet);
      if (HasFailure()) return;
      EXPECT_EQ(testing::BytesMoved(fleet), settled ? fleet.plan.plan.bytes_total : 0);
      EXPECT_EQ(testing::BytesKept(fleet), settled ? 0 : fleet.plan.plan.bytes_total);
    }
  }
}

}  // namespace
}  // namespace weightwire::transfer
