#include <gtest/gtest.h>

#include <cstdlib>
#include <numeric>
#include <random>

#include "server/plan/segments.h"
#include "tests/support/plan_run.h"

namespace weightwire::plan {
namespace {

Stream OneOp(std::vector<int64_t> extent, layout::DType dtype = layout::DType::kBF16) {
  CopyOp op;
  op.target_dtype = dtype;
  op.extent = std::move(extent);
  Stream stream;
  stream.ops.push_back(op);
  return stream;
}

/// Positions in the packed order of the op that a segment covers, in the segment's own order.
std::vector<int64_t> PackedPositions(const CopyOp& op, const Segment& segment) {
  std::vector<int64_t> positions;
  weightwire::testing::ForEachIndex(segment.extent, [&](const std::vector<int64_t>& index) {
    int64_t position = 0;
    for (size_t d = 0; d < index.size(); ++d) {
      EXPECT_LT(segment.begin[d] + index[d], op.extent[d]);
      position = position * op.extent[d] + segment.begin[d] + index[d];
    }
    positions.push_back(position);
  });
  return positions;
}

/// Everything that segments.h promises, checked element by element.
void ExpectSound(const Stream& stream, const StreamSchedule& schedule, int64_t segment_bytes_max,
                 int64_t slot_bytes_max) {
  size_t next_segment = 0;
  for (uint32_t i = 0; i < stream.ops.size(); ++i) {
    const CopyOp& op = stream.ops[i];
    int64_t next = 0;
    while (next_segment < schedule.segments.size() &&
           schedule.segments[next_segment].op_index == i) {
      const Segment& segment = schedule.segments[next_segment++];
      const std::vector<int64_t> positions = PackedPositions(op, segment);
      for (int64_t position : positions) ASSERT_EQ(position, next++);
      EXPECT_EQ(segment.bytes,
                static_cast<int64_t>(positions.size()) * layout::ElementBytes(op.target_dtype));
      EXPECT_LE(segment.bytes, segment_bytes_max);
    }
    EXPECT_EQ(next, ElementCount(op));
  }
  EXPECT_EQ(next_segment, schedule.segments.size());

  ASSERT_EQ(schedule.offset_in_slot.size(), schedule.segments.size());
  uint32_t next_in_slots = 0;
  for (const SlotSpan& slot : schedule.slots) {
    EXPECT_EQ(slot.first_segment, next_in_slots);
    EXPECT_GT(slot.segment_count, 0u);
    EXPECT_LE(slot.bytes, slot_bytes_max);
    int64_t free_from = int64_t{8} * slot.segment_count;
    int64_t payload = 0;
    for (uint32_t i = 0; i < slot.segment_count; ++i, ++next_in_slots) {
      const int64_t offset = schedule.offset_in_slot[next_in_slots];
      EXPECT_EQ(offset % 64, 0);
      EXPECT_GE(offset, free_from);
      EXPECT_LT(offset, free_from + 64);
      free_from = offset + schedule.segments[next_in_slots].bytes;
      payload += schedule.segments[next_in_slots].bytes;
    }
    EXPECT_EQ(schedule.offset_in_slot[slot.first_segment], SlotPayloadOffset(slot.segment_count));
    EXPECT_EQ(slot.bytes, free_from);
    EXPECT_EQ(slot.payload_bytes, payload);
  }
  EXPECT_EQ(next_in_slots, schedule.segments.size());
}

TEST(ScheduleOf, KeepsASmallOpWhole) {
  const Stream stream = OneOp({3, 5});
  const StreamSchedule schedule = ScheduleOf(stream, 64, 256);
  ASSERT_EQ(schedule.segments.size(), 1u);
  EXPECT_EQ(schedule.segments[0].extent, (std::vector<int64_t>{3, 5}));
  EXPECT_EQ(schedule.slots[0].bytes, 64 + 30);
  ExpectSound(stream, schedule, 64, 256);
}

TEST(ScheduleOf, CutsTheOutermostDimensionFirst) {
  const Stream stream = OneOp({7, 4, 5});  // 40 bytes per outer row
  const StreamSchedule schedule = ScheduleOf(stream, 100, 1024);
  ASSERT_EQ(schedule.segments.size(), 4u);
  EXPECT_EQ(schedule.segments[0].extent, (std::vector<int64_t>{2, 4, 5}));
  EXPECT_EQ(schedule.segments[3].extent, (std::vector<int64_t>{1, 4, 5}));
  ExpectSound(stream, schedule, 100, 1024);
}

TEST(ScheduleOf, CutsAnInnermostRunThatIsTooLong) {
  const Stream stream = OneOp({2, 1001});
  const StreamSchedule schedule = ScheduleOf(stream, 1000, 4096);
  ASSERT_EQ(schedule.segments.size(), 6u);
  EXPECT_EQ(schedule.segments[0].extent, (std::vector<int64_t>{1, 500}));
  EXPECT_EQ(schedule.segments[2].extent, (std::vector<int64_t>{1, 1}));
  ExpectSound(stream, schedule, 1000, 4096);
}

TEST(ScheduleOf, LooksPastOuterDimensionsOfOne) {
  const Stream stream = OneOp({1, 1, 9, 16});
  const StreamSchedule schedule = ScheduleOf(stream, 64, 192);
  ASSERT_EQ(schedule.segments.size(), 5u);
  ExpectSound(stream, schedule, 64, 192);
}

TEST(ScheduleOf, TakesScalars) {
  const Stream stream = OneOp({}, layout::DType::kF64);
  ExpectSound(stream, ScheduleOf(stream, 8, 136), 8, 136);
}

TEST(ScheduleOf, GivesNothingForAStreamWithoutOps) {
  const StreamSchedule schedule = ScheduleOf(Stream{}, 64, 256);
  EXPECT_TRUE(schedule.segments.empty());
  EXPECT_TRUE(schedule.slots.empty());
}

TEST(ScheduleOf, HoldsForRandomStreamsAtOddSizes) {
  const char* seed_text = std::getenv("WEIGHTWIRE_SEED");
  const uint64_t seed = seed_text ? std::strtoull(seed_text, nullptr, 10) : std::random_device()();
  SCOPED_TRACE(std::string("WEIGHTWIRE_SEED=") + std::to_string(seed));
  std::printf("WEIGHTWIRE_SEED=%llu\n", static_cast<unsigned long long>(seed));
  std::mt19937_64 random(seed);
  const auto in = [&](int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random);
  };
  for (int round = 0; round < 500; ++round) {
    Stream stream;
    for (int64_t ops = in(1, 6); ops > 0; --ops) {
      CopyOp op;
      op.target_dtype = static_cast<layout::DType>(in(1, 12));
      for (int64_t d = in(0, 4); d > 0; --d) op.extent.push_back(in(1, d == 1 ? 60 : 6));
      stream.ops.push_back(op);
    }
    const int64_t segment_bytes_max = in(8, 300);
    const int64_t slot_bytes_max = segment_bytes_max + 128 + in(0, 3000);
    const StreamSchedule schedule = ScheduleOf(stream, segment_bytes_max, slot_bytes_max);
    ExpectSound(stream, schedule, segment_bytes_max, slot_bytes_max);
    if (HasFailure()) return;
  }
}

}  // namespace
}  // namespace weightwire::plan
