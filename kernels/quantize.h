#pragma once

#include <cstdint>

#include "kernels/kernels.h"

/// Quantizes matrices to fp8 e4m3 with one scale per block, as DeepSeek's checkpoints have them and
/// vLLM reads them: element ≈ code × scale_inv. The rules of kernels/kernels.h hold here too: no
/// allocation, no locks, no exceptions, any alignment.
///
/// Per block, in fp32:
///   amax       largest magnitude in the block
///   scale_inv  amax / 448, rounded to nearest; at least 2^-126, the smallest normal fp32, so that
///              it and its reciprocal are finite, and readers that flush denormals see the same.
///              Other rules: ScaleKind
///   code       element / scale_inv rounded to nearest fp32, then to nearest e4m3, ties to even
///   each
/// so that
///   - the largest element becomes ±448 (0x7e, 0xfe) unless amax < 448 × 2^-126 or the scale is a
///     power of two; what rounding carries past 448 saturates there;
///   - quotients below 2^-6 become e4m3 denormals (counts of 2^-9), those up to 2^-10 a zero; a
///   zero
///     keeps its sign;
///   - a block of zeros has scale_inv 2^-126 and codes ±0;
///   - a block that holds a NaN or an infinity has no scale: scale_inv is NaN (0x7fc00000, E8M0
///     0xff) and every code 0x7f (NaN), so that it can never be taken for numbers.
namespace weightwire::kernels {

/// What a scale is, and how it is stored. Numbers up to 3 are those of layout::ScaleRule.
enum class ScaleKind : uint8_t {
  kF32 = 0,         ///< amax / 448
  kPowerOfTwo = 1,  ///< 2^ceil(log2(amax / 448)) as fp32: `scale_fmt` "ue8m0"
  /// As compressed-tensors computes: amax / 448 and each quotient are rounded to the element's own
  /// kind, in which the scale is stored. What would be 0 is the kind's epsilon (2^-7, 2^-10,
  /// 2^-23).
  kOwnKind = 2,
  /// One byte as compressed-tensors' MX formats have it: 2^(e - 8), where amax is below 1.75 · 2^e
  /// and from 1.75 · 2^(e - 1) on; at least 2^-127. It is kE8M0's but where amax is 448 times a
  /// power of two, which becomes 224 times the next one.
  kE8M0Rounded = 3,
  /// One byte, kPowerOfTwo's exponent + 127, but from 2^-127 on, which is also that of zeros: from
  /// 0 to 247, or 0xff for NaN.
  kE8M0 = 4,
  /// As modelopt computes a scale of a whole tensor: kF32's, but each quotient is rounded to the
  /// element's own kind.
  kF32OwnQuotient = 5,
};
inline constexpr ScaleKind kLastScaleKind = ScaleKind::kF32OwnQuotient;
/// Of scales by the layout::ScaleRule `rule` that have so many bytes each.
constexpr ScaleKind ScaleKindOf(int rule, int bytes) {
  constexpr int kOwnQuotientRule = 9;  // behind those of four bits
  if (rule == kOwnQuotientRule) return ScaleKind::kF32OwnQuotient;
  const auto kind = static_cast<ScaleKind>(rule);
  return kind == ScaleKind::kPowerOfTwo && bytes == 1 ? ScaleKind::kE8M0 : kind;
}
constexpr bool IsE8M0(ScaleKind kind) {
  return kind == ScaleKind::kE8M0 || kind == ScaleKind::kE8M0Rounded;
}
constexpr bool RoundsQuotients(ScaleKind kind) {
  return kind == ScaleKind::kOwnKind || kind == ScaleKind::kF32OwnQuotient;
}
/// Of scales of elements `from`.
constexpr int ScaleBytes(ScaleKind kind, Element from) {
  if (IsE8M0(kind)) return 1;
  return kind == ScaleKind::kOwnKind && from != Element::kF32 ? 2 : 4;
}

/// A rows × columns matrix whose first element begins a block; blocks at its end may be smaller.
/// Blocks of 128 × 128 are DeepSeek's; 1 × columns gives one scale per output channel, 1 × 32 with
/// kE8M0 MXFP8, and rows × columns one for the tensor. Extents ≥ 1, strides ≥ 0, [0] of rows and
/// [1] of columns, in elements of each side; those of `scale_stride` step by blocks.
struct QuantizeBox {
  int64_t rows = 0;
  int64_t columns = 0;
  int64_t block_rows = 128;
  int64_t block_columns = 128;
  int64_t source_stride[2] = {};
  int64_t target_stride[2] = {};
  int64_t scale_stride[2] = {};
  ScaleKind scale = ScaleKind::kF32;
};

/// Writes one byte to `codes` per element and one scale to `scale_inv` per block. Either may be
/// null: only the other is made then. The memories must not overlap. Aborts unless `from` is kBF16,
/// kF16 or kF32.
void QuantizeE4M3(void* codes, void* scale_inv, const void* source, const QuantizeBox& box,
                  Element from);

}  // namespace weightwire::kernels
