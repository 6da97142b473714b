#include "server/transfer/arrival_sums.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>

#include "server/transfer/segment_copy.h"
#include "tests/unit/transfer/random_plan.h"

namespace weightwire::transfer {
namespace {

// A multiple of 64: what is said of the end of a segment's run is seen at the next one's begin.
constexpr int64_t kSegmentBytes = 704, kSlotBytes = 4'096, kChunkBytes = 1'500;
constexpr Straight kStraight{64, false};

// Summed by the plain reference, where the segment lies at the target.
uint64_t SumAtTarget(const plan::Stream& stream, const plan::Segment& segment,
                     const Binding& binding) {
  const plan::CopyOp& op = stream.ops[segment.op_index];
  const SegmentCopy copy = CopyOf(op, segment);
  return kernels::reference::SumTarget(binding[op.target_tensor].data() + copy.target_offset,
                                       copy.box, copy.to);
}

class ArrivalSumsTest : public ::testing::Test {
 protected:
  /// Brings random bytes through `chunk`'s scatter in pieces of any size. Checks every byte of the
  /// target, of the scratch and of the expected sums against a plain scatter, and the sums.
  void Bring(const plan::Stream& stream, const plan::StreamSchedule& schedule, const Chunk& chunk,
             const testing::RankMemory& target) {
    const uint64_t scratch_bytes = ScratchBytes(stream, schedule, chunk, target.binding, kStraight);
    const auto scratch = testing::MakeMemory(rng_, {std::max<uint64_t>(scratch_bytes, 1)});
    std::vector<uint64_t> expected(schedule.slots[chunk.slot].segment_count);
    Scatter scatter =
        ScatterOf(stream, schedule, chunk, target.binding, kStraight, scratch.binding[0], expected);
    std::vector<std::byte> sent;
    for (const auto& span : scatter.into) sent.resize(sent.size() + span.size());
    for (std::byte& byte : sent) byte = static_cast<std::byte>(rng_());

    // The plain scatter first, and what it wrote undone.
    const auto before = target.Snapshot();
    const auto write = [&](auto bytes) {
      for (const auto& span : scatter.into) {
        std::memcpy(span.data(), bytes.data(), span.size());
        bytes = bytes.subspan(span.size());
      }
    };
    write(std::span<const std::byte>(sent));
    const auto target_after = target.Snapshot(), scratch_after = scratch.Snapshot();
    const auto expected_after = expected;
    write(std::span<const std::byte>(std::vector<std::byte>(sent.size())));
    target.Write(before);

    ArrivalSums sums(schedule, chunk, scatter);
    for (std::span<const std::byte> rest = sent; !rest.empty();) {
      EXPECT_FALSE(chunk.segment_count > 0 && sums.complete());
      // From a place of any alignment, with nothing behind it; 0 bytes too.
      const std::vector<std::byte> piece(
          rest.begin(),
          rest.begin() + std::min<ptrdiff_t>(std::ssize(rest), testing::Below(rng_, 900)));
      sums.Take(piece);
      rest = rest.subspan(piece.size());
    }
    EXPECT_EQ(target.Snapshot(), target_after);
    EXPECT_EQ(scratch.Snapshot(), scratch_after);
    EXPECT_EQ(expected, expected_after);
    CheckSums(stream, schedule, chunk, target, scatter, sums);
  }

  void CheckSums(const plan::Stream& stream, const plan::StreamSchedule& schedule,
                 const Chunk& chunk, const testing::RankMemory& target, const Scatter& scatter,
                 const ArrivalSums& sums) {
    bool all = true;
    for (uint32_t i = 0; i < chunk.segment_count; ++i) {
      const auto& sum = sums.so_far()[i];
      EXPECT_EQ(sum.has_value(), !scatter.scratch_offset[i].has_value());
      all = all && sum.has_value();
      sum ? ++summed_ : ++left_;
      if (!sum) continue;
      EXPECT_EQ(*sum,
                SumAtTarget(stream, schedule.segments[chunk.first_segment + i], target.binding));
    }
    EXPECT_EQ(sums.complete(), all);
    if (all) {
      EXPECT_EQ(sums.TakeAll().size(), chunk.segment_count);
    }
  }

  testing::Rng rng_{testing::SeedOr(20261124)};
  uint64_t summed_ = 0, left_ = 0;
};

TEST_F(ArrivalSumsTest, AreOfTheBytesThatTheyBringToTheDestination) {
  for (int round = 0; round < 40; ++round) {
    // Every fourth: one tensor of many segments side by side.
    const auto random = round % 4 == 3 ? testing::MakeSizedPlan({{10'000 + round}})
                                       : testing::MakeRandomPlan(rng_, {1, 1, 6, 4'000, 0});
    const auto slice = plan::SliceOf(random.plan, plan::Side::kTarget, 0);
    const auto target = testing::MakeMemory(rng_, random.target_tensor_bytes[0]);
    for (const plan::Stream& stream : slice.streams) {
      const auto schedule = plan::ScheduleOf(stream, kSegmentBytes, kSlotBytes);
      for (uint32_t slot = 0; slot < schedule.slots.size(); ++slot) {
        // Half of them as where some segments were kept, so that chunks begin anywhere.
        std::vector<bool> kept;
        for (size_t i = 0; round % 2 == 1 && i < schedule.slots[slot].segment_count; ++i) {
          kept.push_back(testing::Below(rng_, 3) == 0);
        }
        for (const Chunk& chunk : ChunksOf(schedule, slot, kChunkBytes, kept)) {
          if (chunk.segment_count > 0) Bring(stream, schedule, chunk, target);
        }
      }
    }
  }
  EXPECT_GT(summed_, 100u);
  EXPECT_GT(left_, 100u);
}

TEST(KeptSums, MayHoldWhereOneHintIsTheSumThatIsExpected) {
  const std::vector<uint64_t> expected = {5, 6, 7};
  EXPECT_FALSE(KeptSums{}.MayHold(expected));
  EXPECT_FALSE((KeptSums{{6, 7, 5}, {1, 1, 1}}).MayHold(expected));
  EXPECT_TRUE((KeptSums{{1, 1, 7}, {}}).MayHold(expected));
  EXPECT_TRUE((KeptSums{{}, {5, 1, 1}}).MayHold(expected));
}

}  // namespace
}  // namespace weightwire::transfer
