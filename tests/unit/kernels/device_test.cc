// The functions of kernels/device.h, run thread by thread as a device would, against the CPU
// kernels. What this leaves to `ctest -L gpu` is launches, shuffles and shared memory.
#define XXH_INLINE_ALL
#include "kernels/device.h"

#include <gtest/gtest.h>
#include <xxhash.h>

#include <cstring>

#include "tests/unit/kernels/device_four_bit.h"
#include "tests/unit/kernels/four_bit_oracle.h"
#include "tests/unit/kernels/oracle.h"
#include "tests/unit/kernels/quantize_oracle.h"
#include "tests/unit/kernels/random_box.h"

namespace weightwire::kernels {
namespace {

using namespace internal;  // NOLINT: the tested names

SumSecret Secret() {
  SumSecret secret;
  std::memcpy(&secret, XXH3_kSecret, sizeof secret);
  return secret;
}

/// SumKernel with `groups` threads on each lane.
uint64_t RunSum(const void* source, const StridedBox& box, Element from, Element to, int groups) {
  static const SumSecret secret = Secret();
  const DeviceSum job = MakeDeviceSum(nullptr, source, box, from, to);
  const PackedBytes bytes(job);
  if (bytes.size <= kShortSumBytes) return SumShort(bytes, secret);
  auto total = [&](auto part) {
    uint64_t sum = 0;
    for (int group = 0; group < groups; ++group) sum += part(group);
    return sum;
  };
  uint64_t lanes[kSumLanes];
  for (int i = 0; i < kSumLanes; ++i) lanes[i] = LaneOfSum(bytes, secret, i, groups, total);
  return MergedLanes(lanes, bytes.size, secret);
}

DeviceCopy RunCopy(void* target, const void* source, const Case& c) {
  DeviceCopy job = MakeDeviceCopy(target, source, c.box, c.from, c.to);
  for (int64_t i = job.box.count; i-- > 0;) CopyAt(job, i);
  return job;
}

TEST(DeviceSum, IsXxh3ForEveryLength) {
  auto random = SeededGenerator();
  Bytes data = RandomBytes(random, 5000);
  for (int64_t size = 1; size < 5000; size += size < 2100 ? 1 : 61) {
    StridedBox box{1, {size}, {1}, {1}};
    uint64_t want = XXH3_64bits(data.data(), static_cast<size_t>(size));
    ASSERT_EQ(RunSum(data.data(), box, Element::kOpaque1, Element::kOpaque1, 4), want) << size;
    ASSERT_EQ(RunSum(data.data(), box, Element::kOpaque1, Element::kOpaque1, 1), want) << size;
  }
}

TEST(DeviceSum, ReadsMisalignedBytes) {
  auto random = SeededGenerator();
  Bytes data = RandomBytes(random, 3010);
  for (size_t shift = 0; shift < 8; ++shift) {
    StridedBox box{1, {3000}, {1}, {1}};
    EXPECT_EQ(RunSum(&data[shift], box, Element::kOpaque1, Element::kOpaque1, 4),
              XXH3_64bits(&data[shift], 3000));
  }
}

TEST(DeviceCopyAndSum, AgreeWithTheCpuOnRandomBoxes) {
  auto random = SeededGenerator();
  for (int i = 0; i < 1500 && !HasFailure(); ++i) {
    Case c = RandomCase(random);
    SCOPED_TRACE(testing::Message() << c);
    Bytes source = RandomBytes(random, SpanBytes(c.box, c.box.source_stride, c.from));
    Bytes want = RandomBytes(random, SpanBytes(c.box, c.box.target_stride, c.to));
    Bytes got = want;
    Copy(want.data(), source.data(), c.box, c.from, c.to);
    RunCopy(got.data(), source.data(), c);
    ASSERT_TRUE(got == want);
    ASSERT_EQ(RunSum(source.data(), c.box, c.from, c.to, 4),
              SumSource(source.data(), c.box, c.from, c.to));
  }
}

TEST(DeviceCopy, ChoosesTheWidestUnitThatEveryRunAllows) {
  alignas(16) unsigned char source[4096] = {};
  alignas(16) unsigned char target[4096];
  auto unit = [&](int64_t columns, int64_t source_row, int64_t target_row, int64_t shift) {
    Case c{{2, {3, columns}, {source_row, 1}, {target_row, 1}}, Element::kBF16, Element::kBF16};
    return RunCopy(target, source + shift, c).unit;
  };
  EXPECT_EQ(unit(64, 64, 64, 0), 16);
  EXPECT_EQ(unit(64, 72, 80, 0), 16);
  EXPECT_EQ(unit(64, 68, 80, 0), 8);  // the source's rows begin at multiples of 136 bytes
  EXPECT_EQ(unit(64, 72, 66, 0), 4);
  EXPECT_EQ(unit(60, 64, 64, 0), 8);
  EXPECT_EQ(unit(63, 64, 64, 0), 2);
  EXPECT_EQ(unit(64, 64, 64, 4), 4);
  Case transposed{{2, {3, 5}, {1, 3}, {5, 1}}, Element::kBF16, Element::kBF16};
  EXPECT_EQ(RunCopy(target, source, transposed).unit, 2);
  Case cast{{1, {64}, {1}, {1}}, Element::kBF16, Element::kF32};
  EXPECT_EQ(RunCopy(target, source, cast).unit, 0);
}

// Indices past 32 bits divide in 64.
TEST(DeviceCopy, FindsElementsBeyondThirtyTwoBits) {
  DeviceBox box{int64_t{3} << 31, 2, {int64_t{3} << 20, 2048}, {5000, 1}, {7000, 1}};
  DeviceOffsets at = OffsetsOf(box, (int64_t{5} << 30) + 17);
  EXPECT_EQ(at.source, (int64_t{5} << 19) * 5000 + 17);
  EXPECT_EQ(at.target, (int64_t{5} << 19) * 7000 + 17);
}

/// QuantizeKernel. Returns how many blocks were read 16 bytes at once.
int RunQuantize(const DeviceQuantize& job, int threads) {
  int wide = 0;
  for (int64_t index = 0; index < BlockCount(job.box); ++index) {
    const DeviceBlock block = BlockAt(job, index);
    wide += block.unit > 1;
    uint32_t amax = 0;
    for (int t = 0; t < threads; ++t) amax = std::max(amax, AmaxOfThread(job, block, t, threads));
    for (int t = 0; t < threads; ++t) QuantizeOfThread(job, block, amax, t, threads);
  }
  return wide;
}

TEST(DeviceQuantize, AgreesWithTheOracleWhateverTheThreads) {
  auto random = SeededGenerator();
  int wide = 0;
  for (int i = 0; i < 200 && !HasFailure(); ++i) {
    oracle::QuantizeCase c = oracle::RandomQuantizeCase(random);
    if (i % 4 == 0) {  // rows that begin at multiples of 16 bytes, with codes in another place
      const auto columns = static_cast<int64_t>(8 * (1 + random() % 30));
      c.box = oracle::PackedQuantizeBox(1 + static_cast<int64_t>(random() % 200), columns, 128,
                                        i % 8 == 0 ? columns : 128);
      c.box.target_stride[0] += static_cast<int64_t>(8 * (random() % 3));
      oracle::FillSource(random, c);
    }
    SCOPED_TRACE(c.Text());
    oracle::Quantized want = oracle::Quantize(c);
    oracle::Quantized got = c.Blank();
    auto* scales = reinterpret_cast<uint32_t*>(got.scales.data());
    const int threads = 1 + static_cast<int>(random() % 300);
    wide += RunQuantize({got.codes.data(), scales, c.source.data(), c.box, c.from}, threads);
    EXPECT_EQ(got.codes, want.codes);
    EXPECT_EQ(got.scales, want.scales);
    oracle::Quantized apart = c.Blank();
    scales = reinterpret_cast<uint32_t*>(apart.scales.data());
    RunQuantize({apart.codes.data(), nullptr, c.source.data(), c.box, c.from}, threads);
    EXPECT_EQ(apart.scales, c.Blank().scales);
    RunQuantize({nullptr, scales, c.source.data(), c.box, c.from}, threads);
    EXPECT_EQ(apart.codes, want.codes);
    EXPECT_EQ(apart.scales, want.scales);
  }
  EXPECT_GT(wide, 20);
}

/// DeepSeek's blocks and channels, as kernels are used most.
TEST(DeviceQuantize, ReadsSixteenBytesAtOnceWhereEveryRowAllowsIt) {
  alignas(16) static unsigned char source[256 * 264 * 4] = {};
  alignas(16) static unsigned char codes[256 * 264];
  uint32_t scales[256];
  const auto wide = [&](oracle::QuantizeCase c, size_t shift, Element from) {
    return RunQuantize({codes, scales, source + shift, c.box, from}, 7);
  };
  const auto packed = [](int64_t rows, int64_t columns, int64_t block_rows, int64_t block_columns) {
    oracle::QuantizeCase c;
    c.box = oracle::PackedQuantizeBox(rows, columns, block_rows, block_columns);
    return c;
  };
  EXPECT_EQ(wide(packed(256, 256, 128, 128), 0, Element::kBF16), 4);
  EXPECT_EQ(wide(packed(200, 256, 128, 128), 0, Element::kF16), 4);
  EXPECT_EQ(wide(packed(256, 256, 128, 128), 0, Element::kF32), 4);
  EXPECT_EQ(wide(packed(3, 256, 1, 256), 0, Element::kBF16), 3);      // one scale per output
  EXPECT_EQ(wide(packed(256, 24, 256, 1), 0, Element::kBF16), 0);     // and per input
  EXPECT_EQ(wide(packed(256, 252, 128, 128), 0, Element::kBF16), 0);  // rows of 504 bytes
  EXPECT_EQ(wide(packed(256, 252, 128, 128), 0, Element::kF32), 4);
  EXPECT_EQ(wide(packed(256, 256, 128, 128), 2, Element::kBF16), 0);
  EXPECT_EQ(wide(packed(256, 136, 128, 128), 0, Element::kBF16), 4);  // the last ones have 8
  EXPECT_EQ(wide(packed(256, 256, 128, 4), 0, Element::kBF16), 0);
}

/// A case of four bits in memories whose elements lie apart, misaligned to more than themselves.
class FourBitMemories {
 public:
  FourBitMemories(std::mt19937_64& random, const oracle::FourBitCase& c, bool packed)
      : case_(c), want_(oracle::QuantizeFourBits(c)) {
    const oracle::QuantizeCase& s = c.source;
    code_bytes_ = random() % 2 == 0 ? 1 : 4;
    const auto place = [&](Side& side, int64_t columns, int64_t bytes) {
      side.rows = s.box.rows;
      side.columns = columns;
      side.bytes = bytes;
      const int64_t step = packed || random() % 2 == 0 ? 1 : 1 + static_cast<int64_t>(random() % 3);
      const int64_t gap = packed ? 0 : static_cast<int64_t>(random() % 9);
      side.stride[0] = step * columns + gap;
      side.stride[1] = step;
      if (!packed && random() % 4 == 0) {  // columns lie together
        side.stride[0] = 1;
        side.stride[1] = s.box.rows + gap;
      }
      side.shift = packed ? 0 : static_cast<int64_t>(random() % 5);
      const int64_t span = (side.rows - 1) * side.stride[0] + (columns - 1) * side.stride[1] + 1;
      side.memory.assign(static_cast<size_t>((side.shift + span + 16) * bytes), 0xa5);
    };
    place(source_, s.box.columns, ElementBytes(s.from));
    place(codes_, s.box.columns / 2 / code_bytes_, code_bytes_);
    place(scales_, s.box.columns / c.group, FourBitScaleBytes(c.kind, s.from));
    source_.Put(s.source);
  }

