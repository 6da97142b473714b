#include "server/agent/plan_bounds.h"

#include <functional>

#include "tests/unit/agent/agent_fixture.h"

namespace weightwire::agent {
namespace {

class PlanBounds : public AgentTest {
 protected:
  static Status Check(const plan::RankSlice& slice) {
    return CheckSlice(slice, kPlan, slice.side, 0, Layout());
  }
};

TEST_F(PlanBounds, AcceptsWhatFitsExactly) {
  EXPECT_TRUE(Check(SliceFor(plan::Side::kSource)).ok());
  EXPECT_TRUE(Check(SliceFor(plan::Side::kTarget)).ok());
}

TEST_F(PlanBounds, RefusesAnotherPlanSideOrRank) {
  const auto slice = SliceFor(plan::Side::kSource);
  const layout::RankLayout layout = Layout();
  EXPECT_FALSE(CheckSlice(slice, PlanId{1, 3}, plan::Side::kSource, 0, layout).ok());
  EXPECT_FALSE(CheckSlice(slice, kPlan, plan::Side::kTarget, 0, layout).ok());
  EXPECT_FALSE(CheckSlice(slice, kPlan, plan::Side::kSource, 1, layout).ok());
}

TEST_F(PlanBounds, RefusesEveryLieOnTheSideThatItConcerns) {
  using Lie = std::function<void(plan::RankSlice&, plan::CopyOp&)>;
  struct Case {
    const char* what;
    Reason reason;
    Lie source, target;
  };
  const int64_t huge = int64_t{1} << 62;
  const std::vector<Case> cases = {
      {"offset", Reason::kShapeMismatch, [](auto&, auto& op) { op.source_offset = 1; },
       [](auto&, auto& op) { op.target_offset = 1; }},
      {"stride", Reason::kShapeMismatch,
       [](auto&, auto& op) {
         op.source_stride = {3, 2};
       },
       [](auto&, auto& op) {
         op.target_stride = {3, 2};
       }},
      {"stride overflow", Reason::kShapeOverflow,
       [&](auto&, auto& op) {
         op.source_stride = {huge, huge}, op.source_offset = huge;
       },
       [&](auto&, auto& op) {
         op.target_stride = {huge, huge}, op.target_offset = huge;
       }},
      {"negative offset", Reason::kInvalidRequest, [](auto&, auto& op) { op.source_offset = -1; },
       [](auto&, auto& op) { op.target_offset = -1; }},
      {"negative stride", Reason::kInvalidRequest,
       [](auto&, auto& op) { op.source_stride[1] = -1; },
       [](auto&, auto& op) { op.target_stride[1] = -1; }},
      {"stride 0", Reason::kInvalidRequest, [](auto&, auto& op) { op.source_stride[0] = 0; },
       [](auto&, auto& op) { op.target_stride[0] = 0; }},
      {"strides of another ndim", Reason::kInvalidRequest,
       [](auto&, auto& op) { op.source_stride.pop_back(); },
       [](auto&, auto& op) { op.target_stride.pop_back(); }},
      {"tensor", Reason::kTensorMissing, [](auto&, auto& op) { op.source_tensor = 2; },
       [](auto&, auto& op) { op.target_tensor = 2; }},
      {"dtype", Reason::kDtypeMismatch,
       [](auto&, auto& op) { op.source_dtype = layout::DType::kF16; },
       [](auto&, auto& op) { op.target_dtype = layout::DType::kF16; }},
      {"no cast", Reason::kDtypeMismatch,
       [](auto&, auto& op) { op.target_dtype = layout::DType::kI32; },
       [](auto&, auto& op) { op.source_dtype = layout::DType::kI32; }},
      {"rank of a stream", Reason::kInvalidRequest,
       [](auto& slice, auto&) { slice.streams[0].source_rank = 1; },
       [](auto& slice, auto&) { slice.streams[0].target_rank = 1; }},
  };
  for (const Case& lie : cases) {
    SCOPED_TRACE(lie.what);
    for (plan::Side side : {plan::Side::kSource, plan::Side::kTarget}) {
      auto slice = SliceFor(side);
      (side == plan::Side::kSource ? lie.source : lie.target)(slice, slice.streams[0].ops[0]);
      ExpectStatus(Check(slice), Code::kInvalidArgument, lie.reason);
    }
  }
}

TEST_F(PlanBounds, RefusesMalformedOpsAndStreams) {
  using Lie = std::function<void(plan::RankSlice&, plan::CopyOp&)>;
  const std::vector<std::pair<Lie, Reason>> cases = {
      {[](auto&, auto& op) { op.extent[0] = 0; }, Reason::kInvalidRequest},
      {[](auto&, auto& op) { op.extent[0] = -4; }, Reason::kInvalidRequest},
      {[](auto&, auto& op) { op.extent[0] = 5; }, Reason::kShapeMismatch},
      {[](auto&, auto& op) { op.canonical = 2; }, Reason::kTensorMissing},
      {[](auto&, auto& op) {
         op.extent.assign(9, 1);
         op.source_stride.assign(9, 1);
         op.target_stride.assign(9, 1);
       },
       Reason::kInvalidRequest},
      {[](auto& slice, auto&) { slice.streams[0].bytes = 57; }, Reason::kInvalidRequest},
      {[](auto& slice, auto&) { slice.streams[0].bytes = -58; }, Reason::kInvalidRequest},
      {[](auto& slice, auto&) { slice.streams.push_back(slice.streams[0]); },
       Reason::kInvalidRequest},
  };
  for (size_t i = 0; i < cases.size(); ++i) {
    SCOPED_TRACE(i);
    auto slice = SliceFor(plan::Side::kSource);
    cases[i].first(slice, slice.streams[0].ops[0]);
    ExpectStatus(Check(slice), Code::kInvalidArgument, cases[i].second);
  }
}

TEST_F(PlanBounds, FarSideMayBeLargerThanOurs) {
  auto slice = SliceFor(plan::Side::kSource);
  slice.streams[0].ops[0].target_tensor = 400;
  slice.streams[0].ops[0].target_offset = 1'000'000;
  EXPECT_TRUE(Check(slice).ok());
}

TEST_F(PlanBounds, AcceptsScalarsAndUnitDimensionsOfAnyStride) {
  auto slice = SliceFor(plan::Side::kSource);
  plan::CopyOp scalar{0, 0, 0, layout::DType::kF32, layout::DType::kBF16, {}, 11, {}, 0, {}};
  plan::CopyOp unit{0,        0, 0,     layout::DType::kF32, layout::DType::kF32, {1, 1}, 11,
                    {0, 999}, 0, {1, 1}};
  slice.streams[0].ops = {scalar, unit};
  slice.streams[0].bytes = 2 + 4;
  EXPECT_TRUE(Check(slice).ok());
  slice.streams[0].ops[0].source_offset = 12;
  ExpectStatus(Check(slice), Code::kInvalidArgument, Reason::kShapeMismatch);
}

/// Scales read more elements than they write: all of them are bounded.
TEST_F(PlanBounds, BoundsScalesByWhatTheyAreMadeOf) {
  layout::RankLayout layout;
  layout.tensors = {{"w", layout::DType::kBF16, {5, 7}, {}}};
  plan::RankSlice slice = SliceFor(plan::Side::kSource);
  plan::CopyOp op{0, 0, 0, layout::DType::kBF16, layout::DType::kF32, {3, 3}, 0, {7, 1}, 0, {3, 1}};
  op.transform = plan::Transform::kScales;
  op.block = {2, 3};
  op.source_extent = {5, 7};
  slice.streams[0].ops = {op};
  slice.streams[0].bytes = 9 * 4;
  const auto check = [&] { return CheckSlice(slice, kPlan, plan::Side::kSource, 0, layout); };
  EXPECT_TRUE(check().ok()) << check().ToString();
  layout.tensors[0].shape = {34};
  ExpectStatus(check(), Code::kInvalidArgument, Reason::kShapeMismatch);
  layout.tensors[0].shape = {5, 7};
  slice.streams[0].ops[0].source_extent = {5, 6};
  slice.streams[0].ops[0].extent = {3, 3};
  ExpectStatus(check(), Code::kInvalidArgument, Reason::kInvalidRequest);
}

/// A rank of codes and scales that gathers the 5 x 7 floats of which it makes them.
class GatheredBounds : public PlanBounds {
 protected:
  GatheredBounds() {
    layout_.tensors = {{"w", layout::DType::kF8E4M3, {5, 7}, {}},
                       {"w_scale_inv", layout::DType::kF32, {3, 3}, {}}};
    slice_ = SliceFor(plan::Side::kTarget);
    const layout::DType floats = layout::DType::kBF16;
    slice_.streams[0].ops = {{0, 0, 2, floats, floats, {5, 7}, 0, {7, 1}, 0, {7, 1}}};
    slice_.streams[0].bytes = 70;
    plan::CopyOp codes{0, 2, 0, floats, layout::DType::kF8E4M3, {5, 7}, 0, {7, 1}, 0, {7, 1}};
    codes.transform = plan::Transform::kCodes;
    codes.block = {2, 3};
    plan::CopyOp scales{1, 2, 1, floats, layout::DType::kF32, {3, 3}, 0, {7, 1}, 0, {3, 1}};
    scales.transform = plan::Transform::kScales;
    scales.block = {2, 3};
    scales.source_extent = {5, 7};
    slice_.gathered = {floats, 35, {codes, scales}};
  }
  Status Check() const { return CheckSlice(slice_, kPlan, slice_.side, 0, layout_); }
  plan::CopyOp& floats() { return slice_.streams[0].ops[0]; }
  plan::CopyOp& codes() { return slice_.gathered.made[0]; }
  plan::CopyOp& scales() { return slice_.gathered.made[1]; }

