#include "server/memory/stage_store.h"

#include <cstdlib>
#include <iostream>
#include <random>

#include "gmock/gmock.h"

namespace weightwire::memory {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

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
  buffers.Flip(buffers.next(), {Epoch(1), Version(1)});
  EXPECT_EQ(buffers.live(), 0);
  EXPECT_EQ(buffers.next(), 0);
  EXPECT_FALSE(buffers.has_room());
  buffers.Forget();
  EXPECT_TRUE(buffers.has_room());
}

TEST(StageBuffers, TheOtherOneHoldsWhatWasServedUntilItIsWritten) {
  auto stage = StageBuffers::Make("stage", *ArenaMapOf({100}), 2);
  StageBuffers& buffers = **stage;
  const StageBuffers::Content first{Epoch(1), Version(10)}, second{Epoch(2), Version(20)};
  EXPECT_THAT(buffers.held(), IsEmpty());
  buffers.Flip(buffers.next(), first);
  EXPECT_EQ(buffers.served(), first);
  EXPECT_THAT(buffers.held(), IsEmpty());
  buffers.Flip(buffers.next(), second);
  EXPECT_EQ(buffers.served(), second);
  EXPECT_THAT(buffers.held(), ElementsAre(first));
  EXPECT_THAT(buffers.held_beyond(), IsEmpty()) << "the next epoch takes it";
  buffers.Overwrite(buffers.next());
  EXPECT_THAT(buffers.held(), IsEmpty());
  EXPECT_EQ(buffers.served(), second);
}

TEST(StageBuffers, OneBufferHoldsNothingBesideWhatIsServed) {
  auto stage = StageBuffers::Make("stage", *ArenaMapOf({100}), 1);
  StageBuffers& buffers = **stage;
  buffers.Flip(buffers.next(), {Epoch(1), Version(10)});
  EXPECT_THAT(buffers.held(), IsEmpty());
  buffers.Forget();
  EXPECT_THAT(buffers.held(), IsEmpty());
}

TEST(StageBuffers, TheOldestGivesWayToTheNextEpoch) {
  auto stage = StageBuffers::Make("stage", *ArenaMapOf({100}), 4);
  StageBuffers& buffers = **stage;
  const auto content = [](uint64_t n) { return StageBuffers::Content{Epoch(n), Version(10 * n)}; };
  const auto serve = [&](uint64_t n) {
    const int buffer = buffers.next();
    buffers.Overwrite(buffer);
    buffers.Flip(buffer, content(n));
    return buffer;
  };
  EXPECT_EQ((std::vector{serve(1), serve(2), serve(3), serve(4)}), (std::vector{0, 1, 2, 3}));
  EXPECT_THAT(buffers.held(), ElementsAre(content(3), content(2), content(1)));
  EXPECT_THAT(buffers.held_beyond(), ElementsAre(content(3), content(2)));
  EXPECT_EQ(serve(5), 0);
  EXPECT_THAT(buffers.held(), ElementsAre(content(4), content(3), content(2)));
  // An epoch that begins to write and is aborted costs the oldest one, and the next takes its room.
  buffers.Overwrite(buffers.next());
  EXPECT_THAT(buffers.held(), ElementsAre(content(4), content(3)));
  EXPECT_EQ(buffers.held_beyond(), buffers.held());
  EXPECT_EQ(serve(7), 1);
  EXPECT_THAT(buffers.held(), ElementsAre(content(5), content(4), content(3)));
  // A rollback: what the buffer holds is served under a new epoch, and is the newest from then on.
  EXPECT_EQ(buffers.HolderOf(Epoch(4)), 3);
  EXPECT_EQ(buffers.HolderOf(Epoch(7)), -1) << "it is served";
  EXPECT_EQ(buffers.HolderOf(Epoch(1)), -1);
  EXPECT_EQ(buffers.HolderOf(Epoch(0)), -1);
  const StageBuffers::Content again{Epoch(8), Version(40)};
  buffers.Flip(3, again);
  EXPECT_EQ(buffers.served(), again);
  EXPECT_THAT(buffers.held(), ElementsAre(content(7), content(5), content(3)));
  EXPECT_EQ(serve(9), 2) << "3 was the oldest";
  EXPECT_THAT(buffers.held(), ElementsAre(again, content(7), content(5)));
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
    buffers.Flip(buffers.next(), {Epoch(epoch), Version(epoch)});
    EXPECT_EQ(buffers.live(), written);
    EXPECT_EQ(buffers.live_epoch(), Epoch(epoch));
  }
  buffers.Forget();
  EXPECT_EQ(buffers.live(), -1);
  EXPECT_EQ(buffers.live_epoch(), Epoch());
}

}  // namespace
}  // namespace weightwire::memory
