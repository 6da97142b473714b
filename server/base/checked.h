#pragma once

#include <cstdint>
#include <optional>
#include <span>

namespace weightwire {

/// nullopt on overflow. Every size that came from outside goes through these.
inline std::optional<uint64_t> CheckedAdd(uint64_t a, uint64_t b) {
  uint64_t out;
  if (__builtin_add_overflow(a, b, &out)) return std::nullopt;
  return out;
}
inline std::optional<uint64_t> CheckedMul(uint64_t a, uint64_t b) {
  uint64_t out;
  if (__builtin_mul_overflow(a, b, &out)) return std::nullopt;
  return out;
}

/// Product of `extents`; nullopt if one is negative or the product does not fit int64. The empty
/// product is 1 (a scalar).
inline std::optional<int64_t> CheckedProduct(std::span<const int64_t> extents) {
  int64_t product = 1;
  for (int64_t extent : extents) {
    if (extent < 0 || __builtin_mul_overflow(product, extent, &product)) return std::nullopt;
  }
  return product;
}

inline constexpr uint64_t RoundUp(uint64_t value, uint64_t alignment) {
  return (value + alignment - 1) / alignment * alignment;
}

}  // namespace weightwire
