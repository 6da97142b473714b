#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include "server/layout/types.h"
#include "server/plan/locator.h"

/// The proof's questions of what keeps apart, in storage and in the canonical tensor.
namespace weightwire::plan {

/// nullopt when the pieces are proven to keep apart in storage.
std::optional<std::string> StorageDefect(const layout::LocalTensor& tensor,
                                         const PieceLocator& locator);

/// A block written into one piece of one target tensor.
struct Written {
  uint32_t tensor = 0;
  PiecePart part;
};
/// First pair of blocks of one piece that share an element. Reorders `blocks`.
std::optional<std::pair<layout::Box, layout::Box>> FindOverlap(std::span<Written> blocks);

}  // namespace weightwire::plan
