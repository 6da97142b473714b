#include "server/transport/export_table.h"

#include <atomic>
#include <cstdlib>
#include <iostream>
#include <random>
#include <set>
#include <thread>

#include "gtest/gtest.h"

namespace weightwire::transport {
namespace {

std::shared_ptr<memory::MemoryRegion> Region(uint64_t bytes) {
  return *memory::MemoryRegion::Allocate("export", bytes);
}

/// Keeps posted tasks until they are asked for.
struct Posted {
  std::vector<Task> tasks;
  Exported::Post post() {
    return [this](Task task) { tasks.push_back(std::move(task)); };
  }
  void Run() {
    for (Task& task : std::exchange(tasks, {})) task();
  }
};

TEST(ExportTable, KeysAreNeverReusedEvenAcrossTables) {
  Posted posted;
  ExportTable one(posted.post());
  ExportTable two(posted.post());
  auto region = Region(10);
  std::set<uint64_t> ids;
  uint64_t generation = 0;
  for (int i = 0; i < 10; ++i) {
    const RegionKey key = (i % 2 == 0 ? one : two).Export({{region, 0, 10}});
    EXPECT_TRUE(ids.insert(key.id).second);
    EXPECT_GT(key.generation, generation);
    generation = key.generation;
  }
  EXPECT_FALSE(two.Use({*ids.begin(), 2}).has_value());
}

TEST(ExportTable, RevokeWaitsForTheLastUse) {
  Posted posted;
  ExportTable table(posted.post());
  const RegionKey key = table.Export({{Region(10), 0, 10}});
  auto first = table.Use(key);
  auto second = table.Use(key);
  ASSERT_TRUE(first.has_value() && second.has_value());
  int done = 0;
  table.Revoke(key, [&] { ++done; });
  table.Revoke(key, [&] { done += 10; });
  EXPECT_FALSE(table.Use(key).has_value());
  first->reset();
  posted.Run();
  EXPECT_EQ(done, 0);
  second->reset();
  EXPECT_EQ(done, 0) << "callbacks go through post";
  posted.Run();
  EXPECT_EQ(done, 11);
  table.Revoke(key, [&] { done += 100; });
  posted.Run();
  EXPECT_EQ(done, 111);
}

TEST(ExportTable, AnotherGenerationRevokesNothing) {
  Posted posted;
  ExportTable table(posted.post());
  const RegionKey key = table.Export({{Region(10), 0, 10}});
  int done = 0;
  table.Revoke({key.id, key.generation + 1}, [&] { ++done; });
  posted.Run();
  EXPECT_EQ(done, 1);
  EXPECT_TRUE(table.Use(key).has_value());
}

TEST(ExportTable, RegionsLiveUntilRevokedAndUnused) {
  Posted posted;
  ExportTable table(posted.post());
  auto region = Region(10);
  std::weak_ptr<memory::MemoryRegion> watch = region;
  const RegionKey key = table.Export({{std::move(region), 0, 10}});
  auto use = table.Use(key);
  table.Revoke(key, [] {});
  EXPECT_FALSE(watch.expired());
  use->reset();
  EXPECT_TRUE(watch.expired());
}

TEST(ExportTable, TellsWhatLeavesUntilNothingWill) {
  Posted posted;
  ExportTable table(posted.post());
  std::vector<std::pair<uint64_t, uint64_t>> told;
  auto held = std::make_shared<int>();
  std::weak_ptr<int> watch = held;
  const RegionKey key = table.Export(
      {{Region(10), 0, 10}}, [&told, held = std::move(held)](uint64_t offset, uint64_t bytes) {
        told.emplace_back(offset, bytes);
      });
  auto use = table.Use(key);
  (*use)->Tell(3, 4);
  EXPECT_EQ(told, (std::vector<std::pair<uint64_t, uint64_t>>{{3, 4}}));
  bool gone_first = false;
  table.Revoke(key, [&] { gone_first = watch.expired(); });
  EXPECT_FALSE(watch.expired());
  use->reset();
  posted.Run();
  EXPECT_TRUE(gone_first);
  (*table.Use(table.Export({{Region(10), 0, 10}})))->Tell(0, 1);  // nobody wants to know
}

TEST(ExportTable, UsesAndRevocationsRaceSafely) {
  std::atomic<int> done{0};
  ExportTable table([](Task task) { task(); });
  auto region = Region(4096);
  constexpr int kRounds = 300;
  for (int round = 0; round < kRounds; ++round) {
    const RegionKey key = table.Export({{region, 0, 4096}});
    std::thread user([&] {
      for (int i = 0; i < 20; ++i) {
        auto use = table.Use(key);
        if (use.has_value()) {
          EXPECT_TRUE((*use)->Slice(0, 1).has_value());
        }
      }
    });
    table.Revoke(key, [&] { ++done; });
    user.join();
  }
  EXPECT_EQ(done, kRounds);
}

TEST(Exported, SlicesAgreeWithAConcatenation) {
  const char* text = std::getenv("WEIGHTWIRE_SEED");
  const uint64_t seed = text != nullptr ? std::strtoull(text, nullptr, 10) : 11;
  std::cout << "WEIGHTWIRE_SEED=" << seed << std::endl;
  std::mt19937_64 random(seed);
  Posted posted;
  for (int round = 0; round < 200; ++round) {
    auto region = Region(5000);
    for (uint64_t i = 0; i < 5000; ++i) region->data()[i] = static_cast<std::byte>(random());
    GatherList pieces;
    std::vector<std::byte> whole;
    const size_t count = random() % 12;
    for (size_t i = 0; i < count; ++i) {
      const uint64_t offset = random() % 5000;
      const uint64_t bytes =
          random() % 3 == 0 ? 0 : random() % std::min<uint64_t>(300, 5000 - offset);
      pieces.push_back({region, offset, bytes});
      whole.insert(whole.end(), region->data() + offset, region->data() + offset + bytes);
    }
    ExportTable table(posted.post());
    auto exported = *table.Use(table.Export(pieces));
    ASSERT_EQ(exported->bytes(), whole.size());
    ASSERT_EQ(exported->All().size(), count);
    for (int get = 0; get < 20; ++get) {
      const uint64_t offset = random() % (whole.size() + 3);
      const uint64_t bytes = random() % (whole.size() + 3);
      auto ranges = exported->Slice(offset, bytes);
      ASSERT_EQ(ranges.has_value(), bytes > 0 && offset + bytes <= whole.size());
      if (!ranges.has_value()) {
        EXPECT_EQ(ranges.error().code(), Code::kOutOfRange);
        continue;
      }
      std::vector<std::byte> read;
      for (const PieceRange& range : *ranges) {
        ASSERT_GT(range.bytes, 0u);
        read.insert(read.end(), range.span().begin(), range.span().end());
      }
      ASSERT_TRUE(std::equal(read.begin(), read.end(),
                             whole.begin() + static_cast<std::ptrdiff_t>(offset),
                             whole.begin() + static_cast<std::ptrdiff_t>(offset + bytes)));
    }
  }
}

TEST(Exported, RefusesRangesThatOverflow) {
  Posted posted;
  ExportTable table(posted.post());
  auto exported = *table.Use(table.Export({{Region(10), 0, 10}}));
  for (auto [offset, bytes] :
       {std::pair<uint64_t, uint64_t>{UINT64_MAX, 2}, {1, UINT64_MAX}, {10, 1}, {0, 0}, {11, 0}}) {
    EXPECT_FALSE(exported->Slice(offset, bytes).has_value()) << offset << "+" << bytes;
  }
}

}  // namespace
}  // namespace weightwire::transport
