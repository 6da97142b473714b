#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/four_bit.h"
#include "kernels/quantize.h"

#if defined(__CUDACC__)
#define WW_HOST_DEVICE_MEMBER __host__ __device__
#define WW_NOINLINE_ON_DEVICE __noinline__
#else
#define WW_HOST_DEVICE_MEMBER
#define WW_NOINLINE_ON_DEVICE
#endif
#define WW_HOST_DEVICE WW_HOST_DEVICE_MEMBER static inline

/// Internal to kernels/: what becomes of one element, as bits, for CPU loops and device kernels
/// alike. Branch-free, so that compilers vectorise loops over them; static, because they are
/// compiled once per instruction set. Floats go through f32, which holds every bf16 and f16.
namespace weightwire::kernels::internal {

WW_HOST_DEVICE float AsFloat(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

WW_HOST_DEVICE uint32_t AsBits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

WW_HOST_DEVICE bool IsNan(uint32_t bits) { return (bits & 0x7fffffffu) > 0x7f800000u; }

WW_HOST_DEVICE uint32_t F32FromBF16(uint32_t half) {
  uint32_t bits = half << 16;
  return bits | (IsNan(bits) ? 0x00400000u : 0u);
}

WW_HOST_DEVICE uint32_t BF16FromF32(uint32_t bits) {
  uint32_t high = bits >> 16;
  uint32_t rounded = (bits + 0x7fffu + (high & 1u)) >> 16;
  return IsNan(bits) ? high | 0x0040u : rounded;
}

WW_HOST_DEVICE uint32_t F32FromF16(uint32_t half) {
  uint32_t magnitude = (half & 0x7fffu) << 13;
  uint32_t normal = magnitude + 0x38000000u;  // exponent bias 15 → 127
  // 2^-14 is added as an exponent and subtracted as a value: that normalises a denormal.
  uint32_t denormal = AsBits(AsFloat(magnitude + 0x38800000u) - AsFloat(0x38800000u));
  uint32_t special = (magnitude | 0x7f800000u) | (magnitude > 0x0f800000u ? 0x00400000u : 0u);
  uint32_t bits = magnitude < 0x00800000u ? denormal : normal;
  bits = magnitude >= 0x0f800000u ? special : bits;
  return bits | (half & 0x8000u) << 16;
}

WW_HOST_DEVICE uint32_t F16FromF32(uint32_t bits) {
  uint32_t magnitude = bits & 0x7fffffffu;
  uint32_t normal = (magnitude - 0x38000000u + 0x0fffu + (magnitude >> 13 & 1u)) >> 13;
  // 0.5 has f16's smallest denormal as its last place, so the addition rounds to it.
  uint32_t denormal = AsBits(AsFloat(magnitude) + 0.5f) - 0x3f000000u;
  uint32_t nan = 0x7e00u | (magnitude >> 13 & 0x03ffu);
  uint32_t half = magnitude < 0x38800000u ? denormal : normal;
  half = magnitude >= 0x47800000u ? 0x7c00u : half;
  half = IsNan(bits) ? nan : half;
  return half | (bits >> 16 & 0x8000u);
}

/// To the nearest e4m3 (1 sign, 4 exponent with bias 7, 3 fraction; no infinity), ties to even.
/// Saturates at ±448, infinity too; a NaN becomes 0x7f with its sign.
WW_HOST_DEVICE uint32_t E4M3FromF32(uint32_t bits) {
  uint32_t magnitude = bits & 0x7fffffffu;
  uint32_t normal = (magnitude - 0x3c000000u + 0x7ffffu + (magnitude >> 20 & 1u)) >> 20;
  // 2^14 has e4m3's smallest denormal, 2^-9, as its last place, so the addition rounds to it.
  uint32_t denormal = AsBits(AsFloat(magnitude) + 16384.0f) - 0x46800000u;
  uint32_t code = magnitude < 0x3c800000u ? denormal : normal;
  code = magnitude > 0x43e00000u ? 0x7eu : code;
  code = IsNan(bits) ? 0x7fu : code;
  return code | (bits >> 24 & 0x80u);
}

constexpr uint32_t kInfinityBits = 0x7f800000u;
constexpr uint32_t kLeastE8M0 = 0x00400000u;  // 2^-127, which is denormal

/// The nearest value of the kind, as f32 bits.
WW_HOST_DEVICE uint32_t InKind(uint32_t bits, Element kind) {
  if (kind == Element::kBF16) return F32FromBF16(BF16FromF32(bits));
  return kind == Element::kF16 ? F32FromF16(F16FromF32(bits)) : bits;
}
/// From 1 to the next value of the kind.
WW_HOST_DEVICE uint32_t Epsilon(Element kind) {
  return kind == Element::kBF16 ? 0x3c000000u : kind == Element::kF16 ? 0x3a800000u : 0x34000000u;
}

/// What the codes of a block are multiplied by to get its elements back, as kernels/quantize.h
/// defines it; `amax` is the largest magnitude in the block, as f32 bits.
///
/// The quotient of a power of two is exact, and no other one rounds to it: of 24 bits, the nearest
/// amax to 448 · 2^k is more than half of the last place away from it. So the next power of two is
/// that of the exact quotient.
WW_HOST_DEVICE uint32_t ScaleInv(uint32_t amax, ScaleKind kind, Element from) {
  if (amax >= kInfinityBits) return 0x7fc00000u;
  uint32_t scale = AsBits(AsFloat(amax) / 448.0f);
  if (kind == ScaleKind::kOwnKind) {
    scale = InKind(scale, from);
    return scale == 0 ? Epsilon(from) : scale;
  }
  if (kind == ScaleKind::kE8M0Rounded) {
    const uint32_t power = (amax + 0x00200000u) & 0x7f800000u;      // 1.75 and above: the next one
    return power > 0x04000000u ? power - 0x04000000u : kLeastE8M0;  // 8 less
  }
  if (kind == ScaleKind::kE8M0 && scale <= kLeastE8M0) return kLeastE8M0;
  scale = scale < 0x00800000u ? 0x00800000u : scale;
  const bool power = kind == ScaleKind::kPowerOfTwo || kind == ScaleKind::kE8M0;
  return power ? (scale + 0x007fffffu) & 0x7f800000u : scale;
}

/// Writes scale number `index` of those that begin at `scales`; `bits` is ScaleInv's.
WW_HOST_DEVICE void StoreScale(void* scales, int64_t index, uint32_t bits, ScaleKind kind,
                               Element from) {
  auto* at = static_cast<unsigned char*>(scales) + index * ScaleBytes(kind, from);
  if (IsE8M0(kind)) {
    *at = static_cast<unsigned char>(bits >> 23);
  } else if (kind == ScaleKind::kOwnKind && from != Element::kF32) {
    const auto half = static_cast<uint16_t>(from == Element::kBF16 ? bits >> 16 : F16FromF32(bits));
    memcpy(at, &half, sizeof half);
  } else {
    memcpy(at, &bits, sizeof bits);
  }
}

/// The code of one element of a block with a finite scale.
WW_HOST_DEVICE uint32_t Quantized(uint32_t bits, float scale_inv) {
  return E4M3FromF32(AsBits(AsFloat(bits) / scale_inv));
}
WW_HOST_DEVICE uint32_t Quantized(uint32_t bits, float scale_inv, ScaleKind kind, Element from) {
  const uint32_t quotient = AsBits(AsFloat(bits) / scale_inv);
  return E4M3FromF32(RoundsQuotients(kind) ? InKind(quotient, from) : quotient);
}

/// To the nearest e2m1 (1 sign, 2 exponent with bias 1, 1 fraction), ties to even, at most ±6.
WW_HOST_DEVICE uint32_t E2M1FromF32(uint32_t bits) {
  uint32_t magnitude = bits & 0x7fffffffu;
  uint32_t normal = (magnitude - 0x3f000000u + 0x1fffffu + (magnitude >> 22 & 1u)) >> 22;
  // 2^22 has e2m1's smallest denormal, 0.5, as its last place, so the addition rounds to it.
  uint32_t denormal = AsBits(AsFloat(magnitude) + 4194304.0f) - 0x4a800000u;
  uint32_t code = magnitude < 0x3f800000u ? denormal : normal;
  code = magnitude > 0x40c00000u ? 7u : code;
  return code | (bits >> 28 & 8u);
}

WW_HOST_DEVICE uint32_t F32FromE4M3(uint32_t code) {
  const uint32_t magnitude = code & 0x7fu;
  const uint32_t normal = (magnitude << 20) + 0x3c000000u;
  const uint32_t denormal = AsBits(static_cast<float>(magnitude) * 0.001953125f);  // 2^-9
  const uint32_t bits = magnitude < 8 ? denormal : normal;
  return (magnitude == 0x7fu ? 0x7fc00000u : bits) | (code & 0x80u) << 24;
}

/// The scale of a group of four-bit elements: as it is stored, and what elements are divided by.
struct FourBitScale {
  uint32_t stored;
  float divisor;
};
WW_HOST_DEVICE FourBitScale FourBitScaleOf(uint32_t amax, FourBitKind kind, Element from,
                                           float global) {
  const bool number = amax < kInfinityBits && global == global;
  if (kind == FourBitKind::kMxFp4 || kind == FourBitKind::kMxFp4Rounded) {
    uint32_t power = 0;
    if (kind == FourBitKind::kMxFp4) {
      // As with 448, no quotient but that of 6 · 2^k rounds to a power of two.
      const uint32_t scale = AsBits(AsFloat(amax) / 6.0f);
      power = scale <= kLeastE8M0 ? kLeastE8M0 : (scale + 0x007fffffu) & 0x7f800000u;
    } else {
      power = (amax + 0x00200000u) & 0x7f800000u;
      power = power > 0x01000000u ? power - 0x01000000u : kLeastE8M0;
    }
    return {number ? power >> 23 : 0xffu, AsFloat(power)};
  }
  if (kind == FourBitKind::kNvFp4) {
    const uint32_t own = InKind(AsBits(AsFloat(amax) / 6.0f), from);
    uint32_t code = E4M3FromF32(AsBits(AsFloat(own) * global));
    code = code == 0 ? 0x20u : code;  // 0.125
    return {number ? code : 0x7fu, AsFloat(F32FromE4M3(code)) / global};
  }
  if (kind == FourBitKind::kNvFp4Modelopt) {
    const uint32_t own = AsBits(AsFloat(amax) / (6.0f * global));
    uint32_t code = E4M3FromF32(own);
    code = code == 0 ? 0x01u : code;  // 2^-9
    code = own == 0 || global == 0.0f ? 0x38u : code;
    // An infinity makes 0 of each element of a tensor of zeros.
    const float divisor = AsFloat(F32FromE4M3(code)) * global;
    return {number ? code : 0x7fu, global == 0.0f ? AsFloat(kInfinityBits) : divisor};
  }
  uint32_t scale = InKind(AsBits(AsFloat(amax) / 7.5f), from);
  scale = scale == 0 ? Epsilon(from) : scale;
  const uint32_t stored = number ? scale : 0x7fc00000u;
  return {from == Element::kF32    ? stored
          : from == Element::kBF16 ? stored >> 16
                                   : F16FromF32(stored),
          AsFloat(scale)};
}

/// The four bits of an element of a group whose scale is a number.
WW_HOST_DEVICE uint32_t FourBits(uint32_t bits, float divisor, FourBitKind kind, Element from) {
  const float quotient = AsFloat(bits) / divisor;
  if (kind == FourBitKind::kMxFp4) return E2M1FromF32(AsBits(quotient));
  if (kind != FourBitKind::kInt4) {
    const uint32_t zero = kind == FourBitKind::kNvFp4Modelopt ? AsBits(quotient) : bits;
    return E2M1FromF32((zero << 1) == 0 ? 0u : AsBits(quotient));
  }
  float own = AsFloat(InKind(AsBits(quotient), from));
  own = own > 7.0f ? 7.0f : own < -8.0f ? -8.0f : own;
  // 1.5 · 2^23 has 1 as its last place, so the addition rounds to whole numbers.
  return AsBits(own + 12582912.0f) + 8u - 0x4b400000u;
}

}  // namespace weightwire::kernels::internal