  DeviceFourBit Job() {
    return {codes_.at(),
            scales_.at(),
            source_.at(),
            case_.source.box.rows,
            case_.source.box.columns / case_.group,
            case_.group,
            {source_.stride[0], source_.stride[1]},
            {codes_.stride[0], codes_.stride[1]},
            {scales_.stride[0], scales_.stride[1]},
            code_bytes_,
            case_.source.from,
            case_.kind,
            case_.global};
  }

  /// Codes and scales are the oracle's, or nobody wrote them; nothing else is written.
  void Expect(bool codes, bool scales) {
    Side both[] = {codes_, scales_};
    for (Side& side : both) std::fill(side.memory.begin(), side.memory.end(), 0xa5);
    if (codes) both[0].Put(want_.codes);
    if (scales) both[1].Put(want_.scales);
    EXPECT_EQ(codes_.memory, both[0].memory);
    EXPECT_EQ(scales_.memory, both[1].memory);
  }

 private:
  struct Side {
    int64_t rows, columns, bytes, shift;
    int64_t stride[2];
    std::vector<unsigned char> memory;
    /// 16 bytes are the most that anything is aligned to.
    unsigned char* at() {
      const uintptr_t begin = reinterpret_cast<uintptr_t>(memory.data());
      return memory.data() + (16 - begin % 16) % 16 + shift * bytes;
    }
    void Put(const std::vector<unsigned char>& packed) {
      for (int64_t i = 0; i < rows * columns; ++i) {
        const int64_t to = i / columns * stride[0] + i % columns * stride[1];
        std::memcpy(at() + to * bytes, &packed[static_cast<size_t>(i * bytes)],
                    static_cast<size_t>(bytes));
      }
    }
  };
  oracle::FourBitCase case_;
  oracle::Quantized want_;
  int32_t code_bytes_;
  Side source_, codes_, scales_;
};

TEST(DeviceFourBit, EverySizeOfGroupsIsTheOracles) {
  auto random = SeededGenerator();
  for (int number = 0; number <= static_cast<int>(kLastFourBitKind); ++number) {
    const auto kind = static_cast<FourBitKind>(number);
    for (const Element from : {Element::kBF16, Element::kF16, Element::kF32}) {
      for (int64_t group = 8; group <= 256 && !HasFailure(); group += 8) {
        for (int i = 0; i < 4; ++i) {
          const auto rows = static_cast<int64_t>(1 + random() % 6);
          const auto across = static_cast<int64_t>(1 + random() % 20);
          const oracle::FourBitCase c =
              oracle::RandomFourBitCase(random, kind, from, rows, across, group);
          SCOPED_TRACE(c.Text());
          FourBitMemories memories(random, c, i == 0);
          const DeviceFourBit job = memories.Job();
          const int shared = ThreadsOfGroup(group);
          const int threads = shared * static_cast<int>(1 + random() % 9);
          DeviceFourBit apart = job;
          apart.codes = nullptr;
          RunFourBit(apart, threads);
          memories.Expect(false, true);
          RunFourBit(job, threads);
          memories.Expect(true, true);
        }
      }
    }
  }
}

TEST(DeviceFourBit, MakesCodesAlone) {
  auto random = SeededGenerator();
  for (int i = 0; i < 60 && !HasFailure(); ++i) {
    const oracle::FourBitCase c = oracle::RandomFourBitCase(
        random, static_cast<FourBitKind>(i % 5), static_cast<Element>(4 + i % 3), 5, 7, 32);
    FourBitMemories memories(random, c, false);
    DeviceFourBit job = memories.Job();
    unsigned char* const scales = job.scales;
    job.scales = nullptr;
    RunFourBit(job, 256);
    memories.Expect(true, false);
    job.scales = scales;
    RunFourBit(job, 256);
    memories.Expect(true, true);
  }
}

/// Shuffles need powers of two, within a warp.
TEST(DeviceFourBit, SharesAGroupAmongThreadsOfOneWarp) {
  for (int64_t group = 8; group <= 256; group += 8) {
    const int threads = ThreadsOfGroup(group);
    EXPECT_EQ(threads & (threads - 1), 0) << group;
    EXPECT_GE(threads * 8, group);
    EXPECT_LE(threads, 32);
  }
}

// Groups past 32 bits divide in 64: of a matrix that nobody has, the row of a group.
TEST(DeviceFourBit, FindsGroupsBeyondThirtyTwoBits) {
  alignas(16) unsigned char element[64] = {};
  DeviceFourBit job{};
  job.source = element;  // all strides are 0
  job.rows = int64_t{1} << 20;
  job.across = int64_t{3} << 19;
  job.group = 32;
  job.from = Element::kBF16;
  const FourBitUnit unit = FourBitUnitOf(job, (int64_t{5} << 33) + 17, 6);
  EXPECT_EQ(unit.row, ((int64_t{5} << 33) + 18) / job.across);
  EXPECT_EQ(unit.group, ((int64_t{5} << 33) + 18) % job.across);
  EXPECT_EQ(unit.first, 16);
}

}  // namespace
}  // namespace weightwire::kernels
