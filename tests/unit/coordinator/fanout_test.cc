#include "server/coordinator/fanout.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "server/coordinator/prepare.h"
#include "tests/unit/coordinator/fleet.h"

namespace weightwire::coordinator {
namespace {

using ::testing::ElementsAre;
using testing::Fleet;

/// Engines "0", "1", … of two ranks, one plan, a trainer of one rank on host "t".
class ParentsTest : public ::testing::Test {
 protected:
  /// A rank's bytes, to the coordinator's slots of 8 MiB.
  int64_t rank_bytes_ = 1 << 30;

  std::vector<int> Parents(Fanout fanout, const std::vector<std::string>& hosts,
                           const std::vector<std::string>& transports = {"shm", "tcp"},
                           const std::set<std::string>& direct = {}) {
    const auto address = [&](const std::string& host) {
      epoch::PeerAddress peer;
      peer.host = host;
      for (const std::string& name : transports) peer.addresses[name] = host + ":1";
      return peer;
    };
    auto pair = std::make_shared<PlannedPair>();
    auto plan = std::make_shared<plan::TransferPlan>();
    for (uint32_t rank : {0, 1}) plan->streams.push_back({rank, 0, rank, rank_bytes_, {}});
    pair->plan = plan;
    PrepareInput input;
    input.fanout = fanout;
    input.direct = direct;
    input.spec.sources = {{ParticipantId(1), Incarnation(1)}};
    input.addresses[input.spec.sources[0]] = address("t");
    for (size_t i = 0; i < hosts.size(); ++i) {
      const auto id = static_cast<uint32_t>(10 + 2 * i);
      input.spec.engines.push_back(
          {std::to_string(i),
           {{ParticipantId(id), Incarnation(1)}, {ParticipantId(id + 1), Incarnation(1)}}});
      for (const epoch::Member& rank : input.spec.engines[i].ranks) {
        input.addresses[rank] = address(hosts[i]);
      }
      input.plans[std::to_string(i)] = pair;
    }
    std::vector<const epoch::EngineMembers*> engines;
    for (const auto& engine : input.spec.engines) engines.push_back(&engine);
    return ParentsOf(input, engines);
  }
};

TEST_F(ParentsTest, WhoCanMapTheTrainersGpuMemoryReadsFromIt) {
  EXPECT_THAT(Parents(Fanout::kAuto, {"t", "t", "t", "t"}, {"cuda_ipc", "tcp"}),
              ElementsAre(-1, -1, -1, -1));
  EXPECT_THAT(Parents(Fanout::kAuto, {"t", "t", "t", "t"}, {"tcp"}), ElementsAre(-1, 0, 1, 2));
}

TEST_F(ParentsTest, AStarIsAStar) {
  EXPECT_THAT(Parents(Fanout::kStar, {"a", "b", "c", "d"}), ElementsAre(-1, -1, -1, -1));
}

TEST_F(ParentsTest, AChainIsOneFromTwoEnginesOn) {
  EXPECT_THAT(Parents(Fanout::kChain, {"a"}), ElementsAre(-1));
  EXPECT_THAT(Parents(Fanout::kChain, {"a", "b"}), ElementsAre(-1, 0));
  EXPECT_THAT(Parents(Fanout::kChain, {"t", "t", "t"}), ElementsAre(-1, 0, 1));
}

TEST_F(ParentsTest, AnEngineThatCouldNotReadFromAnotherReadsFromTheTrainerAndKeepsItsReader) {
  EXPECT_THAT(Parents(Fanout::kChain, {"a", "b", "c", "d"}, {"tcp"}, {"1"}),
              ElementsAre(-1, -1, 1, 2));
  EXPECT_THAT(Parents(Fanout::kAuto, {"a", "b", "c"}, {"tcp"}, {"0", "1", "2", "x"}),
              ElementsAre(-1, -1, -1));
}

TEST_F(ParentsTest, ByItselfItIsAChainFromThreeOn) {
  EXPECT_THAT(Parents(Fanout::kAuto, {"a", "b"}), ElementsAre(-1, -1));
  EXPECT_THAT(Parents(Fanout::kAuto, {"a", "b", "c"}), ElementsAre(-1, 0, 1));
}

TEST_F(ParentsTest, ATreeHasTwoReadersForEachThatReadsFromTheTrainer) {
  EXPECT_THAT(Parents(Fanout::kTree, {"a"}), ElementsAre(-1));
  EXPECT_THAT(Parents(Fanout::kTree, {"a", "b", "c", "d", "e", "f"}),
              ElementsAre(-1, 0, 0, 1, 1, 2));
  EXPECT_THAT(Parents(Fanout::kTree, {"a", "b", "c", "d"}, {"tcp"}, {"1"}),
              ElementsAre(-1, -1, 0, 1));
}

TEST_F(ParentsTest, EnginesOfOneHostAreOneBranch) {
  EXPECT_THAT(Parents(Fanout::kTree, {"a", "b", "a", "b", "c", "d"}),
              ElementsAre(-1, 0, 0, 1, 0, 1));
  EXPECT_THAT(Parents(Fanout::kTree, {"", "", ""}), ElementsAre(-1, 0, 0)) << "hosts of their own";
}

TEST_F(ParentsTest, ByItselfItIsATreeWhereAChainIsLongForItsBytes) {
  std::vector<std::string> hosts;
  const auto most_readers = [&] {
    const auto parents = Parents(Fanout::kAuto, hosts);
    int64_t most = 0;
    for (int i = 0; i < static_cast<int>(parents.size()); ++i) {
      most = std::max<int64_t>(most, std::ranges::count(parents, i));
    }
    return most;
  };
  for (int i = 0; i < 100; ++i) hosts.push_back("host-" + std::to_string(i));
  EXPECT_EQ(most_readers(), 1) << "128 slots, 99 engines to pass";
  for (int i = 100; i < 200; ++i) hosts.push_back("host-" + std::to_string(i));
  EXPECT_EQ(most_readers(), 2) << "199 engines to pass";
  rank_bytes_ <<= 4;
  EXPECT_EQ(most_readers(), 1);
  rank_bytes_ >>= 4;
  for (std::string& host : hosts) host = "one";
  EXPECT_EQ(most_readers(), 1) << "no link to share";
}

TEST_F(ParentsTest, EveryEngineIsFedByTheTrainerInTheEnd) {
  std::mt19937 random(7);
  for (int round = 0; round < 2'000; ++round) {
    const size_t count = 1 + random() % 20;
    std::vector<std::string> hosts;
    std::set<std::string> direct;
    for (size_t i = 0; i < count; ++i) {
      hosts.push_back(std::string(random() % 3, static_cast<char>('a' + random() % 4)));
      if (random() % 5 == 0) direct.insert(std::to_string(i));
    }
    rank_bytes_ = 1 << (20 + random() % 8);
    const auto parents =
        Parents(static_cast<Fanout>(1 + random() % 4), hosts, {"shm", "tcp"}, direct);
    for (size_t i = 0; i < count; ++i) {
      size_t passed = 0;
      for (int at = static_cast<int>(i); at >= 0; at = parents[static_cast<size_t>(at)]) {
        ASSERT_LE(++passed, count) << "a cycle";
      }
      EXPECT_LE(std::ranges::count(parents, static_cast<int>(i)), 3);
    }
  }
}

TEST_F(ParentsTest, EnginesOfOneHostAreNextToEachOther) {
  EXPECT_THAT(Parents(Fanout::kAuto, {"b", "a", "b", "a"}), ElementsAre(3, -1, 0, 1));
}

TEST_F(ParentsTest, WhoMapsTheTrainersMemoryReadsFromIt) {
  EXPECT_THAT(Parents(Fanout::kAuto, {"t", "a", "t", "b", "c"}), ElementsAre(-1, -1, -1, 1, 3));
  EXPECT_THAT(Parents(Fanout::kAuto, {"t", "t", "t"}), ElementsAre(-1, -1, -1));
  EXPECT_THAT(Parents(Fanout::kAuto, {"t", "t", "t"}, {"tcp"}), ElementsAre(-1, 0, 1));
}

TEST(Fanout, AChainTellsEveryRankWhoseBytesItReadsAndWhoReadsItsOwn) {
  Fleet fleet;
  const auto trainer = fleet.Trainer(2);
  const std::vector<std::vector<epoch::Member>> engines = {
      fleet.Engine("engine-a", 2), fleet.Engine("engine-b", 2), fleet.Engine("engine-c", 2)};
  fleet.Engine("other", 1);  // of another layout: it reads from the trainer
  fleet.PublishAll(trainer, 1);
  fleet.Run();
  EXPECT_EQ(fleet.Newest().phase, epoch::Phase::kCommitted);
  for (const auto& source : fleet.Agent("trainer-agent").All<epoch::PrepareCommand>()) {
    for (const auto& assignment : source.assignments) EXPECT_EQ(assignment.readers, 1u);
    EXPECT_FALSE(source.relayed);
    EXPECT_EQ(source.relay_readers, 0u);
  }
  const auto commands = [&](const std::string& name) {
    return fleet.Agent(name + "-agent").All<epoch::PrepareCommand>();
  };
  const std::vector<std::string> names = {"engine-a", "engine-b", "engine-c"};
  for (size_t i = 0; i < names.size(); ++i) {
    const auto ranks = commands(names[i]);
    ASSERT_EQ(ranks.size(), 2u);
    for (uint32_t rank = 0; rank < 2; ++rank) {
      const auto& target = ranks[rank];
      EXPECT_EQ(target.relayed, i > 0);
      EXPECT_EQ(target.relay_readers, i < 2 ? 1u : 0u);
      ASSERT_EQ(target.admitted.size(), i < 2 ? 1u : 0u);
      if (i < 2) {
        const auto child = commands(names[i + 1])[rank];
        EXPECT_EQ(target.admitted[0].second, fleet.Agent(names[i + 1] + "-agent").incarnation);
        ASSERT_EQ(target.readers.size(), 1u);
        EXPECT_EQ(target.readers[0],
                  (epoch::Reader{child.member.id, rank,
                                 fleet.Agent(names[i + 1] + "-agent").incarnation}));
        ASSERT_FALSE(child.sources.empty());
        for (const auto& [source, peer] : child.sources) {
          EXPECT_EQ(peer.ticket, target.admitted[0].first);
          EXPECT_EQ(peer.agent, fleet.Agent(names[i] + "-agent").id());
          EXPECT_EQ(child.source_participants.at(source), engines[i][rank].id);
        }
      }
    }
  }
  for (const auto& target : commands("other")) EXPECT_FALSE(target.relayed);
}

TEST(Fanout, AFillHasNoRelays) {
  Fleet fleet;
  const auto trainer = fleet.Trainer(1);
  for (const char* name : {"a", "b", "c"}) fleet.Engine(name);
  fleet.PublishAll(trainer, 1);
  fleet.Run();
  fleet.Engine("late");
  fleet.Run();
  EXPECT_EQ(fleet.EngineNamed("late").state, EngineState::kServing);
  const auto fill = fleet.Agent("late-agent").Last<epoch::PrepareCommand>();
  ASSERT_TRUE(fill.has_value());
  EXPECT_EQ(fill->kind, epoch::Kind::kFill);
  EXPECT_FALSE(fill->relayed);
}

}  // namespace
}  // namespace weightwire::coordinator
