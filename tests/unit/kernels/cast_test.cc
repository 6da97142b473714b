#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "kernels/kernels.h"
#include "kernels/simd.h"
#include "tests/unit/kernels/oracle.h"

namespace weightwire::kernels {
namespace {

using internal::SimdKernels;
using internal::SimdVariants;

constexpr Element kFloats[] = {Element::kBF16, Element::kF16, Element::kF32};

/// Packed elements of `element` with these bits, in a buffer of exactly their size.
std::unique_ptr<unsigned char[]> Pack(Element element, const std::vector<uint32_t>& bits) {
  auto size = static_cast<size_t>(ElementBytes(element));
  auto packed = std::make_unique<unsigned char[]>(bits.size() * size);
  for (size_t i = 0; i < bits.size(); ++i) std::memcpy(packed.get() + i * size, &bits[i], size);
  return packed;
}

std::vector<uint32_t> Unpack(Element element, const unsigned char* packed, size_t count) {
  auto size = static_cast<size_t>(ElementBytes(element));
  std::vector<uint32_t> bits(count);
  for (size_t i = 0; i < count; ++i) std::memcpy(&bits[i], packed + i * size, size);
  return bits;
}

void ExpectSameBits(const std::vector<uint32_t>& input, const std::vector<uint32_t>& want,
                    const std::vector<uint32_t>& got, const char* who) {
  for (size_t i = 0; i < want.size(); ++i) {
    ASSERT_EQ(want[i], got[i]) << who << ": input " << std::hex << input[i] << " at " << std::dec
                               << i;
  }
}

void ExpectCastsLikeOracle(Element from, Element to, const std::vector<uint32_t>& input) {
  SCOPED_TRACE(testing::Message() << "from " << static_cast<int>(from) << " to "
                                  << static_cast<int>(to));
  std::vector<uint32_t> want(input.size());
  for (size_t i = 0; i < input.size(); ++i) want[i] = oracle::Cast(from, to, input[i]);
  auto source = Pack(from, input);
  auto target = Pack(to, want);
  size_t target_bytes = input.size() * static_cast<size_t>(ElementBytes(to));

  StridedBox box;
  box.ndim = 1;
  box.extent[0] = static_cast<int64_t>(input.size());
  box.source_stride[0] = box.target_stride[0] = 1;
  std::memset(target.get(), 0x5a, target_bytes);
  reference::Copy(target.get(), source.get(), box, from, to);
  ExpectSameBits(input, want, Unpack(to, target.get(), input.size()), "reference");

  auto index = [](Element element) {
    return static_cast<int>(element) - static_cast<int>(Element::kBF16);
  };
  for (const SimdKernels* simd : SimdVariants()) {
    std::memset(target.get(), 0x5a, target_bytes);
    simd->cast[index(from)][index(to)](target.get(), source.get(), input.size());
    ExpectSameBits(input, want, Unpack(to, target.get(), input.size()), simd->name);
  }
}

TEST(Cast, AgreesOnEverySixteenBitPattern) {
  std::vector<uint32_t> all(65536);
  for (uint32_t i = 0; i < all.size(); ++i) all[i] = i;
  for (Element from : {Element::kBF16, Element::kF16}) {
    for (Element to : kFloats) {
      if (from != to) ExpectCastsLikeOracle(from, to, all);
    }
  }
}

TEST(Cast, RoundsToEvenAroundEveryMidpoint) {
  for (Element to : {Element::kBF16, Element::kF16}) {
    std::vector<uint32_t> input;
    for (uint32_t bits = 0; bits < 65536; ++bits) {
      if (oracle::IsSpecial(to, bits) || oracle::IsSpecial(to, bits + 1)) continue;
      double middle = (oracle::Decode(to, bits) + oracle::Decode(to, bits + 1)) / 2;
      auto near = static_cast<float>(middle);
      uint32_t near_bits;
      std::memcpy(&near_bits, &near, sizeof near);
      for (uint32_t ulp : {0u, 1u, ~0u}) input.push_back(near_bits + ulp);
    }
    ExpectCastsLikeOracle(Element::kF32, to, input);
  }
}

TEST(Cast, KeepsSpecialFloats) {
  std::vector<uint32_t> input;
  for (uint32_t exponent = 0; exponent < 256; ++exponent) {
    for (uint32_t fraction : {0u, 1u, 0xfffu, 0x1000u, 0x1001u, 0x1fffu, 0x2000u, 0x7fffu, 0x8000u,
                              0x8001u, 0x3fffffu, 0x400000u, 0x7fefffu, 0x7ff000u, 0x7fffffu}) {
      input.push_back(exponent << 23 | fraction);
      input.push_back(0x80000000u | exponent << 23 | fraction);
    }
  }
  ExpectCastsLikeOracle(Element::kF32, Element::kBF16, input);
  ExpectCastsLikeOracle(Element::kF32, Element::kF16, input);
}

TEST(Cast, AgreesOnRandomFloats) {
  auto random = SeededGenerator();
  std::vector<uint32_t> input(300001);
  for (uint32_t& bits : input) bits = static_cast<uint32_t>(random());
  ExpectCastsLikeOracle(Element::kF32, Element::kBF16, input);
  // Most random exponents are outside f16's range; the second half is inside.
  for (size_t i = 0; i < input.size(); i += 2) {
    input[i] = (input[i] & 0x80ffffffu) + 0x33000000u + (input[i] >> 7 & 0x0e000000u);
  }
  ExpectCastsLikeOracle(Element::kF32, Element::kF16, input);
}

TEST(Cast, AgreesOnEveryShortCount) {
  std::vector<uint32_t> input;
  for (uint32_t count = 0; count < 40; ++count) {
    for (Element from : kFloats) {
      for (Element to : kFloats) {
        if (from != to && count > 0) ExpectCastsLikeOracle(from, to, input);
      }
    }
    input.push_back(0x3f80 + 77 * count);
  }
}

TEST(Cast, TurnsLargeBF16IntoInfiniteF16) {
  uint16_t huge = 0x4780;  // 65536
  uint16_t half = 0;
  Copy(&half, &huge, StridedBox{}, Element::kBF16, Element::kF16);
  EXPECT_EQ(half, 0x7c00);
}

}  // namespace
}  // namespace weightwire::kernels
