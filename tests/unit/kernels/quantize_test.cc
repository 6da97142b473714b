// Quantization against torch's results (tests/data/e4m3.txt) and against an oracle that searches
// the 256 e4m3 values in double precision.
#include "kernels/quantize.h"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <fstream>
#include <map>
#include <memory>
#include <set>
#include <sstream>
#include <vector>

#include "kernels/element.h"
#include "kernels/simd.h"
#include "tests/unit/kernels/oracle.h"
#include "tests/unit/kernels/quantize_oracle.h"

namespace weightwire::kernels {
namespace {

using internal::SimdKernels;
using internal::SimdVariants;

constexpr Element kFloats[] = {Element::kBF16, Element::kF16, Element::kF32};

/// The lines of a golden file that begin with `kind`, as their words after it.
std::vector<std::vector<std::string>> Golden(const std::string& kind,
                                             const char* name = "e4m3.txt") {
  const char* root = std::getenv("WEIGHTWIRE_SOURCE_DIR");
  std::ifstream file(std::string(root != nullptr ? root : ".") + "/tests/data/" + name);
  std::vector<std::vector<std::string>> lines;
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string word;
    if (!(words >> word) || word != kind) continue;
    lines.emplace_back();
    while (words >> word) lines.back().push_back(word);
  }
  return lines;
}

uint32_t Hex(const std::string& word) {
  return static_cast<uint32_t>(std::stoul(word, nullptr, 16));
}

Element ElementNamed(const std::string& word) {
  return word == "bf16" ? Element::kBF16 : word == "f16" ? Element::kF16 : Element::kF32;
}

TEST(E4M3, OracleDecodesEveryCodeLikeTorch) {
  auto lines = Golden("decode");
  ASSERT_EQ(lines.size(), 256u) << "tests/data/e4m3.txt below WEIGHTWIRE_SOURCE_DIR";
  for (const auto& line : lines) {
    double value = oracle::DecodeE4M3(static_cast<uint8_t>(Hex(line[0])));
    float want = internal::AsFloat(Hex(line[1]));
    if (std::isnan(want)) {
      EXPECT_TRUE(std::isnan(value)) << line[0];
    } else {
      EXPECT_EQ(value, static_cast<double>(want)) << line[0];
      EXPECT_EQ(std::signbit(value), std::signbit(want)) << line[0];
    }
  }
}

// With a scale of 1 the loops are the bare cast, which reaches codes and NaN that blocks never do.
void ExpectCodes(Element from, const std::vector<uint32_t>& bits,
                 const std::vector<uint8_t>& want) {
  auto size = static_cast<size_t>(ElementBytes(from));
  std::vector<unsigned char> source(bits.size() * size);
  for (size_t i = 0; i < bits.size(); ++i) std::memcpy(&source[i * size], &bits[i], size);
  auto index = static_cast<size_t>(from) - static_cast<size_t>(Element::kBF16);
  for (const SimdKernels* simd : SimdVariants()) {
    std::vector<uint8_t> codes(bits.size(), 0x5a);
    simd->quantize[index](codes.data(), source.data(), codes.size(), 1.0f);
    for (size_t i = 0; i < bits.size(); ++i) {
      ASSERT_EQ(codes[i], want[i]) << simd->name << ": " << std::hex << bits[i];
    }
  }
}

TEST(E4M3, EverySixteenBitPatternIsCastLikeTorchAndTheOracle) {
  for (const char* kind : {"bf16", "f16"}) {
    Element from = ElementNamed(kind);
    std::vector<uint8_t> want(65536);
    std::vector<uint32_t> all(65536);
    for (uint32_t bits = 0; bits < 65536; ++bits) all[bits] = bits;
    size_t lines = 0;
    for (const auto& line : Golden("cast")) {
      if (line[0] != kind) continue;
      ++lines;
      std::fill(want.begin() + Hex(line[1]), want.end(), static_cast<uint8_t>(Hex(line[2])));
    }
    ASSERT_GT(lines, 250u);
    ExpectCodes(from, all, want);
    for (uint32_t bits : all) {
      if (!oracle::IsSpecial(from, bits)) {
        ASSERT_EQ(want[bits], oracle::EncodeE4M3(oracle::Decode(from, bits))) << kind << bits;
      }
    }
  }
}

TEST(E4M3, RoundsLikeTorchAroundEveryMidpoint) {
  std::vector<uint32_t> bits;
  std::vector<uint8_t> want;
  for (const auto& line : Golden("point")) {
    bits.push_back(Hex(line[0]));
    want.push_back(static_cast<uint8_t>(Hex(line[1])));
  }
  ASSERT_EQ(bits.size(), 2u * 3u * 126u);
  ExpectCodes(Element::kF32, bits, want);
}

uint32_t Crc32(const unsigned char* data, size_t bytes) {
  uint32_t crc = ~0u;
  for (size_t i = 0; i < bytes; ++i) {
    crc ^= data[i];
    for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ (crc & 1 ? 0xedb88320u : 0u);
  }
  return ~crc;
}

/// The elements of tests/golden/e4m3.py's `matrix`.
std::vector<unsigned char> GoldenMatrix(Element from, int64_t elements) {
  bool f32 = from == Element::kF32;
  uint32_t keep = f32 ? 0x87ffffffu : from == Element::kF16 ? 0xbfffu : 0x87ffu;
  uint32_t plus = f32 ? 0x38000000u : from == Element::kF16 ? 0u : 0x3800u;
  auto size = static_cast<size_t>(ElementBytes(from));
  std::vector<unsigned char> packed(static_cast<size_t>(elements) * size);
  uint64_t state = 1;
  for (size_t at = 0; at < packed.size(); at += size) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    uint32_t bits = (static_cast<uint32_t>(state >> (f32 ? 32 : 48)) & keep) | plus;
    std::memcpy(&packed[at], &bits, size);
  }
  return packed;
}

