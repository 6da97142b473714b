#include "server/transfer/windows.h"

#include <algorithm>
#include <cmath>

namespace weightwire::transfer {

uint32_t WindowOf(int64_t stream_bytes, int64_t rank_bytes, uint32_t together) {
  const double part = static_cast<double>(stream_bytes) / static_cast<double>(rank_bytes);
  return std::clamp(static_cast<uint32_t>(std::ceil(part * together)), 1u, together);
}

}  // namespace weightwire::transfer
