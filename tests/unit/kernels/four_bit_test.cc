// Four-bit formats against the libraries that define them (tests/data/low_precision.txt) and
// against an oracle that searches all values of a format in double precision.
#include "kernels/four_bit.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <sstream>
#include <vector>

#include "kernels/simd.h"
#include "tests/unit/kernels/oracle.h"
#include "tests/unit/kernels/quantize_oracle.h"

namespace weightwire::kernels {
namespace {

constexpr Element kFloats[] = {Element::kBF16, Element::kF16, Element::kF32};
constexpr FourBitKind kKinds[] = {FourBitKind::kMxFp4, FourBitKind::kMxFp4Rounded,
                                  FourBitKind::kNvFp4, FourBitKind::kInt4};
constexpr const char* kKindNames[] = {"kMxFp4", "kMxFp4Rounded", "kNvFp4", "kInt4"};
constexpr const char* kFloatNames[] = {"bf16", "f16", "f32"};

std::vector<unsigned char> FromHex(const std::string& digits, int bytes) {
  std::vector<unsigned char> made;
  const auto width = 2 * static_cast<size_t>(bytes);
  for (size_t at = 0; at < digits.size(); at += width) {
    const unsigned long bits = std::stoul(digits.substr(at, width), nullptr, 16);
    for (int i = 0; i < bytes; ++i) made.push_back(static_cast<unsigned char>(bits >> (8 * i)));
  }
  return made;
}

template <class Names>
size_t Position(const Names& names, const std::string& word) {
  const auto at = static_cast<size_t>(std::ranges::find(names, word) - std::begin(names));
  EXPECT_LT(at, std::size(names)) << word;
  return at;
}

TEST(FourBit, GivesTheBytesOfTheLibrariesThatDefineTheFormats) {
  const char* root = std::getenv("WEIGHTWIRE_SOURCE_DIR");
  std::ifstream file(std::string(root != nullptr ? root : ".") + "/tests/data/low_precision.txt");
  int lines = 0;
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string first, library, kind_name, from_name, elements, codes, scales, global;
    int64_t group = 0;
    words >> first;
    if (first != "four") continue;
    words >> library >> kind_name >> from_name >> group >> elements >> codes >> scales >> global;
    ++lines;
    SCOPED_TRACE(library + " " + kind_name + " " + from_name + " " + elements);
    const FourBitKind kind = kKinds[Position(kKindNames, kind_name)];
    const Element from = kFloats[Position(kFloatNames, from_name)];
    const auto source = FromHex(elements, ElementBytes(from));
    const auto columns = std::ssize(source) / ElementBytes(from);
    float scale = 0;
    std::memcpy(&scale, FromHex(global, 4).data(), 4);
    if (kind == FourBitKind::kNvFp4) {
      EXPECT_EQ(NvFp4Global(LargestMagnitude(source.data(), columns, from), from), scale);
    }
    const auto want_scales = FromHex(scales, FourBitScaleBytes(kind, from));
    std::vector<unsigned char> got(static_cast<size_t>(columns / 2)),
        got_scales(want_scales.size());
    QuantizeFourBit(got.data(), got_scales.data(), source.data(), 1, columns, group, from, kind,
                    scale);
    EXPECT_EQ(got, FromHex(codes, 1));
    EXPECT_EQ(got_scales, want_scales);
  }
  EXPECT_GT(lines, 50) << "tests/data/low_precision.txt below WEIGHTWIRE_SOURCE_DIR";
}

/// The nearest of `values`, each an even or an odd code in turn; of two the even one.
int Nearest(double value, const std::vector<double>& values) {
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

Group Oracle(const std::vector<double>& elements, bool special, Element from, FourBitKind kind,
             float global) {
  Group made;
  double amax = 0, divisor = 0;
  for (double element : elements) amax = std::max(amax, std::fabs(element));
  const bool mx = kind == FourBitKind::kMxFp4 || kind == FourBitKind::kMxFp4Rounded;
  special = special || std::isnan(global);
  if (mx) {
    const bool rounded = kind == FourBitKind::kMxFp4Rounded;
    divisor = std::ldexp(1.0, -126);
    const double most = rounded ? 7.0 : 6.0;  // of a scale of 1
    while (amax > most * divisor || (rounded && amax == most * divisor)) divisor *= 2;
    made.scale = {static_cast<unsigned char>(special ? 0xff : std::ilogb(divisor) + 127)};
  } else if (kind == FourBitKind::kNvFp4) {
    const auto wanted =
        static_cast<float>(oracle::RoundTo(from, static_cast<float>(amax / 6)) * global);
    uint8_t code = special ? 0x7f : oracle::EncodeE4M3(std::min(wanted, 448.0f));
    if (code == 0) code = 0x20;
    made.scale = {code};
    divisor = static_cast<float>(oracle::DecodeE4M3(code) / static_cast<double>(global));
  } else {
    divisor = oracle::RoundTo(from, static_cast<float>(amax / 7.5));
    if (divisor == 0) divisor = std::ldexp(1.0, -oracle::FormatOf(from).fraction_bits);
    oracle::QuantizeCase stored;
    stored.from = from;
    stored.box.scale = ScaleKind::kOwnKind;
    made.scale.resize(static_cast<size_t>(FourBitScaleBytes(kind, from)));
    oracle::StoreScale(made.scale.data(), stored, special ? std::nan("") : divisor);
  }
  std::vector<int> four;
  for (double element : elements) {
    const double quotient = static_cast<double>(static_cast<float>(element / divisor));
    if (kind == FourBitKind::kInt4) {
      const double own = std::clamp(oracle::RoundTo(from, quotient), -8.0, 7.0);
      four.push_back(special ? 8 : static_cast<int>(std::nearbyint(own)) + 8);
    } else {
      const int code = Nearest(std::min(std::fabs(quotient), 6.0), {0, 0.5, 1, 1.5, 2, 3, 4, 6});
      const bool keeps = kind == FourBitKind::kMxFp4 || element != 0;
      four.push_back(special ? 0 : code | (std::signbit(element) && keeps ? 8 : 0));
    }
  }
  for (size_t i = 0; i < four.size(); i += 2) {
    made.codes.push_back(static_cast<unsigned char>(four[i] + 16 * four[i + 1]));
  }
  return made;
}

TEST(FourBit, RandomGroupsAreTheOraclesInEverySetOfLoops) {
  auto random = SeededGenerator();
  for (int i = 0; i < 2400 && !testing::Test::HasFailure(); ++i) {
    const auto group =
        static_cast<int64_t>(i % 8 < 4 ? 16 << random() % 4 : 8 * (1 + random() % 8));
    const auto groups = static_cast<int64_t>(1 + random() % (random() % 2 == 0 ? 60 : 5));
    const FourBitKind kind = kKinds[i % 4];
    const auto index = static_cast<size_t>(i / 4 % 3);
    const Element from = kFloats[index];
    oracle::QuantizeCase c{oracle::PackedQuantizeBox(1, group * groups, 1, group), from, {}};
    oracle::FillSource(random, c);
    const auto size = static_cast<size_t>(ElementBytes(from));
    const auto put = [&](size_t element, uint32_t bits) {
      std::memcpy(&c.source[element * size], &bits, size);
    };
    const uint32_t sign = from == Element::kF32 ? 0x80000000u : 0x8000u;
    for (size_t g = 0; g < static_cast<size_t>(groups); ++g) {
      const uint64_t what = random() % 8;  // of each: a -0, all of them, a NaN, far smaller ones
      for (size_t k = g * static_cast<size_t>(group); k < (g + 1) * static_cast<size_t>(group);
           ++k) {
        if (what == 1 || (what == 0 && random() % 8 == 0)) put(k, sign);
        if (what == 2 && random() % 16 == 0) put(k, 0x7f81u);
        if (what < 5 && what > 2 && from == Element::kBF16) {
          uint32_t bits = 0;
          std::memcpy(&bits, &c.source[k * size], size);
          put(k, bits - (std::min(bits >> 7 & 0xffu, 11u + static_cast<uint32_t>(what)) << 7));
        }
      }
    }
    float global = NvFp4Global(LargestMagnitude(c.source.data(), group * groups, from), from);
    if (std::isnan(global) && random() % 2 == 0) global = 1.5f;
    SCOPED_TRACE(std::string(kKindNames[i % 4]) + " of " + kFloatNames[index] + ", " +
                 std::to_string(group));
    std::vector<unsigned char> codes, scales;
    for (int64_t g = 0; g < groups; ++g) {
      std::vector<double> elements;
      bool special = false;
      for (int64_t k = g * group; k < (g + 1) * group; ++k) {
        const uint32_t bits = oracle::LoadBits(c, 0, k);
        special = special || oracle::IsSpecial(from, bits);
        elements.push_back(oracle::Decode(from, bits));
      }
      const Group want =
          Oracle(elements, special, from, kind, kind == FourBitKind::kNvFp4 ? global : 1.0f);
      codes.insert(codes.end(), want.codes.begin(), want.codes.end());
      scales.insert(scales.end(), want.scale.begin(), want.scale.end());
    }
    for (const internal::SimdKernels* simd : internal::SimdVariants()) {
      std::vector<unsigned char> got(codes.size(), 0xa5), got_scales(scales.size(), 0xa5);
      simd->four_bit[index](got.data(), got_scales.data(), c.source.data(),
                            static_cast<size_t>(groups), static_cast<size_t>(group), kind, global);
      EXPECT_EQ(got, codes) << simd->name;
      EXPECT_EQ(got_scales, scales) << simd->name;
    }
  }
}

TEST(FourBitDeathTest, AbortsOnWhatHasNoGroups) {
  char bytes[64] = {};
  EXPECT_DEATH(QuantizeFourBit(bytes, bytes, bytes, 1, 8, 8, Element::kOpaque2, FourBitKind::kInt4),
               "is no float");
  EXPECT_DEATH(QuantizeFourBit(bytes, bytes, bytes, 1, 12, 8, Element::kF32, FourBitKind::kInt4),
               "groups of 8 of 12");
}

}  // namespace
}  // namespace weightwire::kernels
