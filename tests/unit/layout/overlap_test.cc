#include <gtest/gtest.h>

#include <cstdlib>
#include <random>
#include <set>

#include "server/layout/overlap.h"
#include "server/layout/types.h"
#include "tests/support/safetensors.h"

namespace weightwire::layout {
namespace {

Piece Block(Shape extent, int64_t offset, std::vector<int64_t> stride) {
  return {0, {Shape(extent.size(), 0), extent}, offset, std::move(stride)};
}

bool Overlap(const std::vector<Piece>& pieces) {
  int64_t steps = 1'000'000;
  const auto found = FindOverlap(pieces, steps);
  EXPECT_TRUE(found.has_value());
  return found->has_value();
}

TEST(FindOverlap, SeesColumnBlocksOfOneMatrixApart) {
  EXPECT_FALSE(Overlap({Block({5, 3}, 0, {7, 1}), Block({5, 4}, 3, {7, 1})}));
  EXPECT_TRUE(Overlap({Block({5, 4}, 0, {7, 1}), Block({5, 4}, 3, {7, 1})}));
}

TEST(FindOverlap, SeesTransposedPiecesInterleave) {
  // [expert][hidden][gate|up]: two transposed pieces share each row.
  EXPECT_FALSE(Overlap({Block({3, 4}, 0, {1, 6}), Block({3, 4}, 3, {1, 6})}));
  EXPECT_TRUE(Overlap({Block({4, 4}, 0, {1, 6}), Block({3, 4}, 3, {1, 6})}));
}

TEST(FindOverlap, SeesAPieceThatMeetsItself) {
  EXPECT_TRUE(Overlap({Block({2, 2}, 0, {1, 1})}));
  EXPECT_FALSE(Overlap({Block({3, 2}, 0, {2, 3})}));  // not nested, and yet distinct: 0 3 2 5 4 7
  EXPECT_TRUE(Overlap({Block({4, 3}, 0, {2, 3})}));   // 3·2 = 2·3
}

TEST(FindOverlap, NamesThePair) {
  int64_t steps = 1'000;
  const std::vector<Piece> pieces = {Block({4}, 8, {1}), Block({4}, 0, {1}), Block({4}, 3, {1})};
  const auto found = FindOverlap(pieces, steps);
  ASSERT_TRUE(found.has_value() && found->has_value());
  EXPECT_EQ(**found, (std::pair<size_t, size_t>{1, 2}));
}

TEST(FindOverlap, SpendsNoStepsOnBlocksThatFollowEachOther) {
  std::vector<Piece> pieces;
  for (int64_t i = 0; i < 100'000; ++i) pieces.push_back(Block({2, 3}, 6 * i, {3, 1}));
  int64_t steps = 0;
  const auto found = FindOverlap(pieces, steps);
  ASSERT_TRUE(found.has_value());
  EXPECT_FALSE(found->has_value());
}

TEST(FindOverlap, RefusesMoreWorkThanItsBudget) {
  std::vector<Piece> pieces;
  for (int64_t i = 0; i < 100; ++i) pieces.push_back(Block({50}, i, {100}));
  int64_t steps = 100;
  const auto found = FindOverlap(pieces, steps);
  ASSERT_FALSE(found.has_value());
  EXPECT_EQ(found.error().reason(), Reason::kLimitExceeded);
}

TEST(FindOverlap, IsRightAtTheEdgeOfInt64) {
  const int64_t far = int64_t{1} << 61;
  EXPECT_FALSE(Overlap({Block({3}, 0, {far}), Block({3}, 1, {far})}));
  EXPECT_TRUE(Overlap({Block({3}, 0, {far}), Block({2, 3}, 1, {far - 1, far})}));
}

TEST(FindOverlap, AgreesWithMarkingEachElement) {
  const char* text = std::getenv("WEIGHTWIRE_SEED");
  const uint64_t seed = text != nullptr ? std::strtoull(text, nullptr, 10) : std::random_device{}();
  std::printf("WEIGHTWIRE_SEED=%llu\n", static_cast<unsigned long long>(seed));
  std::mt19937_64 engine(seed);
  const auto between = [&](int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(engine);
  };
  int overlapping = 0;
  for (int round = 0; round < 20'000; ++round) {
    std::vector<Piece> pieces;
    std::set<int64_t> marked;
    bool want = false;
    for (int64_t i = between(1, 3); i > 0; --i) {
      Shape extent;
      std::vector<int64_t> stride;
      for (int64_t d = between(0, 3); d > 0; --d) {
        extent.push_back(between(1, 4));
        stride.push_back(between(1, 20));
      }
      pieces.push_back(Block(extent, between(0, 60), stride));
      testing::ForEachElement(pieces.back(), extent, [&](int64_t, int64_t local) {
        want = !marked.insert(local).second || want;
      });
    }
    overlapping += want ? 1 : 0;
    ASSERT_EQ(Overlap(pieces), want) << "round " << round;
  }
  EXPECT_GT(overlapping, 2'000);
  EXPECT_LT(overlapping, 18'000);
}

}  // namespace
}  // namespace weightwire::layout
