#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "server/plan/plan.h"
#include "tests/support/plan_run.h"
#include "tests/unit/plan/hand_layouts.h"

namespace weightwire::plan {
namespace {

using layout::DType;
using layout::ModelLayout;
using testing::BoxTensor;
using testing::Cut;
using ::testing::HasSubstr;
using testing::OneTensor;
using testing::Whole;

/// Both the bytes and the proof.
void ExpectExact(const ModelLayout& source, const ModelLayout& target, const TransferPlan& plan) {
  auto memory = weightwire::testing::EmptyMemory(target);
  EXPECT_EQ(weightwire::testing::RunPlan(plan, weightwire::testing::FilledMemory(source), memory),
            0);
  EXPECT_EQ(memory, weightwire::testing::FilledMemory(target));
  EXPECT_EQ(VerifyPlan(plan, source, target), OkStatus());
}

TEST(BuildPlan, FillsWholeTensorFromRows) {
  const auto source = OneTensor({7, 3}, Cut({7, 3}, 0, 3));
  const auto target = OneTensor({7, 3}, {Whole({7, 3})});
  const auto plan = BuildPlan(source, target);
  ASSERT_TRUE(plan.has_value()) << plan.error().ToString();
  EXPECT_EQ(plan->streams.size(), 3u);
  EXPECT_EQ(plan->copies_total, 3u);
  EXPECT_EQ(plan->bytes_total, 7 * 3 * 2);
  ExpectExact(source, target, *plan);
}

TEST(BuildPlan, CrossesRowsWithColumns) {
  const auto source = OneTensor({7, 5}, Cut({7, 5}, 0, 3));
  const auto target = OneTensor({7, 5}, Cut({7, 5}, 1, 2));
  const auto plan = BuildPlan(source, target);
  ASSERT_TRUE(plan.has_value());
  EXPECT_EQ(plan->copies_total, 6u);
  ExpectExact(source, target, *plan);
}

TEST(BuildPlan, TransposesWhereStridesSaySo) {
  const auto source = OneTensor({4, 6}, {Whole({4, 6})});
  auto target = OneTensor({4, 6}, {Whole({4, 6})});
  target.ranks[0].tensors[0].shape = {6, 4};
  target.ranks[0].tensors[0].pieces[0].local_stride = {1, 4};
  const auto plan = BuildPlan(source, target);
  ASSERT_TRUE(plan.has_value());
  EXPECT_EQ(plan->copies_total, 1u);
  ExpectExact(source, target, *plan);
}

TEST(BuildPlan, MovesScalars) {
  const auto source = OneTensor({}, {Whole({}), Whole({})}, DType::kF32);
  const auto target = OneTensor({}, {Whole({}), Whole({}), Whole({})}, DType::kF32);
  const auto plan = BuildPlan(source, target);
  ASSERT_TRUE(plan.has_value()) << plan.error().ToString();
  EXPECT_EQ(plan->bytes_total, 3 * 4);
  ExpectExact(source, target, *plan);
}

TEST(BuildPlan, SharesReadsAmongReplicas) {
  std::vector<layout::Box> boxes = Cut({12, 4}, 0, 2);
  boxes.push_back(boxes[0]);
  boxes.push_back(boxes[1]);
  const auto source = OneTensor({12, 4}, boxes);
  const auto target = OneTensor({12, 4}, std::vector(5, Whole({12, 4})));
  const auto plan = BuildPlan(source, target);
  ASSERT_TRUE(plan.has_value());
  // Five reads of each half: the fifth is cut in two.
  const int64_t copy = 6 * 4 * 2;
  EXPECT_EQ(Report(*plan, source, target).egress, std::vector<int64_t>(4, 5 * copy / 2));
  EXPECT_EQ(plan->copies_total, 12u);
  ExpectExact(source, target, *plan);
}

TEST(BuildPlan, CutsACopyThatIsTooLargeForOneHolder) {
  const auto source = OneTensor({1, 100, 3}, std::vector(4, Whole({1, 100, 3})));
  const auto target = OneTensor({1, 100, 3}, {Whole({1, 100, 3})});
  const auto plan = BuildPlan(source, target);
  ASSERT_TRUE(plan.has_value());
  EXPECT_EQ(plan->copies_total, 4u);
  EXPECT_EQ(Report(*plan, source, target).egress, std::vector<int64_t>(4, 150));
  ExpectExact(source, target, *plan);
}

TEST(BuildPlan, CutsNothingWhereSharesAreNearEnough) {
  // Two hundred and one copies: the odd one is within a per cent of what everyone sends.
  const auto source = OneTensor({50}, {Whole({50}), Whole({50})});
  const auto target = OneTensor({50}, std::vector(201, Whole({50})));
  const auto plan = BuildPlan(source, target);
  ASSERT_TRUE(plan.has_value());
  EXPECT_EQ(plan->copies_total, 201u);
}

TEST(BuildPlan, UsesEveryHolderOfShardsThatOverlap) {
  // Rank 0 holds the tensor whole, the others a third each, and rank 3 the middle of it.
  std::vector<layout::Box> boxes = Cut({12, 2}, 0, 3);
  boxes.insert(boxes.begin(), Whole({12, 2}));
  boxes[3] = {{3, 0}, {6, 2}};
  const auto source = OneTensor({12, 2}, boxes);
  const auto target = OneTensor({12, 2}, {Whole({12, 2})});
  const auto plan = BuildPlan(source, target);
  ASSERT_TRUE(plan.has_value());
  EXPECT_EQ(Report(*plan, source, target).egress, std::vector<int64_t>(4, 12));
  ExpectExact(source, target, *plan);
}

TEST(BuildPlan, GivesSharedTensorsToTheHolderThatHasLessOfItsOwn) {
  // Rank 0 alone holds "b"; "a" is on both ranks and must come from rank 1, though it is first.
  ModelLayout source;
  source.canonical.tensors = {{"a", DType::kBF16, {8}}, {"b", DType::kBF16, {8}}};
  source.ranks = {{{BoxTensor("a", 0, Whole({8})), BoxTensor("b", 1, Whole({8}))}},
                  {{BoxTensor("a", 0, Whole({8}))}}};
  ModelLayout target = source;
  target.ranks.pop_back();
  const auto plan = BuildPlan(source, target);
  ASSERT_TRUE(plan.has_value());
  EXPECT_EQ(Report(*plan, source, target).egress, (std::vector<int64_t>{16, 16}));
}

TEST(BuildPlan, SharesOutLargeCopiesBeforeSmallOnes) {
  ModelLayout source;
  source.canonical.tensors = {
      {"a", DType::kBF16, {4}}, {"b", DType::kBF16, {4}}, {"c", DType::kBF16, {8}}};
  const layout::RankLayout rank = {{BoxTensor("a", 0, Whole({4})), BoxTensor("b", 1, Whole({4})),
                                    BoxTensor("c", 2, Whole({8}))}};
  source.ranks = {rank, rank};
  ModelLayout target = source;
  target.ranks.pop_back();
  const auto plan = BuildPlan(source, target);
  ASSERT_TRUE(plan.has_value());
  EXPECT_EQ(Report(*plan, source, target).egress, (std::vector<int64_t>{16, 16}));
}

TEST(BuildPlan, ReadsUnequalOverlappingShardsOnce) {
  const auto source =
      OneTensor({10, 6}, {{{0, 0}, {6, 6}}, {{4, 0}, {6, 4}}, {{3, 2}, {7, 4}}, {{2, 1}, {2, 2}}});
  const auto target = OneTensor({10, 6}, {Whole({10, 6}), {{3, 1}, {5, 5}}});
  const auto plan = BuildPlan(source, target);
  ASSERT_TRUE(plan.has_value()) << plan.error().ToString();
  ExpectExact(source, target, *plan);
}

TEST(BuildPlan, LeavesPaddingAlone) {
  const auto source = OneTensor({5, 2}, {Whole({5, 2})});
  auto target = OneTensor({5, 2}, {Whole({5, 2})});
  target.ranks[0].tensors[0].shape = {8, 2};
  const auto plan = BuildPlan(source, target);
  ASSERT_TRUE(plan.has_value());
  EXPECT_EQ(plan->bytes_total, 5 * 2 * 2);
  ExpectExact(source, target, *plan);
}

TEST(BuildPlan, MergesPiecesThatContinueEachOther) {
  const auto source = OneTensor({9, 4}, {Whole({9, 4})});
  auto target = OneTensor({9, 4}, {Whole({9, 4})});
  auto& tensor = target.ranks[0].tensors[0];
  tensor.pieces = {{0, {{0, 0}, {2, 4}}, 0, {4, 1}},
                   {0, {{2, 0}, {3, 4}}, 8, {4, 1}},
                   {0, {{5, 0}, {4, 4}}, 20, {4, 1}}};
  const auto plan = BuildPlan(source, target);
  ASSERT_TRUE(plan.has_value());
  EXPECT_EQ(plan->copies_total, 1u);
  ExpectExact(source, target, *plan);
}

TEST(BuildPlan, KeepsApartPiecesThatOnlyTouchOnOneSide) {
  const auto source = OneTensor({9, 4}, {Whole({9, 4})});
  auto target = OneTensor({9, 4}, {Whole({9, 4})});
  auto& tensor = target.ranks[0].tensors[0];
  tensor.pieces = {{0, {{0, 0}, {2, 4}}, 28, {4, 1}}, {0, {{2, 0}, {7, 4}}, 0, {4, 1}}};
  const auto plan = BuildPlan(source, target);
  ASSERT_TRUE(plan.has_value());
  EXPECT_EQ(plan->copies_total, 2u);
  ExpectExact(source, target, *plan);
}

TEST(BuildPlan, FillsTwoTiedCopiesFromOneTensor) {
  const auto source = OneTensor({6, 3}, Cut({6, 3}, 0, 2));
  auto target = OneTensor({6, 3}, {Whole({6, 3})});
  target.ranks[0].tensors.push_back(BoxTensor("head", 0, Whole({6, 3})));
  const auto plan = BuildPlan(source, target);
  ASSERT_TRUE(plan.has_value());
  EXPECT_EQ(plan->bytes_total, 2 * 6 * 3 * 2);
  ExpectExact(source, target, *plan);
}

TEST(BuildPlan, CastsAmongFloatsAndCountsWireBytesInTheTargetDtype) {
  for (DType from : {DType::kBF16, DType::kF16, DType::kF32}) {
    for (DType to : {DType::kBF16, DType::kF16, DType::kF32}) {
      const auto source = OneTensor({5}, {Whole({5})}, from);
      const auto target = OneTensor({5}, {Whole({5})}, to);
      const auto plan = BuildPlan(source, target);
      ASSERT_TRUE(plan.has_value());
      EXPECT_EQ(plan->bytes_total, 5 * layout::ElementBytes(to));
      EXPECT_EQ(plan->streams[0].ops[0].source_dtype, from);
      EXPECT_EQ(VerifyPlan(*plan, source, target), OkStatus());
    }
  }
}

TEST(BuildPlan, OrdersOpsOfEveryStreamByTensorThenTargetOffset) {
  ModelLayout source;
  source.canonical.tensors = {{"a", DType::kBF16, {6, 4}}, {"b", DType::kBF16, {6, 4}}};
  for (const auto& box : Cut({6, 4}, 1, 2)) {
    source.ranks.push_back({{BoxTensor("b", 1, box), BoxTensor("a", 0, box)}});
  }
  ModelLayout target = source;
  target.ranks = {{{{"ba",
                     DType::kBF16,
                     {12, 4},
                     {{1, Whole({6, 4}), 0, {4, 1}}, {0, Whole({6, 4}), 24, {4, 1}}}}}}};
  const auto plan = BuildPlan(source, target);
  ASSERT_TRUE(plan.has_value());
  ASSERT_EQ(plan->streams.size(), 2u);
  for (const Stream& stream : plan->streams) {
    ASSERT_EQ(stream.ops.size(), 2u);
    EXPECT_EQ(stream.ops[0].canonical, 0u);
    EXPECT_EQ(stream.ops[1].canonical, 1u);
  }
  ExpectExact(source, target, *plan);
}

TEST(BuildPlan, SortsStreamsByTargetThenSource) {
  const auto source = OneTensor({12, 4}, Cut({12, 4}, 0, 3));
  const auto target = OneTensor({12, 4}, Cut({12, 4}, 1, 2));
  const auto plan = BuildPlan(source, target);
  ASSERT_TRUE(plan.has_value());
  std::vector<std::pair<uint32_t, uint32_t>> pairs;
  for (const Stream& stream : plan->streams) {
    EXPECT_EQ(stream.id, pairs.size());
    pairs.emplace_back(stream.target_rank, stream.source_rank);
  }
  EXPECT_EQ(pairs, (std::vector<std::pair<uint32_t, uint32_t>>{
                       {0, 0}, {0, 1}, {0, 2}, {1, 0}, {1, 1}, {1, 2}}));
}

TEST(BuildPlan, GivesEqualPlansForEqualInputs) {
  const auto source = OneTensor({12, 4}, Cut({12, 4}, 0, 3));
  const auto target = OneTensor({12, 4}, Cut({12, 4}, 1, 2));
  EXPECT_EQ(BuildPlan(source, target), BuildPlan(ModelLayout(source), ModelLayout(target)));
}

TEST(BuildPlan, GivesAnotherIdForAnyOtherLayoutOrOption) {
  const auto source = OneTensor({12, 4}, Cut({12, 4}, 0, 3));
  const auto target = OneTensor({12, 4}, Cut({12, 4}, 1, 2));
  const PlanId id = BuildPlan(source, target)->id;
  EXPECT_NE(BuildPlan(OneTensor({12, 4}, Cut({12, 4}, 0, 4)), target)->id, id);
  EXPECT_NE(BuildPlan(source, OneTensor({12, 4}, Cut({12, 4}, 1, 4)))->id, id);
  EXPECT_NE(BuildPlan(target, source)->id, id);
  PlanOptions options;
  options.copies_max = 1000;
  EXPECT_NE(BuildPlan(source, target, options)->id, id);
  options = {};
  options.streams_max = 1000;
  EXPECT_NE(BuildPlan(source, target, options)->id, id);
}

TEST(BuildPlan, NeedsNothingForATensorThatNoTargetHolds) {
  auto source = OneTensor({4}, {Whole({4})});
  auto target = source;
  target.canonical.tensors.push_back({"x", DType::kBF16, {2}});
  const auto plan = BuildPlan(source, target);
  ASSERT_TRUE(plan.has_value()) << plan.error().ToString();
  EXPECT_EQ(plan->tensor_names, (std::vector<std::string>{"w", "x"}));
}

struct Refusal {
  Code code;
  Reason reason;
};
void ExpectRefused(const Result<TransferPlan>& plan, Refusal expected) {
  ASSERT_FALSE(plan.has_value());
  EXPECT_EQ(plan.error().code(), expected.code) << plan.error().ToString();
  EXPECT_EQ(plan.error().reason(), expected.reason) << plan.error().ToString();
}

TEST(BuildPlan, RefusesATargetThatNoSourceCanFill) {
  const auto source = OneTensor({8, 4}, {{{0, 0}, {3, 4}}, {{4, 0}, {4, 4}}});
  const auto plan = BuildPlan(source, OneTensor({8, 4}, Cut({8, 4}, 0, 2)));
  ExpectRefused(plan, {Code::kFailedPrecondition, Reason::kUnownedElement});
  EXPECT_EQ(plan.error().tensor(), "w");
  EXPECT_EQ(plan.error().rank(), "target/0");
  EXPECT_THAT(plan.error().message(), HasSubstr("[3:4, 0:4]"));
}

TEST(BuildPlan, RefusesATargetWhoseTensorNobodyHolds) {
  auto source = OneTensor({8}, {Whole({8})});
  source.ranks[0].tensors.clear();
  ExpectRefused(BuildPlan(source, OneTensor({8}, {Whole({8})})),
                {Code::kFailedPrecondition, Reason::kUnownedElement});
}

TEST(BuildPlan, RefusesDtypesWithoutACast) {
  const auto source = OneTensor({8}, {Whole({8})}, DType::kF32);
  const auto plan = BuildPlan(source, OneTensor({8}, {Whole({8})}, DType::kI32));
  ExpectRefused(plan, {Code::kFailedPrecondition, Reason::kDtypeMismatch});
  EXPECT_EQ(plan.error().tensor(), "w");
  EXPECT_THAT(plan.error().message(), HasSubstr("source/0"));
  EXPECT_THAT(plan.error().message(), HasSubstr("target/0"));
}

TEST(BuildPlan, RefusesAReplicaWithADtypeOfItsOwn) {
  auto source = OneTensor({8}, {Whole({8}), Whole({8})}, DType::kF32);
  source.ranks[1].tensors[0].dtype = DType::kF8E4M3;
  const auto plan = BuildPlan(source, OneTensor({8}, {Whole({8})}, DType::kF32));
  ExpectRefused(plan, {Code::kFailedPrecondition, Reason::kDtypeMismatch});
  EXPECT_THAT(plan.error().message(), HasSubstr("source/1"));
}

TEST(BuildPlan, RefusesCanonicalShapesThatDiffer) {
  const auto plan =
      BuildPlan(OneTensor({8, 4}, {Whole({8, 4})}), OneTensor({8, 5}, {Whole({8, 5})}));
  ExpectRefused(plan, {Code::kFailedPrecondition, Reason::kShapeMismatch});
  EXPECT_THAT(plan.error().message(), HasSubstr("[8, 4]"));
}

TEST(BuildPlan, RefusesATensorThatTheSourceDoesNotKnow) {
  auto source = OneTensor({8}, {Whole({8})});
  source.canonical.tensors[0].name = "v";
  const auto plan = BuildPlan(source, OneTensor({8}, {Whole({8})}));
  ExpectRefused(plan, {Code::kFailedPrecondition, Reason::kTensorMissing});
  EXPECT_EQ(plan.error().tensor(), "w");
}

TEST(BuildPlan, RefusesTargetPiecesThatOverlap) {
  auto target = OneTensor({8}, {Whole({8})});
  target.ranks[0].tensors[0].pieces = {{0, {{0}, {5}}, 0, {1}}, {0, {{5}, {3}}, 4, {1}}};
  ExpectRefused(BuildPlan(OneTensor({8}, {Whole({8})}), target),
                {Code::kInvalidArgument, Reason::kOverlappingShards});
}

TEST(BuildPlan, RefusesALayoutThatLeavesItsStorage) {
  auto source = OneTensor({8}, {Whole({8})});
  source.ranks[0].tensors[0].pieces[0].local_offset = 1;
  ExpectRefused(BuildPlan(source, OneTensor({8}, {Whole({8})})),
                {Code::kInvalidArgument, Reason::kShapeMismatch});
}

TEST(BuildPlan, RefusesMoreCopiesThanAllowed) {
  const auto source = OneTensor({12, 4}, Cut({12, 4}, 0, 3));
  const auto target = OneTensor({12, 4}, Cut({12, 4}, 1, 2));
  PlanOptions options;
  options.copies_max = 6;
  EXPECT_TRUE(BuildPlan(source, target, options).has_value());
  options.copies_max = 5;
  ExpectRefused(BuildPlan(source, target, options),
                {Code::kResourceExhausted, Reason::kLimitExceeded});
}

TEST(BuildPlan, RefusesMoreStreamsThanAllowed) {
  const auto source = OneTensor({12, 4}, Cut({12, 4}, 0, 3));
  const auto target = OneTensor({12, 4}, Cut({12, 4}, 1, 2));
  PlanOptions options;
  options.streams_max = 6;
  EXPECT_TRUE(BuildPlan(source, target, options).has_value());
  options.streams_max = 5;
  ExpectRefused(BuildPlan(source, target, options),
                {Code::kResourceExhausted, Reason::kLimitExceeded});
}

}  // namespace
}  // namespace weightwire::plan
