#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <string>

#include "server/transfer/delta_base.h"
#include "server/transfer/delta_slot.h"
#include "tests/unit/transfer/fleet.h"

// Versions after each other, of which only what changed is sent. What arrives is always compared
// with the oracle of random_plan.h.
namespace weightwire::transfer {
namespace {

using testing::Below;
using testing::BytesKept;
using testing::BytesMoved;
using testing::ChangeAll;
using testing::ChangeSome;
using testing::ExpectBytes;
using testing::Fleet;
using testing::FleetOptions;
using testing::HandReader;
using testing::LosingFleet;
using testing::NextAttempt;
using testing::OnDevice;
using testing::RandomFleet;
using testing::RankMemory;
using testing::StartAfterLosses;
using testing::Versions;

Result<DeltaBases::Share> Always(uint64_t) { return DeltaBases::Share(); }

RankMemory OnHost(const RankMemory& rank) {
  RankMemory copy;
  copy.region = memory::MemoryRegion::Allocate("a copy", rank.region->size()).value();
  for (const memory::RegionSpan& tensor : rank.binding) {
    copy.binding.push_back({copy.region, tensor.offset, tensor.bytes});
  }
  copy.Write(rank.Snapshot());
  return copy;
}

DeltaFigures Delta(const Fleet& fleet) {
  DeltaFigures sum;
  for (const auto& target : fleet.targets) sum += (*target.result)->delta;
  return sum;
}

/// Three streams of small slots, 600 KB together, not mapped.
FleetOptions Large(uint32_t engines = 1) {
  FleetOptions options;
  options.shape = {.source_ranks = 3, .target_ranks = 1};
  options.stream_bytes = {{300'001}, {200'000}, {99'999}};
  options.engines = engines;
  options.tuning.segment_bytes_max = 16'384;
  options.tuning.slot_bytes = 65'536;
  options.tuning.chunk_bytes = 65'536;
  return options;
}

/// One version was served, and in the next one some elements are others.
void ServeOneAndChange(Versions& versions, double share) {
  versions.Code({DeltaPolicy::Mode::kAlways, 4, ""}, Always);
  versions.Next(versions.fleet.source_memory);
  ChangeSome(versions.fleet.rng, versions.fleet.source_memory, share);
  versions.Prepare(versions.fleet.source_memory);
}

void ExpectAllAccounted(const Fleet& fleet, uint32_t engines) {
  const DeltaFigures delta = Delta(fleet);
  EXPECT_EQ(BytesMoved(fleet) - delta.code_bytes + delta.bytes + BytesKept(fleet),
            fleet.plan.plan.bytes_total * engines);
}

// Ranks, agents, dtypes, casts, quantization, gathers, chains, limits and delays by chance; of each
// version any share has changed.
TEST(Delta, AnyShareOfAnyLayoutArrivesBitForBit) {
  const uint64_t first = testing::SeedOr(1);
  DeltaFigures all;
  for (uint64_t seed = first; seed < first + 60; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    FleetOptions options = RandomFleet(seed);
    std::mt19937_64 rng(seed);
    Versions versions(options);
    if (Below(rng, 2) == 0) versions.TellGenerations();
    versions.Code({Below(rng, 2) == 0 ? DeltaPolicy::Mode::kAuto : DeltaPolicy::Mode::kAlways,
                   1 + Below(rng, 4), ""},
                  Always);
    constexpr double kShares[] = {0, 0.0001, 0.001, 0.01, 0.03, 0.1, 0.4, 1};
    for (int version = 0; version < 5; ++version) {
      if (version > 0) {
        const double share = kShares[Below(rng, 8)];
        if (share == 1) {
          ChangeAll(rng, versions.fleet.plan.plan, versions.fleet.source_memory);
        } else {
          ChangeSome(rng, versions.fleet.source_memory, share);
        }
        for (auto& source : versions.fleet.sources) {
          for (uint64_t& generation : source.job.generations) ++generation;
        }
      }
      versions.Next(versions.fleet.source_memory);
      if (HasFailure()) return;
      ExpectAllAccounted(versions.fleet, options.engines);
      all += Delta(versions.fleet);
    }
  }
  EXPECT_GT(all.bytes, 0);
  EXPECT_GT(all.changed, 0);
}

// Where tensors, slots and stages lie in GPUs, codes are made and applied by way of host memory,
// over transports that reach GPU memory and over those that do not.
TEST(Delta, RanksOnGpusSendWhatChangedToo) {
  DeltaFigures from_gpus, to_gpus;
  for (uint64_t seed = 1; seed <= 25; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 rng(seed * 17);
    FleetOptions options = RandomFleet(seed);
    options.map = false;
    for (auto* side : {&options.sources_on, &options.targets_on}) {
      side->emplace();
      if (const uint32_t gpu = Below(rng, 3); gpu < 2) (*side)->gpu = gpu;
      (*side)->gets_device_memory = Below(rng, 3) > 0;
      (*side)->slab_bytes = 16 << 20;
    }
    if (!options.sources_on->gpu && !options.targets_on->gpu) options.sources_on->gpu = 0;
    Versions versions(options);
    Fleet& fleet = versions.fleet;
    std::vector<RankMemory> on_host;  // what the oracle reads
    for (const RankMemory& rank : fleet.source_memory) on_host.push_back(OnHost(rank));
    for (size_t i = 0; i < fleet.targets.size() && options.targets_on->gpu; ++i) {
      auto& pools = fleet.target_agents[fleet.targets[i].agent].gpu_pools.by_device;
      versions.spare[i] = OnDevice(versions.spare[i], *pools.begin()->second);
    }
    versions.Code({DeltaPolicy::Mode::kAlways, 2, ""}, Always);
    for (const double share : {1.0, 0.0, 0.002, 0.02}) {
      ChangeSome(rng, fleet.source_memory, share);
      for (size_t i = 0; i < on_host.size(); ++i)
        on_host[i].Write(fleet.source_memory[i].Snapshot());
      versions.Next(on_host);
      if (HasFailure()) return;
      ExpectAllAccounted(fleet, options.engines);
      if (options.sources_on->gpu) from_gpus += Delta(fleet);
      if (options.targets_on->gpu) to_gpus += Delta(fleet);
    }
    EXPECT_EQ(fleet.metrics.Count("delta_mismatches_total{transport=fake}"), 0);
  }
  EXPECT_GT(from_gpus.changed, 0);
  EXPECT_GT(to_gpus.changed, 0);
}

// Where nothing may pass host memory everything is sent.
TEST(Delta, WhereGpuDirectIsRequiredNothingIsCoded) {
  for (const bool targets_require : {false, true}) {
    FleetOptions options = Large();
    options.sources_on = options.targets_on = testing::Placement{.gpu = 0, .slab_bytes = 16 << 20};
    options.gpu_direct_required = true;
    options.targets_require_gpu_direct = targets_require;
    Versions versions(options);
    Fleet& fleet = versions.fleet;
    const std::vector<RankMemory> on_host = {OnHost(fleet.source_memory[0]),
                                             OnHost(fleet.source_memory[1]),
                                             OnHost(fleet.source_memory[2])};
    for (size_t i = 0; i < fleet.targets.size(); ++i) {
      auto& pools = fleet.target_agents[fleet.targets[i].agent].gpu_pools.by_device;
      versions.spare[i] = OnDevice(versions.spare[i], *pools.begin()->second);
    }
    versions.Code({DeltaPolicy::Mode::kAlways, 2, ""}, Always);
    versions.Next(on_host);
    ChangeSome(fleet.rng, fleet.source_memory, 0.01);
    for (size_t i = 0; i < on_host.size(); ++i) on_host[i].Write(fleet.source_memory[i].Snapshot());
    versions.Next(on_host);
    EXPECT_EQ(Delta(fleet).bytes, 0);
  }
}

// Sessions break three times in every version: what was made stays, nothing wrong is kept.
TEST(Delta, AttemptsThatAreCutShortCostNothingThatIsWrong) {
  int64_t made = 0;
  for (uint64_t seed = 1; seed <= 40; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    FleetOptions options = LosingFleet(seed);
    std::mt19937_64 rng(seed);
    Versions versions(options);
    versions.Code({DeltaPolicy::Mode::kAlways, 4, ""}, Always);
    for (int version = 0; version < 4; ++version) {
      if (version > 0) ChangeSome(rng, versions.fleet.source_memory, 0.01);
      versions.Prepare(versions.fleet.source_memory);
      StartAfterLosses(versions.fleet, options, rng);
      if (HasFatalFailure()) return;
      ExpectBytes(versions.fleet);
      if (HasFailure()) return;
      made += Delta(versions.fleet).bytes;
    }
  }
  EXPECT_GT(made, 0);
}

// An attempt after the bytes were coded has come to nothing: the next one sends the same codes.
TEST(Delta, AnAbortedVersionIsSentAsChangesAgain) {
  Versions versions(Large());
  Fleet& fleet = versions.fleet;
  ServeOneAndChange(versions, 0.005);
  for (size_t i = 0; i < fleet.sources.size(); ++i) fleet.StartSource(i);
  for (size_t i = 0; i < fleet.targets.size(); ++i) fleet.StartTarget(i);
  for (int i = 0; i < 400 && fleet.sim.RunOne(); ++i) {
  }
  // What it wrote is lost, too: nobody knows it.
  NextAttempt(fleet, Epoch(99));
  for (auto& target : fleet.targets) *target.job.kept = Kept();
  fleet.StartAll();
  testing::ExpectArrived(fleet, 1);
  EXPECT_EQ(Delta(fleet).bytes + BytesKept(fleet), fleet.plan.plan.bytes_total);
  EXPECT_LT(BytesMoved(fleet), fleet.plan.plan.bytes_total / 20);
}

// A fill, and whoever swapped without a transfer, leaves bytes of which no sums are known.
TEST(Delta, WhatIsServedIsSummedWhereNothingIsKnownOfIt) {
  for (const bool known_before : {false, true}) {
    Versions versions(Large());
    Fleet& fleet = versions.fleet;
    ServeOneAndChange(versions, 0.005);
    for (size_t i = 0; i < fleet.targets.size(); ++i) {
      *fleet.targets[i].job.kept = Kept();
      if (!known_before) fleet.targets[i].job.served_kept.reset();
    }
    fleet.StartAll();
    testing::ExpectArrived(fleet, 1);
    EXPECT_EQ(Delta(fleet).bytes + BytesKept(fleet), fleet.plan.plan.bytes_total);
    EXPECT_LT(BytesMoved(fleet), fleet.plan.plan.bytes_total / 20);
    EXPECT_EQ(fleet.metrics.Count("delta_mismatches_total{transport=fake}"), 0);
  }
}

// Two engines from one stream, and one that reads from the other: both get the same codes.
TEST(Delta, RelaysPassCodesOn) {
  for (const bool chain : {false, true}) {
    SCOPED_TRACE(chain ? "chain" : "star");
    FleetOptions options = Large(3);
    options.chain = chain;
    options.target_agents = 3;
    Versions versions(options);
    Fleet& fleet = versions.fleet;
    versions.Code({DeltaPolicy::Mode::kAlways, 4, ""}, Always);
    versions.Next(fleet.source_memory);
    ASSERT_FALSE(HasFailure());
    EXPECT_EQ(BytesMoved(fleet), 3 * fleet.plan.plan.bytes_total);
    for (int version = 0; version < 3; ++version) {
      ChangeSome(fleet.rng, fleet.source_memory, 0.005);
      versions.Next(fleet.source_memory);
      ASSERT_FALSE(HasFailure());
      ExpectAllAccounted(fleet, 3);
      EXPECT_EQ(Delta(fleet).bytes + BytesKept(fleet), 3 * fleet.plan.plan.bytes_total);
      EXPECT_LT(BytesMoved(fleet), 3 * fleet.plan.plan.bytes_total / 20);
    }
  }
}

// The sums that a target remembers are right and the bytes that they were made of are not there any
// more: what comes out is found to be wrong, and read as it is.
TEST(Delta, AWrongBaseIsAlwaysCaught) {
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    FleetOptions options = Large();
    options.seed = seed;
    Versions versions(options);
    Fleet& fleet = versions.fleet;
    versions.Code({DeltaPolicy::Mode::kAlways, 4, ""}, Always);
    versions.Next(fleet.source_memory);
    ChangeSome(fleet.rng, fleet.source_memory, 0.005);
    // What will be served: one byte somewhere is another one.
    auto bytes = fleet.targets[0].memory.Snapshot();
    const auto& tensor = fleet.targets[0].memory.binding[0];
    bytes[tensor.offset + Below(fleet.rng, static_cast<uint32_t>(tensor.bytes))] ^= std::byte{64};
    fleet.targets[0].memory.Write(bytes);
    versions.Next(fleet.source_memory);  // compares with what the sources hold
    ASSERT_FALSE(HasFailure());
    EXPECT_GT(fleet.metrics.Count("delta_mismatches_total{transport=fake}"), 0);
  }
}

// Bytes that change on their way, codes among them.
TEST(Delta, DamagedCodesAreCaught) {
  uint64_t caught = 0;
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    FleetOptions options = Large();
    options.seed = seed;
    options.link.corrupt_every_get = 7;
    Versions versions(options);
    Fleet& fleet = versions.fleet;
    versions.Code({DeltaPolicy::Mode::kAlways, 4, ""}, Always);
    versions.Next(fleet.source_memory);
    ASSERT_FALSE(HasFailure());
    ChangeSome(fleet.rng, fleet.source_memory, 0.01);
    versions.Next(fleet.source_memory);
    ASSERT_FALSE(HasFailure());
    caught += fleet.metrics.Count("delta_mismatches_total{transport=fake}") > 0 ? 1 : 0;
  }
  EXPECT_GT(caught, 0u);
}

// A reader that was away for some versions needs the codes of all of them, and no more.
TEST(Delta, MissedVersionsComeAsAChain) {
  for (const uint32_t missed : {1u, 2u, 3u, 4u}) {
    SCOPED_TRACE(std::to_string(missed) + " missed");
    Versions versions(Large(2));
    Fleet& fleet = versions.fleet;
    versions.Code({DeltaPolicy::Mode::kAlways, 3, ""}, Always);
    versions.Next(fleet.source_memory);
    ASSERT_FALSE(HasFailure());
    const auto all = fleet.plan.plan.bytes_total;
    for (uint32_t version = 0; version < missed; ++version) {
      ChangeSome(fleet.rng, fleet.source_memory, 0.002);
      versions.Prepare(fleet.source_memory);
      for (auto& source : fleet.sources) source.job.assignments[0].readers = 1;
      for (size_t i = 0; i < fleet.sources.size(); ++i) fleet.StartSource(i);
      fleet.StartTarget(0);
      fleet.targets[1].result.emplace(Fail(Code::kAborted, Reason::kMemberLost, "away"));
      fleet.RunToResults();
      ASSERT_TRUE(fleet.targets[0].result->has_value());
      // It writes nothing, and serves on what it served.
      std::swap(fleet.targets[1].memory, versions.spare[1]);
      std::swap(fleet.targets[1].job.kept, versions.kept[1]);
    }
    ChangeSome(fleet.rng, fleet.source_memory, 0.002);
    versions.Prepare(fleet.source_memory);
    for (auto& source : fleet.sources) source.job.assignments[0].readers = 2;
    fleet.StartAll();
    testing::ExpectArrived(fleet, 2);
    ASSERT_FALSE(HasFailure());
    const auto moved = [&](size_t i) {
      return (*fleet.targets[i].result)->bytes_by_transport.at("fake");
    };
    EXPECT_LT(moved(0), all / 20);
    if (missed < 3) {
      EXPECT_LT(moved(1), all / 8);
      EXPECT_GT(moved(1), moved(0));
    } else {
      EXPECT_GT(moved(1), all / 2);
    }
  }
}

// Where all changes in every version, coding stops, and comes back when less does.
TEST(Delta, WhatDoesNotGetShorterIsNotCodedForSomeTime) {
  Versions versions(Large());
  Fleet& fleet = versions.fleet;
  versions.Code({DeltaPolicy::Mode::kAuto, 4, ""}, Always);
  const auto coded = [&] { return Delta(fleet).code_bytes > 0; };
  for (int version = 0; version < 12; ++version) {
    if (version > 0) ChangeAll(fleet.rng, fleet.plan.plan, fleet.source_memory);
    versions.Next(fleet.source_memory);
    ASSERT_FALSE(HasFailure());
    EXPECT_LE(BytesMoved(fleet), fleet.plan.plan.bytes_total + fleet.plan.plan.bytes_total / 50);
  }
  int shorter = 0;
  for (int version = 0; version < 40; ++version) {
    ChangeSome(fleet.rng, fleet.source_memory, 0.003);
    versions.Next(fleet.source_memory);
    ASSERT_FALSE(HasFailure());
    shorter += coded() ? 1 : 0;
  }
  EXPECT_GT(shorter, 20);
}

TEST(Delta, OffMeansThatEverythingIsSent) {
  Versions versions(Large());
  Fleet& fleet = versions.fleet;
  versions.Code({DeltaPolicy::Mode::kOff, 4, ""}, Always);
  for (int version = 0; version < 3; ++version) {
    ChangeSome(fleet.rng, fleet.source_memory, 0.9);
    versions.Next(fleet.source_memory);
    ASSERT_FALSE(HasFailure());
    EXPECT_EQ(Delta(fleet), DeltaFigures());
  }
}

// There is no memory for a base: everything is sent, and the reason is kept.
TEST(Delta, WithoutMemoryEverythingIsSentAndItIsSaid) {
  Versions versions(Large());
  Fleet& fleet = versions.fleet;
  versions.Code({DeltaPolicy::Mode::kAlways, 4, ""},
                [](uint64_t bytes) -> Result<DeltaBases::Share> {
                  return Fail(Code::kResourceExhausted, Reason::kLimitExceeded,
                              std::to_string(bytes) + " bytes are too many");
                });
  for (int version = 0; version < 2; ++version) {
    ChangeSome(fleet.rng, fleet.source_memory, 0.01);
    versions.Next(fleet.source_memory);
    ASSERT_FALSE(HasFailure());
    EXPECT_EQ(Delta(fleet), DeltaFigures());
  }
  EXPECT_EQ(fleet.sources[0].job.delta->why_not().reason(), Reason::kLimitExceeded);
  EXPECT_EQ(fleet.sources[0].job.delta->bytes(), 0u);
}

// A base in files of a folder, which nothing is left of.
TEST(Delta, ABaseMayLieInFiles) {
  const std::string folder = ::testing::TempDir();
  Versions versions(Large());
  Fleet& fleet = versions.fleet;
  versions.Code({DeltaPolicy::Mode::kAlways, 4, folder}, Always);
  versions.Next(fleet.source_memory);
  ChangeSome(fleet.rng, fleet.source_memory, 0.005);
  versions.Next(fleet.source_memory);
  ASSERT_FALSE(HasFailure());
  EXPECT_GT(Delta(fleet).bytes, fleet.plan.plan.bytes_total / 2);
}

TEST(Delta, AFolderThatIsNotThereIsNamed) {
  const testing::RandomPlan plan = testing::MakeSizedPlan({{5'000}});
  const auto schedule = plan::ScheduleOf(plan.plan.streams[0], 1'000, 8'192);
  const auto made = StreamBase::Make(schedule, {DeltaPolicy::Mode::kAuto, 4, "/no/such/folder"});
  ASSERT_FALSE(made.has_value());
  EXPECT_EQ(made.error().code(), Code::kResourceExhausted);
  EXPECT_NE(made.error().message().find("/no/such/folder"), std::string::npos);
}

// To whom a type of message that it does not know is nonsense, which ends its session.
TEST(Delta, ReadersThatDoNotKnowOfCodesAreOfferedNone) {
  FleetOptions options;
  options.shape = {.source_ranks = 1, .target_ranks = 1};
  options.stream_bytes = {{6'000}};
  options.source_agents = 1;
  Versions versions(options);
  Fleet& fleet = versions.fleet;
  ServeOneAndChange(versions, 0.01);
  SourceJob& job = fleet.sources[0].job;
  job.assignments[0].readers = 2;
  const ParticipantId older_id(5), newer_id(6);
  HandReader older(fleet, fleet.source_agents[0], job, Incarnation(771), 0);
  HandReader newer(fleet, fleet.source_agents[0], job, Incarnation(772),
                   transport::kFeatureTakesDelta);
  fleet.StartSource(0);
  older.Open(older_id);
  newer.Open(newer_id);
  fleet.sim.RunFor(std::chrono::milliseconds(100));
  ASSERT_EQ(older.heard.size(), 1u);
  EXPECT_EQ(older.heard[0].type, NotifyType::kReady);
  ASSERT_EQ(newer.heard.size(), 2u);
  EXPECT_EQ(newer.heard[0].type, NotifyType::kDelta);
  EXPECT_EQ(newer.heard[1].type, NotifyType::kReady);
  older.Credit(older_id, 0);
  newer.Credit(newer_id, 0);
  fleet.sim.RunFor(std::chrono::seconds(1));
  fleet.targets[0].drained = true;  // it had nothing to do
}

/// One stream with a base that is one change behind, and what a source offers of its first slot.
struct OneSlot {
  OneSlot()
      : random(testing::MakeSizedPlan({{9'000}})),
        stream(random.plan.streams[0]),
        schedule(plan::ScheduleOf(stream, 1'000, 16'384)),
        coders(1'000),
        base(StreamBase::Make(schedule, {DeltaPolicy::Mode::kAlways, 4, ""}).value()),
        source(testing::MakeMemory(rng, random.source_tensor_bytes[0])),
        target(testing::MakeMemory(rng, random.target_tensor_bytes[0])) {
    Make();
    for (uint32_t i = 0; i < schedule.slots[0].segment_count; ++i) kept.here.push_back(sums[i]);
    std::memcpy(target.binding[0].data(), source.binding[0].data(), source.binding[0].bytes);
    testing::Rng change(5);
    ChangeSome(change, {source}, 0.02);
    delta = Make();
  }
  std::optional<SlotDelta> Make() {
    sums.resize(schedule.segments.size());
    SlotDeltaMaker maker(stream, schedule, 0, *base, coders);
    for (uint32_t i = 0; i < schedule.slots[0].segment_count; ++i) {
      const plan::Segment& segment = schedule.segments[i];
      const std::byte* at = source.binding[0].data() + segment.begin[0];
      const auto bytes = static_cast<size_t>(segment.bytes);
      sums[i] = kernels::SumContiguous(at, bytes);
      maker.Add(i, {at, bytes}, sums[i]);
    }
    return maker.Finish(sums);
  }
  DeltaTaken Take(std::span<const std::byte> read, DeltaTaken before = {}) {
    return TakeDelta(stream, schedule, 0, read, kept, {}, target.binding, coders, stop,
                     std::move(before));
  }
  testing::Rng rng{7};
  testing::RandomPlan random;
  const plan::Stream& stream;
  plan::StreamSchedule schedule;
  DeltaCoders coders;
  std::shared_ptr<StreamBase> base;
  testing::RankMemory source, target;
  std::vector<uint64_t> sums;
  KeptSums kept;
  std::optional<SlotDelta> delta;
  std::atomic<bool> stop = false;
};

// A segment of which too little gets shorter is left alone for one version, then for two, then for
// four; one that does get shorter is coded at once again.
TEST(StreamBase, RestsLongerEachTimeThatItWasInVain) {
  constexpr size_t kBytes = 1'000;
  const testing::RandomPlan plan = testing::MakeSizedPlan({{kBytes}});
  const auto schedule = plan::ScheduleOf(plan.plan.streams[0], 1'000, 8'192);
  const auto base = StreamBase::Make(schedule, {DeltaPolicy::Mode::kAuto, 4, ""}).value();
  ASSERT_TRUE(base->Begin(/*adaptive=*/true));
  EXPECT_FALSE(base->Begin(true));  // a job has it
  delta::Coder coder(kBytes);
  testing::Rng rng(3);
  std::vector<std::byte> bytes(kBytes);
  uint64_t version = 0;
  // Whether the version could be coded.
  const auto next = [&](bool all_changes) {
    const uint64_t before = version++;
    for (size_t i = 0; i < kBytes; i += all_changes ? 1 : 100) {
      bytes[i] = static_cast<std::byte>(Below(rng, 256));
    }
    base->Update(0, kernels::DeltaOrder::kBits8, bytes, version, coder);
    return base->Has(0, version) && !base->links(0).empty() &&
           base->links(0).front().from == before;
  };
  EXPECT_FALSE(next(true));  // there is nothing to compare it with
  for (const int rest : {1, 2, 4}) {
    next(true);  // in vain
    for (int i = 0; i < rest; ++i) {
      EXPECT_FALSE(next(false));
      EXPECT_FALSE(base->Has(0, version));
    }
    EXPECT_FALSE(next(false));
    EXPECT_TRUE(base->Has(0, version));  // taken again
  }
  EXPECT_TRUE(next(false));
  next(true);
  EXPECT_FALSE(next(false));
  EXPECT_FALSE(next(false));
  EXPECT_TRUE(next(false));  // one version of rest again
}

// Whatever is read, nothing but the slot's segments is written, and what is said to be made has the
// sum that was read.
TEST(SlotDelta, AnyBytesAreReadWithoutHarm) {
  OneSlot one;
  ASSERT_TRUE(one.delta);
  const std::vector<std::byte> good(one.delta->region->data(),
                                    one.delta->region->data() + one.delta->bytes);
  const std::vector<std::byte> held = one.target.Snapshot();
  uint64_t refused = 0, mismatched = 0;
  for (uint32_t round = 0; round < 4'000; ++round) {
    one.target.Write(held);
    std::vector<std::byte> bad(
        good.begin(), good.begin() + Below(one.rng, static_cast<uint32_t>(good.size() + 1)));
    for (uint32_t i = Below(one.rng, 4); i > 0 && !bad.empty(); --i) {
      bad[Below(one.rng, static_cast<uint32_t>(
                             std::min<size_t>(bad.size(), round % 2 == 0 ? 200 : bad.size())))] =
          static_cast<std::byte>(Below(one.rng, 256));
    }
    const DeltaTaken taken = one.Take(bad);
    refused += taken.status.ok() ? 0 : 1;
    mismatched += taken.mismatches;
    for (uint32_t i = 0; i < taken.segments.size(); ++i) {
      if (taken.segments[i] != DeltaTaken::Segment::kMade) continue;
      const plan::Segment& segment = one.schedule.segments[i];
      EXPECT_EQ(kernels::SumContiguous(one.target.binding[0].data() + segment.begin[0],
                                       static_cast<size_t>(segment.bytes)),
                taken.expected[i]);
    }
  }
  EXPECT_GT(refused, 0u);
  EXPECT_GT(mismatched, 0u);
}

// When older codes have come: a segment that came out wrong is neither tried nor counted again, and
// what it would have changed is in no figure.
TEST(SlotDelta, WhatCameOutWrongIsLeftAlone) {
  OneSlot one;
  const std::span<const std::byte> all(one.delta->region->data(), one.delta->bytes);
  const int64_t right = OneSlot().Take(all).changes;
  one.target.binding[0].data()[one.schedule.segments[2].begin[0]] ^= std::byte{64};
  const DeltaTaken first = one.Take(all);
  EXPECT_EQ(first.mismatches, 1u);
  ASSERT_EQ(first.segments[2], DeltaTaken::Segment::kUnread);
  EXPECT_LT(first.changes, right);
  const std::vector<std::byte> held = one.target.Snapshot();
  const DeltaTaken second = one.Take(all, first);
  EXPECT_EQ(second.mismatches, 0u);
  EXPECT_EQ(second.segments, first.segments);
  EXPECT_EQ(second.changes, first.changes);
  EXPECT_EQ(one.target.Snapshot(), held);
}

TEST(SlotDelta, WhatIsNotReadYetIsAskedFor) {
  OneSlot one;
  const std::span<const std::byte> all(one.delta->region->data(), one.delta->bytes);
  const DeltaTaken some = one.Take(all.first(all.size() - 1));
  EXPECT_TRUE(some.status.ok());
  EXPECT_TRUE(some.wants_older());
  const DeltaTaken whole = one.Take(all);
  EXPECT_FALSE(whole.wants_older());
}

}  // namespace
}  // namespace weightwire::transfer
