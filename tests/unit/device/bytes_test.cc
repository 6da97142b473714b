// Boxes between host and GPUs, against the plain kernels on host memory alone.
#include "server/device/bytes.h"

#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "tests/support/fake_cuda/fake_gpus.h"
#include "tests/unit/kernels/four_bit_oracle.h"
#include "tests/unit/kernels/quantize_oracle.h"
#include "tests/unit/kernels/random_box.h"

namespace weightwire::device {
namespace {

using kernels::Case;
using weightwire::testing::FakeDevice;

enum class On { kHost, kGpu0, kGpu1 };
constexpr On kPlaces[] = {On::kHost, On::kGpu0, On::kGpu1};

/// Memory at a place, `odd` bytes into its allocation, that begins with `content`.
class Memory {
 public:
  Memory(On where, const kernels::Bytes& content, size_t odd)
      : host_(content.size() + odd), odd_(odd), size_(content.size()) {
    if (where != On::kHost) {
      allocation_ = FakeDevice(where == On::kGpu0 ? 0 : 1)->Allocate(content.size() + odd).value();
      FAKE_CALL(fake_cuda_write)(allocation_->at() + odd, content.data(), content.size());
    } else {
      std::memcpy(host_.data() + odd, content.data(), content.size());
    }
  }
  Bytes bytes() {
    if (allocation_) return {allocation_->at() + odd_, &allocation_->device()};
    return {host_.data() + odd_, nullptr};
  }
  kernels::Bytes Content() const {
    kernels::Bytes content(size_);
    if (allocation_) {
      FAKE_CALL(fake_cuda_read)(allocation_->at() + odd_, content.data(), size_);
    } else {
      std::memcpy(content.data(), host_.data() + odd_, size_);
    }
    return content;
  }

