#pragma once

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "kernels/four_bit.h"
#include "tests/unit/kernels/oracle.h"
#include "tests/unit/kernels/quantize_oracle.h"

/// What quantization to four bits should give, computed in doubles by searching all values of a
/// format, and random cases.
namespace weightwire::kernels::oracle {

/// The nearest of `values`, each an even or an odd code in turn; of two the even one.
inline int Nearest(double value, const std::vector<double>& values) {
  int best = 0;
  for (int i = 1; i < static_cast<int>(values.size()); ++i) {
    const double here = std::fabs(values[static_cast<size_t>(i)] - value);
    const double there = std::fabs(values[static_cast<size_t>(best)] - value);
    if (here < there || (here == there && i % 2 == 0)) best = i;
  }
  return best;
}

struct Group {
  std::vector<unsigned char> codes, scale;
};

inline Group QuantizeGroup(const std::vector<double>& elements, bool special, Element from,
                           FourBitKind kind, float global) {
  Group made;
  double amax = 0, divisor = 0;
  for (double element : elements) amax = std::max(amax, std::fabs(element));
  const bool mx = kind == FourBitKind::kMxFp4 || kind == FourBitKind::kMxFp4Rounded;
  special = special || std::isnan(global);
  if (mx) {
    const bool rounded = kind == FourBitKind::kMxFp4Rounded;
    divisor = std::ldexp(1.0, -127);
    const double most = rounded ? 7.0 : 6.0;  // of a scale of 1
    while (amax > most * divisor || (rounded && amax == most * divisor)) divisor *= 2;
    made.scale = {static_cast<unsigned char>(special ? 0xff : std::ilogb(divisor) + 127)};
  } else if (kind == FourBitKind::kNvFp4) {
    const auto wanted = static_cast<float>(RoundTo(from, static_cast<float>(amax / 6)) * global);
    uint8_t code = special ? 0x7f : EncodeE4M3(std::min(wanted, 448.0f));
    if (code == 0) code = 0x20;
    made.scale = {code};
    divisor = static_cast<float>(DecodeE4M3(code) / static_cast<double>(global));
  } else if (kind == FourBitKind::kNvFp4Modelopt) {
    const auto least = static_cast<double>(static_cast<float>(6.0 * static_cast<double>(global)));
    const double wanted = least > 0 ? static_cast<double>(static_cast<float>(amax / least)) : 0;
    const double held = wanted == 0 ? 1 : std::clamp(wanted, std::ldexp(1.0, -9), 448.0);
    const uint8_t code = special ? 0x7f : EncodeE4M3(static_cast<float>(held));
    made.scale = {code};
    divisor =
        static_cast<double>(static_cast<float>(DecodeE4M3(code) * static_cast<double>(global)));
    if (global == 0) divisor = HUGE_VAL;  // of a tensor of zeros all codes are 0
  } else {
    divisor = RoundTo(from, static_cast<float>(amax / 7.5));
    if (divisor == 0) divisor = std::ldexp(1.0, -FormatOf(from).fraction_bits);
    QuantizeCase stored;
    stored.from = from;
    stored.box.scale = ScaleKind::kOwnKind;
    made.scale.resize(static_cast<size_t>(FourBitScaleBytes(kind, from)));
    StoreScale(made.scale.data(), stored, special ? std::nan("") : divisor);
  }
  std::vector<int> four;
  for (double element : elements) {
    const double quotient = static_cast<double>(static_cast<float>(element / divisor));
    if (kind == FourBitKind::kInt4) {
      const double own = std::clamp(RoundTo(from, quotient), -8.0, 7.0);
      four.push_back(special ? 8 : static_cast<int>(std::nearbyint(own)) + 8);
    } else {
      const int code = Nearest(std::min(std::fabs(quotient), 6.0), {0, 0.5, 1, 1.5, 2, 3, 4, 6});
      const double zero = kind == FourBitKind::kNvFp4Modelopt ? quotient : element;
      const bool keeps = kind == FourBitKind::kMxFp4 || zero != 0;
      four.push_back(special ? 0 : code | (std::signbit(element) && keeps ? 8 : 0));
    }
  }
  for (size_t i = 0; i < four.size(); i += 2) {
    made.codes.push_back(static_cast<unsigned char>(four[i] + 16 * four[i + 1]));
  }
  return made;
}

/// Rows of groups, packed on all sides.
struct FourBitCase {
  FourBitKind kind;
  int64_t group;
  QuantizeCase source;  ///< its box, kind of elements and bytes
  float global = 1.0f;
  int64_t groups() const { return source.box.rows * source.box.columns / group; }
  std::string Text() const {
    return "kind " + std::to_string(static_cast<int>(kind)) + " of " + source.Text() + ", global " +
           std::to_string(global);
  }
};

/// Of groups some that have a -0, are all so, have a NaN, or are far smaller; and of elements all
/// that FillSource makes.
inline FourBitCase RandomFourBitCase(std::mt19937_64& random, FourBitKind kind, Element from,
                                     int64_t rows, int64_t across, int64_t group) {
  FourBitCase made{kind, group, {PackedQuantizeBox(rows, group * across, 1, group), from, {}}};
  QuantizeCase& c = made.source;
  FillSource(random, c);
  const auto size = static_cast<size_t>(ElementBytes(from));
  const auto put = [&](size_t element, uint32_t bits) {
    std::memcpy(&c.source[element * size], &bits, size);
  };
  const uint32_t sign = from == Element::kF32 ? 0x80000000u : 0x8000u;
  const uint32_t nan = from == Element::kF32 ? 0x7f800100u : 0x7f81u;
  const auto in_group = static_cast<size_t>(group);
  for (size_t g = 0; g < static_cast<size_t>(made.groups()); ++g) {
    const uint64_t what = random() % 8;
    for (size_t k = g * in_group; k < (g + 1) * in_group; ++k) {
      if (what == 1 || (what == 0 && random() % 8 == 0)) put(k, sign);
      if (what == 2 && random() % 16 == 0) put(k, nan);
      if (what < 5 && what > 2 && from == Element::kBF16) {
        uint32_t bits = 0;
        std::memcpy(&bits, &c.source[k * size], size);
        put(k, bits - (std::min(bits >> 7 & 0xffu, 11u + static_cast<uint32_t>(what)) << 7));
      }
    }
  }
  if (!IsNvFp4(kind)) return made;
  made.global =
      NvFp4Global(LargestMagnitude(c.source.data(), group * made.groups(), from), from, kind);
  // That of several tensors, of which another one has larger elements.
  if (kind == FourBitKind::kNvFp4Modelopt && random() % 3 == 0) {
    made.global *= std::ldexp(1.0f, static_cast<int>(random() % 60));
  }
  if (std::isinf(made.global)) made.global = 1.5f;
  if (std::isnan(made.global) && random() % 2 == 0) made.global = 1.5f;
  return made;
}

/// Codes and scales, packed.
inline Quantized QuantizeFourBits(const FourBitCase& c) {
  Quantized made;
  for (int64_t row = 0; row < c.source.box.rows; ++row) {
    for (int64_t first = 0; first < c.source.box.columns; first += c.group) {
      std::vector<double> elements;
      bool special = false;
      for (int64_t k = first; k < first + c.group; ++k) {
        const uint32_t bits = LoadBits(c.source, row, k);
        special = special || IsSpecial(c.source.from, bits);
        elements.push_back(Decode(c.source.from, bits));
      }
      const Group group = QuantizeGroup(elements, special, c.source.from, c.kind, c.global);
      made.codes.insert(made.codes.end(), group.codes.begin(), group.codes.end());
      made.scales.insert(made.scales.end(), group.scale.begin(), group.scale.end());
    }
  }
  return made;
}

}  // namespace weightwire::kernels::oracle
