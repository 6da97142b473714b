// What is registered, when and for how long, with a UCX that only keeps books. The real one
// registers no GPU memory here.
#include "server/transport/ucx/ucx_registry.h"

#include <gtest/gtest.h>

#include <set>

#include "tests/support/fake_cuda/fake_gpus.h"

namespace weightwire::transport {
namespace {

class Books final : public UcxWorker {
 public:
  struct Range {
    std::byte* at;
    size_t bytes;
    UcxKind kind;
  };
  std::vector<Range> registered;
  std::multiset<std::string> alive;
  std::string refusal;

  std::string Register(std::byte* data, size_t bytes, UcxKind kind, UcxMemory& memory) override {
    if (!refusal.empty()) return refusal;
    registered.push_back({data, bytes, kind});
    memory = {kind, data, "key " + std::to_string(registered.size())};
    alive.insert(memory.remote_key);
    return {};
  }
  void Release(const UcxMemory& memory) override { ASSERT_EQ(alive.erase(memory.remote_key), 1u); }

  std::vector<std::string> Resources() const override { return {}; }
  bool KnowsCuda() const override { return true; }
  int event_fd() const override { return -1; }
  bool Progress(UcxEvents&) override { return false; }
  bool Arm() override { return true; }
  std::string Listen(const sockaddr*, size_t, uint16_t&) override { return {}; }
  void StopListening() override {}
  uint64_t Connect(const sockaddr*, size_t, std::string&) override { return 0; }
  uint64_t Accept(void*, std::string&) override { return 0; }
  void Reject(void*) override {}
  void Send(uint64_t, std::span<const std::byte>, bool) override {}
  std::vector<std::string> Lanes(uint64_t) override { return {}; }
  void Close(uint64_t) override {}
  void* ImportKey(uint64_t, std::span<const std::byte>) override { return nullptr; }
  void ReleaseKey(void*) override {}
  void Read(uint64_t, void*, uint64_t, std::byte*, size_t, const UcxMemory*, uint64_t) override {}
};

TEST(UcxRegistry, AnAllocationIsRegisteredOnceAndAsAWhole) {
  Books ucx;
  UcxRegistry registry;
  std::string failure;
  auto slabs = memory::GpuMemoryPool::Make(testing::FakeDevice(0), 1 << 20).value();
  auto first = slabs->Allocate("a", 1'000).value();
  auto second = slabs->Allocate("b", 2'000).value();
  const UcxRegistered* known = registry.Of(ucx, first, failure);
  ASSERT_NE(known, nullptr) << failure;
  EXPECT_EQ(registry.Of(ucx, second, failure), known);
  EXPECT_EQ(registry.Of(ucx, second->allocation(), failure), known);
  ASSERT_EQ(ucx.registered.size(), 1u);
  EXPECT_EQ(ucx.registered[0].at, first->allocation().at());
  EXPECT_EQ(ucx.registered[0].bytes, size_t{1} << 20);
  EXPECT_EQ(ucx.registered[0].kind, UcxKind::kCuda);
  registry.ReleaseAll(ucx);
  EXPECT_TRUE(ucx.alive.empty());
}

// Ranges come and go with the ranks they were lent to, and a peer may still read.
TEST(UcxRegistry, AnAllocationStaysRegisteredAndAliveUntilTheEnd) {
  const auto allocated = FAKE_CALL(fake_cuda_bytes_allocated);
  Books ucx;
  UcxRegistry registry;
  std::string failure;
  auto slabs = memory::GpuMemoryPool::Make(testing::FakeDevice(0), 1 << 20).value();
  const uint64_t with_slab = allocated();
  auto region = slabs->Allocate("a", 1'000).value();
  ASSERT_NE(registry.Of(ucx, region, failure), nullptr);
  region.reset();
  EXPECT_TRUE(registry.ReleaseDead(ucx).empty());
  slabs.reset();
  EXPECT_TRUE(registry.ReleaseDead(ucx).empty());
  EXPECT_EQ(ucx.alive.size(), 1u);
  EXPECT_EQ(allocated(), with_slab);
  registry.ReleaseAll(ucx);
  EXPECT_TRUE(ucx.alive.empty());
  EXPECT_LT(allocated(), with_slab);
}

TEST(UcxRegistry, HostMemoryAndAllocationsHaveNumbersOfTheirOwn) {
  Books ucx;
  UcxRegistry registry;
  std::string failure;
  auto slabs = memory::GpuMemoryPool::Make(testing::FakeDevice(0), 1 << 20).value();
  auto other_slabs = memory::GpuMemoryPool::Make(testing::FakeDevice(1), 1 << 20).value();
  auto host = memory::MemoryRegion::Allocate("host", 4'096).value();
  auto other_host = memory::MemoryRegion::Allocate("host", 4'096).value();
  std::set<uint64_t> ids;
  for (const auto& region : {host, slabs->Allocate("a", 10).value(), other_host,
                             other_slabs->Allocate("b", 10).value()}) {
    const UcxRegistered* known = registry.Of(ucx, region, failure);
    ASSERT_NE(known, nullptr);
    EXPECT_NE(known->id, 0u);
    ids.insert(known->id);
  }
  EXPECT_EQ(ids.size(), 4u);
  EXPECT_EQ(ucx.registered[0].kind, UcxKind::kHost);
  const uint64_t gone = registry.Of(ucx, host, failure)->id;
  host.reset();
  EXPECT_EQ(registry.ReleaseDead(ucx), std::vector<uint64_t>{gone});
  EXPECT_EQ(ucx.alive.size(), 3u);
  registry.ReleaseAll(ucx);
}

TEST(UcxRegistry, ARefusalIsToldAndTriedAgain) {
  Books ucx;
  UcxRegistry registry;
  std::string failure;
  auto slabs = memory::GpuMemoryPool::Make(testing::FakeDevice(0), 1 << 20).value();
  auto region = slabs->Allocate("a", 10).value();
  ucx.refusal = "no peer memory";
  EXPECT_EQ(registry.Of(ucx, region, failure), nullptr);
  EXPECT_EQ(failure, "no peer memory");
  ucx.refusal.clear();
  EXPECT_NE(registry.Of(ucx, region, failure), nullptr);
  registry.ReleaseAll(ucx);
}

}  // namespace
}  // namespace weightwire::transport
