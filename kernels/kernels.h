#pragma once

#include <cstddef>
#include <cstdint>

/// Copies, casts and sums of strided boxes. Plain pointers and sizes; no allocation, no locks, no
/// exceptions; each call touches nothing but what it is given. Every function has a plain
/// reference (`namespace reference`, kernels/reference_cpu.cc) that agrees with it bit for bit.
namespace weightwire::kernels {

inline constexpr int kMaxDims = 8;

/// Row-major box of `extent[0..ndim)` elements; strides in elements of the respective side.
/// ndim 0 is one element. Extents ≥ 1, strides ≥ 0.
struct StridedBox {
  int ndim = 0;
  int64_t extent[kMaxDims] = {};
  int64_t source_stride[kMaxDims] = {};
  int64_t target_stride[kMaxDims] = {};
};

/// Element kinds that kernels can cast between; everything else is copied by size.
enum class Element : uint8_t { kOpaque1, kOpaque2, kOpaque4, kOpaque8, kBF16, kF16, kF32 };
int ElementBytes(Element element);
/// True when `from` → `to` is a copy (same kind, or opaque of equal size) or a known float cast.
bool CastKnown(Element from, Element to);

/// Merges dimensions that are contiguous on both sides and drops extents of 1. The result covers
/// the same elements in the same order. `Runs` below speaks of the normalised box.
StridedBox Normalize(const StridedBox& box);

/// The same elements with one side packed (row-major) instead.
StridedBox WithPackedSource(const StridedBox& box);
StridedBox WithPackedTarget(const StridedBox& box);
/// The same elements between two buffers that are both laid out like the target.
StridedBox WithTargetOnBothSides(const StridedBox& box);

/// Bytes of the innermost run that is contiguous at the source (target), after Normalize.
int64_t SourceRunBytes(const StridedBox& normalized, int element_bytes);
int64_t TargetRunBytes(const StridedBox& normalized, int element_bytes);

/// Sum of a byte sequence: XXH3 64-bit, seed 0. The sum of a box is the sum of its bytes in packed
/// (row-major) order, however they lie in memory, so a strided source, a slot and a strided target
/// have the same one.
uint64_t SumContiguous(const void* data, size_t bytes);
/// The same of bytes that come piece by piece and are copied past the caches meanwhile: whatever
/// the pieces, the sum of all that was copied.
class RunningSum {
 public:
  RunningSum();
  /// `source` should be in a cache, and nobody else may write it meanwhile. CopiesEnd comes after
  /// the last of several.
  void CopyAndAdd(void* target, const void* source, size_t bytes);
  /// What was copied so far is seen before what is written after this.
  static void CopiesEnd();
  uint64_t End() const;

 private:
  struct alignas(64) State {
    unsigned char bytes[640];
  };
  State state_;
};
/// Sum of the box at `target` (uses target_stride).
uint64_t SumTarget(const void* target, const StridedBox& box, Element element);
/// Sum of the box at `source` (uses source_stride), of the bytes that a cast to `to` would give.
uint64_t SumSource(const void* source, const StridedBox& box, Element from, Element to);

/// Writes the box from `source` to `target`, casting when the kinds differ (float casts round to
/// nearest even, NaN stays NaN, bf16 → fp16 overflows to infinity). A NaN keeps its sign and its
/// highest payload bits and becomes quiet. The memories must not overlap, and no two elements of
/// the box may share a target byte; elements may be written in any order. Any alignment will do.
/// Aborts unless CastKnown(from, to).
void Copy(void* target, const void* source, const StridedBox& box, Element from, Element to);
/// Copies elements of `element_bytes` (1, 2, 4 or 8) as bits, past the caches however small the box
/// is: for many boxes that together are large, whose targets nobody reads soon.
void CopyPastCaches(void* target, const void* source, const StridedBox& box, int64_t element_bytes);
/// Copy, and the sum of the bytes that were *written*: of the very bytes that are stored, in blocks
/// of the first cache's size, or read back from `target` while they are warm. Never the sum of a
/// second look at the source.
uint64_t CopyAndSumTarget(void* target, const void* source, const StridedBox& box, Element from,
                          Element to);
struct BothSums {
  uint64_t source = 0;
  uint64_t target = 0;
};
/// SumSource of the box at `seen`, and CopyAndSumTarget from `source`. `seen` is where whoever
/// vouches for the source sees it, so it is the same memory unless somebody is mistaken. Where bits
/// are kept and runs are long, the two take turns of a few KiB: memory is then read once. Neither
/// sum is made of what was loaded for the other.
BothSums CopyAndSumBoth(void* target, const void* source, const void* seen, const StridedBox& box,
                        Element from, Element to);

namespace reference {
uint64_t SumTarget(const void* target, const StridedBox& box, Element element);
uint64_t SumSource(const void* source, const StridedBox& box, Element from, Element to);
void Copy(void* target, const void* source, const StridedBox& box, Element from, Element to);
}  // namespace reference

}  // namespace weightwire::kernels
