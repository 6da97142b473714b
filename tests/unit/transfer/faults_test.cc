#include <gtest/gtest.h>

#include <algorithm>

#include "tests/unit/transfer/fleet.h"

namespace weightwire::transfer {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::Below;
using testing::Fleet;
using testing::FleetOptions;

// What must hold however it ended: an OK is the right bytes, gaps are never touched.
void ExpectHonest(const Fleet::Target& target) {
  if (!target.result.has_value() || !target.result->has_value()) return;
  EXPECT_EQ(target.memory.Snapshot(), target.expected);
}

TEST(TransferFaults, CorruptedGetsAreReadAgain) {
  const uint64_t first = testing::SeedOr(1);
  uint32_t rereads = 0;
  for (uint64_t seed = first; seed < first + 20; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    FleetOptions options;
    options.seed = seed;
    options.shape.elements_per_op_max = 20'000;
    options.link.corrupt_every_get = 1;
    options.link.corrupt_probability = 0.04;
    Fleet fleet(options);
    fleet.StartAll();
    fleet.RunToResults();
    uint32_t here = 0;
    for (auto& target : fleet.targets) {
      ASSERT_TRUE(target.result->has_value()) << target.result->error().ToString();
      EXPECT_EQ(target.memory.Snapshot(), target.expected);
      here += (*target.result)->rereads;
    }
    EXPECT_EQ(fleet.metrics.Count("transfer_retries_total{cause=digest_mismatch}"), here);
    EXPECT_EQ(fleet.metrics.Count("digest_failures_total{transport=fake}"), here);
    rereads += here;
  }
  EXPECT_GT(rereads, 20u);
}

TEST(TransferFaults, LastingCorruptionNamesTensorSourceAndTargetAndHurtsNobodyElse) {
  FleetOptions options;
  options.engines = 2;
  options.target_agents = 4;
  Fleet fleet(options);
  transport::FakeLink bad;
  bad.corrupt_every_get = 1;
  fleet.network.SetLink("t0", "s0", bad);
  fleet.network.SetLink("t0", "s1", bad);
  fleet.StartAll();
  fleet.RunToResults();
  ASSERT_FALSE(fleet.targets[0].result->has_value());
  const Status why = fleet.targets[0].result->error();
  EXPECT_EQ(why.code(), Code::kDataLoss);
  EXPECT_EQ(why.reason(), Reason::kDigestMismatch);
  EXPECT_NE(why.tensor().find("model.tensor."), std::string::npos);
  EXPECT_NE(why.message().find("participant 1"), std::string::npos) << why.message();
  EXPECT_NE(why.message().find("engine-0/0"), std::string::npos) << why.message();
  EXPECT_EQ(why.rank(), "engine-0/0");
  EXPECT_EQ(why.epoch(), Epoch(5));
  for (size_t i = 1; i < fleet.targets.size(); ++i) {
    ASSERT_TRUE(fleet.targets[i].result->has_value());
    EXPECT_EQ(fleet.targets[i].memory.Snapshot(), fleet.targets[i].expected);
  }
  for (auto& source : fleet.sources) {
    ASSERT_FALSE(source.result->has_value());
    EXPECT_EQ(source.result->error().rank(), source.job.name);
  }
  EXPECT_EQ(fleet.metrics.Count("transfers_finished_total{result=digest_mismatch}"), 1);
}

// The source's memory changes while it is mapped: what was summed is not what is copied.
TEST(TransferFaults, MappedSourceThatChangesIsNeverTakenForGood) {
  size_t mismatches = 0;
  for (size_t steps = 0; steps < 120; ++steps) {
    FleetOptions options;
    options.seed = 4;
    options.map = true;
    options.shape = {.source_ranks = 1, .target_ranks = 1, .ops_per_stream_max = 6};
    options.link.latency = milliseconds(1);
    Fleet fleet(options);
    const auto& op = fleet.plan.plan.streams[0].ops.back();
    fleet.StartAll();
    for (size_t i = 0; i < steps && fleet.sim.RunOne(); ++i) {
    }
    const auto& tensor = fleet.source_memory[0].binding[op.source_tensor];
    tensor.data()[op.source_offset * layout::ElementBytes(op.source_dtype)] ^= std::byte{1};
    const auto changed =
        testing::Expected(fleet.plan.plan, 0, fleet.targets[0].memory, fleet.source_memory);
    fleet.RunToResults();
    auto& target = fleet.targets[0];
    if (!target.result->has_value()) {
      EXPECT_EQ(target.result->error().reason(), Reason::kDigestMismatch);
      ++mismatches;
      continue;
    }
    const auto now = target.memory.Snapshot();
    EXPECT_TRUE(now == target.expected || now == changed);
  }
  EXPECT_GT(mismatches, 0u);
  EXPECT_LT(mismatches, 120u);
}

TEST(TransferFaults, DroppedConnectionFailsCleanlyAtEveryOperation) {
  for (bool map : {false, true}) {
    uint64_t failed = 0;
    uint64_t drop = 1;
    for (; drop < 2'000; ++drop) {
      SCOPED_TRACE("drop at " + std::to_string(drop));
      FleetOptions options;
      options.seed = 2;
      options.map = map;
      options.shape = {.source_ranks = 2,
                       .target_ranks = 1,
                       .ops_per_stream_max = 3,
                       .elements_per_op_max = 40'000};
      options.target_agents = 1;
      Fleet fleet(options);
      transport::FakeLink link;
      link.drop_at_operation = drop;
      fleet.network.SetLink("t0", "s0", link);
      fleet.StartAll();
      fleet.RunToResults();
      auto& target = fleet.targets[0];
      ExpectHonest(target);
      fleet.End();
      EXPECT_TRUE(target.drained);
      if (HasFailure()) return;
      if (target.result->has_value()) {
        if (fleet.sources[0].result->has_value()) break;  // `drop` was never reached
        continue;  // the last CLOSE or CREDIT was lost: the source cannot know
      }
      ++failed;
      EXPECT_EQ(target.result->error().reason(), Reason::kTransportFailed);
      EXPECT_FALSE(fleet.sources[0].result->has_value());
    }
    EXPECT_LT(drop, 2'000u);
    EXPECT_GT(failed, 2u);
  }
}

// The same in the other direction: READY, BINDING and FAIL are lost.
TEST(TransferFaults, DroppedAnswersFailCleanlyAtEveryOperation) {
  for (bool map : {false, true}) {
    bool reached_end = false;
    for (uint64_t drop = 1; drop < 500 && !reached_end; ++drop) {
      SCOPED_TRACE("drop at " + std::to_string(drop));
      FleetOptions options;
      options.seed = 2;
      options.map = map;
      options.shape = {.source_ranks = 1, .target_ranks = 1, .ops_per_stream_max = 4};
      Fleet fleet(options);
      transport::FakeLink link;
      link.drop_at_operation = drop;
      fleet.network.SetLink("s0", "t0", link);
      fleet.StartAll();
      fleet.RunToResults();
      ExpectHonest(fleet.targets[0]);
      reached_end = fleet.targets[0].result->has_value();
      EXPECT_EQ(fleet.sources[0].result->has_value(), reached_end);
      fleet.End();
      if (HasFailure()) return;
    }
    EXPECT_TRUE(reached_end);
  }
}

TEST(TransferFaults, StaleTicketIsRefused) {
  Fleet fleet({});
  for (auto& [rank, peer] : fleet.targets[0].job.sources) peer.ticket = {66};
  fleet.StartTarget(0);
  fleet.sim.RunFor(seconds(6));
  ASSERT_TRUE(fleet.targets[0].result.has_value());
  EXPECT_EQ(fleet.targets[0].result->error().code(), Code::kUnauthenticated);
  EXPECT_EQ(fleet.targets[0].result->error().reason(), Reason::kTicketRejected);
  EXPECT_EQ(fleet.targets[0].memory.Snapshot(), fleet.targets[0].before);
}

TEST(TransferFaults, WithdrawnTicketEndsEarlyOpens) {
  Fleet fleet({});
  fleet.StartTarget(0);
  fleet.sim.RunFor(seconds(1));
  EXPECT_FALSE(fleet.targets[0].result.has_value());
  const Ticket ticket = fleet.targets[0].job.sources.at(0).ticket;
  for (auto& agent : fleet.source_agents) {
    agent.engine->WithdrawTicket(ticket, fleet.target_agents[0].incarnation);
  }
  fleet.sim.RunFor(seconds(1));
  ASSERT_TRUE(fleet.targets[0].result.has_value());
  EXPECT_EQ(fleet.targets[0].result->error().reason(), Reason::kTicketRejected);
}

TEST(TransferFaults, OpenForADrainedSourceIsAnsweredAtOnce) {
  Fleet fleet({});
  for (size_t i = 0; i < fleet.sources.size(); ++i) {
    fleet.StartSource(i);
    fleet.DrainSource(i);
  }
  fleet.sim.RunFor(seconds(1));
  fleet.StartTarget(0);
  fleet.sim.RunFor(seconds(1));
  ASSERT_TRUE(fleet.targets[0].result.has_value());
  EXPECT_EQ(fleet.targets[0].result->error().code(), Code::kAborted);
}

TEST(TransferFaults, SilenceEndsAtTheProgressTimeout) {
  for (bool map : {false, true}) {
    FleetOptions options;
    options.map = map;
    Fleet fleet(options);
    for (size_t i = 0; i < fleet.sources.size(); ++i) fleet.StartSource(i);
    fleet.StartTarget(0);  // the second target never comes
    fleet.sim.RunFor(options.tuning.progress_timeout - milliseconds(1));
    for (auto& source : fleet.sources) EXPECT_FALSE(source.result.has_value());
    fleet.sim.RunFor(seconds(1));
    for (auto& source : fleet.sources) {
      ASSERT_TRUE(source.result.has_value());
      EXPECT_EQ(source.result->error().code(), Code::kDeadlineExceeded);
    }
    ASSERT_TRUE(fleet.targets[0].result.has_value());
    EXPECT_TRUE(fleet.targets[0].result->has_value());
  }
}

TEST(TransferFaults, SilentPeerEndsBothSides) {
  for (bool map : {false, true}) {
    FleetOptions options;
    options.map = map;
    options.tuning.mapped_window = 1;
    options.shape.elements_per_op_max = 40'000;
    options.link.latency = milliseconds(1);
    Fleet fleet(options);
    fleet.StartAll();
    fleet.sim.RunFor(milliseconds(6));
    transport::FakeLink silent;
    silent.silent = true;
    for (const char* s : {"s0", "s1"}) {
      for (const char* t : {"t0", "t1"}) {
        fleet.network.SetLink(s, t, silent);
        fleet.network.SetLink(t, s, silent);
      }
    }
    fleet.sim.RunFor(seconds(120));
    for (auto& target : fleet.targets) {
      ASSERT_TRUE(target.result.has_value());
      EXPECT_FALSE(target.result->has_value());
    }
    for (auto& source : fleet.sources) {
      ASSERT_TRUE(source.result.has_value());
      EXPECT_EQ(source.result->error().code(), Code::kDeadlineExceeded);
    }
  }
}

TEST(TransferFaults, PeerWithoutACommonTransportIsRefusedInWords) {
  Fleet fleet({});
  for (auto& [rank, peer] : fleet.targets[0].job.sources) peer.addresses = {{"ucx", "x"}};
  fleet.StartTarget(0);
  fleet.sim.RunFor(seconds(1));
  ASSERT_TRUE(fleet.targets[0].result.has_value());
  const Status why = fleet.targets[0].result->error();
  EXPECT_EQ(why.reason(), Reason::kTransportFailed);
  EXPECT_NE(why.message().find("we have fake, it has ucx"), std::string::npos) << why.message();
}

TEST(TransferFaults, ReaderThatCutsOtherSlotsIsRefused) {
  FleetOptions options;
  options.shape = {.source_ranks = 1, .target_ranks = 1};
  Fleet fleet(options);
  FleetOptions other = options;
  Options engine;
  engine.tuning = other.tuning;
  engine.tuning.slot_bytes = 4'096;
  engine.host = "x";
  engine.self = Incarnation(777);
  engine.preference = {"fake"};
  auto transport = fleet.network.MakeTransport("x");
  auto odd = Engine::Make(engine, fleet.sim, fleet.sim, fleet.sim, {transport.get()}, fleet.metrics)
                 .value();
  fleet.source_agents[0].engine->AdmitTicket({9}, engine.self);
  TargetJob job = fleet.targets[0].job;
  job.sources.at(0).ticket = {9};
  std::optional<Result<TargetReport>> result;
  fleet.StartSource(0);
  odd->StartTarget(job, [&](Result<TargetReport> done) { result = std::move(done); });
  fleet.sim.RunFor(seconds(1));
  ASSERT_TRUE(result.has_value());
  EXPECT_EQ(result->error().reason(), Reason::kConfigInvalid);
  for (const char* word : {"segment_bytes_max is", "slot_bytes 4096", "source rank 0"}) {
    EXPECT_NE(result->error().message().find(word), std::string::npos)
        << word << ": " << result->error().message();
  }
  bool shut = false;
  odd->Shutdown([&] { shut = true; });
  fleet.sim.RunFor(seconds(1));
  EXPECT_TRUE(shut);
  transport.reset();
}

TEST(TransferFaults, JobThatDoesNotFitItsMemoryIsRefusedBeforeAnyByteMoves) {
  Fleet fleet({});
  fleet.targets[0].job.binding.back().bytes = 0;
  fleet.StartAll();
  fleet.sim.RunFor(seconds(1));
  ASSERT_TRUE(fleet.targets[0].result.has_value());
  EXPECT_EQ(fleet.targets[0].result->error().reason(), Reason::kMemoryInvalid);
  EXPECT_EQ(fleet.targets[0].memory.Snapshot(), fleet.targets[0].before);
}

// Everything at once: whatever happens, each job ends once, an OK is the right bytes, a drained
// target is never written, a drained source is never needed, and every engine shuts down.
TEST(TransferFaults, AnyMixOfFaultsEndsHonestly) {
  const uint64_t first = testing::SeedOr(1);
  size_t succeeded = 0;
  size_t failed = 0;
  for (uint64_t seed = first; seed < first + 300; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    testing::Rng dice(seed * 104'729);
    FleetOptions options;
    options.seed = seed;
    options.map = Below(dice, 2) == 0;
    options.engines = 1 + Below(dice, 2);
    options.chain = Below(dice, 2) == 0;
    options.shape.source_ranks = 1 + Below(dice, 3);
    options.source_agents = 1 + Below(dice, options.shape.source_ranks);
    options.tuning.slots_in_pool = 1 + Below(dice, 4);
    options.tuning.progress_timeout = milliseconds(200);
    options.tuning.rate_limit = Below(dice, 2) * 2'000'000;
    options.tuning.get_timeout = milliseconds(300);
    options.tuning.drain_grace = milliseconds(100);
    options.link.latency = std::chrono::microseconds(Below(dice, 2'000));
    options.link.get_jitter_max = std::chrono::microseconds(Below(dice, 2'000));
    Fleet fleet(options);
    for (const auto& s : fleet.source_agents) {
      for (const auto& t : fleet.target_agents) {
        for (auto [from, to] : {std::pair(s.address, t.address), std::pair(t.address, s.address)}) {
          transport::FakeLink link = options.link;
          if (Below(dice, 6) == 0) link.drop_at_operation = 1 + Below(dice, 60);
          if (Below(dice, 4) == 0) link.corrupt_every_get = 1 + Below(dice, 12);
          link.corrupt_probability = 0.5;
          link.refuse_hello = Below(dice, 30) == 0;
          fleet.network.SetLink(from, to, link);
        }
      }
    }
    fleet.StartAll();
    std::map<size_t, std::vector<std::byte>> poisoned;
    while (fleet.sim.Now() < seconds(5)) {
      fleet.sim.RunFor(std::chrono::microseconds(500));
      if (Below(dice, 400) == 0) fleet.DrainTarget(Below(dice, 2));
      if (Below(dice, 400) == 0) fleet.DrainSource(Below(dice, options.shape.source_ranks));
      if (Below(dice, 400) == 0) {
        transport::FakeLink silent;
        silent.silent = true;
        fleet.network.SetLink("t0", "s0", silent);
      }
      if (Below(dice, 400) == 0) fleet.network.Break("s0", "t1");
      for (size_t i = 0; i < fleet.targets.size(); ++i) {
        auto& target = fleet.targets[i];
        if (!target.drained || poisoned.contains(i)) continue;
        ExpectHonest(target);
        std::fill_n(target.memory.region->data(), target.memory.region->size(), std::byte{0xee});
        poisoned[i] = target.memory.Snapshot();
      }
    }
    fleet.End();
    for (size_t i = 0; i < fleet.targets.size(); ++i) {
      auto& target = fleet.targets[i];
      EXPECT_EQ(target.done_calls, 1);
      if (poisoned.contains(i)) {
        EXPECT_EQ(target.memory.Snapshot(), poisoned[i]);
      } else {
        ExpectHonest(target);
      }
      ++(target.result->has_value() ? succeeded : failed);
    }
    for (auto& source : fleet.sources) EXPECT_EQ(source.done_calls, 1);
    if (HasFailure()) return;
  }
  EXPECT_GT(succeeded, 50u);
  EXPECT_GT(failed, 50u);
}

}  // namespace
}  // namespace weightwire::transfer
