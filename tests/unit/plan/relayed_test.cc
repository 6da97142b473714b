#include "server/plan/relayed.h"

#include <gtest/gtest.h>

#include "server/plan/segments.h"

namespace weightwire::plan {
namespace {

/// A row-cut fp32 tensor of a source, transposed and cast on its way into a wider bf16 one.
RankSlice TargetSlice() {
  CopyOp op;
  op.canonical = 0;
  op.source_tensor = 7;
  op.target_tensor = 2;
  op.source_dtype = layout::DType::kF32;
  op.target_dtype = layout::DType::kBF16;
  op.extent = {30, 50};
  op.source_offset = 11;
  op.source_stride = {1, 30};
  op.target_offset = 400;
  op.target_stride = {64, 1};
  Stream stream{.id = 5, .source_rank = 3, .target_rank = 1, .bytes = 3'000, .ops = {op}};
  return {PlanId{1, 2}, Side::kTarget, 1, {stream}, {"w"}};
}

TEST(RelayedSlice, ReadsWhereItWrites) {
  const RankSlice target = TargetSlice();
  for (Side side : {Side::kSource, Side::kTarget}) {
    const RankSlice relayed = RelayedSlice(target, side);
    EXPECT_EQ(relayed.side, side);
    EXPECT_EQ(relayed.rank, target.rank);
    EXPECT_EQ(relayed.plan, target.plan);
    EXPECT_EQ(relayed.tensor_names, target.tensor_names);
    ASSERT_EQ(relayed.streams.size(), 1u);
    const Stream& stream = relayed.streams[0];
    EXPECT_EQ(stream.id, 5u);
    EXPECT_EQ(stream.source_rank, 3u);
    EXPECT_EQ(stream.bytes, 3'000);
    const CopyOp& op = stream.ops[0];
    EXPECT_EQ(op.source_tensor, 2u);
    EXPECT_EQ(op.source_dtype, layout::DType::kBF16);
    EXPECT_EQ(op.source_offset, 400);
    EXPECT_EQ(op.source_stride, (std::vector<int64_t>{64, 1}));
    CopyOp same_target = op;
    same_target.source_tensor = 7;
    same_target.source_dtype = layout::DType::kF32;
    same_target.source_offset = 11;
    same_target.source_stride = {1, 30};
    EXPECT_EQ(same_target, target.streams[0].ops[0]);
  }
}

TEST(RelayedSlice, HasTheSlotsAndSegmentsOfTheStreamThatItPassesOn) {
  const RankSlice target = TargetSlice();
  const StreamSchedule own = ScheduleOf(target.streams[0], 128, 1'024);
  const StreamSchedule passed_on =
      ScheduleOf(RelayedSlice(target, Side::kSource).streams[0], 128, 1'024);
  ASSERT_GT(own.slots.size(), 2u);
  ASSERT_EQ(own.slots.size(), passed_on.slots.size());
  EXPECT_EQ(own.offset_in_slot, passed_on.offset_in_slot);
  for (size_t i = 0; i < own.segments.size(); ++i) {
    EXPECT_EQ(own.segments[i].begin, passed_on.segments[i].begin);
    EXPECT_EQ(own.segments[i].extent, passed_on.segments[i].extent);
  }
}

}  // namespace
}  // namespace weightwire::plan
