#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace weightwire::plan {

/// Bytes that any of `ranks` may send.
struct Demand {
  std::span<const uint32_t> ranks;  ///< at least one, distinct
  int64_t bytes = 0;
};

/// Shares every demand among its ranks so that the greatest load is within 1/1024 of the least
/// possible, and loads below it are near even too. Element [i][j] is what demands[i].ranks[j]
/// sends; row sums are the demands. Ranks are below `rank_count`; the demands' sum fits int64.
/// Whole numbers only, so the answer is the same in every process.
std::vector<std::vector<int64_t>> ShareDemands(std::span<const Demand> demands,
                                               uint32_t rank_count);

}  // namespace weightwire::plan
