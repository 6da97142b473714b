// libweightwire_cuda.so as an application meets it: by dlopen, on a host with or without a driver.
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <string>

#include "kernels/cuda.h"
#include "kernels/kernels.h"

namespace weightwire::kernels {
namespace {

static_assert(WW_OPAQUE8 == static_cast<int>(Element::kOpaque8));
static_assert(WW_BF16 == static_cast<int>(Element::kBF16));
static_assert(WW_F32 == static_cast<int>(Element::kF32));
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

TEST_F(CudaLibrary, SaysNoDeviceWhereThereIsNone) {
  int32_t count = -1;
  if (FIND(ww_cuda_device_count)(&count) == WW_CUDA_OK) GTEST_SKIP() << "this host has a GPU";
  EXPECT_EQ(count, 0);
  alignas(16) char memory[64] = {};
  ww_cuda_copy_job copy{memory, memory + 32, {1, {4}, {1}, {1}}, WW_F32, WW_F32};
  uint64_t sum = 0;
  ww_cuda_sum_job sum_job{&sum, memory, {1, {4}, {1}, {1}}, WW_F32, WW_F32};
  float scale = 0;
  ww_cuda_quantize_job quantize{memory, &scale, memory + 32, 2,      2,     128,
                                128,    {2, 1}, {2, 1},      {1, 1}, WW_F32};
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
