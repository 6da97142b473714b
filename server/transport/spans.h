#pragma once

#include <algorithm>
#include <span>
#include <vector>

#include "server/transport/transport.h"

namespace weightwire::transport {

using ConstSpan = std::span<const std::byte>;

/// Sum of sizes.
uint64_t TotalBytes(std::span<const MutableSpan> spans);

/// Walks two lists of spans of equal total size side by side: calls `copy(to, from, bytes)` for
/// each stretch that is contiguous in both and at most `stretch_bytes_max` long. Stops early when
/// `copy` returns false, and then returns false.
template <typename Copy>
bool ForEachStretch(std::span<const ConstSpan> from, std::span<const MutableSpan> into,
                    size_t stretch_bytes_max, Copy&& copy) {
  ConstSpan source;
  for (MutableSpan target : into) {
    while (!target.empty()) {
      while (source.empty()) {
        source = from.front();
        from = from.subspan(1);
      }
      const size_t bytes = std::min({source.size(), target.size(), stretch_bytes_max});
      if (!copy(target.data(), source.data(), bytes)) return false;
      source = source.subspan(bytes);
      target = target.subspan(bytes);
    }
  }
  return true;
}

}  // namespace weightwire::transport
