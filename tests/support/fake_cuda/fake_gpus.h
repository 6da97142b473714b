#pragma once

#include <dlfcn.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "server/device/device.h"
#include "server/memory/gpu_memory_pool.h"
#include "tests/support/fake_cuda/fake_cuda.h"

/// The fake GPUs of a test program (FAKE_CUDA_LIBRARY), two of them, loaded as a GPU's library is.
namespace weightwire::testing {

inline std::shared_ptr<const device::Library> FakeLibrary() {
  static const auto library = [] {
    setenv("FAKE_CUDA_DEVICES", "1,0", 1);
    return device::Library::Load(FAKE_CUDA_LIBRARY).value();
  }();
  return library;
}

/// A call of the fake that its interface does not have.
template <typename Function>
Function* FakeCall(const char* name, Function*) {
  static_cast<void>(FakeLibrary());
  void* library = dlopen(FAKE_CUDA_LIBRARY, RTLD_NOW | RTLD_NOLOAD);
  auto* found = reinterpret_cast<Function*>(dlsym(library, name));
  EXPECT_NE(found, nullptr) << name;
  return found;
}
#define FAKE_CALL(name) \
  ::weightwire::testing::FakeCall(#name, static_cast<decltype(&::name)>(nullptr))

/// By index; on any thread. Lanes are so small that most boxes go in parts.
inline std::shared_ptr<device::Device> FakeDevice(size_t index,
                                                  const device::LaneSizes& lanes = {2, 1024}) {
  static std::mutex mutex;
  static std::map<std::pair<size_t, size_t>, std::shared_ptr<device::Device>> devices;
  const std::lock_guard lock(mutex);
  auto& device = devices[{index, lanes.bytes}];
  if (!device) {
    device = device::Device::Open(FakeLibrary(), FakeLibrary()->devices().at(index), lanes).value();
  }
  return device;
}

/// The same GPU with lanes that most of what a test copies fits in, where lanes are not what it is
/// about.
inline std::shared_ptr<device::Device> WideFakeDevice(size_t index) {
  return FakeDevice(index, {4, 1 << 20});
}

/// Both, as a transport takes them.
inline std::map<device::Uuid, std::shared_ptr<device::Device>> FakeDevices() {
  return {{FakeDevice(0)->uuid(), FakeDevice(0)}, {FakeDevice(1)->uuid(), FakeDevice(1)}};
}

inline std::shared_ptr<memory::GpuMemoryPool> FakeSlabs(size_t index) {
  static std::map<size_t, std::shared_ptr<memory::GpuMemoryPool>> pools;
  auto& pool = pools[index];
  if (!pool) pool = memory::GpuMemoryPool::Make(FakeDevice(index), 64 << 20).value();
  return pool;
}

}  // namespace weightwire::testing