 private:
  std::vector<std::byte> host_;
  const size_t odd_;
  const size_t size_;
  std::shared_ptr<Allocation> allocation_;
};

class DeviceBytes : public ::testing::TestWithParam<std::tuple<On, On>> {};

TEST_P(DeviceBytes, CopyAndSumAgreeWithTheReference) {
  const auto [source_on, target_on] = GetParam();
  std::mt19937_64 random(11);
  for (int i = 0; i < 150; ++i) {
    const Case c = kernels::RandomCase(random);
    SCOPED_TRACE(::testing::PrintToString(c));
    const auto source_bytes =
        kernels::RandomBytes(random, SpanBytes(c.box, c.box.source_stride, c.from));
    const auto before = kernels::RandomBytes(random, SpanBytes(c.box, c.box.target_stride, c.to));
    Memory source(source_on, source_bytes, 8 * (random() % 5));
    Memory target(target_on, before, 8 * (random() % 5));
    kernels::Bytes expected = before;
    kernels::reference::Copy(expected.data(), source_bytes.data(), c.box, c.from, c.to);
    const uint64_t sum = kernels::reference::SumTarget(expected.data(), c.box, c.to);

    EXPECT_EQ(SumSource(source.bytes(), c.box, c.from, c.to), Result<uint64_t>(sum));
    EXPECT_EQ(CopyAndSumTarget(target.bytes(), source.bytes(), c.box, c.from, c.to),
              Result<uint64_t>(sum));
    EXPECT_EQ(target.Content(), expected);
    EXPECT_EQ(SumTarget(target.bytes(), c.box, c.to), Result<uint64_t>(sum));

    Memory other(target_on, before, 8);
    EXPECT_EQ(Copy(other.bytes(), source.bytes(), c.box, c.from, c.to), OkStatus());
    EXPECT_EQ(other.Content(), expected);
  }
}

TEST_P(DeviceBytes, CopyRunTakesAnyLength) {
  const auto [source_on, target_on] = GetParam();
  std::mt19937_64 random(12);
  for (size_t bytes : {size_t{0}, size_t{1}, size_t{1023}, size_t{1024}, size_t{5431}}) {
    const auto content = kernels::RandomBytes(random, bytes + 1);
    Memory source(source_on, content, 0), target(target_on, kernels::Bytes(bytes + 1, 0x55), 0);
    EXPECT_EQ(CopyRun(target.bytes(), source.bytes(), bytes), OkStatus());
    kernels::Bytes expected(content.begin(), content.begin() + static_cast<ptrdiff_t>(bytes));
    expected.push_back(0x55);
    EXPECT_EQ(target.Content(), expected);
  }
}

/// Codes and scales, each by itself, in parts where a lane has no room for all of them.
TEST_P(DeviceBytes, QuantizeAgreesWithTheOracle) {
  const auto [source_on, target_on] = GetParam();
  std::mt19937_64 random(15);
  for (int i = 0; i < 40; ++i) {
    kernels::oracle::QuantizeCase c = kernels::oracle::RandomQuantizeCase(random);
    const auto lane = static_cast<int64_t>(FakeDevice(0)->Borrow()->bytes());
    while (std::min(c.box.rows, c.box.block_rows) * std::min(c.box.columns, c.box.block_columns) >
           lane) {
      c = kernels::oracle::RandomQuantizeCase(random);
    }
    SCOPED_TRACE(c.Text());
    const kernels::oracle::Quantized want = kernels::oracle::Quantize(c);
    const kernels::oracle::Quantized blank = c.Blank();
    Memory source(source_on, c.source, 8 * (random() % 5));
    Memory codes(target_on, blank.codes, random() % 5);
    Memory scales(target_on, blank.scales, 4 * (random() % 5));
    EXPECT_EQ(QuantizeCodes(codes.bytes(), source.bytes(), c.box, c.from), OkStatus());
    EXPECT_EQ(QuantizeScales(scales.bytes(), source.bytes(), c.box, c.from), OkStatus());
    EXPECT_EQ(codes.Content(), want.codes);
    EXPECT_EQ(scales.Content(), want.scales);
  }
}

/// Four bits, with strides on all sides.
TEST_P(DeviceBytes, FourBitsAreTheOracles) {
  namespace oracle = kernels::oracle;
  const auto [source_on, target_on] = GetParam();
  std::mt19937_64 random(16);
  constexpr kernels::FourBitKind kKinds[] = {kernels::FourBitKind::kMxFp4,
                                             kernels::FourBitKind::kMxFp4Rounded,
                                             kernels::FourBitKind::kInt4};
  for (int i = 0; i < 90 && !HasFailure(); ++i) {
    const auto from = static_cast<kernels::Element>(4 + i / 3 % 3);
    const auto group = static_cast<int64_t>(8 * (1 + random() % 32));
    const bool large = i % 5 == 0;  // more codes than a lane has room for, of one row or of many
    const auto rows = static_cast<int64_t>(1 + random() % (large ? 2 : 9));
    const auto across = static_cast<int64_t>((large ? 32'768 / group : 0) + 1 + random() % 9);
    const oracle::FourBitCase c =
        oracle::RandomFourBitCase(random, kKinds[i % 3], from, rows, across, group);
    SCOPED_TRACE(c.Text());
    const oracle::Quantized want = oracle::QuantizeFourBits(c);
    kernels::QuantizeBox box = c.source.box;
    const int code_bytes = i % 2 == 0 ? 1 : 4;
    const auto spread = [&](const kernels::Bytes& packed, int64_t bytes, int64_t* stride) {
      const int64_t columns = std::ssize(packed) / bytes / rows;
      stride[1] = 1 + static_cast<int64_t>(random() % 2);
      stride[0] = columns * stride[1] + static_cast<int64_t>(random() % 9);
      const uint64_t how = random() % 6;
      if (how < 2) {
        stride[0] = 1;
        stride[1] = rows + static_cast<int64_t>(random() % 2);
      } else if (how < 5) {  // rows together, or apart
        stride[0] = columns + (how == 4 ? 3 : 0);
        stride[1] = 1;
      }
      const int64_t span = (rows - 1) * stride[0] + (columns - 1) * stride[1] + 1;
      kernels::Bytes made(static_cast<size_t>(span * bytes), 0x5a);
      for (int64_t e = 0; e < rows * columns; ++e) {
        const int64_t to = e / columns * stride[0] + e % columns * stride[1];
        std::memcpy(&made[static_cast<size_t>(to * bytes)], &packed[static_cast<size_t>(e * bytes)],
                    static_cast<size_t>(bytes));
      }
      return made;
    };
    const int scale_bytes = kernels::FourBitScaleBytes(c.kind, from);
    const auto elements = spread(c.source.source, kernels::ElementBytes(from), box.source_stride);
    const auto codes_wanted = spread(want.codes, code_bytes, box.target_stride);
    const auto scales_wanted = spread(want.scales, scale_bytes, box.scale_stride);
    Memory source(source_on, elements, 8 * (random() % 5));
    Memory codes(target_on, kernels::Bytes(codes_wanted.size(), 0x5a), 4 * (random() % 5));
    Memory scales(target_on, kernels::Bytes(scales_wanted.size(), 0x5a), 4 * (random() % 5));
    EXPECT_EQ(QuantizeFourBitCodes(codes.bytes(), source.bytes(), box, from, c.kind, code_bytes),
              OkStatus());
    EXPECT_EQ(QuantizeFourBitScales(scales.bytes(), source.bytes(), box, from, c.kind), OkStatus());
    EXPECT_EQ(codes.Content(), codes_wanted);
    EXPECT_EQ(scales.Content(), scales_wanted);
  }
}

std::string PlaceName(On on) {
  return on == On::kHost ? "Host" : on == On::kGpu0 ? "Gpu0" : "Gpu1";
}
INSTANTIATE_TEST_SUITE_P(Between, DeviceBytes,
                         ::testing::Combine(::testing::ValuesIn(kPlaces),
                                            ::testing::ValuesIn(kPlaces)),
                         [](const auto& param) {
                           return PlaceName(std::get<0>(param.param)) + "To" +
                                  PlaceName(std::get<1>(param.param));
                         });

struct Batch {
  std::vector<Memory> sources, targets;
  std::vector<CopyJob> jobs;
  std::vector<kernels::Bytes> expected;
  std::vector<uint64_t> sums;
};

Batch MakeBatch(std::mt19937_64& random, size_t count, const std::function<On()>& place) {
  Batch batch;
  batch.sources.reserve(count);
  batch.targets.reserve(count);
  for (size_t i = 0; i < count; ++i) {
    const Case c = kernels::RandomCase(random);
    const auto content =
        kernels::RandomBytes(random, SpanBytes(c.box, c.box.source_stride, c.from));
    auto bytes = kernels::RandomBytes(random, SpanBytes(c.box, c.box.target_stride, c.to));
    batch.sources.emplace_back(place(), content, 8 * (random() % 5));
    batch.targets.emplace_back(place(), bytes, 8 * (random() % 5));
    batch.jobs.push_back(
        {batch.targets.back().bytes(), batch.sources.back().bytes(), c.box, c.from, c.to});
    kernels::reference::Copy(bytes.data(), content.data(), c.box, c.from, c.to);
    batch.sums.push_back(kernels::reference::SumTarget(bytes.data(), c.box, c.to));
    batch.expected.push_back(std::move(bytes));
  }
  return batch;
}

TEST(DeviceBytesBatch, IsWhatItsJobsAreOneByOneWhereverTheyLie) {
  std::mt19937_64 random(15);
  Batch batch = MakeBatch(random, 200, [&] { return kPlaces[random() % 3]; });
  std::vector<uint64_t> sums(batch.jobs.size());
  ASSERT_EQ(SumSources(batch.jobs, sums), OkStatus());
  EXPECT_EQ(sums, batch.sums);
  sums.assign(sums.size(), 0);
  ASSERT_EQ(CopyAndSumTargets(batch.jobs, sums), OkStatus());
  EXPECT_EQ(sums, batch.sums);
  for (size_t i = 0; i < batch.jobs.size(); ++i) {
    ASSERT_EQ(batch.targets[i].Content(), batch.expected[i]) << i;
  }
  EXPECT_EQ(SumSources({}, {}), OkStatus());
  EXPECT_EQ(CopyAndSumTargets({}, {}), OkStatus());
}

TEST(DeviceBytesBatch, OnOneGpuTakesOneLaunchForEachLaneful) {
  std::mt19937_64 random(16);
  Batch batch = MakeBatch(random, Lane::kSumsMax + 1, [] { return On::kGpu1; });
  std::vector<uint64_t> sums(batch.jobs.size());
  for (const char* call : {"ww_cuda_copy", "ww_cuda_sum"}) {
    FAKE_CALL(fake_cuda_fail)(call, 3);
    EXPECT_EQ(CopyAndSumTargets(batch.jobs, sums), OkStatus()) << call;
    EXPECT_EQ(sums, batch.sums);
    EXPECT_FALSE(CopyAndSumTargets(batch.jobs, sums).ok()) << call;
  }
}

// More threads than lanes, both ways between two GPUs: who took lanes in another order than the
// other would wait for it forever.
/// Streams in memory of exactly the room that they need.
struct DeltaRoom {
  DeltaRoom(size_t elements, size_t width, size_t changes_max)
      : gaps(kernels::DeltaGapBytesMax(elements, changes_max)),
        steps(changes_max + kernels::kDeltaSlack),
        escapes(steps.size() * width),
        streams{gaps.data(), steps.data(), escapes.data(), 0, 0, 0} {}
  kernels::Bytes gaps, steps, escapes;
  kernels::DeltaStreams streams;
};

// The streams themselves: tests/unit/kernels/delta_test.cc has them by their definition.
TEST(DeviceDelta, MakesOnAGpuWhatRestoresTheNewVersionOnTheOther) {
  const auto device =
      Device::Open(weightwire::testing::FakeLibrary(),
                   weightwire::testing::FakeLibrary()->devices().at(0), {1, 256 << 10})
          .value();
  std::mt19937_64 random(5);
  for (int number = 0; number < kernels::kDeltaOrders; ++number) {
    const auto order = static_cast<kernels::DeltaOrder>(number);
    const auto width = static_cast<size_t>(kernels::DeltaElementBytes(order));
    for (const size_t elements : {1u, 7u, 3000u}) {
      SCOPED_TRACE(std::to_string(number) + " of " + std::to_string(elements));
      const size_t bytes = elements * width;
      const kernels::Bytes before = kernels::RandomBytes(random, bytes);
      kernels::Bytes after = before;
      size_t changes = 0;
      for (size_t i = 0; i < elements; ++i) {
        if (random() % 5 != 0) continue;
        after[i * width + random() % width] ^= 1;
        ++changes;
      }
      const auto base = device->Allocate(bytes).value(), now = device->Allocate(bytes).value();
      FAKE_CALL(fake_cuda_write)(base->at(), before.data(), bytes);
      FAKE_CALL(fake_cuda_write)(now->at(), after.data(), bytes);
      const auto content = [&](const Allocation& of) {
        kernels::Bytes read(bytes);
        FAKE_CALL(fake_cuda_read)(of.at(), read.data(), bytes);
        return read;
      };
      const Bytes on_gpu{base->at(), device.get()};
      const ConstBytes now_on_gpu(now->at(), device.get());
      DeltaRoom room(elements, width, changes);
      EXPECT_EQ(DeltaScan(order, on_gpu, now_on_gpu, elements, changes, room.streams, false),
                Result<bool>(true));
      EXPECT_EQ(room.streams.changes, changes);
      EXPECT_EQ(content(*base), before);
      // To the host's memory by the same calls, and on the GPU.
      kernels::Bytes on_host = before;
      const Bytes host{reinterpret_cast<std::byte*>(on_host.data()), nullptr};
      EXPECT_EQ(DeltaApply(order, host, elements, room.streams), Result<bool>(true));
      EXPECT_EQ(on_host, after);
      EXPECT_EQ(DeltaApply(order, on_gpu, elements, room.streams), Result<bool>(true));
      EXPECT_EQ(content(*base), after);
      // Back again, with the copy, where there is room for all changes and where there is not.
      const auto back = [&](size_t changes_max, bool made) {
        FAKE_CALL(fake_cuda_write)(now->at(), before.data(), bytes);
        FAKE_CALL(fake_cuda_write)(base->at(), after.data(), bytes);
        DeltaRoom other(elements, width, changes_max);
        EXPECT_EQ(DeltaScan(order, on_gpu, now_on_gpu, elements, changes_max, other.streams, true),
                  Result<bool>(made));
        EXPECT_EQ(content(*base), before);
        if (!made) return;
        EXPECT_EQ(DeltaApply(order, host, elements, other.streams), Result<bool>(true));
        EXPECT_EQ(on_host, before);
      };
      back(changes, true);
      if (changes > 0) back(changes - 1, false);
      if (changes > 0) {
        kernels::DeltaStreams damaged = room.streams;
        --damaged.changes;
        EXPECT_EQ(DeltaApply(order, on_gpu, elements, damaged), Result<bool>(false));
        damaged.changes = elements + 1;
        EXPECT_EQ(DeltaApply(order, on_gpu, elements, damaged), Result<bool>(false));
      }
    }
  }
}

TEST(DeviceDelta, SaysWhereStreamsDoNotFitALane) {
  Device& device = *FakeDevice(0);  // lanes of 1 KiB
  const auto base = device.Allocate(4000).value();
  const kernels::Bytes before(4000, 7);
  FAKE_CALL(fake_cuda_write)(base->at(), before.data(), before.size());
  DeltaRoom room(2000, 2, 1000);
  const auto scanned = DeltaScan(kernels::DeltaOrder::kFloat16, {base->at(), &device},
                                 ConstBytes(base->at(), &device), 2000, 1000, room.streams, false);
  ASSERT_FALSE(scanned.has_value());
  EXPECT_EQ(scanned.error().reason(), Reason::kLimitExceeded);
  EXPECT_NE(scanned.error().message().find("of a lane of 1024"), std::string::npos);
  room.streams.changes = room.streams.gap_bytes = 1000;
  EXPECT_FALSE(DeltaApply(kernels::DeltaOrder::kFloat16, {base->at(), &device}, 2000, room.streams)
                   .has_value());
}

TEST(DeviceBytesThreads, ShareLanesWithoutWaitingInACircle) {
  std::mt19937_64 random(13);
  const auto content = kernels::RandomBytes(random, 20'001);
  std::vector<std::thread> threads;
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([&content, t] {
      for (int round = 0; round < 20; ++round) {
        Memory source(t % 2 == 0 ? On::kGpu0 : On::kGpu1, content, 0);
        Memory target(t % 2 == 0 ? On::kGpu1 : On::kGpu0, kernels::Bytes(content.size()), 0);
        EXPECT_EQ(CopyRun(target.bytes(), source.bytes(), content.size()), OkStatus());
        EXPECT_EQ(target.Content(), content);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(DeviceBytesFailure, NamesTheGpuAndLeavesTheLaneUsable) {
  std::mt19937_64 random(14);
  const auto content = kernels::RandomBytes(random, 4'001);
  for (const char* call : {"ww_cuda_copy", "ww_cuda_copy_bytes", "ww_cuda_event_wait"}) {
    Memory source(On::kHost, content, 0), target(On::kGpu0, kernels::Bytes(content.size()), 0);
    FAKE_CALL(fake_cuda_fail)(call, 2);
    const Status failed = CopyRun(target.bytes(), source.bytes(), content.size());
    EXPECT_EQ(failed.code(), Code::kInternal);
    EXPECT_EQ(failed.reason(), Reason::kIoError);
    EXPECT_EQ(failed.message(),
              FakeDevice(0)->name() + ": " + call + ": a failure that the test asked for");
    EXPECT_EQ(CopyRun(target.bytes(), source.bytes(), content.size()), OkStatus());
    EXPECT_EQ(target.Content(), content);
  }
  kernels::oracle::QuantizeCase c;
  c.box = kernels::oracle::PackedQuantizeBox(8, 8, 4, 4);
  Memory floats(On::kGpu0, content, 0), codes(On::kHost, kernels::Bytes(64), 0);
  for (const char* call : {"ww_cuda_quantize", "ww_cuda_copy_bytes"}) {
    FAKE_CALL(fake_cuda_fail)(call, 1);
    const auto quantize = [&] {
      return QuantizeCodes(codes.bytes(), floats.bytes(), c.box, kernels::Element::kBF16);
    };
    EXPECT_EQ(quantize().reason(), Reason::kIoError) << call;
    EXPECT_EQ(quantize(), OkStatus());
  }
  FAKE_CALL(fake_cuda_fail)("ww_cuda_quantize_four_bit", 1);
  const kernels::QuantizeBox groups = kernels::oracle::PackedQuantizeBox(8, 8, 1, 8);
  const auto four_bits = [&] {
    return QuantizeFourBitCodes(codes.bytes(), floats.bytes(), groups, kernels::Element::kBF16,
                                kernels::FourBitKind::kMxFp4, 1);
  };
  EXPECT_EQ(four_bits().reason(), Reason::kIoError);
  EXPECT_EQ(four_bits(), OkStatus());
  const kernels::QuantizeBox one = kernels::oracle::PackedQuantizeBox(64, 512, 64, 512);
  Memory much(On::kGpu0, kernels::Bytes(64 * 512 * 2), 0),
      made(On::kHost, kernels::Bytes(64 * 512), 0);
  EXPECT_EQ(QuantizeCodes(made.bytes(), much.bytes(), one, kernels::Element::kBF16).reason(),
            Reason::kLimitExceeded);
  Memory source(On::kGpu0, content, 0);
  const kernels::StridedBox box{1, {4'001}, {1}, {1}};
  FAKE_CALL(fake_cuda_fail)("ww_cuda_sum", 1);
  const auto sum = SumTarget(source.bytes(), box, kernels::Element::kOpaque1);
  ASSERT_FALSE(sum.has_value());
  EXPECT_EQ(sum.error().reason(), Reason::kIoError);
}

}  // namespace
}  // namespace weightwire::device
