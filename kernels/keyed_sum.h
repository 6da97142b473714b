#pragma once

#include <cstdint>

#include "kernels/kernels.h"

/// A sum of a tensor's elements that no cut changes: sums of boxes that are disjoint add up, in
/// whatever order, layout and process they were taken. Finds accidents, not attackers.
namespace weightwire::kernels {

/// Two independent lanes, each mod 2^64.
struct KeyedSum {
  uint64_t lane[2] = {0, 0};
  KeyedSum& operator+=(const KeyedSum& other) {
    lane[0] += other.lane[0];
    lane[1] += other.lane[1];
    return *this;
  }
  friend bool operator==(const KeyedSum&, const KeyedSum&) = default;
};

/// What a tensor's keys are derived from.
struct SumSeed {
  uint64_t lane[2] = {0, 0};
};

/// splitmix64's finalizer: a bijection of 64 bits.
constexpr uint64_t Mix(uint64_t x) {
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
  x = (x ^ x >> 27) * 0x94d049bb133111ebu;
  return x ^ x >> 31;
}

/// 32-bit words that share one 64-bit key.
inline constexpr int64_t kKeyedBlockWords = 512;

/// Adds the elements of the box at `source`, as the cast to `to` gives them. `first` is the index
/// of the box's first element within its whole tensor in row-major order, and `box.target_stride`
/// are the strides of that tensor.
///
/// The tensor's row-major bytes are read as little-endian 32-bit words; word w adds
///     (Mix(seed[l] + kGolden · (1 + w div 512)) | 1) · (Mix(kTable[l] + w mod 512) >> 32 | 1) ·
///     word
/// to lane l. So an element of up to four bytes has a key, shifted by its place in its word, and
/// one of eight bytes has two. Keys are odd: a difference within one word always shows in both
/// lanes. An element that is zero adds nothing.
void AddKeyed(KeyedSum& sum, const SumSeed& seed, const void* source, const StridedBox& box,
              Element from, Element to, int64_t first);

inline constexpr uint64_t kGolden = 0x9e3779b97f4a7c15u;
inline constexpr uint64_t kTable[2] = {0x243f6a8885a308d3u, 0x13198a2e03707344u};

}  // namespace weightwire::kernels
