#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>

namespace weightwire::transport {

/// Appends integers to a buffer of a known size, least significant byte first. Writing past the end
/// aborts: sizes are constants of the protocol.
class LittleEndianWriter {
 public:
  explicit LittleEndianWriter(std::span<std::byte> into) : left_(into) {}
  template <std::unsigned_integral T>
  void Put(T value) {
    for (size_t i = 0; i < sizeof(T); ++i) left_[i] = static_cast<std::byte>(value >> (8 * i));
    left_ = left_.subspan(sizeof(T));
  }
  void PutBytes(std::span<const uint8_t> bytes) {
    for (uint8_t byte : bytes) Put(byte);
  }
  void Skip(size_t bytes) { left_ = left_.subspan(bytes); }

 private:
  std::span<std::byte> left_;
};

/// The reverse. The caller has checked the size.
class LittleEndianReader {
 public:
  explicit LittleEndianReader(std::span<const std::byte> from) : left_(from) {}
  template <std::unsigned_integral T>
  T Take() {
    T value = 0;
    for (size_t i = 0; i < sizeof(T); ++i) {
      value = static_cast<T>(value | static_cast<T>(static_cast<T>(left_[i]) << (8 * i)));
    }
    left_ = left_.subspan(sizeof(T));
    return value;
  }
  void TakeBytes(std::span<uint8_t> into) {
    for (uint8_t& byte : into) byte = Take<uint8_t>();
  }
  void Skip(size_t bytes) { left_ = left_.subspan(bytes); }

 private:
  std::span<const std::byte> left_;
};

/// Guards the fixed messages of the data plane against stray bytes, not against an attacker.
uint32_t Checksum(std::span<const std::byte> bytes);

}  // namespace weightwire::transport