TEST(QuantizeE4M3, GivesTorchsCodesAndScalesForWholeMatrices) {
  auto lines = Golden("matrix");
  ASSERT_EQ(lines.size(), 18u);
  for (const auto& line : lines) {
    SCOPED_TRACE(testing::PrintToString(line));
    Element from = ElementNamed(line[0]);
    QuantizeBox box = oracle::PackedQuantizeBox(std::stoll(line[1]), std::stoll(line[2]),
                                                std::stoll(line[3]), std::stoll(line[4]));
    std::vector<unsigned char> source = GoldenMatrix(from, box.rows * box.columns);
    std::vector<unsigned char> codes(static_cast<size_t>(box.rows * box.columns));
    std::vector<unsigned char> scales(static_cast<size_t>(oracle::Blocks(box) * 4));
    QuantizeE4M3(codes.data(), scales.data(), source.data(), box, from);
    EXPECT_EQ(Crc32(codes.data(), codes.size()), Hex(line[5]));
    EXPECT_EQ(Crc32(scales.data(), scales.size()), Hex(line[6]));
  }
}

/// Numbers of so many bytes from hexadecimal digits.
std::vector<unsigned char> Bytes(const std::string& digits, int bytes) {
  std::vector<unsigned char> made;
  for (size_t at = 0; at < digits.size(); at += 2 * static_cast<size_t>(bytes)) {
    const uint32_t bits = Hex(digits.substr(at, 2 * static_cast<size_t>(bytes)));
    for (int i = 0; i < bytes; ++i) made.push_back(static_cast<unsigned char>(bits >> (8 * i)));
  }
  return made;
}

ScaleKind KindNamed(const std::string& word) {
  const std::map<std::string, ScaleKind> kinds = {
      {"kF32", ScaleKind::kF32},         {"kPowerOfTwo", ScaleKind::kPowerOfTwo},
      {"kOwnKind", ScaleKind::kOwnKind}, {"kE8M0Rounded", ScaleKind::kE8M0Rounded},
      {"kE8M0", ScaleKind::kE8M0},       {"kF32OwnQuotient", ScaleKind::kF32OwnQuotient}};
  return kinds.at(word);
}

TEST(QuantizeE4M3, GivesTheBytesOfTheLibrariesThatDefineTheFormats) {
  auto lines = Golden("row", "low_precision.txt");
  std::set<std::string> libraries;
  for (const auto& line : lines) libraries.insert(line[0]);
  ASSERT_EQ(libraries.size(), 4u) << "tests/data/low_precision.txt below WEIGHTWIRE_SOURCE_DIR";
  for (const auto& line : lines) {
    SCOPED_TRACE(line[0] + " " + line[1] + " " + line[2] + " " + line[3] + " " + line[4]);
    const Element from = ElementNamed(line[2]);
    const auto source = Bytes(line[4], ElementBytes(from));
    const auto columns = std::ssize(source) / ElementBytes(from);
    QuantizeBox box = oracle::PackedQuantizeBox(1, columns, 1, std::stoll(line[3]));
    box.scale = KindNamed(line[1]);
    const int bytes = ScaleBytes(box.scale, from);
    std::vector<unsigned char> codes(static_cast<size_t>(columns));
    std::vector<unsigned char> scales(static_cast<size_t>(oracle::Blocks(box) * bytes));
    QuantizeE4M3(codes.data(), scales.data(), source.data(), box, from);
    EXPECT_EQ(codes, Bytes(line[5], 1));
    EXPECT_EQ(scales, Bytes(line[6], bytes));
  }
}

