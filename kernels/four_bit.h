#pragma once

#include <cstdint>

#include "kernels/kernels.h"

/// Quantizes rows to four bits an element, with one scale per group along a row, as the formats of
/// gpt-oss, modelopt and compressed-tensors have it. The rules of kernels/kernels.h hold here too.
/// Elements lie two in a byte, the first in the low half: eight in a little-endian word of 32 bits.
///
/// Per group, `amax` its largest magnitude:
///   e2m1   ±{0, 0.5, 1, 1.5, 2, 3, 4, 6}, to nearest, ties to even, at most 6
///   int4   -8 … 7, to nearest, ties to even, stored with 8 added
/// A group with a NaN or an infinity has no scale: it is NaN, and all codes are those of 0.
namespace weightwire::kernels {

enum class FourBitKind : uint8_t {
  /// e2m1 with scales 2^ceil(log2(amax / 6)) as one byte, exponent + 127 (E8M0), at least 2^-127:
  /// torchao's RCEIL, and what transformers makes for gpt-oss.
  kMxFp4 = 0,
  /// The same with compressed-tensors' scale: 2^(e - 2), where amax is below 1.75 · 2^e and from
  /// 1.75 · 2^(e - 1) on; at least 2^-127. An element -0 becomes 0.
  kMxFp4Rounded = 1,
  /// e2m1 with scales in e4m3 beside one fp32 `global` of the tensor, as compressed-tensors
  /// computes:
  /// amax / 6, rounded to the element's own kind, times global, in e4m3 (0.125 where that is 0);
  /// quotients by scale / global in fp32. An element -0 becomes 0.
  kNvFp4 = 2,
  /// int4 with scales amax / 7.5; scale and quotient are rounded to the element's own kind, in
  /// which
  /// the scale is stored. What would be 0 is the kind's epsilon.
  kInt4 = 3,
  /// e2m1 with scales in e4m3 beside one fp32 `global` of the tensor, or of several that an engine
  /// fuses, as modelopt computes, all in fp32: amax / (6 · global), in e4m3, at least 2^-9 (1 where
  /// it is 0); quotients by scale · global. A quotient -0 becomes 0. Of a global scale of 0 all
  /// scales are 1 and all codes 0.
  kNvFp4Modelopt = 4,
};
inline constexpr FourBitKind kLastFourBitKind = FourBitKind::kNvFp4Modelopt;
/// Whether it has a global scale.
constexpr bool IsNvFp4(FourBitKind kind) {
  return kind == FourBitKind::kNvFp4 || kind == FourBitKind::kNvFp4Modelopt;
}
/// Of the layout::ScaleRule `rule`, which is one of four bits: they follow four rules of fp8.
constexpr FourBitKind FourBitKindOf(int rule) { return static_cast<FourBitKind>(rule - 4); }
/// Of a scale of elements `from`.
constexpr int FourBitScaleBytes(FourBitKind kind, Element from) {
  return kind != FourBitKind::kInt4 ? 1 : from == Element::kF32 ? 4 : 2;
}

/// The global scale of a tensor whose largest magnitude is `amax`; NaN for NaN and infinity.
/// kNvFp4's: 448 · 6 · (1 / amax), both steps rounded to the element's own kind, where amax is at
/// least that kind's smallest normal number; 1 where that overflows. kNvFp4Modelopt's: amax / 2688.
float NvFp4Global(float amax, Element from, FourBitKind kind = FourBitKind::kNvFp4);
/// The largest magnitude of packed elements; NaN or infinity where one is such.
float LargestMagnitude(const void* source, int64_t count, Element from);

/// Writes rows · columns / 2 bytes of codes and rows · columns / group scales of a packed matrix;
/// one of the two may be null and is left out.
/// `columns` is a multiple of `group`, which is one of 8, at most 256. Aborts otherwise, and unless
/// `from` is kBF16, kF16 or kF32. `global`: of IsNvFp4, else ignored.
void QuantizeFourBit(void* codes, void* scales, const void* source, int64_t rows, int64_t columns,
                     int64_t group, Element from, FourBitKind kind, float global = 1.0f);

}  // namespace weightwire::kernels
