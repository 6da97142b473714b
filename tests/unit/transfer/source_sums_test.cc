#include "server/transfer/source_sums.h"

#include <gtest/gtest.h>

#include <cstring>

#include "server/transfer/fetch.h"
#include "server/transfer/kept.h"
#include "tests/unit/transfer/random_plan.h"

namespace weightwire::transfer {
namespace {

using testing::Expected;
using testing::MakeMemory;
using testing::MakeRandomPlan;
using testing::MakeSizedPlan;
using testing::RandomPlan;
using testing::RankMemory;

/// Both sides of one stream, which one agent has.
struct OneAgent {
  OneAgent(testing::Rng& rng, RandomPlan random, int64_t segment_bytes, int64_t slot_bytes)
      : plan(std::move(random.plan)), target(MakeMemory(rng, random.target_tensor_bytes[0])) {
    for (uint32_t rank = 0; rank < random.source_tensor_bytes.size(); ++rank) {
      sources.push_back(MakeMemory(rng, random.source_tensor_bytes[rank]));
      testing::TameFloats(rng, plan, rank, sources[rank]);
    }
    source = sources[plan.streams[0].source_rank];
    schedule = plan::ScheduleOf(plan.streams[0], segment_bytes, slot_bytes);
    sums.resize(schedule.segments.size());
    kept.resize(sums.size());
  }

  /// All slots, with `view` as what the reader has mapped of the source.
  MappedCopy CopyAll(const RankMemory& view) {
    OwnSums own(plan.streams[0], schedule, source.binding, sums, known);
    std::vector<transport::MappedPiece> pieces;
    for (const auto& tensor : view.binding) pieces.push_back({tensor.data(), tensor.bytes});
    MappedCopy all;
    for (uint32_t slot = 0; slot < schedule.slots.size(); ++slot) {
      const plan::SlotSpan& span = schedule.slots[slot];
      MappedCopy one = CopyMapped(plan.streams[0], schedule, slot, pieces, own,
                                  std::span(kept).subspan(span.first_segment, span.segment_count),
                                  target.binding, 2, stop);
      all.sums.insert(all.sums.end(), one.sums.begin(), one.sums.end());
      all.mismatches += one.mismatches;
      all.rereads += one.rereads;
      all.kept_bytes += one.kept_bytes;
      all.status = one.status;
      all.broken = one.broken;
      if (one.broken || !one.status.ok()) break;
    }
    return all;
  }