TEST(QuantizeE4M3, QuantizesRandomBoxesLikeTheOracle) {
  auto random = SeededGenerator();
  for (int i = 0; i < 200 && !testing::Test::HasFailure(); ++i) {
    oracle::QuantizeCase c = oracle::RandomQuantizeCase(random);
    SCOPED_TRACE(c.Text());
    oracle::Quantized want = oracle::Quantize(c);
    oracle::Quantized got = c.Blank();
    QuantizeE4M3(got.codes.data(), got.scales.data(), c.source.data(), c.box, c.from);
    EXPECT_EQ(got.codes, want.codes);
    EXPECT_EQ(got.scales, want.scales);
  }
}

TEST(QuantizeE4M3, MakesCodesWithoutScalesAndScalesWithoutCodes) {
  auto random = SeededGenerator();
  for (int i = 0; i < 100 && !testing::Test::HasFailure(); ++i) {
    oracle::QuantizeCase c = oracle::RandomQuantizeCase(random);
    SCOPED_TRACE(c.Text());
    oracle::Quantized want = oracle::Quantize(c);
    oracle::Quantized got = c.Blank();
    QuantizeE4M3(got.codes.data(), nullptr, c.source.data(), c.box, c.from);
    EXPECT_EQ(got.codes, want.codes);
    EXPECT_EQ(got.scales, c.Blank().scales);
    got = c.Blank();
    QuantizeE4M3(nullptr, got.scales.data(), c.source.data(), c.box, c.from);
    EXPECT_EQ(got.codes, c.Blank().codes);
    EXPECT_EQ(got.scales, want.scales);
  }
}

struct BlockOfFour {
  float scale_inv;
  uint8_t codes[4];
};
BlockOfFour QuantizeFour(std::initializer_list<float> values) {
  BlockOfFour result;
  QuantizeE4M3(result.codes, &result.scale_inv, values.begin(),
               oracle::PackedQuantizeBox(2, 2, 128, 128), Element::kF32);
  return result;
}

TEST(QuantizeE4M3, GivesZerosTheSmallestScaleAndKeepsTheirSign) {
  BlockOfFour block = QuantizeFour({0.0f, -0.0f, 0.0f, 0.0f});
  EXPECT_EQ(block.scale_inv, 0x1p-126f);
  EXPECT_EQ(std::vector<uint8_t>(block.codes, block.codes + 4),
            std::vector<uint8_t>({0, 0x80, 0, 0}));
}

TEST(QuantizeE4M3, NeverMakesADenormalScale) {
  BlockOfFour block = QuantizeFour({0x1p-126f, -0x1p-130f, 0x1p-149f, 0x1p-120f});
  EXPECT_EQ(block.scale_inv, 0x1p-126f);
  EXPECT_EQ(std::vector<uint8_t>(block.codes, block.codes + 4),
            std::vector<uint8_t>({0x38, 0x98, 0, 0x68}));  // 1, -2^-4, 0, 64
}

TEST(QuantizeE4M3, MarksABlockThatHoldsNoNumberAndLeavesItsNeighbours) {
  float infinity = std::numeric_limits<float>::infinity();
  for (float bad : {infinity, -infinity, std::nanf("")}) {
    float values[2][4] = {{1, 2, 3, 4}, {5, bad, 7, 8}};
    uint8_t codes[2][4];
    uint32_t scales[4];
    QuantizeE4M3(codes, scales, values, oracle::PackedQuantizeBox(2, 4, 2, 2), Element::kF32);
    EXPECT_EQ(scales[0], 0x7fc00000u);
    for (int row : {0, 1}) EXPECT_TRUE(codes[row][0] == 0x7f && codes[row][1] == 0x7f);
    EXPECT_EQ(internal::AsFloat(scales[1]), 8.0f / 448.0f);
    EXPECT_EQ(codes[1][3], 0x7e);
  }
}

