#pragma once

#include <algorithm>
#include <cstring>

#include "kernels/element.h"
#include "kernels/four_bit.h"
#include "kernels/quantize.h"

/// The quantization that kernels_bench measures: a packed matrix, its scales behind its codes.
namespace weightwire::kernels {

/// `block_columns` 0: all of a row.
inline QuantizeBox PackedMatrix(int64_t rows, int64_t columns, int64_t block_rows,
                                int64_t block_columns, ScaleKind scale) {
  if (block_columns == 0) block_columns = columns;
  const int64_t across = (columns - 1) / block_columns + 1;
  return {rows, columns, block_rows, block_columns, {columns, 1}, {columns, 1}, {across, 1}, scale};
}

inline void QuantizeInto(unsigned char* codes, const unsigned char* source, const QuantizeBox& box,
                         Element from) {
  QuantizeE4M3(codes, codes + box.rows * box.columns, source, box, from);
}

/// One block after the other, one element at a time.
inline bool QuantizedRight(const unsigned char* codes, const unsigned char* source,
                           const QuantizeBox& box, Element from) {
  auto bits_at = [&](int64_t at) {
    uint32_t bits = 0;
    auto bytes = static_cast<size_t>(ElementBytes(from));
    std::memcpy(&bits, source + at * ElementBytes(from), bytes);
    if (from == Element::kF32) return bits;
    return from == Element::kBF16 ? internal::F32FromBF16(bits) : internal::F32FromF16(bits);
  };
  const unsigned char* scale = codes + box.rows * box.columns;
  for (int64_t top = 0; top < box.rows; top += box.block_rows) {
    for (int64_t left = 0; left < box.columns;
         left += box.block_columns, scale += ScaleBytes(box.scale, from)) {
      const int64_t bottom = std::min(box.rows, top + box.block_rows);
      const int64_t right = std::min(box.columns, left + box.block_columns);
      uint32_t amax = 0;
      for (int64_t row = top; row < bottom; ++row) {
        for (int64_t column = left; column < right; ++column) {
          amax = std::max(amax, bits_at(row * box.columns + column) & 0x7fffffffu);
        }
      }
      const uint32_t want = internal::ScaleInv(amax, box.scale, from);
      unsigned char stored[4];
      internal::StoreScale(stored, 0, want, box.scale, from);
      if (std::memcmp(scale, stored, static_cast<size_t>(ScaleBytes(box.scale, from))) != 0)
        return false;
      for (int64_t row = top; row < bottom; ++row) {
        for (int64_t column = left; column < right; ++column) {
          int64_t at = row * box.columns + column;
          const uint32_t code =
              internal::Quantized(bits_at(at), internal::AsFloat(want), box.scale, from);
          if (codes[at] != code) return false;
        }
      }
    }
  }
  return true;
}

/// Codes of bf16, their scales behind them; one element at a time.
inline bool FourBitRight(const unsigned char* codes, const unsigned char* source, int64_t elements,
                         int64_t group, FourBitKind kind, float global) {
  const auto bits_at = [&](int64_t at) {
    uint16_t bits = 0;
    std::memcpy(&bits, source + 2 * at, 2);
    return internal::F32FromBF16(bits);
  };
  const auto scale_bytes = static_cast<size_t>(FourBitScaleBytes(kind, Element::kBF16));
  const unsigned char* stored = codes + elements / 2;
  for (int64_t first = 0; first < elements; first += group, stored += scale_bytes) {
    uint32_t amax = 0;
    for (int64_t at = first; at < first + group; ++at) {
      amax = std::max(amax, bits_at(at) & 0x7fffffffu);
    }
    const internal::FourBitScale scale =
        internal::FourBitScaleOf(amax, kind, Element::kBF16, global);
    if (std::memcmp(stored, &scale.stored, scale_bytes) != 0) return false;
    for (int64_t at = first; at < first + group; ++at) {
      const uint32_t want = internal::FourBits(bits_at(at), scale.divisor, kind, Element::kBF16);
      if ((codes[at / 2] >> (at % 2 * 4) & 15u) != want) return false;
    }
  }
  return true;
}

}  // namespace weightwire::kernels
