#include "server/transfer/flow_control.h"

#include <algorithm>
#include <cmath>

namespace weightwire::transfer {

uint32_t WindowOf(int64_t stream_bytes, int64_t rank_bytes, uint32_t together) {
  const double part = static_cast<double>(stream_bytes) / static_cast<double>(rank_bytes);
  return std::clamp(static_cast<uint32_t>(std::ceil(part * together)), 1u, together);
}

ReadAhead ReadAheadOf(const Tuning& tuning, bool same_host) {
  if (!same_host) return {tuning.chunk_bytes, tuning.gets_in_flight};
  return {std::min(tuning.chunk_bytes, tuning.near_chunk_bytes),
          std::min(tuning.gets_in_flight, tuning.near_gets_in_flight)};
}

}  // namespace weightwire::transfer
