// Copies that keep the bits.
//
// The order of the elements does not matter to a copy, so the box is sorted to run along the target
// and merged again. What is then contiguous on both sides is one *unit*. Units are copied row by
// row; small units whose source runs along another dimension (a transpose) are copied in square
// tiles of one cache line each way, 2- and 4-byte units by 8×8 or 4×4 squares in registers.
#include <cstring>
#include <utility>

#include "kernels/kernels.h"
#include "kernels/simd.h"
#include "kernels/strided.h"

namespace weightwire::kernels {
namespace internal {
namespace {

using Bytes = unsigned char;

// Past this size the target would be evicted before anybody reads it, so it is streamed past the
// caches, which saves reading it first. A unit must hold several lines for that to pay.
constexpr int64_t kStreamBoxBytes = int64_t{8} << 20;
constexpr int64_t kStreamUnitBytes = 512;

// Tiles of one column of tiles that are copied before the next column: each column of the source is
// another page, so that a page is worth visiting for several lines.
constexpr int64_t kBandTiles = 4;

/// Strides in bytes; each index is one unit, contiguous on both sides.
struct UnitBox {
  StridedBox dims;
  int64_t unit = 0;
};

UnitBox ToUnits(const StridedBox& box, int64_t element_bytes) {
  StridedBox dims = Normalize(box);
  for (int i = 1; i < dims.ndim; ++i) {
    for (int d = i; d > 0 && dims.target_stride[d - 1] < dims.target_stride[d]; --d) {
      std::swap(dims.extent[d - 1], dims.extent[d]);
      std::swap(dims.source_stride[d - 1], dims.source_stride[d]);
      std::swap(dims.target_stride[d - 1], dims.target_stride[d]);
    }
  }
  UnitBox units{Normalize(dims), element_bytes};
  for (int d = 0; d < units.dims.ndim; ++d) {
    units.dims.source_stride[d] *= element_bytes;
    units.dims.target_stride[d] *= element_bytes;
  }
  int last = units.dims.ndim - 1;
  if (last >= 0 && units.dims.source_stride[last] == element_bytes &&
      units.dims.target_stride[last] == element_bytes) {
    units.unit *= units.dims.extent[last];
    --units.dims.ndim;
  }
  return units;
}

template <size_t kBytes>
void CopyFixed(Bytes* target, const Bytes* source, int64_t) {
  std::memcpy(target, source, kBytes);
}

// Between kBytes and twice as many: two copies that may overlap.
template <size_t kBytes>
void CopyUpToTwice(Bytes* target, const Bytes* source, int64_t unit) {
  Bytes first[kBytes];
  Bytes second[kBytes];
  std::memcpy(first, source, kBytes);
  std::memcpy(second, source + unit - kBytes, kBytes);
  std::memcpy(target, first, kBytes);
  std::memcpy(target + unit - kBytes, second, kBytes);
}

void CopyLong(Bytes* target, const Bytes* source, int64_t unit) {
  std::memcpy(target, source, static_cast<size_t>(unit));
}

void CopyStreaming(Bytes* target, const Bytes* source, int64_t unit) {
  Simd().stream(target, source, static_cast<size_t>(unit));
}

template <void (*kCopyUnit)(Bytes*, const Bytes*, int64_t)>
void CopyRows(Bytes* target, const Bytes* source, const UnitBox& units) {
  const StridedBox& dims = units.dims;
  int row = dims.ndim - 1;
  if (row < 0) return kCopyUnit(target, source, units.unit);
  ForEachIndex(dims, row, [&](int64_t source_offset, int64_t target_offset) {
    Bytes* to = target + target_offset;
    const Bytes* from = source + source_offset;
    for (int64_t i = 0; i < dims.extent[row]; ++i) {
      kCopyUnit(to + i * dims.target_stride[row], from + i * dims.source_stride[row], units.unit);
    }
  });
}

void CopyUnits(Bytes* target, const Bytes* source, const UnitBox& units, int64_t stream_from) {
  int64_t unit = units.unit;
  if (unit == 1) return CopyRows<CopyFixed<1>>(target, source, units);
  if (unit == 2) return CopyRows<CopyFixed<2>>(target, source, units);
  if (unit < 4) return CopyRows<CopyUpToTwice<2>>(target, source, units);
  if (unit == 4) return CopyRows<CopyFixed<4>>(target, source, units);
  if (unit < 8) return CopyRows<CopyUpToTwice<4>>(target, source, units);
  if (unit == 8) return CopyRows<CopyFixed<8>>(target, source, units);
  if (unit < 16) return CopyRows<CopyUpToTwice<8>>(target, source, units);
  if (unit <= 32) return CopyRows<CopyUpToTwice<16>>(target, source, units);
  if (unit <= 64) return CopyRows<CopyUpToTwice<32>>(target, source, units);
  if (unit < kStreamUnitBytes || unit * ElementsFrom(units.dims, 0) <= stream_from) {
    return CopyRows<CopyLong>(target, source, units);
  }
  CopyRows<CopyStreaming>(target, source, units);
  Simd().stream_end();
}

/// A plane of a transpose: [rows][columns], the source runs along rows, the target along columns.
struct Plane {
  int64_t rows;
  int64_t columns;
  int64_t source_row;
  int64_t source_column;
  int64_t target_row;
  int64_t target_column;
};

typedef uint16_t Lanes8 __attribute__((vector_size(16)));
typedef uint32_t Lanes4 __attribute__((vector_size(16)));

inline Lanes8 Low(Lanes8 a, Lanes8 b) {
  return __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
}
inline Lanes8 High(Lanes8 a, Lanes8 b) {
  return __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
}
inline Lanes4 Low(Lanes4 a, Lanes4 b) { return __builtin_shufflevector(a, b, 0, 4, 1, 5); }
inline Lanes4 High(Lanes4 a, Lanes4 b) { return __builtin_shufflevector(a, b, 2, 6, 3, 7); }

// Interleaving row i with row i + kSide / 2, log2(kSide) times, transposes the square.
template <class Lanes, int kSide>
void TransposeSquare(Bytes* target, const Bytes* source, const Plane& plane) {
  Lanes square[kSide];
  Lanes mixed[kSide];
  for (int i = 0; i < kSide; ++i) {
    std::memcpy(&square[i], source + i * plane.source_column, sizeof(Lanes));
  }
  for (int step = 1; step < kSide; step *= 2) {
    for (int i = 0; i < kSide / 2; ++i) {
      mixed[2 * i] = Low(square[i], square[i + kSide / 2]);
      mixed[2 * i + 1] = High(square[i], square[i + kSide / 2]);
    }
    std::memcpy(square, mixed, sizeof square);
  }
  for (int i = 0; i < kSide; ++i) {
    std::memcpy(target + i * plane.target_row, &square[i], sizeof(Lanes));
  }
}

template <size_t kBytes>
void CopyTilePlain(Bytes* target, const Bytes* source, const Plane& plane) {
  for (int64_t r = 0; r < plane.rows; ++r) {
    Bytes* to = target + r * plane.target_row;
    const Bytes* from = source + r * plane.source_row;
    for (int64_t c = 0; c < plane.columns; ++c) {
      std::memcpy(to + c * plane.target_column, from + c * plane.source_column, kBytes);
    }
  }
}

// A full tile is turned in a buffer and leaves it in whole cache lines. Rows of a plane are often a
// power of two apart and then share one set of the first cache, which would lose half-written
// lines.
template <class Lanes, int kSide>
void TransposeTile(Bytes* target, const Bytes* source, const Plane& plane) {
  constexpr int kTile = 64 / (sizeof(Lanes) / kSide);
  constexpr int64_t kElement = sizeof(Lanes) / kSide;
  alignas(64) Bytes turned[kTile * 64];
  Plane into_buffer = plane;
  into_buffer.target_row = 64;
  for (int c = 0; c < kTile; c += kSide) {
    for (int r = 0; r < kTile; r += kSide) {
      TransposeSquare<Lanes, kSide>(turned + r * 64 + c * kElement,
                                    source + r * kElement + c * plane.source_column, into_buffer);
    }
  }
  for (int r = 0; r < kTile; ++r) std::memcpy(target + r * plane.target_row, turned + r * 64, 64);
}

template <size_t kBytes>
void CopyTile(Bytes* target, const Bytes* source, const Plane& tile) {
  constexpr int64_t kFull = 64 / kBytes;
  bool full = tile.rows == kFull && tile.columns == kFull && tile.source_row == kBytes &&
              tile.target_column == kBytes;
  if constexpr (kBytes == 2) {
    if (full) return TransposeTile<Lanes8, 8>(target, source, tile);
  }
  if constexpr (kBytes == 4) {
    if (full) return TransposeTile<Lanes4, 4>(target, source, tile);
  }
  CopyTilePlain<kBytes>(target, source, tile);
}

template <size_t kBytes>
void CopyPlane(Bytes* target, const Bytes* source, const Plane& plane) {
  constexpr int64_t kTile = 64 / kBytes;
  Plane tile = plane;
  for (int64_t band = 0; band < plane.rows; band += kBandTiles * kTile) {
    int64_t band_end = std::min(plane.rows, band + kBandTiles * kTile);
    for (int64_t c = 0; c < plane.columns; c += kTile) {
      tile.columns = std::min(kTile, plane.columns - c);
      for (int64_t r = band; r < band_end; r += kTile) {
        tile.rows = std::min(kTile, band_end - r);
        CopyTile<kBytes>(target + r * plane.target_row + c * plane.target_column,
                         source + r * plane.source_row + c * plane.source_column, tile);
      }
    }
  }
}

int SourceInnerDim(const StridedBox& dims) {
  const int64_t* stride = dims.source_stride;
  return static_cast<int>(std::min_element(stride, stride + dims.ndim) - stride);
}

bool IsTransposed(const UnitBox& units) {
  const StridedBox& dims = units.dims;
  if (dims.ndim < 2 || (units.unit != 1 && units.unit != 2 && units.unit != 4 && units.unit != 8)) {
    return false;
  }
  return dims.source_stride[SourceInnerDim(dims)] < dims.source_stride[dims.ndim - 1];
}

void CopyTransposed(Bytes* target, const Bytes* source, const UnitBox& units) {
  const StridedBox& dims = units.dims;
  int row = SourceInnerDim(dims);
  int column = dims.ndim - 1;
  Plane plane{dims.extent[row],           dims.extent[column],     dims.source_stride[row],
              dims.source_stride[column], dims.target_stride[row], dims.target_stride[column]};
  StridedBox planes;
  for (int d = 0; d < column; ++d) {
    if (d == row) continue;
    planes.extent[planes.ndim] = dims.extent[d];
    planes.source_stride[planes.ndim] = dims.source_stride[d];
    planes.target_stride[planes.ndim++] = dims.target_stride[d];
  }
  ForEachIndex(planes, planes.ndim, [&](int64_t source_offset, int64_t target_offset) {
    Bytes* to = target + target_offset;
    const Bytes* from = source + source_offset;
    if (units.unit == 1) return CopyPlane<1>(to, from, plane);
    if (units.unit == 2) return CopyPlane<2>(to, from, plane);
    if (units.unit == 4) return CopyPlane<4>(to, from, plane);
    CopyPlane<8>(to, from, plane);
  });
}

}  // namespace

namespace {

void CopyBitsFrom(Bytes* target, const Bytes* source, const StridedBox& box, int64_t element_bytes,
                  int64_t stream_from) {
  UnitBox units = ToUnits(box, element_bytes);
  if (IsTransposed(units)) return CopyTransposed(target, source, units);
  CopyUnits(target, source, units, stream_from);
}

}  // namespace

void CopyBits(unsigned char* target, const unsigned char* source, const StridedBox& box,
              int64_t element_bytes) {
  CopyBitsFrom(target, source, box, element_bytes, kStreamBoxBytes);
}

}  // namespace internal

void CopyPastCaches(void* target, const void* source, const StridedBox& box,
                    int64_t element_bytes) {
  internal::CopyBitsFrom(static_cast<unsigned char*>(target),
                         static_cast<const unsigned char*>(source), box, element_bytes, 0);
}

void Copy(void* target, const void* source, const StridedBox& box, Element from, Element to) {
  internal::RequireCast(from, to);
  auto* target_bytes = static_cast<unsigned char*>(target);
  auto* source_bytes = static_cast<const unsigned char*>(source);
  if (internal::KeepsBits(from, to)) {
    return internal::CopyBits(target_bytes, source_bytes, box, ElementBytes(from));
  }
  internal::CastBox(target_bytes, source_bytes, box, from, to);
}

}  // namespace weightwire::kernels
