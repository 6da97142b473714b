// The kernels of libweightwire_cuda.so on a GPU against the CPU kernels, bit for bit.
// Untested on hardware until a machine with a GPU has run it.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstring>
#include <memory>

#include "kernels/cuda.h"
#include "kernels/delta.h"
#include "kernels/quantize.h"
#include "tests/unit/kernels/four_bit_oracle.h"
#include "tests/unit/kernels/oracle.h"
#include "tests/unit/kernels/quantize_oracle.h"
#include "tests/unit/kernels/random_box.h"

namespace weightwire::kernels {
namespace {

class OnDevice : public testing::Test {
 protected:
  void SetUp() override {
    int32_t count = 0;
    ASSERT_EQ(ww_cuda_device_count(&count), WW_CUDA_OK)
        << "tests with the label gpu need a GPU: " << ww_cuda_error();
    ASSERT_GT(count, 0);
    ASSERT_EQ(ww_cuda_stream_create(0, &stream_), WW_CUDA_OK) << ww_cuda_error();
  }
  void TearDown() override {
    if (stream_ != nullptr) {
      EXPECT_EQ(ww_cuda_stream_destroy(0, stream_), WW_CUDA_OK);
    }
  }

  cudaStream_t Stream() const { return static_cast<cudaStream_t>(stream_); }
  void Wait() { ASSERT_EQ(cudaStreamSynchronize(Stream()), cudaSuccess); }

  ww_cuda_stream stream_ = nullptr;
};

/// Device memory that begins with `content`.
class DeviceMemory {
 public:
  explicit DeviceMemory(const Bytes& content) : bytes_(content.size()) {
    EXPECT_EQ(cudaMalloc(&data_, bytes_), cudaSuccess);
    EXPECT_EQ(cudaMemcpy(data_, content.data(), bytes_, cudaMemcpyHostToDevice), cudaSuccess);
  }
  ~DeviceMemory() { cudaFree(data_); }
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;
  void* data() const { return data_; }
  Bytes Content() const {
    Bytes content(bytes_);
    EXPECT_EQ(cudaMemcpy(content.data(), data_, bytes_, cudaMemcpyDeviceToHost), cudaSuccess);
    return content;
  }

