#pragma once

#include <cstdint>

namespace weightwire::transfer {

/// How many of the `together` slots or Gets of a rank one of its streams may have in flight: its
/// part by bytes, rounded up, so that a stream whose peer is slow holds no more than what is due to
/// it and every stream may have one. `rank_bytes` are those of all the rank's streams.
uint32_t WindowOf(int64_t stream_bytes, int64_t rank_bytes, uint32_t together);

}  // namespace weightwire::transfer
