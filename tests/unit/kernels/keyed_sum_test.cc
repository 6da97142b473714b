#include "kernels/keyed_sum.h"

#include <gtest/gtest.h>

#include <cstring>
#include <tuple>
#include <vector>

#include "kernels/simd.h"
#include "tests/unit/kernels/oracle.h"
#include "tests/unit/kernels/random_box.h"

namespace weightwire::kernels {
namespace {

constexpr SumSeed kSeed{{0x1234567812345678u, 0x8765432187654321u}};

/// The definition, byte by byte: byte b of the tensor is byte b mod 4 of word b div 4.
KeyedSum OfByte(int64_t at, unsigned char byte, const SumSeed& seed = kSeed) {
  KeyedSum sum;
  for (int lane = 0; lane < 2; ++lane) {
    const auto word = static_cast<uint64_t>(at / 4);
    const uint64_t outer = Mix(seed.lane[lane] + kGolden * (1 + word / 512)) | 1;
    const uint64_t inner = Mix(kTable[lane] + word % 512) >> 32 | 1;
    sum.lane[lane] = outer * inner * (uint64_t{byte} << 8 * (at % 4));
  }
  return sum;
}

/// The tensor's strides, and the index of the box's first element in it.
struct Place {
  StridedBox box;
  int64_t first = 0;
};

/// Puts the box somewhere into a random row-major tensor that is large enough.
Place Placed(std::mt19937_64& random, StridedBox box) {
  Place place{box, 0};
  int64_t stride = 1;
  for (int d = box.ndim - 1; d >= 0; --d) {
    const auto begin = static_cast<int64_t>(random() % 5);
    const auto behind = static_cast<int64_t>(random() % 5);
    place.box.target_stride[d] = stride;
    place.first += begin * stride;
    stride *= begin + box.extent[d] + (random() % 2 == 0 ? behind : 0);
  }
  if (random() % 2 == 0) place.first += static_cast<int64_t>(random() % (uint64_t{1} << 40));
  return place;
}

KeyedSum Expected(const unsigned char* source, const Case& c, const Place& place) {
  const int64_t count = Elements(c.box);
  const auto bytes = static_cast<int64_t>(ElementBytes(c.to));
  Bytes packed(static_cast<size_t>(count * bytes));
  StridedBox dense = c.box;
  int64_t next = 1;
  for (int d = dense.ndim - 1; d >= 0; --d) {
    dense.target_stride[d] = next;
    next *= dense.extent[d];
  }
  reference::Copy(packed.data(), source, dense, c.from, c.to);
  KeyedSum sum;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t element = place.first + Offset(place.box, place.box.target_stride, i);
    for (int64_t b = 0; b < bytes; ++b) {
      sum += OfByte(element * bytes + b, packed[static_cast<size_t>(i * bytes + b)]);
    }
  }
  return sum;
}

TEST(AddKeyed, IsTheDefinitionForAnyBoxStridesAndCast) {
  auto random = SeededGenerator();
  for (int i = 0; i < 1500; ++i) {
    const Case c = RandomCase(random);
    const Place place = Placed(random, c.box);
    const Bytes source = RandomBytes(random, SpanBytes(c.box, c.box.source_stride, c.from));
    KeyedSum sum;
    AddKeyed(sum, kSeed, source.data(), place.box, c.from, c.to, place.first);
    ASSERT_EQ(sum, Expected(source.data(), c, place)) << c;
  }
}

TEST(AddKeyed, OfAlternatingElementsAndOfAWideTranspose) {
  auto random = SeededGenerator();
  const Case alternating{{2, {900, 700}, {700, 1}, {}}, Element::kBF16, Element::kBF16};
  const Case transposed{{2, {300, 2100}, {1, 300}, {}}, Element::kBF16, Element::kBF16};
  for (const auto& [c, row, inner] :
       {std::tuple(alternating, 1400, 2), std::tuple(transposed, 9000, 1)}) {
    Place place{c.box, 77};
    place.box.target_stride[0] = row;
    place.box.target_stride[1] = inner;
    const Bytes source = RandomBytes(random, SpanBytes(c.box, c.box.source_stride, c.from));
    KeyedSum sum;
    AddKeyed(sum, kSeed, source.data(), place.box, c.from, c.to, place.first);
    EXPECT_EQ(sum, Expected(source.data(), c, place)) << c;
  }
}

TEST(AddKeyed, OfTheRowsAndOfTheColumnsOfATensorAddUpToTheWhole) {
  auto random = SeededGenerator();
  const int64_t rows = 37, columns = 1029;
  const Bytes tensor = RandomBytes(random, static_cast<size_t>(rows * columns * 2));
  const auto sum_of = [&](int64_t row, int64_t row_count, int64_t column, int64_t column_count) {
    KeyedSum sum;
    const int64_t first = row * columns + column;
    const StridedBox box{2, {row_count, column_count}, {columns, 1}, {columns, 1}};
    AddKeyed(sum, kSeed, tensor.data() + first * 2, box, Element::kOpaque2, Element::kOpaque2,
             first);
    return sum;
  };
  const KeyedSum whole = sum_of(0, rows, 0, columns);
  KeyedSum by_rows, by_columns;
  for (int64_t row = 0; row < rows; row += 5)
    by_rows += sum_of(row, std::min<int64_t>(5, rows - row), 0, columns);
  for (int64_t at = 0; at < columns; at += 343) by_columns += sum_of(0, rows, at, 343);
  EXPECT_EQ(by_rows, whole);
  EXPECT_EQ(by_columns, whole);
}

TEST(AddKeyed, ShowsEachBitInBothLanes) {
  auto random = SeededGenerator();
  for (const Element element :
       {Element::kOpaque1, Element::kOpaque2, Element::kOpaque4, Element::kOpaque8}) {
    const int64_t count = 700;
    Bytes tensor = RandomBytes(random, static_cast<size_t>(count * ElementBytes(element)));
    const StridedBox box{1, {count}, {1}, {1}};
    const auto sum = [&] {
      KeyedSum out;
      AddKeyed(out, kSeed, tensor.data(), box, element, element, 0);
      return out;
    };
    const KeyedSum before = sum();
    for (size_t bit = 0; bit < tensor.size() * 8; bit += 3) {
      tensor[bit / 8] ^= static_cast<unsigned char>(1u << bit % 8);
      const KeyedSum after = sum();
      ASSERT_NE(after.lane[0], before.lane[0]) << bit;
      ASSERT_NE(after.lane[1], before.lane[1]) << bit;
      tensor[bit / 8] ^= static_cast<unsigned char>(1u << bit % 8);
    }
  }
}

TEST(SimdVariants, MultiplyWordsByKeysAlike) {
  auto random = SeededGenerator();
  for (size_t words = 0; words < 200; ++words) {
    const Bytes data = RandomBytes(random, words * 4 + 1);
    std::vector<uint32_t> keys[2];
    uint64_t expected[2] = {11, 12};
    for (int lane = 0; lane < 2; ++lane) {
      for (size_t i = 0; i < words; ++i) {
        keys[lane].push_back(static_cast<uint32_t>(random()));
        uint32_t word;
        std::memcpy(&word, data.data() + 1 + i * 4, 4);
        expected[lane] += uint64_t{word} * keys[lane].back();
      }
    }
    for (const internal::SimdKernels* simd : internal::SimdVariants()) {
      uint64_t sums[2] = {11, 12};
      simd->keyed_words(data.data() + 1, words, keys[0].data(), keys[1].data(), sums);
      EXPECT_EQ(sums[0], expected[0]) << simd->name << words;
      EXPECT_EQ(sums[1], expected[1]) << simd->name << words;
    }
  }
}

}  // namespace
}  // namespace weightwire::kernels
