#define XXH_INLINE_ALL
#include "server/delta/coder.h"

#include <gtest/gtest.h>
#include <xxhash.h>
#include <zstd.h>

#include <cmath>
#include <cstring>
#include <map>
#include <random>
#include <string>
#include <vector>

namespace weightwire::delta {
namespace {

using kernels::DeltaOrder;
using Bytes = std::vector<std::byte>;

constexpr DeltaOrder kOrders[] = {DeltaOrder::kBits8,  DeltaOrder::kBits16, DeltaOrder::kBits32,
                                  DeltaOrder::kBits64, DeltaOrder::kFloat8, DeltaOrder::kFloat16,
                                  DeltaOrder::kFloat32};

size_t WidthOf(DeltaOrder order) { return static_cast<size_t>(kernels::DeltaElementBytes(order)); }

Bytes RandomBytes(std::mt19937_64& random, size_t bytes) {
  Bytes made(bytes);
  for (auto& byte : made) byte = static_cast<std::byte>(random());
  return made;
}

/// Some elements by one in their lowest byte, one in eight of them to anything.
Bytes Changed(std::mt19937_64& random, const Bytes& base, size_t width, unsigned per_mille) {
  Bytes now = base;
  for (size_t at = 0; at < now.size(); at += width) {
    if (random() % 1000 >= per_mille) continue;
    if (random() % 8 == 0) {
      for (size_t b = 0; b < width; ++b) now[at + b] = static_cast<std::byte>(random());
    } else {
      now[at] = static_cast<std::byte>(static_cast<unsigned>(now[at]) + 1u);
    }
  }
  return now;
}

TEST(Coder, RestoresEveryBitOfEveryKindAtEveryDensity) {
  std::mt19937_64 random(7);
  Coder coder(64 << 10), other(64 << 10);
  for (const DeltaOrder order : kOrders) {
    const size_t width = WidthOf(order);
    for (const size_t bytes :
         {size_t{0}, width, 3 * width, 1001 * width, (64u << 10) / width * width}) {
      for (const unsigned per_mille : {0u, 1u, 4u, 31u, 190u, 700u, 1000u}) {
        const Bytes base = RandomBytes(random, bytes);
        const Bytes now = Changed(random, base, width, per_mille);
        // What random bits take is bounded, too: the streams as they are.
        const auto code = coder.Encode(order, base, now, 2 * bytes + 1024);
        if (code.bytes.empty()) continue;  // longer than a code may be
        Bytes target = base;
        ASSERT_EQ(other.Apply(order, code.bytes, target), OkStatus());
        ASSERT_EQ(target, now) << static_cast<int>(order) << " " << bytes << " " << per_mille;
        Bytes made(bytes);
        ASSERT_EQ(other.ApplyTo(order, code.bytes, base, made),
                  Result<uint64_t>(XXH3_64bits(now.data(), bytes)));
        ASSERT_EQ(made, now) << static_cast<int>(order) << " " << bytes << " " << per_mille;
        if (per_mille == 0) {
          ASSERT_EQ(code.bytes.size(), kHeaderBytes);
        }
      }
    }
  }
}

TEST(Coder, EncodeAndCopyMakesTheSameCodeAndBringsTheBaseUpToDate) {
  std::mt19937_64 random(11);
  Coder plain(64 << 10), copying(64 << 10);
  for (const DeltaOrder order : kOrders) {
    const size_t width = WidthOf(order), bytes = (60u << 10) / width * width;
    for (const unsigned per_mille : {0u, 10u, 190u, 1000u}) {
      const Bytes base = RandomBytes(random, bytes), now = Changed(random, base, width, per_mille);
      for (const size_t code_bytes_max : {size_t{0}, kHeaderBytes + 100, 2 * bytes}) {
        Bytes kept = base;
        const auto wanted = plain.Encode(order, base, now, code_bytes_max);
        uint64_t sum = 0;
        const auto code = copying.EncodeAndCopy(order, kept, now, code_bytes_max, &sum);
        EXPECT_EQ(sum, XXH3_64bits(now.data(), bytes));
        EXPECT_EQ(Bytes(code.bytes.begin(), code.bytes.end()),
                  Bytes(wanted.bytes.begin(), wanted.bytes.end()));
        EXPECT_EQ(code.changes, wanted.changes);
        EXPECT_EQ(kept, now) << static_cast<int>(order) << " " << per_mille << " "
                             << code_bytes_max;
      }
    }
  }
}

TEST(Coder, SaysHowManyElementsDiffer) {
  Coder coder(1024);
  Bytes base(1024), now(1024);
  now[6] = now[7] = now[100] = std::byte{1};  // elements 3 and 50
  EXPECT_EQ(coder.Encode(DeltaOrder::kFloat16, base, now, 1024).changes, 2u);
  EXPECT_EQ(coder.Encode(DeltaOrder::kFloat16, base, base, 1024).changes, 0u);
}

TEST(Coder, IsTheFormatThatItsHeaderFileDescribes) {
  // By hand: of 300 bf16, element 1 one up, element 299 to a distant value.
  std::vector<uint16_t> target(300, 0x3f80);
  // clang-format off
  const std::vector<uint8_t> code = {
      1, 5, 7, 0,                          // version, kFloat16, all streams as they are
      44, 1, 0, 0,                         // elements
      2, 0, 0, 0,                          // changes
      3, 0, 0, 0,                          // bytes of gaps
      1, 0, 0, 0,                          // escapes
      3, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0,  // stored bytes
      1, 255, 42,                          // gaps: 1, then 255 + 42
      0xf1,                                // steps: +1, an escape
      0, 2,                                // zigzag 512: +256
  };
  // clang-format on
  Coder coder(600);
  ASSERT_EQ(coder.Apply(DeltaOrder::kFloat16, std::as_bytes(std::span(code)),
                        std::as_writable_bytes(std::span(target))),
            OkStatus());
  std::vector<uint16_t> wanted(300, 0x3f80);
  wanted[1] = 0x3f81;
  wanted[299] = 0x4080;
  EXPECT_EQ(target, wanted);
}

TEST(Coder, GivesUpWhereTheBlockItselfIsShorter) {
  std::mt19937_64 random(8);
  Coder coder(4096);
  for (const DeltaOrder order : kOrders) {
    const Bytes base = RandomBytes(random, 4096), now = RandomBytes(random, 4096);
    EXPECT_TRUE(coder.Encode(order, base, now, 4096).bytes.empty());
    EXPECT_TRUE(coder.Encode(order, base, base, kHeaderBytes - 1).bytes.empty());
    EXPECT_FALSE(coder.Encode(order, base, base, kHeaderBytes).bytes.empty());
  }
}

TEST(Coder, RefusesDamagedCodesAndLeavesWhatIsAround) {
  std::mt19937_64 random(9);
  Coder coder(8192);
  for (const DeltaOrder order : kOrders) {
    const size_t width = WidthOf(order);
    const size_t bytes = 1000 * width;
    const Bytes base = RandomBytes(random, bytes);
    const Bytes now = Changed(random, base, width, 100);
    const auto made = coder.Encode(order, base, now, bytes);
    ASSERT_FALSE(made.bytes.empty());
    const Bytes code(made.bytes.begin(), made.bytes.end());
    const auto apply = [&](const Bytes& damaged) {
      constexpr size_t kGuard = 64;
      Bytes around(bytes + 2 * kGuard, std::byte{0xc3});
      std::memcpy(around.data() + kGuard, base.data(), bytes);
      const Status status = coder.Apply(order, damaged, std::span(around).subspan(kGuard, bytes));
      for (size_t i = 0; i < kGuard; ++i) {
        EXPECT_EQ(around[i], std::byte{0xc3});
        EXPECT_EQ(around[kGuard + bytes + i], std::byte{0xc3});
      }
      const bool right = std::memcmp(around.data() + kGuard, now.data(), bytes) == 0;
      Bytes copied(bytes);
      const auto elsewhere = coder.ApplyTo(order, damaged, base, copied);
      EXPECT_EQ(elsewhere ? OkStatus() : elsewhere.error(), status);
      if (elsewhere) {
        EXPECT_EQ(std::memcmp(around.data() + kGuard, copied.data(), bytes), 0);
      }
      return std::pair(status, right);
    };
    EXPECT_TRUE(apply(code).second);
    for (size_t length = 0; length < code.size(); length += 1 + random() % 7) {
      EXPECT_EQ(
          apply(Bytes(code.begin(), code.begin() + static_cast<ptrdiff_t>(length))).first.code(),
          weightwire::Code::kDataLoss)
          << length;
    }
    Bytes longer = code;
    longer.push_back(std::byte{0});
    EXPECT_EQ(apply(longer).first.code(), weightwire::Code::kDataLoss);
    for (size_t at = 0; at < kHeaderBytes; ++at) {
      for (const unsigned bit : {1u, 0x80u}) {
        Bytes damaged = code;
        damaged[at] ^= static_cast<std::byte>(bit);
        EXPECT_EQ(apply(damaged).first.code(), weightwire::Code::kDataLoss) << at << " " << bit;
      }
    }
    int noticed = 0;  // not all: zstd has bits that it does not read, and sums see the result
    for (int i = 0; i < 2000; ++i) {
      Bytes damaged = code;
      damaged[kHeaderBytes + random() % (code.size() - kHeaderBytes)] ^=
          static_cast<std::byte>(1u << random() % 8);
      const auto [status, right] = apply(damaged);
      noticed += !status.ok() || !right;
    }
    EXPECT_GE(noticed, 1900);
  }
}

TEST(Coder, RefusesTheCodeOfAnotherBlock) {
  Coder coder(4096);
  const Bytes base(4096);
  const auto made = coder.Encode(DeltaOrder::kFloat16, base, base, 4096);
  const Bytes code(made.bytes.begin(), made.bytes.end());
  Bytes shorter(4094), same(4096);
  EXPECT_EQ(coder.Apply(DeltaOrder::kFloat16, code, shorter).code(), weightwire::Code::kDataLoss);
  EXPECT_EQ(coder.Apply(DeltaOrder::kBits16, code, same).code(), weightwire::Code::kDataLoss);
  EXPECT_EQ(coder.Apply(DeltaOrder::kFloat16, code, same), OkStatus());
}

uint16_t RoundToBF16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

/// Bits, of `count` things that are told apart by how often each comes.
template <typename Counts>
double Entropy(const Counts& counts, double count) {
  double bits = 0;
  for (const auto& [thing, times] : counts) bits -= times * std::log2(times / count);
  return bits;
}

// What an optimizer does: fp32 masters N(0, 0.02), steps of about the learning rate. The code's
// size is compared with the content of positions and steps, and with zstd (level 1) of the XOR of
// both versions.
TEST(Coder, IsNearTheEntropyAndFromThreePercentOnAtMostElevenTwentiethsOfXor) {
  constexpr size_t kElements = 512 << 10, kBytes = kElements * 2;
  Coder coder(kBytes);
  for (const float rate : {1e-7f, 1e-6f, 3e-6f}) {
    std::mt19937_64 random(10);
    std::normal_distribution<float> weight(0.f, 0.02f), step(0.f, 1.f);
    std::vector<uint16_t> base(kElements), now(kElements), bits(kElements);
    std::map<int, double> steps, changed;
    for (size_t i = 0; i < kElements; ++i) {
      const float master = weight(random);
      base[i] = RoundToBF16(master);
      now[i] = RoundToBF16(master + rate * step(random));
      bits[i] = base[i] ^ now[i];
      ++changed[bits[i] != 0];
      if (bits[i] != 0) ++steps[now[i] - base[i]];
    }
    const double content =
        (Entropy(changed, kElements) + Entropy(steps, changed[true])) / 8;  // bytes
    Bytes rival(ZSTD_compressBound(kBytes));
    const size_t rival_bytes = ZSTD_compress(rival.data(), rival.size(), bits.data(), kBytes, 1);
    ASSERT_EQ(ZSTD_isError(rival_bytes), 0u);
    const auto code = coder.Encode(DeltaOrder::kFloat16, std::as_bytes(std::span(base)),
                                   std::as_bytes(std::span(now)), kBytes);
    ASSERT_FALSE(code.bytes.empty());
    const auto size = static_cast<double>(code.bytes.size());
    std::printf("rate %g: %.2f %% changed, %.1f x shorter, %.3f x the content, %.2f x XOR + zstd\n",
                rate, 100. * static_cast<double>(code.changes) / kElements, kBytes / size,
                size / content, size / static_cast<double>(rival_bytes));
    EXPECT_LE(size, 1.08 * content) << rate;
    // Of few changes most content is where they are, which XOR and zstd find as well.
    EXPECT_LE(size, (rate < 5e-7f ? 0.7 : 0.55) * static_cast<double>(rival_bytes)) << rate;
    std::vector<uint16_t> target = base;
    const Bytes copy(code.bytes.begin(), code.bytes.end());
    ASSERT_EQ(coder.Apply(DeltaOrder::kFloat16, copy, std::as_writable_bytes(std::span(target))),
              OkStatus());
    EXPECT_EQ(target, now);
  }
}

TEST(Coder, EveryDtypeHasAnOrderOfItsWidth) {
  for (int number = 1; number <= 15; ++number) {
    const auto dtype = layout::DTypeFromNumber(number);
    ASSERT_TRUE(dtype.has_value());
    EXPECT_EQ(WidthOf(OrderOf(*dtype)), static_cast<size_t>(layout::ElementBytes(*dtype)));
  }
  EXPECT_FALSE(layout::DTypeFromNumber(16).has_value()) << "a new one needs an order";
}

}  // namespace
}  // namespace weightwire::delta
