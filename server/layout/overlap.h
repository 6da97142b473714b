#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <utility>

#include "server/layout/types.h"

namespace weightwire::layout {

/// Indices into `pieces` of two that share an element of storage, or of one twice when two of its
/// own elements do; nullopt when every storage element has at most one owner. Exact.
///
/// Every piece must lie inside storage of an int64 element count, with extents and strides ≥ 1.
/// `steps_left` is lowered by the work done.
///   kResourceExhausted / kLimitExceeded  steps_left ran out before the answer was known
Result<std::optional<std::pair<size_t, size_t>>> FindOverlap(std::span<const Piece> pieces,
                                                             int64_t& steps_left);

}  // namespace weightwire::layout
