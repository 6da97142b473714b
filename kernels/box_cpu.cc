#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "kernels/kernels.h"
#include "kernels/strided.h"

namespace weightwire::kernels {
namespace {

bool IsFloat(Element element) { return element >= Element::kBF16; }

int64_t RunBytes(const StridedBox& box, const int64_t* stride, int element_bytes) {
  int last = box.ndim - 1;
  bool run = last >= 0 && stride[last] == 1;
  return run ? box.extent[last] * element_bytes : element_bytes;
}

}  // namespace

int ElementBytes(Element element) {
  switch (element) {
    case Element::kOpaque1:
      return 1;
    case Element::kOpaque2:
    case Element::kBF16:
    case Element::kF16:
      return 2;
    case Element::kOpaque4:
    case Element::kF32:
      return 4;
    case Element::kOpaque8:
      return 8;
  }
  std::abort();
}

bool CastKnown(Element from, Element to) {
  return (IsFloat(from) && IsFloat(to)) || ElementBytes(from) == ElementBytes(to);
}

StridedBox Normalize(const StridedBox& box) {
  StridedBox merged;
  for (int d = 0; d < box.ndim; ++d) {
    if (box.extent[d] == 1) continue;
    int outer = merged.ndim - 1;
    bool joins = outer >= 0 &&
                 merged.source_stride[outer] == box.extent[d] * box.source_stride[d] &&
                 merged.target_stride[outer] == box.extent[d] * box.target_stride[d];
    int at = joins ? outer : merged.ndim++;
    merged.extent[at] = box.extent[d] * (joins ? merged.extent[at] : 1);
    merged.source_stride[at] = box.source_stride[d];
    merged.target_stride[at] = box.target_stride[d];
  }
  return merged;
}

StridedBox WithPackedTarget(const StridedBox& box) {
  StridedBox packed = box;
  int64_t stride = 1;
  for (int d = box.ndim - 1; d >= 0; --d) {
    packed.target_stride[d] = stride;
    stride *= box.extent[d];
  }
  return packed;
}

StridedBox WithPackedSource(const StridedBox& box) {
  const StridedBox target = WithPackedTarget(box);
  StridedBox packed = box;
  std::copy(target.target_stride, target.target_stride + box.ndim, packed.source_stride);
  return packed;
}

StridedBox WithTargetOnBothSides(const StridedBox& box) {
  StridedBox same = box;
  std::copy(box.target_stride, box.target_stride + box.ndim, same.source_stride);
  return same;
}

int64_t SourceRunBytes(const StridedBox& normalized, int element_bytes) {
  return RunBytes(normalized, normalized.source_stride, element_bytes);
}

int64_t TargetRunBytes(const StridedBox& normalized, int element_bytes) {
  return RunBytes(normalized, normalized.target_stride, element_bytes);
}

void internal::RequireCast(Element from, Element to) {
  if (CastKnown(from, to)) return;
  std::fprintf(stderr, "kernels: no cast from element kind %d to %d; ask CastKnown first\n",
               static_cast<int>(from), static_cast<int>(to));
  std::abort();
}

}  // namespace weightwire::kernels
