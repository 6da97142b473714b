// Four-bit formats against the libraries that define them (tests/data/low_precision.txt) and
// against an oracle that searches all values of a format in double precision.
#include "kernels/four_bit.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <sstream>
#include <vector>

#include "kernels/simd.h"
#include "tests/unit/kernels/device_four_bit.h"
#include "tests/unit/kernels/four_bit_oracle.h"

namespace weightwire::kernels {
namespace {

constexpr Element kFloats[] = {Element::kBF16, Element::kF16, Element::kF32};
constexpr FourBitKind kKinds[] = {FourBitKind::kMxFp4, FourBitKind::kMxFp4Rounded,
                                  FourBitKind::kNvFp4, FourBitKind::kInt4,
                                  FourBitKind::kNvFp4Modelopt};
constexpr const char* kKindNames[] = {"kMxFp4", "kMxFp4Rounded", "kNvFp4", "kInt4",
                                      "kNvFp4Modelopt"};
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
    if (IsNvFp4(kind)) {
      const float own = NvFp4Global(LargestMagnitude(source.data(), columns, from), from, kind);
      if (library == "modelopt-fused") {
        EXPECT_LT(own, scale);
      } else {
        EXPECT_EQ(own, scale);
      }
    }
    const auto want_scales = FromHex(scales, FourBitScaleBytes(kind, from));
    std::vector<unsigned char> got(static_cast<size_t>(columns / 2)),
        got_scales(want_scales.size());
    QuantizeFourBit(got.data(), got_scales.data(), source.data(), 1, columns, group, from, kind,
                    scale);
    EXPECT_EQ(got, FromHex(codes, 1));
    EXPECT_EQ(got_scales, want_scales);
    std::ranges::fill(got, 0xa5);
    std::ranges::fill(got_scales, 0xa5);
    const float used = IsNvFp4(kind) ? scale : 1.0f;
    RunFourBit({got.data(),
                got_scales.data(),
                source.data(),
                1,
                columns / group,
                group,
                {0, 1},
                {0, 1},
                {0, 1},
                1,
                from,
                kind,
                used},
               256);
    EXPECT_EQ(got, FromHex(codes, 1)) << "on a device";
    EXPECT_EQ(got_scales, want_scales) << "on a device";
  }
  EXPECT_GT(lines, 50) << "tests/data/low_precision.txt below WEIGHTWIRE_SOURCE_DIR";
}

TEST(FourBit, RandomGroupsAreTheOraclesInEverySetOfLoops) {
  auto random = SeededGenerator();
  for (int i = 0; i < 3000 && !testing::Test::HasFailure(); ++i) {
    const auto group =
        static_cast<int64_t>(i % 10 < 5 ? 16 << random() % 4 : 8 * (1 + random() % 8));
    const auto groups = static_cast<int64_t>(1 + random() % (random() % 2 == 0 ? 60 : 5));
    const auto index = static_cast<size_t>(i / 5 % 3);
    const oracle::FourBitCase c =
        oracle::RandomFourBitCase(random, kKinds[i % 5], kFloats[index], 1, groups, group);
    SCOPED_TRACE(c.Text());
    const oracle::Quantized want = oracle::QuantizeFourBits(c);
    for (const internal::SimdKernels* simd : internal::SimdVariants()) {
      std::vector<unsigned char> codes(want.codes.size(), 0xa5), scales(want.scales.size(), 0xa5);
      simd->four_bit[index](codes.data(), scales.data(), c.source.source.data(),
                            static_cast<size_t>(groups), static_cast<size_t>(group), c.kind,
                            c.global);
      EXPECT_EQ(codes, want.codes) << simd->name;
      EXPECT_EQ(scales, want.scales) << simd->name;
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