/// Each set of loops by itself, where a row has several blocks.
TEST(QuantizeE4M3, RowsOfBlocksAreTheOraclesInEverySetOfLoops) {
  auto random = SeededGenerator();
  for (int i = 0; i < 200 && !testing::Test::HasFailure(); ++i) {
    const auto columns = 1 + static_cast<int64_t>(random() % 3000);
    const auto rows = i % 4 < 2 ? 1 : 1 + static_cast<int64_t>(random() % 4);
    const int64_t group = i % 2 == 0 ? 32 : 1 + static_cast<int64_t>(random() % 140);
    oracle::QuantizeCase c{
        oracle::PackedQuantizeBox(rows, columns, rows, group), kFloats[i % 3], {}};
    c.box.scale = static_cast<ScaleKind>(random() % (static_cast<unsigned>(kLastScaleKind) + 1));
    oracle::FillSource(random, c);
    SCOPED_TRACE(c.Text());
    const oracle::Quantized want = oracle::Quantize(c);
    const auto index = static_cast<size_t>(i % 3);
    for (const SimdKernels* simd : SimdVariants()) {
      oracle::Quantized got = c.Blank();
      const uint64_t without = random() % 6;  // 0 codes, 1 scales
      simd->quantize_blocks[index]({without == 0 ? nullptr : got.codes.data(), columns,
                                    without == 1 ? nullptr : got.scales.data(), 1, c.source.data(),
                                    columns * ElementBytes(c.from), rows, columns, group,
                                    c.box.scale});
      EXPECT_EQ(got.codes, without == 0 ? c.Blank().codes : want.codes) << simd->name;
      EXPECT_EQ(got.scales, without == 1 ? c.Blank().scales : want.scales) << simd->name;
    }
  }
}

/// All that a block of bf16 can hold under a scale, of scales of every size: no quotient is rounded
/// but as a division does it.
TEST(QuantizeE4M3, EveryElementUnderScalesOfEverySizeIsTheOracles) {
  auto random = SeededGenerator();
  for (int i = 0; i < 48 && !testing::Test::HasFailure(); ++i) {
    const auto amax = static_cast<uint32_t>(1 + random() % 0x7f7f);
    const int64_t columns = 2 * (static_cast<int64_t>(amax) + 1);
    oracle::QuantizeCase c{oracle::PackedQuantizeBox(1, columns, 1, columns), Element::kBF16, {}};
    c.box.scale = static_cast<ScaleKind>(i % (static_cast<int>(kLastScaleKind) + 1));
    c.source.resize(static_cast<size_t>(2 * columns));
    for (uint32_t bits = 0; bits <= amax; ++bits) {
      const std::array<uint16_t, 2> both = {static_cast<uint16_t>(bits),
                                            static_cast<uint16_t>(bits | 0x8000u)};
      std::memcpy(&c.source[4 * bits], both.data(), 4);
    }
    SCOPED_TRACE(c.Text());
    const oracle::Quantized want = oracle::Quantize(c);
    for (const SimdKernels* simd : SimdVariants()) {
      oracle::Quantized got = c.Blank();
      simd->quantize_blocks[0]({got.codes.data(), columns, got.scales.data(), 1, c.source.data(),
                                2 * columns, 1, columns, columns, c.box.scale});
      EXPECT_TRUE(got.codes == want.codes) << simd->name << " " << std::hex << amax;
      EXPECT_EQ(got.scales, want.scales) << simd->name;
    }
  }
}

TEST(QuantizeE4M3, PowersOfTwoAreTheNextFromTheQuotientUp) {
  // 7 × 2^k is 448 × 2^(k - 6) exactly; its neighbours on either side are not.
  for (float exact : {7.0f, 448.0f, 7 * 0x1p-100f, 7 * 0x1p120f}) {
    const float power = exact / 448.0f;
    for (float amax : {std::nextafter(exact, 0.0f), exact, std::nextafter(exact, 2 * exact)}) {
      QuantizeBox box = oracle::PackedQuantizeBox(1, 1, 1, 1);
      uint8_t code;
      float scale;
      box.scale = ScaleKind::kPowerOfTwo;
      QuantizeE4M3(&code, &scale, &amax, box, Element::kF32);
      EXPECT_EQ(scale, amax > exact ? 2 * power : power) << amax;
      EXPECT_EQ(code, amax > exact ? 0x76 : 0x7e) << amax;  // 224, 448
      uint8_t exponent;
      box.scale = ScaleKind::kE8M0;
      QuantizeE4M3(&code, &exponent, &amax, box, Element::kF32);
      EXPECT_EQ(exponent, std::ilogb(scale) + 127) << amax;
    }
  }
}

TEST(QuantizeE4M3DeathTest, AbortsOnWhatIsNoFloat) {
  char bytes[8] = {};
  EXPECT_DEATH(
      QuantizeE4M3(bytes, bytes, bytes, oracle::PackedQuantizeBox(1, 1, 1, 1), Element::kOpaque2),
      "is no float");
}

}  // namespace
}  // namespace weightwire::kernels
