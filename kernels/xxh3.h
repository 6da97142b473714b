#pragma once

#include <cstdint>

#include "kernels/element.h"

/// Internal to kernels/: XXH3 64-bit with seed 0 for device kernels, where xxhash.h cannot go. A
/// `Bytes` answers At64(offset), At32(offset) and At8(offset), little-endian, and size. Eight lanes
/// are independent but for one merge at the end; within a block of 16 stripes the stripes only add,
/// so that several threads can share a lane.
namespace weightwire::kernels::internal {

constexpr uint64_t kPrime32A = 0x9e3779b1u;
constexpr uint64_t kPrime32B = 0x85ebca77u;
constexpr uint64_t kPrime32C = 0xc2b2ae3du;
constexpr uint64_t kPrime64A = 0x9e3779b185ebca87u;
constexpr uint64_t kPrime64B = 0xc2b2ae3d27d4eb4fu;
constexpr uint64_t kPrime64C = 0x165667b19e3779f9u;
constexpr uint64_t kPrime64D = 0x85ebca77c2b2ae63u;
constexpr uint64_t kPrime64E = 0x27d4eb2f165667c5u;

constexpr int kSumLanes = 8;
constexpr int64_t kStripeBytes = 64;
constexpr int64_t kBlockStripes = 16;
constexpr int64_t kShortSumBytes = 240;

/// xxHash's default secret, 192 bytes.
struct SumSecret {
  uint64_t words[24];
};

WW_HOST_DEVICE uint64_t SecretAt(const SumSecret& secret, int64_t offset) {
  int64_t word = offset / 8;
  int shift = static_cast<int>(offset % 8) * 8;
  if (shift == 0) return secret.words[word];
  return secret.words[word] >> shift | secret.words[word + 1] << (64 - shift);
}

WW_HOST_DEVICE uint64_t FoldedProduct(uint64_t a, uint64_t b) {
  uint64_t a_low = a & 0xffffffffu, a_high = a >> 32;
  uint64_t b_low = b & 0xffffffffu, b_high = b >> 32;
  uint64_t middle = a_high * b_low + (a_low * b_low >> 32);
  uint64_t carried = a_low * b_high + (middle & 0xffffffffu);
  return (a * b) ^ (a_high * b_high + (middle >> 32) + (carried >> 32));
}

WW_HOST_DEVICE uint64_t Avalanche(uint64_t hash) {
  hash = (hash ^ hash >> 37) * 0x165667919e3779f9u;
  return hash ^ hash >> 32;
}

WW_HOST_DEVICE uint64_t AvalancheOfXxh64(uint64_t hash) {
  hash = (hash ^ hash >> 33) * kPrime64B;
  hash = (hash ^ hash >> 29) * kPrime64C;
  return hash ^ hash >> 32;
}

WW_HOST_DEVICE uint64_t Rotated(uint64_t value, int left) {
  return value << left | value >> (64 - left);
}

WW_HOST_DEVICE uint64_t BytesReversed(uint64_t value) {
  uint64_t result = 0;
  for (int i = 0; i < 8; ++i) result = result << 8 | (value >> (8 * i) & 0xff);
  return result;
}

template <class Bytes>
WW_HOST_DEVICE uint64_t Mix16(const Bytes& bytes, int64_t at, const SumSecret& secret,
                              int64_t secret_at) {
  return FoldedProduct(bytes.At64(at) ^ SecretAt(secret, secret_at),
                       bytes.At64(at + 8) ^ SecretAt(secret, secret_at + 8));
}

template <class Bytes>
WW_HOST_DEVICE uint64_t SumUpTo16(const Bytes& bytes, const SumSecret& secret) {
  const int64_t size = bytes.size;
  const auto length = static_cast<uint64_t>(size);
  if (size > 8) {
    uint64_t low = bytes.At64(0) ^ SecretAt(secret, 24) ^ SecretAt(secret, 32);
    uint64_t high = bytes.At64(size - 8) ^ SecretAt(secret, 40) ^ SecretAt(secret, 48);
    return Avalanche(length + BytesReversed(low) + high + FoldedProduct(low, high));
  }
  if (size >= 4) {
    uint64_t hash = bytes.At32(size - 4) + (static_cast<uint64_t>(bytes.At32(0)) << 32);
    hash ^= SecretAt(secret, 8) ^ SecretAt(secret, 16);
    hash ^= Rotated(hash, 49) ^ Rotated(hash, 24);
    hash *= 0x9fb21c651e98df25u;
    hash ^= (hash >> 35) + length;
    hash *= 0x9fb21c651e98df25u;
    return hash ^ hash >> 28;
  }
  uint64_t combined = static_cast<uint64_t>(bytes.At8(0)) << 16 |
                      static_cast<uint64_t>(bytes.At8(size / 2)) << 24 | bytes.At8(size - 1) |
                      length << 8;
  uint64_t key = SecretAt(secret, 0);
  return AvalancheOfXxh64(combined ^ ((key ^ key >> 32) & 0xffffffffu));
}

/// 1 to kShortSumBytes.
template <class Bytes>
WW_HOST_DEVICE uint64_t SumShort(const Bytes& bytes, const SumSecret& secret) {
  const int64_t size = bytes.size;
  if (size <= 16) return SumUpTo16(bytes, secret);
  uint64_t sum = static_cast<uint64_t>(size) * kPrime64A;
  if (size <= 128) {
    for (int64_t i = (size - 1) / 32; i >= 0; --i) {
      sum += Mix16(bytes, 16 * i, secret, 32 * i);
      sum += Mix16(bytes, size - 16 * (i + 1), secret, 32 * i + 16);
    }
    return Avalanche(sum);
  }
  for (int64_t i = 0; i < 8; ++i) sum += Mix16(bytes, 16 * i, secret, 16 * i);
  sum = Avalanche(sum);
  for (int64_t i = 8; i < size / 16; ++i) sum += Mix16(bytes, 16 * i, secret, 16 * (i - 8) + 3);
  return Avalanche(sum + Mix16(bytes, size - 16, secret, 136 - 17));
}

/// What the stripe at `at` adds to one lane.
template <class Bytes>
WW_HOST_DEVICE uint64_t StripeTerm(const Bytes& bytes, int64_t at, const SumSecret& secret,
                                   int64_t secret_at, int64_t lane) {
  uint64_t keyed = bytes.At64(at + 8 * lane) ^ SecretAt(secret, secret_at + 8 * lane);
  return bytes.At64(at + 8 * (lane ^ 1)) + (keyed & 0xffffffffu) * (keyed >> 32);
}

WW_HOST_DEVICE uint64_t LaneStart(int lane) {
  const uint64_t start[kSumLanes] = {kPrime32C, kPrime64A, kPrime64B, kPrime64C,
                                     kPrime64D, kPrime32B, kPrime64E, kPrime32A};
  return start[lane];
}

/// One lane of a sum of more than kShortSumBytes. `total(part)` is the total of part(g) over
/// g < groups; who computes which part is the caller's business.
#if defined(__CUDACC__)
#pragma nv_exec_check_disable
#endif
template <class Bytes, class Total>
WW_HOST_DEVICE uint64_t LaneOfSum(const Bytes& bytes, const SumSecret& secret, int lane, int groups,
                                  const Total& total) {
  const int64_t block_bytes = kStripeBytes * kBlockStripes;
  const int64_t blocks = (bytes.size - 1) / block_bytes;
  uint64_t sum = LaneStart(lane);
  for (int64_t block = 0; block <= blocks; ++block) {
    const int64_t at = block * block_bytes;
    const int64_t stripes = block < blocks ? kBlockStripes : (bytes.size - 1 - at) / kStripeBytes;
    sum += total([&](int group) {
      uint64_t part = 0;
      for (int64_t s = group; s < stripes; s += groups) {
        part += StripeTerm(bytes, at + s * kStripeBytes, secret, 8 * s, lane);
      }
      return part;
    });
    if (block == blocks) break;
    sum = (sum ^ sum >> 47 ^ SecretAt(secret, 128 + 8 * lane)) * kPrime32A;
  }
  return sum + StripeTerm(bytes, bytes.size - kStripeBytes, secret, 128 - 7, lane);
}

WW_HOST_DEVICE uint64_t MergedLanes(const uint64_t* lanes, int64_t size, const SumSecret& secret) {
  uint64_t sum = static_cast<uint64_t>(size) * kPrime64A;
  for (int i = 0; i < kSumLanes; i += 2) {
    sum += FoldedProduct(lanes[i] ^ SecretAt(secret, 11 + 8 * i),
                         lanes[i + 1] ^ SecretAt(secret, 19 + 8 * i));
  }
  return Avalanche(sum);
}

}  // namespace weightwire::kernels::internal
