#pragma once

#include <vector>

#include "server/layout/types.h"

namespace weightwire::layout {

/// A box whose elements follow one another in its tensor's row-major order, from element `begin`.
struct FlatRun {
  Box box;
  int64_t begin = 0;
};

/// Elements [begin, end) of a row-major tensor of `shape`: disjoint boxes in ascending order that
/// together have exactly these elements; at most 2(n − 1) + 1 of them for n ≥ 1 dimensions.
/// Needs 0 ≤ begin ≤ end ≤ the tensor's elements, whose count fits int64.
std::vector<FlatRun> FlatRuns(const Shape& shape, int64_t begin, int64_t end);

/// Strides of a row-major tensor, each ≥ 1 where the tensor has elements.
Shape RowMajorStrides(const Shape& shape);

/// The elements [begin, end) of canonical tensor `tensor` of `shape`, one after another in local
/// storage from `local_offset` on. Needs what FlatRuns needs.
void AppendFlatPieces(uint32_t tensor, const Shape& shape, int64_t begin, int64_t end,
                      int64_t local_offset, std::vector<Piece>& pieces);

}  // namespace weightwire::layout
