#include "server/memory/stage_store.h"

#include <cstdlib>
#include <iostream>
#include <random>

#include "gtest/gtest.h"

namespace weightwire::memory {
namespace {

TEST(ArenaMap, PlacesTensorsInOrderOn64ByteBounds) {
  auto arena = ArenaMapOf({1, 64, 0, 65, 3});
  ASSERT_TRUE(arena.has_value());
  EXPECT_EQ(arena->offsets, (std::vector<uint64_t>{0, 64, 128, 128, 256}));
  EXPECT_EQ(arena->sizes, (std::vector<uint64_t>{1, 64, 0, 65, 3}));
  EXPECT_EQ(arena->bytes_total, 259u);
}

TEST(ArenaMap, AnEmptyRankStillHasAByte) {
  EXPECT_EQ(ArenaMapOf({})->bytes_total, 1u);
  EXPECT_EQ(ArenaMapOf({0, 0})->bytes_total, 1u);
}

TEST(ArenaMap, TensorsNeverOverlapAndGapsStayBelow64Bytes) {
  const char* text = std::getenv("WEIGHTWIRE_SEED");
  const uint64_t seed = text != nullptr ? std::strtoull(text, nullptr, 10) : 3;
  std::cout << "WEIGHTWIRE_SEED=" << seed << std::endl;
  std::mt19937_64 random(seed);
  for (int round = 0; round < 100; ++round) {
    std::vector<uint64_t> sizes(random() % 50);
    for (uint64_t& size : sizes) size = random() % 1000;
    auto arena = ArenaMapOf(sizes);
    ASSERT_TRUE(arena.has_value());
    uint64_t end = 0;
    for (size_t i = 0; i < sizes.size(); ++i) {
      ASSERT_EQ(arena->offsets[i] % 64, 0u);
      ASSERT_GE(arena->offsets[i], end);
      ASSERT_LT(arena->offsets[i] - end, 64u);
      end = arena->offsets[i] + sizes[i];
    }
    ASSERT_EQ(arena->bytes_total, end == 0 ? 1 : end);
  }
}

TEST(ArenaMap, RefusesSumsThatDoNotFit) {
  for (const auto& sizes : {std::vector<uint64_t>{UINT64_MAX, 1},
                            {UINT64_MAX - 5, 0},
                            {uint64_t{1} << 63, uint64_t{1} << 63}}) {
    auto arena = ArenaMapOf(sizes);
    ASSERT_FALSE(arena.has_value());
    EXPECT_EQ(arena.error().code(), Code::kInvalidArgument);
    EXPECT_EQ(arena.error().reason(), Reason::kShapeOverflow);
  }
}

TEST(StageBuffers, OneBufferHasRoomOnlyWhileNothingIsServed) {
  auto stage = StageBuffers::Make("stage", *ArenaMapOf({100, 200}), 1);
  ASSERT_TRUE(stage.has_value());
  StageBuffers& buffers = **stage;
  ASSERT_EQ(buffers.regions().size(), 1u);
  EXPECT_TRUE(buffers.has_room());
  buffers.Flip({Epoch(1), Version(1)});
  EXPECT_EQ(buffers.live(), 0);
  EXPECT_EQ(buffers.next(), 0);
  EXPECT_FALSE(buffers.has_room());
  buffers.Forget();
  EXPECT_TRUE(buffers.has_room());
}

TEST(StageBuffers, TheSpareOneHoldsWhatWasServedUntilItIsWritten) {
  auto stage = StageBuffers::Make("stage", *ArenaMapOf({100}), 2);
  StageBuffers& buffers = **stage;
  const StageBuffers::Content first{Epoch(1), Version(10)}, second{Epoch(2), Version(20)};
  EXPECT_EQ(buffers.spare(), StageBuffers::Content{});
  buffers.Flip(first);
  EXPECT_EQ(buffers.served(), first);
  EXPECT_EQ(buffers.spare(), StageBuffers::Content{});
  buffers.Flip(second);
  EXPECT_EQ(buffers.served(), second);
  EXPECT_EQ(buffers.spare(), first);
  buffers.Overwrite();
  EXPECT_EQ(buffers.spare(), StageBuffers::Content{});
  EXPECT_EQ(buffers.served(), second);
}

TEST(StageBuffers, OneBufferHoldsNothingBesideWhatIsServed) {
  auto stage = StageBuffers::Make("stage", *ArenaMapOf({100}), 1);
  StageBuffers& buffers = **stage;
  buffers.Flip({Epoch(1), Version(10)});
  EXPECT_EQ(buffers.spare(), StageBuffers::Content{});
  buffers.Forget();
  EXPECT_EQ(buffers.spare(), StageBuffers::Content{});
}

TEST(StageBuffers, NextIsNeverTheLiveOne) {
  auto stage = StageBuffers::Make("stage", *ArenaMapOf({100, 200}), 2);
  ASSERT_TRUE(stage.has_value());
  StageBuffers& buffers = **stage;
  EXPECT_EQ(buffers.live(), -1);
  EXPECT_EQ(buffers.live_epoch(), Epoch());
  ASSERT_EQ(buffers.regions().size(), 2u);
  EXPECT_NE(buffers.regions()[0], buffers.regions()[1]);
  EXPECT_EQ(buffers.regions()[0]->size(), buffers.arena().bytes_total);
  for (uint64_t epoch = 1; epoch <= 5; ++epoch) {
    const int written = buffers.next();
    EXPECT_NE(written, buffers.live());
    EXPECT_TRUE(buffers.has_room());
    buffers.Flip({Epoch(epoch), Version(epoch)});
    EXPECT_EQ(buffers.live(), written);
    EXPECT_EQ(buffers.live_epoch(), Epoch(epoch));
  }
  buffers.Forget();
  EXPECT_EQ(buffers.live(), -1);
  EXPECT_EQ(buffers.live_epoch(), Epoch());
}

}  // namespace
}  // namespace weightwire::memory
