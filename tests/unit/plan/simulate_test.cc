#include "server/plan/simulate.h"

#include <gtest/gtest.h>

#include "tests/unit/plan/hand_layouts.h"

namespace weightwire::plan {
namespace {

using testing::Cut;
using testing::OneTensor;
using testing::Whole;

/// Two sources with half of 8,000 bytes each; `replicas` targets with all of it.
Simulation Predict(size_t replicas, LinkModel model) {
  const layout::Shape shape = {4000};
  const auto source = OneTensor(shape, Cut(shape, 0, 2));
  const auto target = OneTensor(shape, std::vector(replicas, Whole(shape)));
  const auto classes = LayoutClasses(target);
  EXPECT_EQ(classes.size(), 1u);
  return Simulate(BuildPlan(source, OnePerClass(target, classes)).value(), classes, model);
}

LinkModel At(Topology topology) {
  return {.bytes_per_second = 1000, .topology = topology, .segment_bytes = 500};
}

TEST(Simulate, IsLimitedByTheSourcesInAStar) {
  const Simulation star = Predict(4, At(Topology::kStar));
  EXPECT_NEAR(star.seconds, 16, 1e-6);  // each source sends 4 × 4,000 bytes
  EXPECT_EQ(star.bottleneck, "source/0 egress");
  EXPECT_NEAR(star.bottleneck_seconds, 16, 1e-9);
  EXPECT_EQ(star.source_egress, (std::vector<int64_t>{16'000, 16'000}));
  EXPECT_EQ(star.target_egress, std::vector<int64_t>(4, 0));
}

TEST(Simulate, LagsOneSegmentPerHopInAChain) {
  const Simulation chain = Predict(4, At(Topology::kChain));
  EXPECT_NEAR(chain.target_end.at(0), 8, 1e-6);
  EXPECT_NEAR(chain.target_end.at(3), 8 + 3 * 0.5, 1e-6);
  EXPECT_NEAR(chain.seconds, 9.5, 1e-6);
  EXPECT_EQ(chain.bottleneck, "target/0 ingress");
  EXPECT_EQ(chain.target_egress, (std::vector<int64_t>{8000, 8000, 8000, 0}));
  EXPECT_EQ(chain.source_egress, (std::vector<int64_t>{4000, 4000}));
}

TEST(Simulate, SendsTwiceFromTheInnerRanksOfATree) {
  const Simulation tree = Predict(7, At(Topology::kTree));
  EXPECT_EQ(tree.bottleneck, "target/0 egress (relay)");
  EXPECT_EQ(tree.target_egress, (std::vector<int64_t>{16'000, 16'000, 16'000, 0, 0, 0, 0}));
  EXPECT_NEAR(tree.seconds, 16 + 0.5, 1e-6);  // the second level ends at 16, the third lags
}

TEST(Simulate, AddsLatencyPerHop) {
  LinkModel model = At(Topology::kChain);
  model.latency_seconds = 0.25;
  EXPECT_NEAR(Predict(3, model).seconds, 8 + 0.25 + 2 * (0.5 + 0.25), 1e-6);
}

TEST(Simulate, TakesNoTimeWithoutBytes) {
  auto nothing = OneTensor({8}, {Whole({8})});
  nothing.ranks[0].tensors.clear();
  const auto classes = LayoutClasses(nothing);
  const Simulation result =
      Simulate(BuildPlan(nothing, nothing).value(), classes, At(Topology::kStar));
  EXPECT_EQ(result.seconds, 0);
  EXPECT_EQ(result.bottleneck, "");
}

}  // namespace
}  // namespace weightwire::plan
