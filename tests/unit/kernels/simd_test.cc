#define XXH_INLINE_ALL
#include "kernels/simd.h"

#include <gtest/gtest.h>
#include <xxhash.h>

#include <cstring>
#include <memory>
#include <vector>

#include "kernels/kernels.h"
#include "tests/unit/kernels/oracle.h"

namespace weightwire::kernels {
namespace {

using internal::SimdKernels;
using internal::SimdVariants;
using internal::SumState;

std::unique_ptr<unsigned char[]> RandomBytes(std::mt19937_64& random, size_t bytes) {
  auto data = std::make_unique<unsigned char[]>(bytes);
  for (size_t i = 0; i < bytes; ++i) data[i] = static_cast<unsigned char>(random());
  return data;
}

TEST(SumContiguous, IsTheXxh3ThatIsDocumented) {
  EXPECT_EQ(SumContiguous("", 0), 0x2d06800538d394c2u);
}

TEST(SimdVariants, StartsPlainAndEndsWithTheOneInUse) {
  EXPECT_STREQ(SimdVariants().front()->name, "baseline");
  EXPECT_EQ(SimdVariants().back(), &internal::Simd());
}

TEST(SimdVariants, SumAndCopyEveryLength) {
  auto random = SeededGenerator();
  for (size_t bytes = 0; bytes < 5000; bytes += bytes < 600 ? 1 : 37) {
    auto source = RandomBytes(random, bytes);
    uint64_t want = XXH3_64bits(source.get(), bytes);
    EXPECT_EQ(SumContiguous(source.get(), bytes), want) << bytes;
    for (const SimdKernels* simd : SimdVariants()) {
      EXPECT_EQ(simd->sum(source.get(), bytes), want) << simd->name << bytes;
      auto target = std::make_unique<unsigned char[]>(bytes);
      SumState state;
      simd->sum_begin(&state);
      simd->copy_and_add(&state, target.get(), source.get(), bytes);
      EXPECT_EQ(simd->sum_end(&state), want) << simd->name << bytes;
      EXPECT_EQ(std::memcmp(target.get(), source.get(), bytes), 0) << simd->name << bytes;
      std::memset(target.get(), 0, bytes);
      simd->sum_begin(&state);
      simd->add_and_stream(&state, target.get(), source.get(), bytes);
      EXPECT_EQ(simd->sum_end(&state), want) << simd->name << bytes;
      EXPECT_EQ(std::memcmp(target.get(), source.get(), bytes), 0) << simd->name << bytes;
    }
  }
}

TEST(SimdVariants, SumTheSameHoweverTheBytesAreFed) {
  auto random = SeededGenerator();
  auto source = RandomBytes(random, 100003);
  uint64_t want = XXH3_64bits(source.get(), 100003);
  for (const SimdKernels* simd : SimdVariants()) {
    SumState state;
    simd->sum_begin(&state);
    for (size_t at = 0; at < 100003;) {
      size_t step = std::min<size_t>(100003 - at, random() % 3000);
      simd->sum_add(&state, source.get() + at, step);
      at += step;
    }
    EXPECT_EQ(simd->sum_end(&state), want) << simd->name;
  }
}

TEST(SimdVariants, StreamWritesItsBytesAndNoOthers) {
  auto random = SeededGenerator();
  constexpr size_t kGuard = 128;
  for (size_t bytes = 0; bytes < 400; ++bytes) {
    auto source = RandomBytes(random, bytes);
    size_t shift = random() % 64;
    for (const SimdKernels* simd : SimdVariants()) {
      std::vector<unsigned char> target(bytes + 2 * kGuard, 0xa5);
      std::vector<unsigned char> want = target;
      std::memcpy(want.data() + shift, source.get(), bytes);
      simd->stream(target.data() + shift, source.get(), bytes);
      simd->stream_end();
      EXPECT_EQ(target, want) << simd->name << " " << bytes << " at " << shift;
    }
  }
}

TEST(SimdVariants, CopyAndSumAtEveryAlignmentWritesItsBytesAndNoOthers) {
  auto random = SeededGenerator();
  constexpr size_t kGuard = 128;
  for (size_t bytes : {0, 1, 63, 64, 65, 1023, 1024, 1025, 1087, 1088, 2500, 70'001}) {
    auto source = RandomBytes(random, bytes + 64);
    for (size_t shift = 0; shift < 64; ++shift) {
      const unsigned char* from = source.get() + random() % 64;
      for (const SimdKernels* simd : SimdVariants()) {
        std::vector<unsigned char> target(bytes + 2 * kGuard, 0xa5);
        std::vector<unsigned char> want = target;
        std::memcpy(want.data() + shift, from, bytes);
        SumState state;
        simd->sum_begin(&state);
        simd->copy_and_add(&state, target.data() + shift, from, bytes);
        simd->stream_end();
        ASSERT_EQ(target, want) << simd->name << " " << bytes << " at " << shift;
        ASSERT_EQ(simd->sum_end(&state), XXH3_64bits(from, bytes)) << simd->name << " " << bytes;
        std::vector<unsigned char> streamed(bytes + 2 * kGuard, 0xa5);
        simd->sum_begin(&state);
        simd->add_and_stream(&state, streamed.data() + shift, from, bytes);
        simd->stream_end();
        ASSERT_EQ(streamed, want) << simd->name << " " << bytes << " at " << shift;
        ASSERT_EQ(simd->sum_end(&state), XXH3_64bits(from, bytes)) << simd->name << " " << bytes;
        std::vector<unsigned char> both(bytes + 2 * kGuard, 0xa5);
        const unsigned char* seen = source.get() + random() % 64;
        SumState seen_state;
        simd->sum_begin(&seen_state);
        simd->sum_begin(&state);
        simd->see_copy_and_add(&seen_state, &state, seen, both.data() + shift, from, bytes);
        simd->stream_end();
        ASSERT_EQ(both, want) << simd->name << " " << bytes << " at " << shift;
        ASSERT_EQ(simd->sum_end(&state), XXH3_64bits(from, bytes)) << simd->name << " " << bytes;
        ASSERT_EQ(simd->sum_end(&seen_state), XXH3_64bits(seen, bytes)) << simd->name << bytes;
      }
    }
  }
}

}  // namespace
}  // namespace weightwire::kernels
