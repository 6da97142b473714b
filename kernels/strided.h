#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/kernels.h"

/// Internal to kernels/: walks over strided boxes. Offsets are in elements.
namespace weightwire::kernels::internal {

/// Elements of dimensions [first, ndim).
inline int64_t ElementsFrom(const StridedBox& box, int first) {
  int64_t elements = 1;
  for (int d = first; d < box.ndim; ++d) elements *= box.extent[d];
  return elements;
}

/// Calls visit(source_offset, target_offset) in row-major order for each index of the first `dims`
/// dimensions; once when there are none.
template <class Visit>
void ForEachIndex(const StridedBox& box, int dims, Visit visit) {
  int64_t index[kMaxDims] = {};
  int64_t source = 0;
  int64_t target = 0;
  while (true) {
    visit(source, target);
    int d = dims - 1;
    for (; d >= 0; --d) {
      source += box.source_stride[d];
      target += box.target_stride[d];
      if (++index[d] < box.extent[d]) break;
      source -= box.source_stride[d] * box.extent[d];
      target -= box.target_stride[d] * box.extent[d];
      index[d] = 0;
    }
    if (d < 0) return;
  }
}

/// Cuts the box into slabs of at most `elements_max` that follow each other in row-major order and
/// calls visit(slab, source_offset, target_offset) for each.
template <class Visit>
void ForEachSlab(const StridedBox& box, int64_t elements_max, Visit visit) {
  int cut = std::max(0, box.ndim - 1);
  while (cut > 0 && ElementsFrom(box, cut) <= elements_max) --cut;
  StridedBox slab;
  slab.ndim = box.ndim - cut;
  std::copy(box.extent + cut, box.extent + box.ndim, slab.extent);
  std::copy(box.source_stride + cut, box.source_stride + box.ndim, slab.source_stride);
  std::copy(box.target_stride + cut, box.target_stride + box.ndim, slab.target_stride);
  if (box.ndim == 0) return visit(slab, int64_t{0}, int64_t{0});
  int64_t rows = std::max<int64_t>(1, elements_max / ElementsFrom(box, cut + 1));
  ForEachIndex(box, cut, [&](int64_t source, int64_t target) {
    for (int64_t row = 0; row < box.extent[cut]; row += rows) {
      slab.extent[0] = std::min(rows, box.extent[cut] - row);
      visit(slab, source + row * slab.source_stride[0], target + row * slab.target_stride[0]);
    }
  });
}

/// True when `from` → `to` keeps the bits.
inline bool KeepsBits(Element from, Element to) {
  return from == to || from < Element::kBF16 || to < Element::kBF16;
}

/// CastKnown, or the caller's error: aborts.
void RequireCast(Element from, Element to);

/// Moves elements of `element_bytes` bits unchanged, in whatever order is fastest.
void CopyBits(unsigned char* target, const unsigned char* source, const StridedBox& box,
              int64_t element_bytes);
/// Casts between different float kinds.
void CastBox(unsigned char* target, const unsigned char* source, const StridedBox& box,
             Element from, Element to);

}  // namespace weightwire::kernels::internal
