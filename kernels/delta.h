#pragma once

#include <cstddef>
#include <cstdint>

/// What changed between two versions of one array, as streams of small numbers that an entropy
/// coder makes short, and back. The rules of kernels/kernels.h hold here too: plain pointers, no
/// allocation, no locks, no exceptions, any alignment.
///
/// A step is the distance between two values of one element in an order of all its bit patterns in
/// which neighbours are 1 apart: most elements that an optimizer changes move by one unit in the
/// last place, so that a step has about one bit of content where the value has 16.
namespace weightwire::kernels {

/// Unsigned numbers, or floats: sign and magnitude, -0 next below +0, NaNs beyond the infinities.
/// Each order is a bijection of bit patterns, so steps restore every bit, of NaNs too.
enum class DeltaOrder : uint8_t { kBits8, kBits16, kBits32, kBits64, kFloat8, kFloat16, kFloat32 };
inline constexpr int kDeltaOrders = 7;
/// 1, 2, 4 or 8.
int DeltaElementBytes(DeltaOrder order);

/// Longest run of unchanged elements that one byte of `gaps` stands for.
inline constexpr size_t kDeltaGapMax = 255;
/// In `steps`: the step is in `escapes`.
inline constexpr uint8_t kDeltaEscape = 15;
/// Entries beyond `changes_max` that there must be room for.
inline constexpr size_t kDeltaSlack = 64;
inline constexpr size_t DeltaGapBytesMax(size_t elements, size_t changes_max) {
  return changes_max + kDeltaSlack + elements / kDeltaGapMax;
}

/// Of the changed elements, in order of their index:
///   gaps     how many unchanged ones lie before each; 255 stands for 255 of them, and the next
///            byte goes on
///   steps    zigzag(new - old) - 1, where zigzag is 1, 2, 3, 4 … for -1, +1, -2, +2 …, modulo the
///            element's range: 0 to 14, or kDeltaEscape
///   escapes  the greater zigzags, each as wide as an element, little-endian
struct DeltaStreams {
  uint8_t* gaps = nullptr;     ///< DeltaGapBytesMax
  uint8_t* steps = nullptr;    ///< changes_max + kDeltaSlack
  uint8_t* escapes = nullptr;  ///< as many, times the element's bytes
  size_t gap_bytes = 0;
  size_t changes = 0;
  size_t escape_count = 0;
};

/// Fills `out` with what makes `now` of `base`. False, with unfinished streams, when more than
/// `changes_max` elements differ.
///
/// `copy`: null, or room for the elements, which hold `now` in the end, whatever is returned. It is
/// filled in the same pass. It may be `base` itself, where only what differs is written; else it
/// touches neither array and is left out of the caches.
/// `sum`: null, or gets SumContiguous of `now`, whatever is returned, in the same pass.
bool DeltaScan(DeltaOrder order, const void* base, const void* now, size_t elements,
               size_t changes_max, DeltaStreams& out, void* copy = nullptr,
               uint64_t* sum = nullptr);

/// Makes the newer version of the older one in place. Total: reads nothing but the streams, writes
/// nothing but the array. False when the streams do not end together within the array; some
/// elements are changed then.
bool DeltaApply(DeltaOrder order, void* target, size_t elements, const DeltaStreams& delta);

/// The same of the older version at `base`, which stays as it is and touches no byte of `target`.
/// `target` is left out of the caches. `sum`: SumContiguous of what was written. Where it is false,
/// some of `target` may have been written and `sum` is not set.
bool DeltaApplyTo(DeltaOrder order, void* target, const void* base, size_t elements,
                  const DeltaStreams& delta, uint64_t& sum);

}  // namespace weightwire::kernels