  layout::RankLayout layout_;
  plan::RankSlice slice_;
};

TEST_F(GatheredBounds, AcceptWhatFitsExactly) { EXPECT_TRUE(Check().ok()) << Check().ToString(); }

TEST_F(GatheredBounds, RefuseEveryLie) {
  using Lie = std::function<void()>;
  const std::vector<std::pair<Lie, Reason>> lies = {
      {[&] { slice_.gathered = {}; }, Reason::kTensorMissing},
      {[&] { slice_.gathered.elements = 34; }, Reason::kShapeMismatch},
      {[&] { slice_.gathered.elements = -1; }, Reason::kInvalidRequest},
      {[&] { slice_.gathered.elements = INT64_MAX; }, Reason::kShapeOverflow},
      {[&] { slice_.gathered.made.clear(); }, Reason::kInvalidRequest},
      {[&] { slice_.gathered.dtype = layout::DType::kF8E4M3; }, Reason::kInvalidRequest},
      {[&] { slice_.gathered.dtype = layout::DType::kF16; }, Reason::kDtypeMismatch},
      {[&] { floats().target_offset = 1; }, Reason::kShapeMismatch},
      {[&] { floats().target_tensor = 3; }, Reason::kTensorMissing},
      {[&] { codes().source_offset = 1; }, Reason::kShapeMismatch},
      {[&] { codes().target_offset = 1; }, Reason::kShapeMismatch},
      {[&] { codes().source_tensor = 0; }, Reason::kInvalidRequest},
      {[&] { codes().target_tensor = 2; }, Reason::kInvalidRequest},
      {[&] { codes().target_tensor = 1; }, Reason::kDtypeMismatch},
      {[&] { codes().canonical = 2; }, Reason::kTensorMissing},
      {[&] {
         codes().block = {0, 3};
       },
       Reason::kInvalidRequest},
      {[&] { codes() = floats(); }, Reason::kInvalidRequest},
      {[&] {
         scales().source_extent = {6, 7};
       },
       Reason::kShapeMismatch},
      {[&] {
         scales().source_extent = {7, 7};
       },
       Reason::kInvalidRequest},
      {[&] { scales().target_offset = 1; }, Reason::kShapeMismatch},
  };
  const plan::RankSlice right = slice_;
  for (size_t i = 0; i < lies.size(); ++i) {
    SCOPED_TRACE(i);
    slice_ = right;
    lies[i].first();
    ExpectStatus(Check(), Code::kInvalidArgument, lies[i].second);
  }
}

TEST_F(GatheredBounds, RefuseASourceThatGathers) {
  plan::RankSlice slice = SliceFor(plan::Side::kSource);
  slice.gathered = slice_.gathered;
  ExpectStatus(PlanBounds::Check(slice), Code::kInvalidArgument, Reason::kInvalidRequest);
}

}  // namespace
}  // namespace weightwire::agent
