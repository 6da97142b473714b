#pragma once

#include <cstdint>
#include <map>
#include <vector>

namespace weightwire::plan {

/// Bytes by the set of ranks (ascending, distinct, none empty) that can send them.
using BytesByHolders = std::map<std::vector<uint32_t>, int64_t>;

/// The least possible bytes of the busiest rank when every byte may be sent by any rank of its set;
/// exact up to the rounding of the final division. 0 for no bytes. Ranks are below `rank_count`.
double LeastGreatestLoad(const BytesByHolders& demands, uint32_t rank_count);

}  // namespace weightwire::plan
