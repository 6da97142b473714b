#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "kernels/quantize.h"
#include "tests/unit/kernels/oracle.h"

/// What quantization should give, computed in doubles by searching all codes, and random cases.
namespace weightwire::kernels::oracle {

inline double DecodeE4M3(uint8_t code) {
  int exponent = code >> 3 & 15;
  int fraction = code & 7;
  if ((code & 0x7f) == 0x7f) return std::nan("");
  double magnitude =
      exponent == 0 ? std::ldexp(fraction, -9) : std::ldexp(8 + fraction, exponent - 10);
  return code & 0x80 ? -magnitude : magnitude;
}

/// The code whose value is nearest; of two, the even one. Neighbouring magnitudes are neighbouring
/// codes, so one bisection finds both candidates.
inline uint8_t EncodeE4M3(double value) {
  double magnitude = std::fabs(value);
  int low = 0;
  int high = 0x7e;
  while (high - low > 1) {
    int middle = (low + high) / 2;
    (DecodeE4M3(static_cast<uint8_t>(middle)) <= magnitude ? low : high) = middle;
  }
  double below = magnitude - DecodeE4M3(static_cast<uint8_t>(low));
  double above = DecodeE4M3(static_cast<uint8_t>(high)) - magnitude;
  int code = below < above || (below == above && low % 2 == 0) ? low : high;
  return static_cast<uint8_t>(code | (std::signbit(value) ? 0x80 : 0));
}

inline int64_t BlocksAlong(int64_t extent, int64_t block) { return (extent - 1) / block + 1; }
inline int64_t Blocks(const QuantizeBox& box) {
  return BlocksAlong(box.rows, box.block_rows) * BlocksAlong(box.columns, box.block_columns);
}

inline QuantizeBox PackedQuantizeBox(int64_t rows, int64_t columns, int64_t block_rows,
                                     int64_t block_columns) {
  QuantizeBox box{rows, columns, block_rows, block_columns, {columns, 1}, {columns, 1}, {}};
  box.scale_stride[0] = BlocksAlong(columns, block_columns);
  box.scale_stride[1] = 1;
  return box;
}

struct Quantized {
  std::vector<unsigned char> codes;
  std::vector<unsigned char> scales;
};

struct QuantizeCase {
  QuantizeBox box;
  Element from = Element::kBF16;
  std::vector<unsigned char> source;

  /// Buffers of exactly the spans, filled with what nobody writes.
  Quantized Blank() const {
    auto span = [](int64_t rows, int64_t columns, const int64_t* stride) {
      return static_cast<size_t>((rows - 1) * stride[0] + (columns - 1) * stride[1] + 1);
    };
    size_t scales = span(BlocksAlong(box.rows, box.block_rows),
                         BlocksAlong(box.columns, box.block_columns), box.scale_stride);
    return {std::vector<unsigned char>(span(box.rows, box.columns, box.target_stride), 0xa5),
            std::vector<unsigned char>(scales * static_cast<size_t>(ScaleBytes(box.scale, from)),
                                       0xa5)};
  }

