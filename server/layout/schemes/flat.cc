// From `begin` on, always the largest step: along the outermost dimension whose whole slices begin
// here and fit before `end`, as many of them as there are before `end` and before their parent's.
// The dimension moves outwards at most n − 1 times, then inwards at most n − 1 times.
#include "server/layout/schemes/flat.h"

#include <algorithm>

namespace weightwire::layout {

Shape RowMajorStrides(const Shape& shape) {
  Shape strides(shape.size(), 1);
  for (size_t d = shape.size(); d-- > 1;) strides[d - 1] = strides[d] * shape[d];
  return strides;
}

std::vector<FlatRun> FlatRuns(const Shape& shape, int64_t begin, int64_t end) {
  std::vector<FlatRun> runs;
  if (begin == end) return runs;
  if (shape.empty()) return {{Box{}, 0}};
  const Shape strides = RowMajorStrides(shape);
  while (begin < end) {
    size_t d = 0;
    while (begin % strides[d] != 0 || strides[d] > end - begin) ++d;
    FlatRun run{{Shape(shape.size(), 0), shape}, begin};
    for (size_t outer = 0; outer <= d; ++outer) {
      run.box.begin[outer] = begin / strides[outer] % shape[outer];
      run.box.extent[outer] = 1;
    }
    run.box.extent[d] = std::min(shape[d] - run.box.begin[d], (end - begin) / strides[d]);
    begin += run.box.extent[d] * strides[d];
    runs.push_back(std::move(run));
  }
  return runs;
}

void AppendFlatPieces(uint32_t tensor, const Shape& shape, int64_t begin, int64_t end,
                      int64_t local_offset, std::vector<Piece>& pieces) {
  const Shape strides = RowMajorStrides(shape);
  for (FlatRun& run : FlatRuns(shape, begin, end)) {
    pieces.push_back({tensor, std::move(run.box), local_offset + run.begin - begin, strides});
  }
}

}  // namespace weightwire::layout
