// Copies and sums of random boxes against an oracle that visits one element at a time by dividing a
// flat index, with buffers of exactly the bytes that the box spans.
#define XXH_INLINE_ALL
#include <gtest/gtest.h>
#include <xxhash.h>

#include <algorithm>
#include <memory>

#include "kernels/kernels.h"
#include "tests/unit/kernels/oracle.h"
#include "tests/unit/kernels/random_box.h"

namespace weightwire::kernels {
namespace {

/// Memory of exactly `bytes`, so that a sanitizer sees every access outside; `shift` misaligns it.
class ExactBuffer {
 public:
  ExactBuffer(const Bytes& content, size_t shift)
      : size_(content.size()), shift_(shift), memory_(new unsigned char[size_ + shift_]) {
    std::copy(content.begin(), content.end(), data());
  }
  unsigned char* data() { return memory_.get() + shift_; }
  Bytes Content() { return {data(), data() + size_}; }

 private:
  size_t size_;
  size_t shift_;
  std::unique_ptr<unsigned char[]> memory_;
};

void ExpectLikeOracle(std::mt19937_64& random, const Case& c) {
  SCOPED_TRACE(testing::Message() << c);
  const auto from_bytes = ElementBytes(c.from);
  const auto to_bytes = ElementBytes(c.to);
  Bytes source_bytes = RandomBytes(random, SpanBytes(c.box, c.box.source_stride, c.from));
  Bytes guard = RandomBytes(random, SpanBytes(c.box, c.box.target_stride, c.to));
  Bytes want = guard;
  Bytes packed(static_cast<size_t>(Elements(c.box) * to_bytes));
  for (int64_t i = 0; i < Elements(c.box); ++i) {
    oracle::Move(packed.data() + i * to_bytes,
                 source_bytes.data() + Offset(c.box, c.box.source_stride, i) * from_bytes, c.from,
                 c.to);
    std::copy_n(packed.begin() + i * to_bytes, to_bytes,
                want.begin() + Offset(c.box, c.box.target_stride, i) * to_bytes);
  }
  uint64_t want_sum = XXH3_64bits(packed.data(), packed.size());
  ExactBuffer source(source_bytes, random() % 4);

  ExactBuffer target(guard, random() % 4);
  Copy(target.data(), source.data(), c.box, c.from, c.to);
  ASSERT_TRUE(target.Content() == want);
  if (c.from == c.to) {
    ExactBuffer past_caches(guard, random() % 4);
    CopyPastCaches(past_caches.data(), source.data(), c.box, from_bytes);
    ASSERT_TRUE(past_caches.Content() == want);
  }
  ExactBuffer plain(guard, 0);
  reference::Copy(plain.data(), source.data(), c.box, c.from, c.to);
  ASSERT_TRUE(plain.Content() == want);
  ExactBuffer summed(guard, random() % 4);
  ASSERT_EQ(CopyAndSumTarget(summed.data(), source.data(), c.box, c.from, c.to), want_sum);
  ASSERT_TRUE(summed.Content() == want);
  Bytes seen_bytes = RandomBytes(random, source_bytes.size());
  for (const bool alike : {true, false}) {
    ExactBuffer both(guard, random() % 4);
    ExactBuffer seen(alike ? source_bytes : seen_bytes, random() % 4);
    const BothSums sums =
        CopyAndSumBoth(both.data(), source.data(), seen.data(), c.box, c.from, c.to);
    ASSERT_EQ(sums.target, want_sum);
    ASSERT_EQ(sums.source, reference::SumSource(seen.data(), c.box, c.from, c.to));
    ASSERT_TRUE(both.Content() == want);
  }

  ASSERT_TRUE(source.Content() == source_bytes);
  ASSERT_EQ(SumSource(source.data(), c.box, c.from, c.to), want_sum);
  ASSERT_EQ(reference::SumSource(source.data(), c.box, c.from, c.to), want_sum);
  ASSERT_EQ(SumTarget(target.data(), c.box, c.to), want_sum);
  ASSERT_EQ(reference::SumTarget(target.data(), c.box, c.to), want_sum);
  ASSERT_EQ(SumContiguous(packed.data(), packed.size()), want_sum);
}

TEST(StridedBox, CopiesAndSumsLikeTheOracle) {
  auto random = SeededGenerator();
  for (int i = 0; i < 3000 && !HasFatalFailure(); ++i) ExpectLikeOracle(random, RandomCase(random));
}

Case Plane(int64_t rows, int64_t columns, Element from, Element to) {
  Case c{{}, from, to};
  c.box.ndim = 2;
  c.box.extent[0] = rows;
  c.box.extent[1] = columns;
  c.box.source_stride[0] = c.box.target_stride[0] = columns;
  c.box.source_stride[1] = c.box.target_stride[1] = 1;
  return c;
}

TEST(StridedBox, TransposesPlanesOfEveryWidth) {
  auto random = SeededGenerator();
  for (Element element : {Element::kOpaque1, Element::kBF16, Element::kF32, Element::kOpaque8}) {
    for (int64_t side : {7, 8, 31, 33, 65, 130}) {
      Case c = Plane(side, 77, element, element);
      c.box.source_stride[0] = 1;
      c.box.source_stride[1] = side + 3;
      ExpectLikeOracle(random, c);
      c.box.source_stride[0] = 2;  // the tile's rows are strided too
      c.box.source_stride[1] = 2 * side + 1;
      ExpectLikeOracle(random, c);
    }
  }
}

// Beyond 64 KiB packed, 128 KiB copied and 4096 elements cast, a box is cut into slabs.
TEST(StridedBox, AgreesAcrossSlabs) {
  auto random = SeededGenerator();
  for (Element to : {Element::kBF16, Element::kF16, Element::kF32}) {
    Case rows = Plane(1001, 131, Element::kBF16, to);
    rows.box.source_stride[0] = 137;
    ExpectLikeOracle(random, rows);
    Case transposed = Plane(517, 259, Element::kBF16, to);
    transposed.box.source_stride[0] = 1;
    transposed.box.source_stride[1] = 517;
    ExpectLikeOracle(random, transposed);
    Case one_long = Plane(1, 150001, Element::kBF16, to);
    one_long.box.source_stride[1] = 2;
    ExpectLikeOracle(random, one_long);
  }
}

TEST(StridedBox, CopiesRunsOfEveryLength) {
  auto random = SeededGenerator();
  for (int64_t run = 1; run < 600; run += run < 140 ? 1 : 23) {
    Case c = Plane(5, run, Element::kOpaque1, Element::kOpaque1);
    c.box.source_stride[0] = run + 3;
    c.box.target_stride[0] = run + 1;
    ExpectLikeOracle(random, c);
  }
}

// Above 8 MiB with long runs the copy streams past the caches.
TEST(StridedBox, CopiesBoxesLargerThanTheCaches) {
  auto random = SeededGenerator();
  Case c = Plane(3, (3 << 20) + 17, Element::kOpaque1, Element::kOpaque1);
  c.box.source_stride[0] += 5;
  c.box.target_stride[0] += 9;
  ExpectLikeOracle(random, c);
  ExpectLikeOracle(random, Plane(1, (9 << 20) + 1, Element::kOpaque1, Element::kOpaque1));
}

}  // namespace
}  // namespace weightwire::kernels
