#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

/// Reads and writes the fixed messages byte by byte, knowing only their documented offsets.
namespace weightwire::transport {

inline uint64_t ReadAt(std::span<const std::byte> bytes, size_t offset, size_t width) {
  uint64_t value = 0;
  for (size_t i = width; i > 0; --i) {
    value = value * 256 + std::to_integer<uint64_t>(bytes[offset + i - 1]);
  }
  return value;
}

}  // namespace weightwire::transport
