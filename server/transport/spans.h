#pragma once

#include <algorithm>
#include <cstring>
#include <span>
#include <vector>

#include "server/transport/transport.h"

namespace weightwire::transport {

using ConstSpan = std::span<const std::byte>;

/// Sum of sizes.
uint64_t TotalBytes(std::span<const MutableSpan> spans);

/// Writes spans of the host, piece by piece. They stay where they are meanwhile.
class SpanWriter {
 public:
  SpanWriter() = default;
  explicit SpanWriter(std::span<const MutableSpan> into) : into_(into) {}
  /// Calls `put(to, some)` for each range of `piece`, whose bytes come next. Together the pieces
  /// have no more bytes than the spans.
  template <typename Put>
  void Write(ConstSpan piece, Put&& put) {
    while (!piece.empty()) {
      const MutableSpan rest = into_.front().subspan(written_);
      const size_t some = std::min(rest.size(), piece.size());
      if (some > 0) put(rest.data(), piece.first(some));
      piece = piece.subspan(some);
      written_ += some;
      if (written_ < into_.front().size()) continue;
      into_ = into_.subspan(1);
      written_ = 0;
    }
  }
  void Write(ConstSpan piece) {
    Write(piece, [](std::byte* to, ConstSpan from) { std::memcpy(to, from.data(), from.size()); });
  }

 private:
  std::span<const MutableSpan> into_;
  size_t written_ = 0;  ///< of the first of into_
};

/// Walks two lists of spans of equal total size side by side: calls `copy(to, from, bytes)` for
/// each range that is contiguous in both and at most `stretch_bytes_max` long. Stops early when
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
