#include "server/plan/balance.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <numeric>
#include <random>
#include <string>

#include "server/plan/min_max_load.h"

namespace weightwire::plan {
namespace {

/// The least greatest load by Hall's theorem, over all sets of ranks: some rank of the set must
/// send at least the bytes that only the set can send / its size.
double LeastByAllSubsets(const BytesByHolders& demands, uint32_t ranks) {
  double least = 0;
  for (uint32_t subset = 1; subset < 1u << ranks; ++subset) {
    int64_t bytes = 0;
    for (const auto& [holders, amount] : demands) {
      uint32_t mask = 0;
      for (uint32_t rank : holders) mask |= 1u << rank;
      if ((mask & ~subset) == 0) bytes += amount;
    }
    least = std::max(least, static_cast<double>(bytes) / __builtin_popcount(subset));
  }
  return least;
}

/// Greatest load of ShareDemands, after checking that every demand is met by its own ranks.
int64_t GreatestShared(const BytesByHolders& demands, uint32_t ranks) {
  std::vector<Demand> list;
  for (const auto& [holders, bytes] : demands) list.push_back({holders, bytes});
  const auto shares = ShareDemands(list, ranks);
  std::vector<int64_t> load(ranks, 0);
  EXPECT_EQ(shares.size(), list.size());
  for (size_t i = 0; i < list.size(); ++i) {
    EXPECT_EQ(shares[i].size(), list[i].ranks.size());
    EXPECT_EQ(std::accumulate(shares[i].begin(), shares[i].end(), int64_t{0}), list[i].bytes);
    for (size_t j = 0; j < shares[i].size(); ++j) {
      EXPECT_GE(shares[i][j], 0);
      load[list[i].ranks[j]] += shares[i][j];
    }
  }
  return *std::max_element(load.begin(), load.end());
}

BytesByHolders RandomDemands(std::mt19937_64& random, uint32_t ranks) {
  const auto in = [&](int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random);
  };
  BytesByHolders demands;
  for (int64_t count = in(1, 10); count > 0; --count) {
    std::vector<uint32_t> holders;
    for (uint32_t rank = 0; rank < ranks; ++rank) {
      if (in(0, 2) == 0) holders.push_back(rank);
    }
    if (holders.empty()) holders.push_back(static_cast<uint32_t>(in(0, ranks - 1)));
    demands[holders] += in(0, 3) == 0 ? in(0, 10) : in(0, 1'000'000);
  }
  return demands;
}

TEST(LeastGreatestLoad, IsThatOfTheWorstSubsetInRandomDemands) {
  const char* seed_text = std::getenv("WEIGHTWIRE_SEED");
  const uint64_t seed = seed_text ? std::strtoull(seed_text, nullptr, 10) : std::random_device()();
  std::printf("WEIGHTWIRE_SEED=%llu\n", static_cast<unsigned long long>(seed));
  std::mt19937_64 random(seed);
  for (int round = 0; round < 3000; ++round) {
    SCOPED_TRACE(std::to_string(seed) + " round " + std::to_string(round));
    const auto ranks = static_cast<uint32_t>(1 + random() % 8);
    const BytesByHolders demands = RandomDemands(random, ranks);
    const double least = LeastByAllSubsets(demands, ranks);
    ASSERT_NEAR(LeastGreatestLoad(demands, ranks), least, least * 1e-12);
    const auto shared = static_cast<double>(GreatestShared(demands, ranks));
    ASSERT_GE(shared, least * (1 - 1e-12));
    ASSERT_LE(shared, least * (1 + 1.0 / 1024) + 1);
  }
}

TEST(LeastGreatestLoad, IsZeroWithoutBytes) {
  EXPECT_EQ(LeastGreatestLoad({}, 4), 0);
  EXPECT_EQ(LeastGreatestLoad({{{1, 2}, 0}}, 4), 0);
}

TEST(LeastGreatestLoad, CountsBytesTimesRanksBeyond64Bits) {
  const int64_t large = int64_t{1} << 61;
  EXPECT_NEAR(LeastGreatestLoad({{{0, 1, 2}, large}, {{3}, 1}}, 16'384),
              static_cast<double>(large) / 3, 1e6);
}

TEST(ShareDemands, LevelsALongChain) {
  // Neighbours share; all bytes lie at one end. Level by level pouring would need ~ n² rounds.
  constexpr uint32_t kRanks = 600;
  BytesByHolders demands;
  for (uint32_t rank = 0; rank + 1 < kRanks; ++rank) {
    demands[{rank, rank + 1}] = rank < kRanks / 2 ? 2'000'000 : 1000;
  }
  const double least = LeastGreatestLoad(demands, kRanks);
  EXPECT_LE(static_cast<double>(GreatestShared(demands, kRanks)), least * (1 + 1.0 / 1024) + 1);
}

TEST(ShareDemands, EvensOutRanksBelowTheBusiest) {
  const std::vector<uint32_t> busy = {0}, pair = {1, 2}, other = {2, 3};
  const std::vector<Demand> demands = {{busy, 1000}, {pair, 90}, {other, 60}};
  const auto shares = ShareDemands(demands, 4);
  EXPECT_EQ(shares[1][0], 50);
  EXPECT_EQ(shares[1][1] + shares[2][0], 50);
  EXPECT_EQ(shares[2][1], 50);
}

}  // namespace
}  // namespace weightwire::plan
