#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <ostream>
#include <random>
#include <vector>

#include "kernels/kernels.h"

/// Random boxes and their memories.
namespace weightwire::kernels {

using Bytes = std::vector<unsigned char>;

inline int64_t Elements(const StridedBox& box) {
  return std::accumulate(box.extent, box.extent + box.ndim, int64_t{1}, std::multiplies<>());
}

inline int64_t Offset(const StridedBox& box, const int64_t* stride, int64_t flat) {
  int64_t offset = 0;
  for (int d = box.ndim - 1; d >= 0; --d) {
    offset += flat % box.extent[d] * stride[d];
    flat /= box.extent[d];
  }
  return offset;
}

inline size_t SpanBytes(const StridedBox& box, const int64_t* stride, Element element) {
  int64_t last = 0;
  for (int d = 0; d < box.ndim; ++d) last += (box.extent[d] - 1) * stride[d];
  return static_cast<size_t>((last + 1) * ElementBytes(element));
}

struct Case {
  StridedBox box;
  Element from = Element::kOpaque1;
  Element to = Element::kOpaque1;
};

inline std::ostream& operator<<(std::ostream& out, const Case& c) {
  out << "from " << static_cast<int>(c.from) << " to " << static_cast<int>(c.to) << " box";
  for (int d = 0; d < c.box.ndim; ++d) {
    out << " " << c.box.extent[d] << "(" << c.box.source_stride[d] << "," << c.box.target_stride[d]
        << ")";
  }
  return out;
}

inline Bytes RandomBytes(std::mt19937_64& random, size_t bytes) {
  Bytes data(bytes);
  for (unsigned char& byte : data) byte = static_cast<unsigned char>(random());
  return data;
}

/// Strides of a memory whose dimensions lie in a random order, most without gaps.
inline void ChooseStrides(std::mt19937_64& random, const StridedBox& box, int64_t* stride) {
  std::vector<int> order(static_cast<size_t>(box.ndim));
  std::iota(order.begin(), order.end(), 0);
  if (random() % 2 == 0) {
    std::reverse(order.begin(), order.end());  // row-major
  } else {
    std::shuffle(order.begin(), order.end(), random);
  }
  int64_t next = random() % 8 == 0 ? 1 + static_cast<int64_t>(random() % 3) : 1;
  for (int d : order) {
    stride[d] = next;
    next = next * box.extent[d] + (random() % 3 == 0 ? static_cast<int64_t>(random() % 5) : 0);
  }
}

inline Case RandomCase(std::mt19937_64& random) {
  Case c;
  c.box.ndim = static_cast<int>(random() % 6);
  int64_t elements_max = 6000;
  for (int d = 0; d < c.box.ndim; ++d) {
    auto limit = std::min<int64_t>(elements_max, random() % 4 == 0 ? 3000 : 17);
    c.box.extent[d] = 1 + static_cast<int64_t>(random() % static_cast<uint64_t>(limit));
    elements_max /= c.box.extent[d];
  }
  std::shuffle(c.box.extent, c.box.extent + c.box.ndim, random);
  ChooseStrides(random, c.box, c.box.source_stride);
  ChooseStrides(random, c.box, c.box.target_stride);
  if (c.box.ndim > 0 && random() % 8 == 0) {
    c.box.source_stride[random() % static_cast<uint64_t>(c.box.ndim)] = 0;  // broadcast
  }
  do {
    c.from = static_cast<Element>(random() % 7);
    c.to = static_cast<Element>(random() % 7);
  } while (!CastKnown(c.from, c.to));
  return c;
}

}  // namespace weightwire::kernels
