#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

/// What exported memory holds in these tests: a byte is a function of its index alone, so that a
/// reader knows what to expect without asking anybody.
namespace weightwire::conformance {

inline std::byte PatternAt(uint64_t index) {
  uint64_t x = index * 0x9e3779b97f4a7c15u + 0x1234567;
  x ^= x >> 29;
  return static_cast<std::byte>(x * 0xbf58476d1ce4e5b9u >> 56);
}

inline void FillPattern(std::span<std::byte> bytes, uint64_t first_index) {
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = PatternAt(first_index + i);
}

/// Index of the first byte that differs; −1 when none does.
inline int64_t FirstDifference(std::span<const std::byte> bytes, uint64_t first_index) {
  for (size_t i = 0; i < bytes.size(); ++i) {
    if (bytes[i] != PatternAt(first_index + i)) return static_cast<int64_t>(i);
  }
  return -1;
}

}  // namespace weightwire::conformance
