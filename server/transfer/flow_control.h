#pragma once

#include <cstdint>

#include "server/transfer/transfer.h"

namespace weightwire::transfer {

/// How many of the `together` slots or Gets of a rank one of its streams may have in flight: its
/// part by bytes, rounded up, so that a stream whose peer is slow holds no more than what is due to
/// it and every stream may have one. `rank_bytes` are those of all the rank's streams.
uint32_t WindowOf(int64_t stream_bytes, int64_t rank_bytes, uint32_t together);

/// How much of what a rank reads from peers, on its host or on others, may be under way at once.
struct ReadAhead {
  int64_t chunk_bytes = 0;
  uint32_t gets = 0;
  friend bool operator==(const ReadAhead&, const ReadAhead&) = default;
};
ReadAhead ReadAheadOf(const Tuning& tuning, bool same_host);

}  // namespace weightwire::transfer