  plan::TransferPlan plan;
  std::vector<RankMemory> sources;
  RankMemory source;
  RankMemory target;
  plan::StreamSchedule schedule;
  std::vector<uint64_t> sums;
  std::vector<uint64_t> kept;
  std::vector<bool> known;
  std::atomic<bool> stop = false;
};

TEST(OwnSums, AreThoseOfASecondLookAndTheBytesArrive) {
  for (uint64_t seed = 1; seed <= 60; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    testing::Rng rng(seed);
    OneAgent agent(rng, MakeRandomPlan(rng, {1, 1, 6, 40'000, seed % 3 == 0 ? 2 : 0}), 16'384,
                   65'536);
    const auto expected = Expected(agent.plan, 0, agent.target, agent.sources);
    const MappedCopy copied = agent.CopyAll(agent.source);
    ASSERT_TRUE(copied.status.ok());
    EXPECT_EQ(copied.mismatches, 0u);
    EXPECT_EQ(agent.target.Snapshot(), expected);
    EXPECT_EQ(copied.sums, agent.sums);
    std::vector<uint64_t> again(agent.sums.size());
    OwnSums own(agent.plan.streams[0], agent.schedule, agent.source.binding, again, agent.known);
    std::vector<uint64_t> into(again.size());
    ASSERT_TRUE(own.Sum(0, into).ok());
    EXPECT_EQ(into, agent.sums);
    EXPECT_EQ(again, agent.sums);
  }
}

// What the reader has mapped is not what the source has, in one byte.
TEST(OwnSums, FindWhatTheReaderSeesDifferently) {
  testing::Rng rng(3);
  OneAgent agent(rng, MakeSizedPlan({{500'000}}), 65'536, 262'144);
  RankMemory other = MakeMemory(rng, {500'000});
  std::memcpy(other.binding[0].data(), agent.source.binding[0].data(), 500'000);
  ASSERT_EQ(agent.CopyAll(other).mismatches, 0u);
  other.binding[0].data()[300'001] ^= std::byte{4};
  const MappedCopy copied = agent.CopyAll(other);
  EXPECT_EQ(copied.broken, 300'001u / 65'536);
  EXPECT_EQ(copied.mismatches, 3u);
  EXPECT_EQ(copied.rereads, 2u);
}

TEST(OwnSums, AreNotMadeInOnePassOfAnotherGeometry) {
  testing::Rng rng(4);
  OneAgent agent(rng, MakeSizedPlan({{100'000}}), 100'000, 200'000);
  OwnSums own(agent.plan.streams[0], agent.schedule, agent.source.binding, agent.sums, agent.known);
  SegmentCopy copy = CopyOf(agent.plan.streams[0].ops[0], agent.schedule.segments[0]);
  const device::Bytes target = agent.target.binding[0].at();
  const device::ConstBytes source = agent.source.binding[0].at();
  EXPECT_TRUE(own.CopyAndSum(0, target, source, copy));
  const auto before = agent.target.Snapshot();
  copy.box.extent[0] /= 2;
  EXPECT_FALSE(own.CopyAndSum(0, target, source, copy));
  copy.box.extent[0] *= 2;
  copy.transform = plan::Transform::kScales;
  EXPECT_FALSE(own.CopyAndSum(0, target, source, copy));
  EXPECT_EQ(agent.target.Snapshot(), before);
}

// The source has changed, and still says of all but the last segment that its sum is known: nothing
// but the last one is looked at.
TEST(OwnSums, WhatIsKnownIsNotRead) {
  testing::Rng rng(6);
  constexpr size_t kSegment = 50'000;
  OneAgent agent(rng, MakeSizedPlan({{4 * kSegment}}), kSegment, 4 * kSegment);
  agent.kept = agent.CopyAll(agent.source).sums;
  auto expected = agent.target.Snapshot();
  agent.known = {true, true, true, false};
  std::byte* bytes = agent.source.binding[0].data();
  for (size_t i = 0; i < 4 * kSegment; ++i) bytes[i] ^= std::byte{1};
  std::memcpy(expected.data() + agent.target.binding[0].offset + 3 * kSegment, bytes + 3 * kSegment,
              kSegment);
  const MappedCopy copied = agent.CopyAll(agent.source);
  EXPECT_EQ(copied.mismatches, 0u);
  EXPECT_EQ(copied.kept_bytes, 3 * kSegment);
  EXPECT_EQ(agent.target.Snapshot(), expected);
  EXPECT_TRUE(std::equal(agent.kept.begin(), agent.kept.begin() + 3, agent.sums.begin()));
}

// Of four segments one is as it was, one differs from its first byte on, one in its last byte only,
// and of one the hint is wrong.
TEST(OwnSums, WhatIsHereIsFoundWhereverTheOthersDiffer) {
  testing::Rng rng(5);
  constexpr size_t kSegment = 50'000;
  OneAgent agent(rng, MakeSizedPlan({{4 * kSegment}}), kSegment, 4 * kSegment);
  ASSERT_EQ(agent.schedule.segments.size(), 4u);
  agent.kept = agent.CopyAll(agent.source).sums;
  std::byte* bytes = agent.source.binding[0].data();
  bytes[kSegment] ^= std::byte{1};
  bytes[3 * kSegment - 1] ^= std::byte{1};
  agent.target.binding[0].data()[3 * kSegment] ^= std::byte{1};
  const auto expected = Expected(agent.plan, 0, agent.target, agent.sources);
  const MappedCopy copied = agent.CopyAll(agent.source);
  EXPECT_EQ(copied.kept_bytes, static_cast<int64_t>(kSegment));
  EXPECT_EQ(copied.mismatches, 0u);
  EXPECT_EQ(copied.sums, agent.sums);
  EXPECT_NE(copied.sums[1], agent.kept[1]);
  EXPECT_NE(copied.sums[2], agent.kept[2]);
  EXPECT_EQ(agent.target.Snapshot(), expected);
}

}  // namespace
}  // namespace weightwire::transfer
