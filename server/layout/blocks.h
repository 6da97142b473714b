#pragma once

#include <cstdint>

/// Rows or columns of a matrix in blocks that share one scale. See TensorSpec::block.
namespace weightwire::layout {

/// Most rows or columns of a block.
inline constexpr int64_t kBlockMax = 65'536;

/// Blocks of `size` rows or columns; the last one may be partial.
constexpr int64_t BlockCount(int64_t size, int64_t block) {
  return size / block + (size % block != 0);
}

/// Whether [begin, end) of `size` rows or columns is made of whole blocks: it begins at one, and it
/// ends at one or, with a partial one, at `size`.
constexpr bool IsWholeBlocks(int64_t begin, int64_t end, int64_t size, int64_t block) {
  return begin % block == 0 && (end % block == 0 || end == size);
}

}  // namespace weightwire::layout
