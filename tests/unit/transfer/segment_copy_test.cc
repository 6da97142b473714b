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

/// Scales of 5 x 7 floats in blocks of 2 x 3.
plan::CopyOp ScalesOp() {
  plan::CopyOp op;
  op.source_dtype = op.target_dtype = layout::DType::kF32;
  op.transform = plan::Transform::kScales;
  op.block = {2, 3};
  op.source_extent = {5, 7};
  op.extent = {3, 3};
  op.source_offset = 1;
  op.source_stride = {7, 1};
  op.target_stride = {3, 1};
  return op;
}

TEST(ValidateSlice, BoundsScalesByTheElementsThatTheyAreMadeOf) {
  testing::Rng rng(1);
  const plan::CopyOp op = ScalesOp();  // reads elements 1 to 35, writes 0 to 8
  const auto reason_in = [&](plan::Side side, uint64_t bytes) {
    return ValidateSlice(SliceWith(op, side), MakeMemory(rng, {bytes}).binding).reason();
  };
  EXPECT_EQ(reason_in(plan::Side::kSource, 144), Reason::kNone);
  EXPECT_EQ(reason_in(plan::Side::kSource, 143), Reason::kMemoryInvalid);
  EXPECT_EQ(reason_in(plan::Side::kTarget, 36), Reason::kNone);
  EXPECT_EQ(reason_in(plan::Side::kTarget, 35), Reason::kMemoryInvalid);
  plan::Stream stream;
  stream.ops = {op};
  EXPECT_TRUE(ValidateSourceSide(stream, {144}).ok());
  EXPECT_FALSE(ValidateSourceSide(stream, {143}).ok());
  EXPECT_FALSE(SourceIsDirect(CopyOf(op, {0, {0, 0}, {3, 3}, 36}), 1));
}

/// What is made of what is gathered is bounded on both sides.
TEST(ValidateSlice, BoundsWhatIsMadeWithinARank) {
  testing::Rng rng(1);
  plan::CopyOp op = ScalesOp();
  op.source_tensor = 1;
  plan::RankSlice slice = SliceWith(MatrixOp(), plan::Side::kTarget);
  slice.gathered = {layout::DType::kF32, 36, {op}};
  const auto reason_in = [&](uint64_t scales, uint64_t floats) {
    return ValidateSlice(slice, MakeMemory(rng, {scales, floats}).binding).reason();
  };
  EXPECT_EQ(reason_in(36, 144), Reason::kNone);
  EXPECT_EQ(reason_in(36, 143), Reason::kMemoryInvalid);
  EXPECT_EQ(reason_in(35, 144), Reason::kMemoryInvalid);
  EXPECT_EQ(ValidateSlice(slice, MakeMemory(rng, {36}).binding).reason(), Reason::kMemoryInvalid);
  slice.gathered.made[0].source_tensor = 0;
  EXPECT_EQ(reason_in(144, 144), Reason::kInvalidRequest);
  slice.gathered.made[0] = op;
  slice.gathered.made[0].block[0] = 0;
  EXPECT_EQ(reason_in(36, 144), Reason::kInvalidRequest);
}

TEST(ValidateSlice, RefusesBlocksThatNoKernelCanQuantize) {
  testing::Rng rng(1);
  const Binding binding = MakeMemory(rng, {4096}).binding;
  const std::vector<void (*)(plan::CopyOp&)> changes = {
      [](plan::CopyOp& op) { op.block.clear(); },
      [](plan::CopyOp& op) { op.block[0] = 0; },
      [](plan::CopyOp& op) { op.block[0] = 3; },
      [](plan::CopyOp& op) { op.block[1] = INT64_MAX; },
      [](plan::CopyOp& op) { op.source_extent.clear(); },
      [](plan::CopyOp& op) { op.source_extent[0] = 7; },
      [](plan::CopyOp& op) { op.source_dtype = layout::DType::kI32; },
      [](plan::CopyOp& op) { op.target_dtype = layout::DType::kBF16; },
      [](plan::CopyOp& op) { op.transform = plan::Transform::kCodes; },
      [](plan::CopyOp& op) { op.transform = static_cast<plan::Transform>(3); },
  };
  for (size_t i = 0; i < changes.size(); ++i) {
    plan::CopyOp op = ScalesOp();
    changes[i](op);
    EXPECT_EQ(ValidateSlice(SliceWith(op, plan::Side::kSource), binding).reason(),
              Reason::kInvalidRequest)
        << i;
  }
}

TEST(CheckBlocksFit, NamesTheTensorAndTheSizeThatSegmentsNeed) {
  plan::CopyOp op = ScalesOp();
  op.transform = plan::Transform::kCodes;
  op.target_dtype = layout::DType::kF8E4M3;
  op.source_extent.clear();
  op.extent = {5, 7};
  op.block = {4, 64};  // 4 x 7 of them are there
  EXPECT_TRUE(CheckBlocksFit(SliceWith(op, plan::Side::kSource), 28).ok());
  const Status status = CheckBlocksFit(SliceWith(op, plan::Side::kTarget), 27);
  EXPECT_EQ(status.reason(), Reason::kConfigInvalid);
  EXPECT_EQ(status.tensor(), "model.embed");
  EXPECT_NE(status.ToString().find("segment_bytes_max"), std::string::npos);
  EXPECT_NE(status.ToString().find("at least 28"), std::string::npos) << status.ToString();
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
