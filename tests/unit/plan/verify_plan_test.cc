#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>

#include "server/plan/plan.h"
#include "tests/unit/plan/hand_layouts.h"

namespace weightwire::plan {
namespace {

using layout::DType;
using layout::ModelLayout;
using testing::BoxTensor;
using testing::Cut;
using testing::OneTensor;
using testing::Whole;

/// Square tensors, a fused target and replicas: mutations keep shapes plausible.
struct Fixture {
  ModelLayout source;
  ModelLayout target;
  TransferPlan plan;
};
Fixture MakeFixture() {
  Fixture f;
  f.source.canonical.tensors = {{"gate", DType::kBF16, {8, 8}}, {"up", DType::kBF16, {8, 8}}};
  f.target.canonical = f.source.canonical;
  for (const auto& box : Cut({8, 8}, 0, 2)) {
    f.source.ranks.push_back({{BoxTensor("gate", 0, box), BoxTensor("up", 1, box)}});
  }
  for (const auto& box : Cut({8, 8}, 1, 2)) {
    layout::LocalTensor fused{"gate_up", DType::kBF16, {16, 4}, {}};
    fused.pieces = {{0, box, 0, {4, 1}}, {1, box, 32, {4, 1}}};
    f.target.ranks.push_back({{fused}});
  }
  f.plan = BuildPlan(f.source, f.target).value();
  return f;
}

CopyOp& FirstOp(TransferPlan& plan) { return plan.streams[0].ops[0]; }

/// Keeps the totals true, so that only the copies themselves can give the mutation away.
void FixTotals(TransferPlan& plan) {
  plan.bytes_total = 0;
  plan.copies_total = 0;
  for (Stream& stream : plan.streams) {
    stream.bytes = 0;
    for (const CopyOp& op : stream.ops) stream.bytes += WireBytes(op);
    plan.bytes_total += stream.bytes;
    plan.copies_total += stream.ops.size();
  }
}

struct Mutation {
  const char* name;
  std::function<void(TransferPlan&)> apply;
  bool fix_totals = true;
};

class VerifyPlanMutation : public ::testing::TestWithParam<Mutation> {};

TEST_P(VerifyPlanMutation, IsCaught) {
  Fixture f = MakeFixture();
  ASSERT_EQ(VerifyPlan(f.plan, f.source, f.target), OkStatus());
  const TransferPlan before = f.plan;
  GetParam().apply(f.plan);
  if (GetParam().fix_totals) FixTotals(f.plan);
  ASSERT_NE(f.plan, before);
  const Status status = VerifyPlan(f.plan, f.source, f.target);
  EXPECT_EQ(status.code(), Code::kInternal);
  EXPECT_EQ(status.reason(), Reason::kInternal);
}

INSTANTIATE_TEST_SUITE_P(
    All, VerifyPlanMutation,
    ::testing::Values(
        Mutation{"DroppedOp", [](TransferPlan& p) { p.streams[0].ops.pop_back(); }},
        Mutation{"DroppedStream", [](TransferPlan& p) { p.streams.pop_back(); }},
        Mutation{"DuplicatedOp",
                 [](TransferPlan& p) { p.streams[0].ops.push_back(p.streams[0].ops.back()); }},
        Mutation{"OverlappingOp",
                 [](TransferPlan& p) {
                   CopyOp op = p.streams[0].ops.back();
                   op.extent[0] -= 1;
                   op.target_offset += op.target_stride[0];
                   op.source_offset += op.source_stride[0];
                   p.streams[0].ops.push_back(op);
                 }},
        Mutation{"OneRowTwiceAndOneRowNever",
                 [](TransferPlan& p) {
                   CopyOp& op = FirstOp(p);
                   CopyOp again = op;
                   op.extent[0] -= 1;
                   again.extent[0] = 1;
                   again.target_offset += again.target_stride[0];
                   again.source_offset += again.source_stride[0];
                   p.streams[0].ops.insert(p.streams[0].ops.begin() + 1, again);
                 }},
        Mutation{"ShiftedTarget", [](TransferPlan& p) { FirstOp(p).target_offset += 4; }},
        Mutation{"TargetShiftedByOneElement",
                 [](TransferPlan& p) { FirstOp(p).target_offset += 1; }},
        Mutation{"ShiftedSource", [](TransferPlan& p) { FirstOp(p).source_offset += 1; }},
        Mutation{"NegativeSource", [](TransferPlan& p) { FirstOp(p).source_offset = -8; }},
        Mutation{"SourceBeyondItsTensor",
                 [](TransferPlan& p) { FirstOp(p).source_offset += 1000; }},
        Mutation{"TargetBeyondItsTensor",
                 [](TransferPlan& p) { FirstOp(p).target_offset += 1000; }},
        Mutation{"ChangedSourceStride", [](TransferPlan& p) { FirstOp(p).source_stride[0] = 4; }},
        Mutation{"ChangedTargetStride", [](TransferPlan& p) { FirstOp(p).target_stride[0] = 8; }},
        Mutation{"HugeStride",
                 [](TransferPlan& p) { FirstOp(p).source_stride[0] = int64_t{1} << 62; }},
        Mutation{"ZeroStride", [](TransferPlan& p) { FirstOp(p).source_stride[0] = 0; }},
        Mutation{"SwappedSourceStrides",
                 [](TransferPlan& p) {
                   std::swap(FirstOp(p).source_stride[0], FirstOp(p).source_stride[1]);
                 }},
        Mutation{"SwappedBothStrides",
                 [](TransferPlan& p) {
                   std::swap(FirstOp(p).source_stride[0], FirstOp(p).source_stride[1]);
                   std::swap(FirstOp(p).target_stride[0], FirstOp(p).target_stride[1]);
                 }},
        Mutation{"SwappedExtents",
                 [](TransferPlan& p) {
                   FirstOp(p).extent = {2, 8};
                 }},
        Mutation{"ShortenedExtent", [](TransferPlan& p) { FirstOp(p).extent[1] -= 1; }},
        Mutation{"LengthenedExtent", [](TransferPlan& p) { FirstOp(p).extent[0] += 1; }},
        Mutation{"ZeroExtent", [](TransferPlan& p) { FirstOp(p).extent[0] = 0; }},
        Mutation{"MissingDimension", [](TransferPlan& p) { FirstOp(p).extent.pop_back(); }},
        Mutation{"GateFromUp", [](TransferPlan& p) { FirstOp(p).source_tensor = 1; }},
        Mutation{"UpCalledGate", [](TransferPlan& p) { p.streams[0].ops[1].canonical = 0; }},
        Mutation{"GateAndUpExchanged",
                 [](TransferPlan& p) {
                   std::swap(p.streams[0].ops[0].target_offset, p.streams[0].ops[1].target_offset);
                 }},
        Mutation{"UnknownTensor", [](TransferPlan& p) { FirstOp(p).canonical = 9; }},
        Mutation{"UnknownSourceTensor", [](TransferPlan& p) { FirstOp(p).source_tensor = 9; }},
        Mutation{"UnknownTargetTensor", [](TransferPlan& p) { FirstOp(p).target_tensor = 9; }},
        Mutation{"OpsOutOfOrder",
                 [](TransferPlan& p) { std::swap(p.streams[0].ops[0], p.streams[0].ops[1]); }},
        Mutation{"WrongSourceRank",
                 [](TransferPlan& p) { std::swap(p.streams[0].ops, p.streams[1].ops); }},
        Mutation{"WrongTargetRank",
                 [](TransferPlan& p) { std::swap(p.streams[0].ops, p.streams[2].ops); }},
        Mutation{"RankThatDoesNotExist", [](TransferPlan& p) { p.streams[3].source_rank = 7; }},
        Mutation{"WrongSourceDtype",
                 [](TransferPlan& p) { FirstOp(p).source_dtype = DType::kF16; }},
        Mutation{"WrongTargetDtype",
                 [](TransferPlan& p) { FirstOp(p).target_dtype = DType::kF16; }},
        Mutation{"StreamsOutOfOrder",
                 [](TransferPlan& p) {
                   std::swap(p.streams[0], p.streams[1]);
                   std::swap(p.streams[0].id, p.streams[1].id);
                 }},
        Mutation{"WrongStreamId", [](TransferPlan& p) { p.streams[1].id = 0; }},
        Mutation{"EmptyStream",
                 [](TransferPlan& p) {
                   p.streams.push_back({4, 1, 1, 0, {}});
                 }},
        Mutation{"WrongStreamBytes",
                 [](TransferPlan& p) {
                   p.streams[0].bytes += 2;
                   p.streams[1].bytes -= 2;
                 },
                 false},
        Mutation{"WrongTotalBytes", [](TransferPlan& p) { p.bytes_total += 1; }, false},
        Mutation{"WrongCopyCount", [](TransferPlan& p) { p.copies_total += 1; }, false},
        Mutation{"WrongTensorNames", [](TransferPlan& p) { p.tensor_names[0] = "down"; }},
        Mutation{"WrongFingerprint", [](TransferPlan& p) { p.source.low ^= 1; }}),
    [](const auto& mutation) { return mutation.param.name; });

TEST(VerifyPlan, RefusesTargetPiecesThatShareStorage) {
  // Rows of width 5 in storage of row length 6 meet rows shifted by 5 columns.
  ModelLayout source = OneTensor({4, 10}, {Whole({4, 10})});
  ModelLayout target = source;
  target.ranks[0].tensors[0].shape = {4, 11};
  target.ranks[0].tensors[0].pieces = {{0, {{0, 0}, {4, 5}}, 0, {11, 1}},
                                       {0, {{0, 5}, {4, 5}}, 6, {11, 1}}};
  TransferPlan plan = BuildPlan(source, target).value();
  ASSERT_EQ(VerifyPlan(plan, source, target), OkStatus());
  target.ranks[0].tensors[0].pieces[1].local_offset = 4;
  for (CopyOp& op : plan.streams[0].ops) {
    if (op.target_offset == 6) op.target_offset = 4;
  }
  plan.target = layout::FingerprintOf(target);
  const Status status = VerifyPlan(plan, source, target);
  EXPECT_EQ(status.code(), Code::kInternal);
  EXPECT_THAT(status.message(), ::testing::HasSubstr("share storage"));
}

TEST(VerifyPlan, RefusesATargetPieceThatRepeatsStorage) {
  ModelLayout source = OneTensor({4, 4}, {Whole({4, 4})});
  ModelLayout target = source;
  TransferPlan plan = BuildPlan(source, target).value();
  target.ranks[0].tensors[0].pieces[0].local_stride = {3, 1};
  plan.streams[0].ops[0].target_stride = {3, 1};
  plan.target = layout::FingerprintOf(target);
  const Status status = VerifyPlan(plan, source, target);
  EXPECT_EQ(status.code(), Code::kInternal);
  EXPECT_THAT(status.message(), ::testing::HasSubstr("two elements in one place"));
}

TEST(VerifyPlan, NamesStreamOpAndTensor) {
  Fixture f = MakeFixture();
  f.plan.streams[1].ops[1].source_offset += 1;
  const Status status = VerifyPlan(f.plan, f.source, f.target);
  EXPECT_THAT(status.message(),
              ::testing::HasSubstr("stream 1 (source/1 to target/0) op 1 of 'up'"));
  EXPECT_EQ(status.tensor(), "up");
  EXPECT_EQ(status.rank(), "target/0");
}

TEST(VerifyPlan, AcceptsAReplicaInPlaceOfTheChosenOne) {
  const auto source = OneTensor({}, {Whole({}), Whole({})});
  const auto target = OneTensor({}, {Whole({})});
  TransferPlan plan = BuildPlan(source, target).value();
  plan.streams[0].source_rank = 1;
  EXPECT_EQ(VerifyPlan(plan, source, target), OkStatus());
}

}  // namespace
}  // namespace weightwire::plan
