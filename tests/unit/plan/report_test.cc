#include <gtest/gtest.h>

#include "server/plan/fluid.h"
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

PlanReport ReportOf(const ModelLayout& source, const ModelLayout& target) {
  return Report(BuildPlan(source, target).value(), source, target);
}

TEST(PlanReport, CountsBytesByRank) {
  const PlanReport report =
      ReportOf(OneTensor({10, 4}, Cut({10, 4}, 0, 3)), OneTensor({10, 4}, Cut({10, 4}, 0, 2)));
  EXPECT_EQ(report.bytes_total, 80);
  EXPECT_EQ(report.copies, 4u);
  EXPECT_EQ(report.streams, 4u);
  EXPECT_EQ(report.egress, (std::vector<int64_t>{24, 24, 32}));
  EXPECT_EQ(report.ingress, (std::vector<int64_t>{40, 40}));
  EXPECT_EQ(report.egress_max, 32);
  EXPECT_EQ(report.ingress_max, 40);
  EXPECT_DOUBLE_EQ(report.egress_over_bound, 1.0);
  EXPECT_DOUBLE_EQ(report.ingress_over_bound, 1.0);
}

TEST(PlanReport, ComparesReplicasWithPerfectSharing) {
  // Scalars cannot be cut: five of them from two replicas are 3 and 2, perfect would be 2½ each.
  const PlanReport report =
      ReportOf(OneTensor({}, {Whole({}), Whole({})}), OneTensor({}, std::vector(5, Whole({}))));
  EXPECT_DOUBLE_EQ(report.egress_bound, 5.0);
  EXPECT_DOUBLE_EQ(report.egress_over_bound, 6.0 / 5.0);
}

TEST(PlanReport, BoundsBytesByEveryoneWhoHoldsThemInAnyShard) {
  // Rank 0 holds everything, rank 1 the last half in a shard of its own.
  const PlanReport report =
      ReportOf(OneTensor({8}, {Whole({8}), {{4}, {4}}}), OneTensor({8}, {Whole({8})}));
  EXPECT_DOUBLE_EQ(report.egress_bound, 8.0);
  EXPECT_DOUBLE_EQ(report.egress_over_bound, 1.0);
}

TEST(PlanReport, CountsNestedHolderSets) {
  // "a" only on rank 0; "b" on ranks 0 and 1; "c" on all three.
  ModelLayout source;
  source.canonical.tensors = {
      {"a", DType::kBF16, {40}}, {"b", DType::kBF16, {10}}, {"c", DType::kBF16, {10}}};
  const auto tensor = [](uint32_t t, int64_t n) {
    return BoxTensor(std::string("t") + std::to_string(t), t, Whole({n}));
  };
  source.ranks = {{{tensor(0, 40), tensor(1, 10), tensor(2, 10)}},
                  {{tensor(1, 10), tensor(2, 10)}},
                  {{tensor(2, 10)}}};
  ModelLayout target = source;
  target.ranks.resize(1);
  const PlanReport report = ReportOf(source, target);
  EXPECT_EQ(report.egress, (std::vector<int64_t>{80, 20, 20}));
  EXPECT_DOUBLE_EQ(report.egress_over_bound, 1.0);
}

TEST(PlanReport, CountsPartsOfMergedCopiesByTheirOwnHolders) {
  // The reader merges rank 0's two pieces into one copy; rank 1 holds only the second of them.
  ModelLayout source = OneTensor({8}, {Whole({8})});
  source.ranks[0].tensors[0].pieces = {{0, {{0}, {4}}, 0, {1}}, {0, {{4}, {4}}, 4, {1}}};
  const PlanReport alone = ReportOf(source, OneTensor({8}, {Whole({8})}));
  EXPECT_EQ(alone.copies, 1u);
  EXPECT_DOUBLE_EQ(alone.egress_over_bound, 1.0);
}

