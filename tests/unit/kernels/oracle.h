#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <limits>
#include <random>
#include <string>

#include "kernels/kernels.h"

/// What the kernels should do, computed another way: floats as doubles with ldexp and nearbyint
/// instead of bit tricks.
namespace weightwire::kernels::oracle {

struct Format {
  int exponent_bits;
  int fraction_bits;
};

inline Format FormatOf(Element element) {
  if (element == Element::kBF16) return {8, 7};
  if (element == Element::kF16) return {5, 10};
  return {8, 23};
}

/// Every finite value of the three formats, and every midpoint of two of them, is a double.
inline double Decode(Element element, uint32_t bits) {
  Format format = FormatOf(element);
  int bias = (1 << (format.exponent_bits - 1)) - 1;
  int exponent = static_cast<int>(bits >> format.fraction_bits) & ((1 << format.exponent_bits) - 1);
  auto fraction = static_cast<double>(bits & ((1u << format.fraction_bits) - 1));
  bool negative = (bits >> (format.exponent_bits + format.fraction_bits)) & 1;
  double magnitude = exponent == 0 ? std::ldexp(fraction, 1 - bias - format.fraction_bits)
                                   : std::ldexp(fraction + std::ldexp(1.0, format.fraction_bits),
                                                exponent - bias - format.fraction_bits);
  return negative ? -magnitude : magnitude;
}

inline bool IsSpecial(Element element, uint32_t bits) {
  Format format = FormatOf(element);
  uint32_t ones = (1u << format.exponent_bits) - 1;
  return (bits >> format.fraction_bits & ones) == ones;
}

/// Nearest value of the format, ties to even; infinity past the largest.
inline uint32_t Encode(Element element, double value) {
  Format format = FormatOf(element);
  int bias = (1 << (format.exponent_bits - 1)) - 1;
  uint32_t sign = std::signbit(value) ? 1u << (format.exponent_bits + format.fraction_bits) : 0;
  double magnitude = std::fabs(value);
  if (magnitude == 0) return sign;
  int exponent = std::max(std::ilogb(magnitude), 1 - bias);
  // In units of the last place; what rounds up to the next power of two carries by itself.
  double units = std::nearbyint(std::ldexp(magnitude, format.fraction_bits - exponent));
  double largest = std::ldexp(2.0 - std::ldexp(1.0, -format.fraction_bits), bias);
  if (std::ldexp(units, exponent - format.fraction_bits) > largest) {
    return sign | ((1u << format.exponent_bits) - 1) << format.fraction_bits;
  }
  auto base = static_cast<uint32_t>(exponent - (1 - bias)) << format.fraction_bits;
  return sign | (base + static_cast<uint32_t>(units));
}

/// A NaN keeps its sign and as many of the high payload bits as fit, and becomes quiet.
inline uint32_t Cast(Element from, Element to, uint32_t bits) {
  if (!IsSpecial(from, bits)) return Encode(to, Decode(from, bits));
  Format source = FormatOf(from);
  Format target = FormatOf(to);
  uint32_t fraction = bits & ((1u << source.fraction_bits) - 1);
  int shift = target.fraction_bits - source.fraction_bits;
  uint32_t moved = shift >= 0 ? fraction << shift : fraction >> -shift;
  if (fraction != 0) moved |= 1u << (target.fraction_bits - 1);
  uint32_t sign = bits >> (source.exponent_bits + source.fraction_bits);
  uint32_t signed_ones = sign << target.exponent_bits | ((1u << target.exponent_bits) - 1);
  return signed_ones << target.fraction_bits | moved;
}

inline bool IsFloat(Element element) { return element >= Element::kBF16; }

/// One element as it should arrive.
inline void Move(unsigned char* target, const unsigned char* source, Element from, Element to) {
  if (from == to || !IsFloat(from) || !IsFloat(to)) {
    std::memcpy(target, source, static_cast<size_t>(ElementBytes(from)));
    return;
  }
  uint32_t bits = 0;  // the tests run on little-endian machines
  std::memcpy(&bits, source, static_cast<size_t>(ElementBytes(from)));
  bits = Cast(from, to, bits);
  std::memcpy(target, &bits, static_cast<size_t>(ElementBytes(to)));
}

}  // namespace weightwire::kernels::oracle

namespace weightwire::kernels {

/// The generator of a property test, its seed printed so that a failure can be run again.
inline std::mt19937_64 SeededGenerator() {
  const char* given = std::getenv("WEIGHTWIRE_SEED");
  uint64_t seed = given != nullptr ? std::stoull(given) : std::random_device{}();
  std::cout << "WEIGHTWIRE_SEED=" << seed << std::endl;
  return std::mt19937_64(seed);
}

}  // namespace weightwire::kernels
