#include "server/transfer/segment_copy.h"

#include <gtest/gtest.h>

#include "tests/unit/transfer/random_plan.h"

namespace weightwire::transfer {
namespace {

using testing::MakeMemory;
using testing::MakeRandomPlan;
using testing::RandomPlan;
using testing::RankMemory;

plan::CopyOp MatrixOp() {
  plan::CopyOp op;
  op.source_dtype = op.target_dtype = layout::DType::kBF16;
  op.extent = {3, 5};
  op.source_offset = 7;
  op.source_stride = {10, 1};
  op.target_offset = 2;
  op.target_stride = {5, 1};
  return op;
}

TEST(SegmentCopy, RunsFollowPackedOrderOnEachSide) {
  const plan::CopyOp op = MatrixOp();
  const SegmentCopy copy = CopyOf(op, {0, {1, 0}, {2, 5}, 20});
  const auto source = SourceRuns(copy);
  ASSERT_EQ(source.size(), 2u);
  EXPECT_EQ(source[0].offset, 2u * (7 + 10));
  EXPECT_EQ(source[1].offset, 2u * (7 + 20));
  EXPECT_EQ(source[0].bytes, 10u);
  const auto target = TargetRuns(copy);
  ASSERT_EQ(target.size(), 1u);
  EXPECT_EQ(target[0].offset, 2u * (2 + 5));
  EXPECT_EQ(target[0].bytes, 20u);
  EXPECT_TRUE(SourceIsDirect(copy, 10));
  EXPECT_FALSE(SourceIsDirect(copy, 11));
  EXPECT_TRUE(TargetIsDirect(copy, 20));
}

TEST(SegmentCopy, CastIsNeverSentFromWhereItLies) {
  plan::CopyOp op = MatrixOp();
  op.source_dtype = layout::DType::kF32;
  EXPECT_FALSE(SourceIsDirect(CopyOf(op, {0, {0, 0}, {3, 5}, 30}), 1));
}

plan::RankSlice SliceWith(const plan::CopyOp& op, plan::Side side) {
  plan::Stream stream;
  stream.ops = {op};
  plan::RankSlice slice;
  slice.side = side;
  slice.streams = {stream};
  slice.tensor_names = {"model.embed"};
  return slice;
}

TEST(ValidateSlice, RefusesAnOpThatLeavesItsTensorByOneByte) {
  const plan::CopyOp op = MatrixOp();
  testing::Rng rng(1);
  // The last source element is 7 + 2·10 + 4 = 31, the last target element 2 + 2·5 + 4 = 16.
  EXPECT_TRUE(
      ValidateSlice(SliceWith(op, plan::Side::kSource), MakeMemory(rng, {64}).binding).ok());
  const Status source =
      ValidateSlice(SliceWith(op, plan::Side::kSource), MakeMemory(rng, {63}).binding);
  EXPECT_EQ(source.reason(), Reason::kMemoryInvalid);
  EXPECT_EQ(source.tensor(), "model.embed");
  EXPECT_TRUE(
      ValidateSlice(SliceWith(op, plan::Side::kTarget), MakeMemory(rng, {34}).binding).ok());
  EXPECT_EQ(
      ValidateSlice(SliceWith(op, plan::Side::kTarget), MakeMemory(rng, {33}).binding).reason(),
      Reason::kMemoryInvalid);
  EXPECT_EQ(ValidateSlice(SliceWith(op, plan::Side::kTarget), {}).reason(), Reason::kMemoryInvalid);
}

TEST(ValidateSlice, RefusesMalformedOps) {
  testing::Rng rng(1);
  const Binding binding = MakeMemory(rng, {4096}).binding;
  const auto reason_of = [&](auto change) {
    plan::CopyOp op = MatrixOp();
    change(op);
    return ValidateSlice(SliceWith(op, plan::Side::kSource), binding).reason();
  };
  EXPECT_EQ(reason_of([](auto&) {}), Reason::kNone);
  EXPECT_EQ(reason_of([](auto& op) { op.extent.assign(9, 1); }), Reason::kInvalidRequest);
  EXPECT_EQ(reason_of([](auto& op) { op.target_stride.pop_back(); }), Reason::kInvalidRequest);
  EXPECT_EQ(reason_of([](auto& op) { op.extent[0] = 0; }), Reason::kMemoryInvalid);
  EXPECT_EQ(reason_of([](auto& op) { op.source_stride[0] = -1; }), Reason::kMemoryInvalid);
  EXPECT_EQ(reason_of([](auto& op) { op.source_offset = -1; }), Reason::kMemoryInvalid);
  EXPECT_EQ(reason_of([](auto& op) { op.source_stride[0] = INT64_MAX; }), Reason::kMemoryInvalid);
  EXPECT_EQ(reason_of([](auto& op) { op.source_dtype = layout::DType(99); }),
            Reason::kInvalidRequest);
  EXPECT_EQ(reason_of([](auto& op) { op.source_dtype = layout::DType::kI32; }),
            Reason::kInvalidRequest);
}

}  // namespace
}  // namespace weightwire::transfer
