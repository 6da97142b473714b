#include "server/coordinator/transfer_edges.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/unit/coordinator/fleet.h"

namespace weightwire::coordinator::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

TEST(EdgeStats, ReadsThatOverlapTakeTheirTimeOnce) {
  EdgeStats sums;
  sums.Add("a", "b", "tcp", 1'000'000, 500'000, 10);
  sums.Add("a", "b", "tcp", 1'250'000, 500'000, 20);
  sums.Add("a", "b", "tcp", 1'300'000, 100'000, 1);  // within another one
  sums.Add("a", "b", "tcp", 3'000'000, 250'000, 4);
  EXPECT_THAT(sums.Take().edges, ElementsAre(TransferEdge{"a", "b", "tcp", 35, 1.0}));
  EXPECT_THAT(sums.Take().edges, IsEmpty()) << "they were taken";
}

TEST(EdgeStats, DirectionsAndTransportsAreLinksOfTheirOwnAndTheLargestComesFirst) {
  EdgeStats sums;
  sums.Add("a", "b", "tcp", -5, 10, 1);
  sums.Add("b", "a", "tcp", 0, 20, 3);
  sums.Add("a", "b", "shm", 0, 40, 2);
  EXPECT_THAT(sums.Take().edges, ElementsAre(TransferEdge{"b", "a", "tcp", 3, 20e-6},
                                             TransferEdge{"a", "b", "shm", 2, 40e-6},
                                             TransferEdge{"a", "b", "tcp", 1, 10e-6}));
}

TEST(EdgeStats, KeepsTheLargestAndCountsTheOthers) {
  EdgeStats sums;
  for (int i = 0; i < 300; ++i) sums.Add("source", std::to_string(i), "tcp", 0, 1, i);
  const EpochEdges edges = sums.Take();
  EXPECT_EQ(edges.edges.size(), EpochEdges::kEdgesMax);
  EXPECT_EQ(edges.left_off, 300 - EpochEdges::kEdgesMax);
  EXPECT_EQ(edges.edges.front().bytes, 299);
}

class CoordinatorLinks : public ::testing::Test {
 protected:
  CoordinatorLinks() : trainer_(fleet_.Trainer(1)) {
    fleet_.Engine("engine-a");
    fleet_.Agent("engine-a-agent").reads_from = trainer_.front().id;
  }
  void Publish(uint64_t version) {
    fleet_.PublishAll(trainer_, version);
    fleet_.Run();
  }
  Fleet fleet_;
  std::vector<epoch::Member> trainer_;
};

TEST_F(CoordinatorLinks, NamesTheAgentsOfBothEnds) {
  EXPECT_THAT(fleet_.coordinator->Edges(), IsEmpty());
  Publish(5);
  const auto epochs = fleet_.coordinator->Edges();
  ASSERT_EQ(epochs.size(), 1u);
  EXPECT_EQ(epochs[0].epoch, Epoch(1));
  EXPECT_EQ(epochs[0].version, Version(5));
  EXPECT_THAT(epochs[0].edges,
              ElementsAre(TransferEdge{"trainer-agent", "engine-a-agent", "tcp", 1, 0.5}));
}

TEST_F(CoordinatorLinks, AreThoseOfTheNewestThatWereCommitted) {
  for (uint64_t version = 1; version <= 9; ++version) Publish(version);
  fleet_.Agent("engine-a-agent").corrupt = true;
  Publish(10);
  ASSERT_EQ(fleet_.Newest().phase, epoch::Phase::kAborted);
  const auto epochs = fleet_.coordinator->Edges();
  ASSERT_EQ(epochs.size(), 8u);
  EXPECT_EQ(epochs.front().epoch, Epoch(9));
  EXPECT_EQ(epochs.back().epoch, Epoch(2));
}

}  // namespace
}  // namespace weightwire::coordinator::testing
