// The plain meaning of every kernel: one element at a time, no shared code with the fast ones.
#define XXH_INLINE_ALL
#include <xxhash.h>

#include <cstring>

#include "kernels/kernels.h"

namespace weightwire::kernels::reference {
namespace {

// NaN: the sign and the highest payload bits stay, the quiet bit is set.

uint32_t F32FromBF16(uint32_t half) {
  uint32_t bits = half << 16;
  bool nan = (bits & 0x7fffffff) > 0x7f800000;
  return nan ? bits | 0x00400000 : bits;
}

uint32_t F32FromF16(uint32_t half) {
  uint32_t sign = (half & 0x8000) << 16;
  uint32_t exponent = half >> 10 & 0x1f;
  uint32_t fraction = half & 0x3ff;
  if (exponent == 31) return sign | 0x7f800000 | fraction << 13 | (fraction != 0 ? 0x400000u : 0u);
  if (exponent == 0 && fraction == 0) return sign;
  exponent += 127 - 15;
  if ((half & 0x7c00) == 0) {
    ++exponent;
    while ((fraction & 0x400) == 0) {
      fraction <<= 1;
      --exponent;
    }
    fraction &= 0x3ff;
  }
  return sign | exponent << 23 | fraction << 13;
}

/// value / 2^shift, to nearest, ties to even; shift in 1..31.
uint32_t RoundedShift(uint32_t value, uint32_t shift) {
  uint32_t quotient = value >> shift;
  uint32_t rest = value & ((1u << shift) - 1);
  uint32_t half = 1u << (shift - 1);
  bool up = rest > half || (rest == half && (quotient & 1) != 0);
  return quotient + (up ? 1 : 0);
}

uint32_t BF16FromF32(uint32_t bits) {
  bool nan = (bits & 0x7fffffff) > 0x7f800000;
  return nan ? bits >> 16 | 0x40 : RoundedShift(bits, 16);
}

uint32_t F16FromF32(uint32_t bits) {
  uint32_t sign = bits >> 16 & 0x8000;
  uint32_t exponent = bits >> 23 & 0xff;
  uint32_t fraction = bits & 0x7fffff;
  if (exponent == 255) {
    return fraction == 0 ? sign | 0x7c00 : sign | 0x7e00 | fraction >> 13;
  }
  if (exponent >= 127 + 16) return sign | 0x7c00;
  if (exponent > 127 - 15) {
    return sign | RoundedShift((exponent - (127 - 15)) << 23 | fraction, 13);
  }
  // A denormal counts 2^-24; below 2^-25 even the nearest is zero.
  if (exponent < 127 - 25) return sign;
  return sign | RoundedShift(0x800000 | fraction, 126 - exponent);
}

uint32_t ToF32(Element from, uint32_t bits) {
  if (from == Element::kBF16) return F32FromBF16(bits);
  if (from == Element::kF16) return F32FromF16(bits);
  return bits;
}

uint32_t FromF32(Element to, uint32_t bits) {
  if (to == Element::kBF16) return BF16FromF32(bits);
  if (to == Element::kF16) return F16FromF32(bits);
  return bits;
}

bool IsFloat(Element element) {
  return element == Element::kBF16 || element == Element::kF16 || element == Element::kF32;
}

void StoreAs(Element to, uint32_t bits, unsigned char* target) {
  if (to == Element::kF32) {
    std::memcpy(target, &bits, 4);
  } else {
    auto half = static_cast<uint16_t>(bits);
    std::memcpy(target, &half, 2);
  }
}

uint32_t LoadAs(Element from, const unsigned char* source) {
  uint32_t bits = 0;
  uint16_t half = 0;
  if (from == Element::kF32) {
    std::memcpy(&bits, source, 4);
    return bits;
  }
  std::memcpy(&half, source, 2);
  return half;
}

void CopyElement(unsigned char* target, const unsigned char* source, Element from, Element to) {
  if (from != to && IsFloat(from) && IsFloat(to)) {
    StoreAs(to, FromF32(to, ToF32(from, LoadAs(from, source))), target);
  } else {
    std::memcpy(target, source, static_cast<size_t>(ElementBytes(to)));
  }
}

/// visit(source element index, target element index), in row-major order.
template <class Visit>
void ForElements(const StridedBox& box, int d, int64_t source, int64_t target, Visit visit) {
  if (d == box.ndim) return visit(source, target);
  for (int64_t i = 0; i < box.extent[d]; ++i) {
    ForElements(box, d + 1, source + i * box.source_stride[d], target + i * box.target_stride[d],
                visit);
  }
}

}  // namespace

uint64_t SumTarget(const void* target, const StridedBox& box, Element element) {
  XXH3_state_t state;
  XXH3_64bits_reset(&state);
  const int64_t bytes = ElementBytes(element);
  ForElements(box, 0, 0, 0, [&](int64_t, int64_t at) {
    XXH3_64bits_update(&state, static_cast<const unsigned char*>(target) + at * bytes,
                       static_cast<size_t>(bytes));
  });
  return XXH3_64bits_digest(&state);
}

uint64_t SumSource(const void* source, const StridedBox& box, Element from, Element to) {
  XXH3_state_t state;
  XXH3_64bits_reset(&state);
  ForElements(box, 0, 0, 0, [&](int64_t at, int64_t) {
    unsigned char element[8];
    CopyElement(element, static_cast<const unsigned char*>(source) + at * ElementBytes(from), from,
                to);
    XXH3_64bits_update(&state, element, static_cast<size_t>(ElementBytes(to)));
  });
  return XXH3_64bits_digest(&state);
}

void Copy(void* target, const void* source, const StridedBox& box, Element from, Element to) {
  ForElements(box, 0, 0, 0, [&](int64_t source_at, int64_t target_at) {
    CopyElement(static_cast<unsigned char*>(target) + target_at * ElementBytes(to),
                static_cast<const unsigned char*>(source) + source_at * ElementBytes(from), from,
                to);
  });
}

}  // namespace weightwire::kernels::reference
