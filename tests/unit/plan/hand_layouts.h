#pragma once

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "server/layout/types.h"

/// Small layouts written by hand.
namespace weightwire::plan::testing {

using layout::Box;
using layout::DType;
using layout::LocalTensor;
using layout::ModelLayout;
using layout::Piece;
using layout::Shape;

inline std::vector<int64_t> RowMajor(const Shape& shape) {
  std::vector<int64_t> stride(shape.size(), 1);
  for (size_t d = shape.size(); d-- > 1;) stride[d - 1] = stride[d] * shape[d];
  return stride;
}

/// A local tensor that is exactly `box` of canonical tensor `tensor`, row-major.
inline LocalTensor BoxTensor(std::string name, uint32_t tensor, Box box,
                             DType dtype = DType::kBF16) {
  LocalTensor local{std::move(name), dtype, box.extent, {}};
  const std::vector<int64_t> stride = RowMajor(local.shape);
  local.pieces.push_back({tensor, std::move(box), 0, stride});
  return local;
}

/// A layout of one canonical tensor "w" with one local tensor per rank.
inline ModelLayout OneTensor(const Shape& shape, const std::vector<Box>& boxes,
                             DType dtype = DType::kBF16) {
  ModelLayout layout;
  layout.canonical.tensors = {{"w", DType::kBF16, shape}};
  for (const Box& box : boxes) layout.ranks.push_back({{BoxTensor("local.w", 0, box, dtype)}});
  return layout;
}

/// `parts` boxes that cut dimension `dim` into near-equal parts.
inline std::vector<Box> Cut(const Shape& shape, size_t dim, int64_t parts) {
  std::vector<Box> boxes;
  for (int64_t p = 0; p < parts; ++p) {
    Box box{std::vector<int64_t>(shape.size(), 0), shape};
    box.begin[dim] = shape[dim] * p / parts;
    box.extent[dim] = shape[dim] * (p + 1) / parts - box.begin[dim];
    boxes.push_back(std::move(box));
  }
  return boxes;
}

inline Box Whole(const Shape& shape) { return {std::vector<int64_t>(shape.size(), 0), shape}; }

}  // namespace weightwire::plan::testing