 private:
  size_t bytes_;
  void* data_ = nullptr;
};

ww_cuda_box ToC(const StridedBox& box) {
  ww_cuda_box c{};
  c.ndim = box.ndim;
  std::copy(box.extent, box.extent + box.ndim, c.extent);
  std::copy(box.source_stride, box.source_stride + box.ndim, c.source_stride);
  std::copy(box.target_stride, box.target_stride + box.ndim, c.target_stride);
  return c;
}

// More jobs in a call than one launch takes.
TEST_F(OnDevice, CopiesAndSumsRandomBoxesLikeTheCpu) {
  auto random = SeededGenerator();
  for (int round = 0; round < 20 && !HasFailure(); ++round) {
    constexpr size_t kJobs = 33;
    std::vector<Case> cases;
    std::vector<Bytes> want;
    std::vector<uint64_t> want_sums;
    std::vector<std::unique_ptr<DeviceMemory>> sources, targets;
    std::vector<ww_cuda_copy_job> copies;
    std::vector<ww_cuda_sum_job> sums;
    DeviceMemory got_sums(Bytes(kJobs * 8));
    for (size_t i = 0; i < kJobs; ++i) {
      const Case& c = cases.emplace_back(RandomCase(random));
      Bytes source = RandomBytes(random, SpanBytes(c.box, c.box.source_stride, c.from));
      Bytes& target =
          want.emplace_back(RandomBytes(random, SpanBytes(c.box, c.box.target_stride, c.to)));
      sources.push_back(std::make_unique<DeviceMemory>(source));
      targets.push_back(std::make_unique<DeviceMemory>(target));
      Copy(target.data(), source.data(), c.box, c.from, c.to);
      want_sums.push_back(SumSource(source.data(), c.box, c.from, c.to));
      auto from = static_cast<int32_t>(c.from);
      auto to = static_cast<int32_t>(c.to);
      copies.push_back({targets[i]->data(), sources[i]->data(), ToC(c.box), from, to});
      sums.push_back(
          {static_cast<uint64_t*>(got_sums.data()) + i, sources[i]->data(), ToC(c.box), from, to});
    }
    ASSERT_EQ(ww_cuda_copy(0, stream_, copies.data(), kJobs), WW_CUDA_OK) << ww_cuda_error();
    ASSERT_EQ(ww_cuda_sum(0, stream_, sums.data(), kJobs), WW_CUDA_OK) << ww_cuda_error();
    Wait();
    Bytes sum_bytes = got_sums.Content();
    for (size_t i = 0; i < kJobs; ++i) {
      EXPECT_TRUE(targets[i]->Content() == want[i]) << cases[i];
      uint64_t sum;
      std::memcpy(&sum, &sum_bytes[i * 8], 8);
      EXPECT_EQ(sum, want_sums[i]) << cases[i];
    }
  }
}

TEST_F(OnDevice, CastsEveryPatternLikeTheCpu) {
  Bytes source(65536 * 2);
  for (uint32_t i = 0; i < 65536; ++i) std::memcpy(&source[2 * i], &i, 2);
  DeviceMemory from(source);
  for (Element kind : {Element::kBF16, Element::kF16}) {
    for (Element to : {Element::kBF16, Element::kF16, Element::kF32}) {
      StridedBox box{1, {65536}, {1}, {1}};
      Bytes want(static_cast<size_t>(65536 * ElementBytes(to)));
      DeviceMemory target(want);
      Copy(want.data(), source.data(), box, kind, to);
      ww_cuda_copy_job job{target.data(), from.data(), ToC(box), static_cast<int32_t>(kind),
                           static_cast<int32_t>(to)};
      ASSERT_EQ(ww_cuda_copy(0, stream_, &job, 1), WW_CUDA_OK) << ww_cuda_error();
      Wait();
      EXPECT_TRUE(target.Content() == want) << static_cast<int>(kind) << static_cast<int>(to);
    }
  }
}

TEST_F(OnDevice, QuantizesRandomBoxesLikeTheCpu) {
  auto random = SeededGenerator();
  for (int i = 0; i < 300 && !HasFailure(); ++i) {
    oracle::QuantizeCase c = oracle::RandomQuantizeCase(random);
    SCOPED_TRACE(c.Text());
    oracle::Quantized want = c.Blank();
    DeviceMemory codes(want.codes), scales(want.scales), source(c.source);
    QuantizeE4M3(want.codes.data(), want.scales.data(), c.source.data(), c.box, c.from);
    const QuantizeBox& box = c.box;
    ww_cuda_quantize_job job{codes.data(),
                             scales.data(),
                             source.data(),
                             box.rows,
                             box.columns,
                             box.block_rows,
                             box.block_columns,
                             {box.source_stride[0], box.source_stride[1]},
                             {box.target_stride[0], box.target_stride[1]},
                             {box.scale_stride[0], box.scale_stride[1]},
                             static_cast<int32_t>(c.from),
                             static_cast<int32_t>(box.scale)};
    ASSERT_EQ(ww_cuda_quantize(0, stream_, &job, 1), WW_CUDA_OK) << ww_cuda_error();
    Wait();
    EXPECT_TRUE(codes.Content() == want.codes);
    EXPECT_TRUE(scales.Content() == want.scales);
  }
}

// Odd numbers of groups, more of them than a block of threads has, and the oracle's results.
TEST_F(OnDevice, QuantizesToFourBitsLikeTheOracle) {
  auto random = SeededGenerator();
  for (int i = 0; i < 15 * 32 && !HasFailure(); ++i) {
    const auto kind = static_cast<FourBitKind>(i % 5);
    const auto from = static_cast<Element>(static_cast<int>(Element::kBF16) + i / 5 % 3);
    const int64_t group = 8 * (1 + i / 15);
    const auto across = static_cast<int64_t>(1 + random() % 40);
    const oracle::FourBitCase c =
        oracle::RandomFourBitCase(random, kind, from, 1 + i % 9, across, group);
    SCOPED_TRACE(c.Text());
    const oracle::Quantized want = oracle::QuantizeFourBits(c);
    DeviceMemory codes(Bytes(want.codes.size(), 0xa5)), scales(Bytes(want.scales.size(), 0xa5)),
        source(c.source.source);
    const int64_t columns = c.source.box.columns;
    const int32_t code_bytes = i % 8 < 4 ? 1 : 4;
    const ww_cuda_four_bit_job job{codes.data(),
                                   scales.data(),
                                   source.data(),
                                   c.source.box.rows,
                                   columns,
                                   group,
                                   {columns, 1},
                                   {columns / 2 / code_bytes, 1},
                                   {across, 1},
                                   code_bytes,
                                   static_cast<int32_t>(from),
                                   static_cast<int32_t>(kind),
                                   c.global};
    ASSERT_EQ(ww_cuda_quantize_four_bit(0, stream_, &job, 1), WW_CUDA_OK) << ww_cuda_error();
    Wait();
    EXPECT_TRUE(codes.Content() == want.codes);
    EXPECT_TRUE(scales.Content() == want.scales);
  }
}

TEST_F(OnDevice, DeltasAreThoseOfTheCpu) {
  auto random = SeededGenerator();
  for (int number = 0; number < kDeltaOrders; ++number) {
    const auto order = static_cast<DeltaOrder>(number);
    const auto width = static_cast<size_t>(DeltaElementBytes(order));
    // The last: more chunks than one block of threads takes at a time.
    for (const size_t elements : {1u, 333u, 4096u, 70'001u, 1'100'003u}) {
      for (const unsigned apart : {1u, 3u, 100u, 5000u}) {
        for (const bool in_place : {false, true}) {
          SCOPED_TRACE(testing::Message() << number << " of " << elements << ", " << apart);
          const Bytes before = RandomBytes(random, elements * width);
          Bytes after = before;
          for (size_t i = random() % apart; i < elements; i += 1 + random() % (2 * apart)) {
            after[i * width + (random() % 8 == 0 ? width - 1 : 0)] ^= 1;
          }
          const size_t room = elements + kDeltaSlack;
          Bytes gaps(DeltaGapBytesMax(elements, elements)), steps(room), escapes(room * width);
          DeltaStreams want{gaps.data(), steps.data(), escapes.data(), 0, 0, 0};
          ASSERT_TRUE(DeltaScan(order, before.data(), after.data(), elements, elements, want));
          DeviceMemory base(before), now(after), copy(before), target(before);
          DeviceMemory made_gaps{Bytes(gaps.size())}, made_steps{Bytes(room)},
              made_escapes{Bytes(room * width)}, counts{Bytes(sizeof(ww_cuda_delta_counts))},
              applied{Bytes(4)};
          const auto at = [](const DeviceMemory& memory) {
            return static_cast<uint8_t*>(memory.data());
          };
          const auto count = static_cast<int64_t>(elements);
          DeviceMemory scratch{
              Bytes(static_cast<size_t>(ww_cuda_delta_scratch_bytes(number, count)))};
          const ww_cuda_delta_scan_job scan{number,
                                            base.data(),
                                            now.data(),
                                            in_place ? base.data() : copy.data(),
                                            count,
                                            count,
                                            at(made_gaps),
                                            at(made_steps),
                                            at(made_escapes),
                                            static_cast<ww_cuda_delta_counts*>(counts.data()),
                                            scratch.data()};
          ASSERT_EQ(ww_cuda_delta_scan(0, stream_, &scan, 1), WW_CUDA_OK) << ww_cuda_error();
          Wait();
          ww_cuda_delta_counts made{};
          std::memcpy(&made, counts.Content().data(), sizeof made);
          ASSERT_EQ(made.gap_bytes, static_cast<int64_t>(want.gap_bytes));
          ASSERT_EQ(made.changes, static_cast<int64_t>(want.changes));
          ASSERT_EQ(made.escapes, static_cast<int64_t>(want.escape_count));
          const auto same = [](const DeviceMemory& memory, const Bytes& wanted, size_t bytes) {
            return std::memcmp(memory.Content().data(), wanted.data(), bytes) == 0;
          };
          EXPECT_TRUE(same(made_gaps, gaps, want.gap_bytes));
          EXPECT_TRUE(same(made_steps, steps, want.changes));
          EXPECT_TRUE(same(made_escapes, escapes, want.escape_count * width));
          EXPECT_TRUE((in_place ? base : copy).Content() == after);
          const ww_cuda_delta_apply_job apply{
              number,         target.data(),    count, at(made_gaps),
              at(made_steps), at(made_escapes), made,  static_cast<uint32_t*>(applied.data()),
              scratch.data()};
          ASSERT_EQ(ww_cuda_delta_apply(0, stream_, &apply, 1), WW_CUDA_OK) << ww_cuda_error();
          Wait();
          EXPECT_TRUE(target.Content() == after);
          uint32_t yes = 0;
          std::memcpy(&yes, applied.Content().data(), sizeof yes);
          EXPECT_EQ(yes, 1u);
        }
      }
    }
  }
}

TEST_F(OnDevice, EventsOrderTwoStreams) {
  ww_cuda_stream second = nullptr;
  ww_cuda_event event = nullptr;
  ASSERT_EQ(ww_cuda_stream_create(0, &second), WW_CUDA_OK) << ww_cuda_error();
  ASSERT_EQ(ww_cuda_event_create(0, &event), WW_CUDA_OK) << ww_cuda_error();
  auto random = SeededGenerator();
  Bytes content = RandomBytes(random, size_t{64} << 20);
  DeviceMemory source(content), middle(Bytes(content.size())), target(Bytes(content.size()));
  StridedBox box{1, {static_cast<int64_t>(content.size())}, {1}, {1}};
  ww_cuda_copy_job first{middle.data(), source.data(), ToC(box), WW_OPAQUE1, WW_OPAQUE1};
  ww_cuda_copy_job then{target.data(), middle.data(), ToC(box), WW_OPAQUE1, WW_OPAQUE1};
  ASSERT_EQ(ww_cuda_copy(0, stream_, &first, 1), WW_CUDA_OK) << ww_cuda_error();
  ASSERT_EQ(ww_cuda_event_record(0, event, stream_), WW_CUDA_OK) << ww_cuda_error();
  ASSERT_EQ(ww_cuda_stream_wait(0, second, event), WW_CUDA_OK) << ww_cuda_error();
  ASSERT_EQ(ww_cuda_copy(0, second, &then, 1), WW_CUDA_OK) << ww_cuda_error();
  ASSERT_EQ(cudaStreamSynchronize(static_cast<cudaStream_t>(second)), cudaSuccess);
  EXPECT_EQ(ww_cuda_event_query(0, event), WW_CUDA_OK);
  EXPECT_TRUE(target.Content() == content);
  EXPECT_EQ(ww_cuda_event_destroy(0, event), WW_CUDA_OK);
  EXPECT_EQ(ww_cuda_stream_destroy(0, second), WW_CUDA_OK);
}

}  // namespace
}  // namespace weightwire::kernels