  std::string Text() const {
    std::ostringstream out;
    out << box.rows << "x" << box.columns << " in " << box.block_rows << "x" << box.block_columns
        << ", source " << box.source_stride[0] << "," << box.source_stride[1] << " target "
        << box.target_stride[0] << "," << box.target_stride[1] << " kind " << static_cast<int>(from)
        << " scales " << static_cast<int>(box.scale);
    return out.str();
  }
};

inline uint32_t LoadBits(const QuantizeCase& c, int64_t row, int64_t column) {
  int64_t at = row * c.box.source_stride[0] + column * c.box.source_stride[1];
  uint32_t bits = 0;
  std::memcpy(&bits, &c.source[static_cast<size_t>(at * ElementBytes(c.from))],
              static_cast<size_t>(ElementBytes(c.from)));
  return bits;
}

/// The value of the kind nearest to a double, ties to even; overflow is infinity.
inline double RoundTo(Element kind, double value) {
  if (kind == Element::kF32) return static_cast<double>(static_cast<float>(value));
  if (value == 0) return value;
  const Format format = FormatOf(kind);
  const int bias = (1 << (format.exponent_bits - 1)) - 1;
  const int exponent = std::max(std::ilogb(value), 1 - bias);
  const double place = std::ldexp(1.0, exponent - format.fraction_bits);
  const double rounded = std::nearbyint(value / place) * place;
  const bool overflows = std::fabs(rounded) >= std::ldexp(1.0, bias + 1);
  return overflows ? std::copysign(HUGE_VAL, value) : rounded;
}

/// The bits of a positive value that a kind of 16 bits has: neighbouring values have neighbouring
/// bits.
inline uint16_t Bits16(Element kind, double value) {
  uint32_t low = 0, high = kind == Element::kBF16 ? 0x7f80 : 0x7c00;
  while (high - low > 1) {
    const uint32_t middle = (low + high) / 2;
    (Decode(kind, middle) <= value ? low : high) = middle;
  }
  return static_cast<uint16_t>(low);
}

/// The least power of two, from 2^`least` on, of which 448 times is no less than amax.
inline double NextPowerOfTwo(double amax, int least) {
  double power = std::ldexp(1.0, least);
  while (448.0 * power < amax) power *= 2;
  return power;
}

/// The scale of a block of finite elements.
inline double ScaleOf(const QuantizeCase& c, double amax) {
  switch (c.box.scale) {
    case ScaleKind::kF32:
    case ScaleKind::kF32OwnQuotient:
      return static_cast<double>(static_cast<float>(std::max(amax / 448.0, std::ldexp(1.0, -126))));
    case ScaleKind::kOwnKind: {
      const double scale = RoundTo(c.from, amax / 448.0);
      return scale > 0 ? scale : std::ldexp(1.0, -FormatOf(c.from).fraction_bits);
    }
    case ScaleKind::kE8M0Rounded: {
      double power = std::ldexp(1.0, -127);
      while (448.0 * power <= amax) power *= 2;
      return power;
    }
    default:
      return NextPowerOfTwo(amax, c.box.scale == ScaleKind::kE8M0 ? -127 : -126);
  }
}

inline void StoreScale(unsigned char* at, const QuantizeCase& c, double scale) {
  const int bytes = ScaleBytes(c.box.scale, c.from);
  if (bytes == 1) {
    *at = std::isnan(scale) ? 0xff : static_cast<unsigned char>(std::ilogb(scale) + 127);
  } else if (bytes == 2) {
    const auto nan = static_cast<uint16_t>(c.from == Element::kBF16 ? 0x7fc0 : 0x7e00);
    const uint16_t bits = std::isnan(scale) ? nan : Bits16(c.from, scale);
    std::memcpy(at, &bits, 2);
  } else {
    const auto value = static_cast<float>(scale);
    const uint32_t nan = 0x7fc00000u;
    std::memcpy(at, std::isnan(scale) ? static_cast<const void*>(&nan) : &value, 4);
  }
}

inline Quantized Quantize(const QuantizeCase& c) {
  const QuantizeBox& box = c.box;
  Quantized result = c.Blank();
  std::vector<double> values(static_cast<size_t>(Blocks(box)));
  for (int64_t row = 0; row < box.rows; ++row) {
    for (int64_t column = 0; column < box.columns; ++column) {
      int64_t first_row = row / box.block_rows * box.block_rows;
      int64_t first_column = column / box.block_columns * box.block_columns;
      double& value = values[static_cast<size_t>(row / box.block_rows *
                                                     BlocksAlong(box.columns, box.block_columns) +
                                                 column / box.block_columns)];
      auto* scale = &result.scales[static_cast<size_t>(
          ScaleBytes(box.scale, c.from) * (row / box.block_rows * box.scale_stride[0] +
                                           column / box.block_columns * box.scale_stride[1]))];
      if (row == first_row && column == first_column) {
        double amax = 0;
        bool special = false;
        for (int64_t r = row; r < std::min(box.rows, row + box.block_rows); ++r) {
          for (int64_t k = column; k < std::min(box.columns, column + box.block_columns); ++k) {
            uint32_t bits = LoadBits(c, r, k);
            special |= IsSpecial(c.from, bits);
            amax = std::max(amax, std::fabs(Decode(c.from, bits)));
          }
        }
        value = special ? std::nan("") : ScaleOf(c, amax);
        StoreScale(scale, c, value);
      }
      // Of two floats, the double quotient rounded to float is the float quotient.
      double quotient =
          static_cast<double>(static_cast<float>(Decode(c.from, LoadBits(c, row, column)) / value));
      if (box.scale == ScaleKind::kOwnKind || box.scale == ScaleKind::kF32OwnQuotient) {
        quotient = RoundTo(c.from, quotient);
      }
      result
          .codes[static_cast<size_t>(row * box.target_stride[0] + column * box.target_stride[1])] =
          std::isnan(value) ? 0x7f : EncodeE4M3(std::clamp(quotient, -448.0, 448.0));
    }
  }
  return result;
}

inline void FillSource(std::mt19937_64& random, QuantizeCase& c) {
  const QuantizeBox& box = c.box;
  int64_t span =
      (box.rows - 1) * box.source_stride[0] + (box.columns - 1) * box.source_stride[1] + 1;
  auto size = static_cast<size_t>(ElementBytes(c.from));
  c.source.resize(static_cast<size_t>(span) * size);
  uint64_t kind = random() % 4;  // any bits, bits near 1, bits near the denormals, few of them
  Format format = FormatOf(c.from);
  for (size_t at = 0; at < c.source.size(); at += size) {
    auto bits = static_cast<uint32_t>(random()) & (size == 2 ? 0xffffu : 0xffffffffu);
    uint32_t ones = (1u << format.exponent_bits) - 1;
    uint32_t low = kind == 2 ? 0 : ones / 2 - 8;
    auto exponent = low + static_cast<uint32_t>(random() % 12);
    if (kind != 0)
      bits = (bits & ~(ones << format.fraction_bits)) | exponent << format.fraction_bits;
    if (kind == 3 && random() % 8 != 0) bits = 0;
    if (IsSpecial(c.from, bits) && random() % 5000 != 0) bits = 0x3c01;
    std::memcpy(&c.source[at], &bits, size);
  }
}

inline QuantizeCase PackedCase(std::mt19937_64& random, int64_t rows, int64_t columns,
                               Element from) {
  QuantizeCase c{PackedQuantizeBox(rows, columns, 128, 128), from, {}};
  FillSource(random, c);
  return c;
}

inline QuantizeCase RandomQuantizeCase(std::mt19937_64& random) {
  auto below = [&](int64_t limit) { return 1 + static_cast<int64_t>(random() % limit); };
  bool wide = random() % 16 == 0;  // rows longer than a tile
  int64_t rows = wide ? below(3) : below(300);
  int64_t columns = wide ? 4000 + below(5000) : below(rows > 150 ? 40 : 300);
  bool channels = wide || random() % 4 == 0;
  QuantizeCase c;
  bool groups = random() % 4 == 0;  // short ones along rows
  c.box = groups                           ? PackedQuantizeBox(rows, columns, 1, 1 + below(40))
          : random() % 2 == 0 && !channels ? PackedQuantizeBox(rows, columns, 128, 128)
          : channels                       ? PackedQuantizeBox(rows, columns, 1, columns)
                                           : PackedQuantizeBox(rows, columns, below(70), below(70));
  c.box.scale = static_cast<ScaleKind>(random() % (static_cast<int>(kLastScaleKind) + 1));
  c.from = static_cast<Element>(static_cast<int>(Element::kBF16) + static_cast<int>(random() % 3));
  auto stride = [&](int64_t* strides, int64_t inner_rows, int64_t inner_columns) {
    bool transposed = random() % 4 == 0;
    int64_t gap = random() % 3 == 0 ? below(9) : 0;
    int64_t unit = random() % 6 == 0 ? below(3) : 1;
    strides[0] = transposed ? unit : unit * (inner_columns + gap);
    strides[1] = transposed ? unit * (inner_rows + gap) : unit;
  };
  stride(c.box.source_stride, rows, columns);
  stride(c.box.target_stride, rows, columns);
  stride(c.box.scale_stride, BlocksAlong(rows, c.box.block_rows),
         BlocksAlong(columns, c.box.block_columns));
  FillSource(random, c);
  return c;
}

}  // namespace weightwire::kernels::oracle
