// libweightwire_cuda.so as an application meets it: by dlopen, on a host with or without a driver.
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <cmath>
#include <string>

#include "kernels/cuda.h"
#include "kernels/delta.h"
#include "kernels/four_bit.h"
#include "kernels/kernels.h"

namespace weightwire::kernels {
namespace {

static_assert(WW_OPAQUE8 == static_cast<int>(Element::kOpaque8));
static_assert(WW_BF16 == static_cast<int>(Element::kBF16));
static_assert(WW_F32 == static_cast<int>(Element::kF32));
static_assert(kDeltaOrders == static_cast<int>(DeltaOrder::kFloat32) + 1);
static_assert(sizeof(ww_cuda_box::extent) == sizeof(StridedBox::extent));

class CudaLibrary : public testing::Test {
 protected:
  void SetUp() override {
    library_ = dlopen(WEIGHTWIRE_CUDA_LIBRARY, RTLD_NOW | RTLD_LOCAL);
    ASSERT_NE(library_, nullptr) << dlerror();
  }
  void TearDown() override {
    if (library_ != nullptr) dlclose(library_);
  }

  template <class Function>
  Function* Find(const char* name, Function*) {
    return reinterpret_cast<Function*>(dlsym(library_, name));
  }

  void* library_ = nullptr;
};
#define FIND(name) Find(#name, static_cast<decltype(&name)>(nullptr))

TEST_F(CudaLibrary, LoadsAnywhereAndTellsItsVersion) {
  ASSERT_NE(FIND(ww_cuda_abi_version), nullptr);
  EXPECT_EQ(FIND(ww_cuda_abi_version)(), uint32_t{WW_CUDA_ABI_VERSION});
  EXPECT_STREQ(FIND(ww_cuda_error)(), "");
}

TEST_F(CudaLibrary, ExportsNothingButItsInterface) {
  EXPECT_NE(dlsym(library_, "ww_cuda_quantize"), nullptr);
  EXPECT_NE(dlsym(library_, "ww_cuda_delta_scan"), nullptr);
  // ElementBytes(Element) and Normalize(const StridedBox&), which it contains.
  EXPECT_EQ(dlsym(library_, "_ZN10weightwire7kernels12ElementBytesENS0_7ElementE"), nullptr);
  EXPECT_EQ(dlsym(library_, "_ZN10weightwire7kernels9NormalizeERKNS0_10StridedBoxE"), nullptr);
}

// Wrong arguments are told before a device is looked for, so this holds on every host.
TEST_F(CudaLibrary, SaysWhichJobIsWrong) {
  alignas(16) char memory[64];
  ww_cuda_copy_job jobs[2] = {{memory, memory + 32, {1, {4}, {1}, {1}}, WW_F32, WW_F32},
                              {memory, memory + 32, {1, {4}, {1}, {1}}, WW_F32, WW_F32}};
  auto copy = FIND(ww_cuda_copy);
  auto expect = [&](const char* why) {
    EXPECT_EQ(copy(0, nullptr, jobs, 2), WW_CUDA_INVALID);
    EXPECT_EQ(std::string(FIND(ww_cuda_error)()), std::string("ww_cuda_copy: job 1 of 2: ") + why);
  };
  jobs[1].to = WW_OPAQUE2;
  expect("no cast between these element kinds is known");
  jobs[1].to = 7;
  expect("an element kind is unknown");
  jobs[1].to = WW_F32;
  jobs[1].box.extent[0] = 0;
  expect("the box needs ndim 0 to 8, extents from 1 and strides from 0");
  jobs[1].box.extent[0] = 4;
  jobs[1].source = memory + 33;
  expect("the source is null or not aligned to its elements");
  jobs[1].source = memory + 32;
  jobs[1].target = nullptr;
  expect("the target is null or not aligned to its elements");
}

TEST_F(CudaLibrary, SaysWhatIsWrongWithGroupsOfFourBits) {
  alignas(16) unsigned char memory[512] = {};
  constexpr int32_t kNvFp4 = static_cast<int32_t>(FourBitKind::kNvFp4);
  constexpr int32_t kInt4 = static_cast<int32_t>(FourBitKind::kInt4);
  const ww_cuda_four_bit_job sound{memory,  memory + 64, memory + 128, 2,      64,
                                   32,      {64, 1},     {32, 1},      {2, 1}, 1,
                                   WW_BF16, kNvFp4,      1.5f};
  const auto expect = [&](auto change, const char* why) {
    ww_cuda_four_bit_job jobs[2] = {sound, sound};
    change(jobs[1]);
    EXPECT_EQ(FIND(ww_cuda_quantize_four_bit)(0, nullptr, jobs, 2), WW_CUDA_INVALID) << why;
    EXPECT_EQ(std::string(FIND(ww_cuda_error)()),
              std::string("ww_cuda_quantize_four_bit: job 1 of 2: ") + why);
  };
  for (const int32_t from : {WW_OPAQUE8 + 0, WW_F32 + 1}) {
    expect([&](auto& job) { job.from = from; }, "only bf16, fp16 and fp32 can be quantized");
  }
  for (const int32_t kind : {-1, static_cast<int32_t>(kLastFourBitKind) + 1}) {
    expect([&](auto& job) { job.kind = kind; }, "no such kind of four bits");
  }
  for (const int64_t group : {-8, 0, 4, 12, 264}) {
    expect([&](auto& job) { job.group = group, job.columns = 11 * group; },
           "groups must be of 8 to 256 elements, a multiple of 8");
  }
  const char* extents = "the matrix needs extents from 1, and whole groups";
  expect([](auto& job) { job.rows = 0; }, extents);
  expect([](auto& job) { job.columns = 0; }, extents);
  expect([](auto& job) { job.columns = 48; }, extents);
  expect([](auto& job) { job.rows = INT64_MAX / 63; }, "the matrix is larger than any memory");
  expect([](auto& job) { job.source_stride[1] = -1; }, "strides must be from 0");
  expect([](auto& job) { job.code_stride[0] = -1; }, "strides must be from 0");
  expect([](auto& job) { job.scale_stride[1] = -1; }, "strides must be from 0");
  expect([](auto& job) { job.codes = job.scales = nullptr; }, "codes and scales are null");
  expect([](auto& job) { job.code_bytes = 2; }, "codes must lie in units of 1 or 4 bytes");
  for (const float global : {0.0f, -1.0f, HUGE_VALF}) {
    expect([&](auto& job) { job.global = global; },
           "the global scale must be a number above 0 (of modelopt's NVFP4 or 0), or NaN");
  }
  const char* aligned = "a pointer is null or not aligned to its elements";
  expect([](auto& job) { job.source = nullptr; }, aligned);
  expect([&](auto& job) { job.source = memory + 129; }, aligned);
  expect([&](auto& job) { job.codes = memory + 2, job.code_bytes = 4; }, aligned);
  expect([&](auto& job) { job.scales = memory + 65, job.kind = kInt4; }, aligned);
}

TEST_F(CudaLibrary, SaysWhatIsWrongWithADelta) {
  alignas(16) uint8_t memory[256] = {};
  ww_cuda_delta_counts counts{};
  uint32_t applied = 0;
  const int32_t kFloat16 = static_cast<int32_t>(DeltaOrder::kFloat16);
  const ww_cuda_delta_scan_job scan{kFloat16,    memory,      memory + 16, nullptr, 8,     8,
                                    memory + 32, memory + 48, memory + 64, &counts, memory};
  const ww_cuda_delta_apply_job apply{kFloat16,    memory,    300,      memory + 32, memory + 48,
                                      memory + 64, {3, 2, 1}, &applied, memory};
  const auto refused = [&](auto call, auto job, const char* name, auto change, const char* why) {
    change(job);
    EXPECT_EQ(call(0, nullptr, &job, 1), WW_CUDA_INVALID);
    EXPECT_EQ(std::string(FIND(ww_cuda_error)()), std::string(name) + ": job 0 of 1: " + why);
  };
  const auto scan_refused = [&](auto change, const char* why) {
    refused(FIND(ww_cuda_delta_scan), scan, "ww_cuda_delta_scan", change, why);
  };
  scan_refused([](auto& job) { job.order = kDeltaOrders; }, "the order is unknown");
  scan_refused([](auto& job) { job.elements = -1; },
               "elements and changes must be from 0, elements at most 2^38");
  scan_refused([&](auto& job) { job.now = memory + 1; },
               "an array is null or not aligned to its elements");
  scan_refused([&](auto& job) { job.copy = memory + 1; },
               "an array is null or not aligned to its elements");
  scan_refused([](auto& job) { job.steps = nullptr; }, "a stream is null");
  scan_refused([&](auto& job) { job.scratch = memory + 4; },
               "counts or scratch memory are null or not aligned to 8 bytes");
  const auto apply_refused = [&](auto change, const char* why) {
    refused(FIND(ww_cuda_delta_apply), apply, "ww_cuda_delta_apply", change, why);
  };
  const char* longer = "the streams are longer than the array's can be";
  apply_refused([](auto& job) { job.order = -1; }, "the order is unknown");
  apply_refused([](auto& job) { job.counts.changes = 301; }, longer);
  apply_refused([](auto& job) { job.counts.escapes = 3; }, longer);
  apply_refused([](auto& job) { job.counts.gap_bytes = 4; }, longer);
  apply_refused([](auto& job) { job.applied = nullptr; },
                "applied or scratch memory are null or not aligned");
  EXPECT_EQ(FIND(ww_cuda_delta_scratch_bytes)(kDeltaOrders, 8), 0);
  EXPECT_GT(FIND(ww_cuda_delta_scratch_bytes)(kFloat16, 0), 0);
}

TEST_F(CudaLibrary, SaysNoDeviceWhereThereIsNone) {
  int32_t count = -1;
  if (FIND(ww_cuda_device_count)(&count) == WW_CUDA_OK) GTEST_SKIP() << "this host has a GPU";
  EXPECT_EQ(count, 0);
  alignas(16) char memory[64] = {};
  ww_cuda_copy_job copy{memory, memory + 32, {1, {4}, {1}, {1}}, WW_F32, WW_F32};
  uint64_t sum = 0;
  ww_cuda_sum_job sum_job{&sum, memory, {1, {4}, {1}, {1}}, WW_F32, WW_F32};
  float scale = 0;
  ww_cuda_quantize_job quantize{memory, &scale, memory + 32, 2,      2,      128,
                                128,    {2, 1}, {2, 1},      {1, 1}, WW_F32, 0};
  void* handle = nullptr;
  auto expect = [&](int32_t status, const std::string& call) {
    EXPECT_EQ(status, WW_CUDA_NO_DEVICE) << call;
    std::string error = FIND(ww_cuda_error)();
    EXPECT_EQ(error.rfind(call + ": no device: ", 0), 0u) << error;
  };
  expect(FIND(ww_cuda_device_count)(&count), "ww_cuda_device_count");
  expect(FIND(ww_cuda_copy)(0, nullptr, &copy, 1), "ww_cuda_copy");
  expect(FIND(ww_cuda_sum)(0, nullptr, &sum_job, 1), "ww_cuda_sum");
  expect(FIND(ww_cuda_quantize)(0, nullptr, &quantize, 1), "ww_cuda_quantize");
  // Codes lie anywhere, scales alone are made, and a global scale is NvFp4's alone.
  ww_cuda_four_bit_job four{memory + 1, nullptr, memory, 1,      8, 8,  {8, 1},
                            {4, 1},     {1, 1},  1,      WW_F32, 2, NAN};
  expect(FIND(ww_cuda_quantize_four_bit)(0, nullptr, &four, 1), "ww_cuda_quantize_four_bit");
  four = {nullptr, memory, memory, 1, 8, 8, {8, 1}, {4, 1}, {1, 1}, 4, WW_F32, 3, -1.0f};
  expect(FIND(ww_cuda_quantize_four_bit)(0, nullptr, &four, 1), "ww_cuda_quantize_four_bit");
  ww_cuda_delta_counts counts{};
  uint8_t* const at = reinterpret_cast<uint8_t*>(memory);
  ww_cuda_delta_scan_job scan{0, at, at, nullptr, 1, 1, at, at, at, &counts, at};
  expect(FIND(ww_cuda_delta_scan)(0, nullptr, &scan, 1), "ww_cuda_delta_scan");
  uint32_t applied = 0;
  ww_cuda_delta_apply_job apply{0, at, 1, at, at, at, {1, 1, 0}, &applied, at};
  expect(FIND(ww_cuda_delta_apply)(0, nullptr, &apply, 1), "ww_cuda_delta_apply");
  expect(FIND(ww_cuda_stream_create)(0, &handle), "ww_cuda_stream_create");
  expect(FIND(ww_cuda_event_create)(3, &handle), "ww_cuda_event_create");
  uint8_t bytes[WW_CUDA_IPC_BYTES] = {};
  expect(FIND(ww_cuda_device_uuid)(0, bytes), "ww_cuda_device_uuid");
  expect(FIND(ww_cuda_alloc)(0, 64, &handle), "ww_cuda_alloc");
  expect(FIND(ww_cuda_free)(0, memory), "ww_cuda_free");
  expect(FIND(ww_cuda_ipc_export)(0, memory, bytes), "ww_cuda_ipc_export");
  expect(FIND(ww_cuda_ipc_open)(0, bytes, &handle), "ww_cuda_ipc_open");
  expect(FIND(ww_cuda_ipc_close)(0, memory), "ww_cuda_ipc_close");
  size_t size = 0;
  expect(FIND(ww_cuda_ipc_bytes)(0, memory, &size), "ww_cuda_ipc_bytes");
  expect(FIND(ww_cuda_peer_enable)(0, 1), "ww_cuda_peer_enable");
  expect(FIND(ww_cuda_host_register)(memory, 64), "ww_cuda_host_register");
  expect(FIND(ww_cuda_host_unregister)(memory), "ww_cuda_host_unregister");
  expect(FIND(ww_cuda_flush_writes)(0), "ww_cuda_flush_writes");
  expect(FIND(ww_cuda_copy_bytes)(0, nullptr, memory, memory + 32, 8), "ww_cuda_copy_bytes");
  expect(FIND(ww_cuda_event_wait)(0, nullptr), "ww_cuda_event_wait");
}

}  // namespace
}  // namespace weightwire::kernels
