#include "server/memory/gpu_memory_pool.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <random>

#include "server/memory/stage_store.h"
#include "tests/support/fake_cuda/fake_gpus.h"

namespace weightwire::memory {
namespace {

using weightwire::testing::FakeDevice;

std::shared_ptr<GpuMemoryPool> MakePool(uint64_t bytes) {
  return GpuMemoryPool::Make(FakeDevice(0), bytes).value();
}

/// What a process gets with a GPU pool.
UniqueFd LeaseOf(const MemoryRegion& region) { return UniqueFd(dup(region.fd())); }

TEST(GpuMemoryPool, LendsRangesOfOneAllocation) {
  const auto pool = MakePool(10'000);
  const auto a = pool->Allocate("a", 700).value();
  const auto b = pool->Allocate("b", 1).value();
  EXPECT_TRUE(a->on_device());
  EXPECT_EQ(a->size(), 700u);
  EXPECT_EQ(&a->allocation(), &b->allocation());
  EXPECT_EQ(a->offset(), 0u);
  EXPECT_EQ(b->offset(), 1'024u);
  EXPECT_EQ(a->bytes().at, a->allocation().at());
  EXPECT_EQ(b->bytes().at, b->allocation().at() + 1'024);
  EXPECT_EQ(b->bytes().device, FakeDevice(0).get());
  EXPECT_EQ(pool->bytes_used(), 1'024u + 512u);
}

TEST(GpuMemoryPool, RefusesWhatDoesNotFitWithNeedUseBudgetAndGpu) {
  const auto pool = MakePool(4'096);
  const auto held = pool->Allocate("first", 3'000).value();
  const auto refused = pool->Allocate("the stage of engine/3", 1'025);
  ASSERT_FALSE(refused.has_value());
  EXPECT_EQ(refused.error().code(), Code::kResourceExhausted);
  EXPECT_EQ(refused.error().reason(), Reason::kLimitExceeded);
  EXPECT_EQ(refused.error().message(),
            "the stage of engine/3 needs 1025 bytes together on " + FakeDevice(0)->name() +
                "; 3072 of the budget of 4096 are in use, 0 of them by processes that have left");
  EXPECT_TRUE(pool->Allocate("fits", 1'024).has_value());
  EXPECT_FALSE(pool->Allocate("overflows", UINT64_MAX).has_value());
  EXPECT_FALSE(pool->Allocate("nothing", 0).has_value());
}

TEST(GpuMemoryPool, LendsAgainOnlyWhenTheLastLeaseIsClosed) {
  const auto pool = MakePool(4'096);
  auto region = pool->Allocate("a", 4'096).value();
  UniqueFd one = LeaseOf(*region), another = LeaseOf(*region);
  region.reset();
  EXPECT_EQ(pool->bytes_used(), 4'096u);
  one = UniqueFd();
  const auto refused = pool->Allocate("b", 1);
  ASSERT_FALSE(refused.has_value());
  EXPECT_NE(refused.error().message().find("4096 of them by processes that have left"),
            std::string::npos);
  another = UniqueFd();
  EXPECT_EQ(pool->bytes_used(), 0u);
  EXPECT_TRUE(pool->Allocate("b", 4'096).has_value());
}

TEST(GpuMemoryPool, KeepsALentSlabWhenOnlyItsLeaseIsClosed) {
  const auto pool = MakePool(4'096);
  const auto region = pool->Allocate("a", 4'096).value();
  static_cast<void>(LeaseOf(*region));
  EXPECT_EQ(pool->bytes_used(), 4'096u);
  EXPECT_FALSE(pool->Allocate("b", 1).has_value());
}

TEST(GpuMemoryPool, NeverLendsAByteTwice) {
  std::mt19937_64 random(21);
  const auto pool = MakePool(100'000);
  std::vector<std::shared_ptr<MemoryRegion>> lent;
  for (int i = 0; i < 2'000; ++i) {
    if (!lent.empty() && random() % 2 == 0) {
      lent.erase(lent.begin() + static_cast<ptrdiff_t>(random() % lent.size()));
      continue;
    }
    auto region = pool->Allocate("some", 1 + random() % 9'000);
    if (!region) continue;
    EXPECT_EQ((*region)->offset() % 512, 0u);
    EXPECT_LE((*region)->offset() + (*region)->size(), 100'000u);
    for (const auto& other : lent) {
      EXPECT_TRUE((*region)->offset() >= other->offset() + other->size() ||
                  other->offset() >= (*region)->offset() + (*region)->size());
    }
    lent.push_back(std::move(*region));
  }
  lent.clear();
  EXPECT_EQ(pool->bytes_used(), 0u);
}

TEST(GpuMemoryPool, LivesAsLongAsItsRegions) {
  auto pool = MakePool(1'024);
  const auto region = pool->Allocate("a", 1'024).value();
  pool.reset();
  std::vector<std::byte> content(1'024, std::byte{3});
  EXPECT_EQ(device::CopyRun(region->bytes(), content.data(), 1'024), OkStatus());
}

TEST(GpuMemoryPoolDeathTest, HostAccessToADeviceRegionAborts) {
  const auto region = MakePool(1'000)->Allocate("a", 10).value();
  EXPECT_DEATH(static_cast<void>(region->data()), "on_device");
}

TEST(GpuMemoryPool, HoldsAStage) {
  const auto pool = MakePool(8'192);
  auto stage = StageBuffers::Make("stage", *ArenaMapOf({100, 200}), 2, pool).value();
  ASSERT_EQ(stage->regions().size(), 2u);
  for (const auto& region : stage->regions()) EXPECT_TRUE(region->on_device());
  EXPECT_FALSE(StageBuffers::Make("large", *ArenaMapOf({5'000}), 2, pool).has_value());
  stage.reset();
  EXPECT_EQ(pool->bytes_used(), 0u);
}

TEST(GpuMemoryPools, SayWhyADeviceIsNotAmongThem) {
  GpuMemoryPools pools;
  pools.none = Status(Code::kFailedPrecondition, Reason::kConfigInvalid, "gpu is off").Remedy("r");
  const auto off = pools.Of(FakeDevice(0)->uuid());
  ASSERT_FALSE(off.has_value());
  EXPECT_EQ(off.error().message(),
            "this agent has no memory of " + FakeDevice(0)->name() + " to lend: gpu is off");
  EXPECT_EQ(off.error().remedy(), "r");
  pools.none = OkStatus();
  pools.by_device.emplace(FakeDevice(0)->uuid(), MakePool(512));
  EXPECT_TRUE(pools.Of(FakeDevice(0)->uuid()).has_value());
  const auto other = pools.Of(FakeDevice(1)->uuid());
  ASSERT_FALSE(other.has_value());
  EXPECT_EQ(other.error().message(), "this agent has no memory of " + FakeDevice(1)->name() +
                                         " to lend: it sees only " + FakeDevice(0)->name());
}

}  // namespace
}  // namespace weightwire::memory
