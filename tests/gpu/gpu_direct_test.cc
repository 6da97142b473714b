// What to run first where a GPU is, and an RDMA device beside it: docs/gpu-results.md. From the
// parts to the whole, so that the first failure says what does not work.
#include <gtest/gtest.h>

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <random>

#include "server/device/bytes.h"
#include "server/memory/gpu_memory_pool.h"
#include "server/transport/ucx/ucx_library.h"
#include "server/transport/ucx/ucx_registry.h"
#include "server/transport/ucx/ucx_transport.h"
#include "tests/support/accepting_handler.h"

namespace weightwire::transport {
namespace {

using namespace std::chrono_literals;  // NOLINT: a test

constexpr uint64_t kSlabBytes = 256 << 20;
constexpr Nanos kLong = 30s;

/// One slab of the first GPU, for all tests.
std::shared_ptr<memory::GpuMemoryPool> Slab() {
  static const auto slab = []() -> std::shared_ptr<memory::GpuMemoryPool> {
    const auto library = device::Library::Load(WEIGHTWIRE_CUDA_LIBRARY);
    if (!library) return nullptr;
    const auto gpu = device::Device::Open(*library, (*library)->devices().front(), {2, 1 << 20});
    return memory::GpuMemoryPool::Make(gpu.value(), kSlabBytes).value();
  }();
  return slab;
}

std::shared_ptr<memory::MemoryRegion> Filled(uint64_t bytes, uint64_t seed,
                                             std::vector<std::byte>* content) {
  auto region = Slab()->Allocate("test", bytes).value();
  std::mt19937_64 random(seed);
  content->resize(bytes);
  for (std::byte& byte : *content) byte = static_cast<std::byte>(random());
  EXPECT_EQ(device::CopyRun(region->bytes(), content->data(), bytes), OkStatus());
  return region;
}

std::vector<std::byte> Content(const memory::MemoryRegion& region) {
  std::vector<std::byte> bytes(region.size());
  EXPECT_EQ(device::CopyRun({bytes.data()}, region.bytes(), bytes.size()), OkStatus());
  return bytes;
}

TEST(GpuDirectHardware, TheGpuSaysHowItOrdersTheWritesOfANic) {
  ASSERT_NE(Slab(), nullptr) << "no GPU";
  EXPECT_EQ(Slab()->device().FlushWrites(), OkStatus());
  EXPECT_EQ(Slab()->device().FlushWrites(), OkStatus());  // from what it has learnt
}

TEST(GpuDirectHardware, UcxRegistersASlab) {
  ASSERT_NE(Slab(), nullptr) << "no GPU";
  auto worker = MakeUcxWorker({});
  if (!worker) GTEST_SKIP() << worker.error().ToString();
  if (!(*worker)->KnowsCuda()) GTEST_SKIP() << "this libucp reaches no CUDA memory";
  UcxRegistry registry;
  std::string failure;
  std::vector<std::byte> content;
  const auto region = Filled(4'096, 1, &content);
  const UcxRegistered* known = registry.Of(**worker, region, failure);
  ASSERT_NE(known, nullptr) << failure;
  EXPECT_FALSE(known->memory.remote_key.empty());
  registry.ReleaseAll(**worker);
}

/// A value that another thread brings.
template <typename T>
class Later {
 public:
  void Set(T value) {
    std::lock_guard lock(mutex_);
    value_ = std::move(value);
    changed_.notify_all();
  }
  std::optional<T> Wait() {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, kLong, [this] { return value_.has_value(); });
    return value_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::optional<T> value_;
};

// From the GPU to the GPU by the NIC, at odd sizes, and seen there after the flush.
TEST(GpuDirectHardware, UcxReadsFromGpuMemoryIntoGpuMemory) {
  ASSERT_NE(Slab(), nullptr) << "no GPU";
  UcxOptions options;
  options.slab_gpus = {Slab()->device().name()};
  testing::AcceptingHandler peer;
  const auto source = MakeUcxTransport(options), reader = MakeUcxTransport(options);
  if (!source->Viable().ok()) GTEST_SKIP() << source->Viable().ToString();
  if (!source->capabilities().gets_device_memory) GTEST_SKIP() << source->choices();
  ASSERT_EQ(source->Start(&peer, Incarnation(1)), OkStatus());
  ASSERT_EQ(reader->Start(&peer, Incarnation(2)), OkStatus());
  Hello hello;
  hello.caller = Incarnation(2);
  hello.callee = Incarnation(1);
  auto connected = std::make_shared<Later<Result<std::shared_ptr<Endpoint>>>>();
  reader->Connect(source->address(), hello, kLong,
                  [connected](auto result) { connected->Set(std::move(result)); });
  const auto endpoint = connected->Wait();
  ASSERT_TRUE(endpoint && endpoint->has_value());
  for (const uint64_t bytes : {uint64_t{1}, uint64_t{63}, uint64_t{4'097}, uint64_t{1} << 20,
                               (uint64_t{8} << 20) + 3, uint64_t{32} << 20}) {
    SCOPED_TRACE(bytes);
    std::vector<std::byte> sent, before;
    const auto from = Filled(bytes + 2, bytes, &sent);
    const auto into = Filled(bytes + 2, bytes + 1, &before);
    auto done = std::make_shared<Later<Status>>();
    (**endpoint)
        ->Get(source->Export({{from, 1, bytes}}), 0, {MutableSpan(*into, 1, bytes)}, kLong, into,
              [done](Status status) { done->Set(std::move(status)); });
    ASSERT_EQ(done->Wait(), OkStatus());
    ASSERT_EQ(Slab()->device().FlushWrites(), OkStatus());
    std::copy(sent.begin() + 1, sent.end() - 1, before.begin() + 1);
    ASSERT_EQ(Content(*into), before);
  }
}

}  // namespace
}  // namespace weightwire::transport