TEST(PlanReport, IsPerfectForAPlanWithoutBytes) {
  ModelLayout empty = OneTensor({8}, {Whole({8})});
  empty.ranks[0].tensors.clear();
  const PlanReport report = ReportOf(empty, empty);
  EXPECT_DOUBLE_EQ(report.egress_over_bound, 1.0);
  EXPECT_DOUBLE_EQ(report.ingress_over_bound, 1.0);
  EXPECT_DOUBLE_EQ(report.simulated_over_bound, 1.0);
}

TEST(PlanReport, SimulatesABalancedPlanAtItsBound) {
  const PlanReport report =
      ReportOf(OneTensor({12, 12}, Cut({12, 12}, 0, 4)), OneTensor({12, 12}, Cut({12, 12}, 1, 3)));
  EXPECT_NEAR(report.simulated_over_bound, 1.0, 1e-9);
}

double EqualTime(const std::vector<Flow>& flows, uint32_t senders, uint32_t receivers) {
  return RunFluid(flows, senders, receivers, Sharing::kEqual).end;
}

TEST(FluidTime, SharesASource) {
  EXPECT_NEAR(EqualTime({{0, 0, 60}, {0, 1, 60}}, 1, 2), 120, 1e-6);
}

TEST(FluidTime, GivesFreedCapacityToTheRest) {
  // Both at ½ until the short one ends at 40; then the long one has 40 left at full rate.
  const FluidTimes times =
      RunFluid(std::vector<Flow>{{0, 0, 20}, {0, 1, 60}}, 1, 2, Sharing::kEqual);
  EXPECT_NEAR(times.end, 80, 1e-6);
  EXPECT_NEAR(times.sender_end.at(0), 80, 1e-6);
  EXPECT_NEAR(times.receiver_end.at(0), 40, 1e-6);
  EXPECT_NEAR(times.receiver_end.at(1), 80, 1e-6);
}

TEST(FluidTime, IsMaxMinFair) {
  // Source 0's three flows run at ⅓, one of them into target 0, whose other flow gets ⅔.
  EXPECT_NEAR(EqualTime({{0, 0, 30}, {0, 1, 30}, {0, 2, 30}, {1, 0, 60}}, 2, 3), 90, 1e-6);
}

TEST(FluidTime, EndsTheFlowsOfAFullLinkTogetherWhenTheyShareByBytes) {
  const FluidTimes times =
      RunFluid(std::vector<Flow>{{0, 0, 20}, {0, 1, 60}, {1, 1, 10}}, 2, 2, Sharing::kByBytes);
  EXPECT_NEAR(times.receiver_end.at(0), 80, 1e-6);
  EXPECT_NEAR(times.receiver_end.at(1), 80, 1e-6);
  // Link 1 takes ¾ from source 0 and leaves ¼, not its share by bytes, to source 1.
  EXPECT_NEAR(times.sender_end.at(1), 40, 1e-6);
}

TEST(FluidTime, SharedByBytesLastsAsLongAsTheBusiestLink) {
  // By equal shares, source 0's long flow starves behind short ones that cross busy targets.
  const std::vector<Flow> flows = {{0, 0, 90}, {0, 1, 10}, {1, 1, 45}, {1, 2, 45}, {2, 1, 45}};
  EXPECT_NEAR(RunFluid(flows, 3, 3, Sharing::kByBytes).end, 100, 1e-6);
}

TEST(FluidTime, IsNotBelowAnyLinkInALargePlan) {
  std::vector<Flow> flows;
  int64_t sent = 0;
  for (uint32_t target = 0; target < 3000; ++target) {
    const auto bytes = static_cast<int64_t>(1 + target % 97);
    flows.push_back({target % 2, target, bytes});
    if (target % 2 == 0) sent += bytes;
  }
  const double time = EqualTime(flows, 2, 3000);
  EXPECT_GE(time, static_cast<double>(sent) * (1 - 1e-9));
  EXPECT_LE(time, static_cast<double>(sent) * 1.02);
}

}  // namespace
}  // namespace weightwire::plan
