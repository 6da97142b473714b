#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <iostream>
#include <random>
#include <set>

#include "tests/unit/coordinator/fleet.h"

// Random histories of a small fleet: processes and agents die and come back, answers are lost,
// digests are spoiled, the coordinator restarts. Everything that an agent sees is judged; when the
// faults stop, everyone who lives must reach the next version.
namespace weightwire::coordinator::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

uint64_t FirstSeed() {
  const char* text = std::getenv("WEIGHTWIRE_SEED");
  return text == nullptr ? 1 : std::strtoull(text, nullptr, 10);
}

class Soak {
 public:
  explicit Soak(uint64_t seed) : random_(seed) {
    fleet_.options.attempts_max = 2;
    for (const auto& [group, world] : worlds_) Rejoin(group);
  }

  void Play() {
    for (int i = 0; i < 60; ++i) {
      Chaos();
      fleet_.Run(milliseconds(Below(1'500)));
      CheckPrepares();
    }
    Heal();
    CheckPrepares();
    for (const auto& engine : fleet_.coordinator->Snapshot().engines) {
      EXPECT_EQ(engine.version, Version(version_)) << engine.name << " is behind: L1";
      EXPECT_EQ(engine.state, EngineState::kServing);
    }
    EXPECT_EQ(fleet_.metrics.Value("invariant_violations_total{id=I2}"), 0);
    EXPECT_EQ(fleet_.metrics.Value("invariant_violations_total{id=I4}"), 0);
  }

  std::map<std::string, int> reached;

 private:
  uint64_t Below(uint64_t n) { return random_() % n; }
  std::string Group() { return std::next(worlds_.begin(), static_cast<long>(Below(3)))->first; }

  void Rejoin(const std::string& group) {
    FakeAgent& agent = fleet_.Agent(group + "-agent");
    if (agent.session_lost) {
      agent.session_lost.reset();
      agent.incarnation = Incarnation(fleet_.next_incarnation++);
      ASSERT_TRUE(agent.Open().has_value());
    }
    const auto role =
        group == "trainer" ? control::GroupRole::kTrainer : control::GroupRole::kEngine;
    for (uint32_t rank = 0; rank < worlds_.at(group); ++rank) {
      auto member = fleet_.Register(group + "-agent", role, group, rank, worlds_.at(group));
      if (!member) continue;  // the place is still taken
      ASSERT_TRUE(fleet_.SubmitRows(*member, rank, worlds_.at(group)).ok());
    }
  }

  std::vector<ParticipantStatus> Ranks(const std::string& group) const {
    std::vector<ParticipantStatus> ranks;
    for (const auto& p : fleet_.coordinator->Snapshot().participants) {
      if (p.group == group) ranks.push_back(p);
    }
    return ranks;
  }

  void PublishNext(Nanos deadline) {
    ++version_;
    for (const auto& rank : Ranks("trainer")) {
      const Status ignored = fleet_.Publish(rank.member, version_, false, deadline);
      ++reached[ignored.ok() ? "published" : std::string(ReasonName(ignored.reason()))];
    }
  }

  void Chaos() {
    const std::string group = Group();
    FakeAgent& agent = fleet_.Agent(group + "-agent");
    switch (Below(12)) {
      case 0:
      case 1:
      case 2:
      case 3:
        return PublishNext(seconds(30));
      case 4: {
        const auto ranks = Ranks(group);
        if (ranks.empty()) return;
        agent.Report(epoch::LostReport{ranks[Below(ranks.size())].member,
                                       Status(Code::kAborted, Reason::kMemberLost, "died")});
        ++reached["lost"];
        return;
      }
      case 5:
        agent.StopHeartbeats();
        return;
      case 6:
        agent.deaf = [kind = Below(7)](const epoch::Command& c) { return c.index() == kind; };
        return;
      case 7:
        agent.deaf = nullptr;
        return;
      case 8:
        agent.corrupt = !agent.corrupt;
        return;
      case 9:
      case 10:
        return Rejoin(group);
      default:
        if (Below(4) != 0) return Rejoin(group);
        ++reached["restart"];
        fleet_.Restart();
        for (auto& [name, other] : fleet_.agents) other->session_lost = Status();
    }
  }

  void Heal() {
    for (auto& [name, agent] : fleet_.agents) {
      agent->deaf = nullptr;
      agent->corrupt = false;
    }
    // Long enough for every deadline of what still runs.
    for (int i = 0; i < 6; ++i) {
      fleet_.Run(seconds(60));
      for (const auto& [group, world] : worlds_) Rejoin(group);
    }
    PublishNext(seconds(100));
    fleet_.Run(seconds(200));
  }

  /// Epochs rise for each incarnation; COMMIT comes only for what is durable (the agents check).
  void CheckPrepares() {
    for (const auto& [name, agent] : fleet_.agents) {
      std::map<epoch::Member, Epoch> highest;
      for (const auto& prepare : agent->All<epoch::PrepareCommand>()) {
        EXPECT_GT(prepare.epoch, highest[prepare.member]) << "epochs only rise";
        highest[prepare.member] = prepare.epoch;
      }
    }
    const StatusSnapshot status = fleet_.coordinator->Snapshot();
    for (const auto& engine : status.engines) {
      EXPECT_LE(engine.serving, status.committed);
      EXPECT_TRUE(engine.serving == Epoch{} || fleet_.journal.Committed(engine.serving)) << "I2";
    }
    for (const auto& epoch : status.epochs) ++reached[std::string(PhaseName(epoch.phase))];
  }

  std::mt19937_64 random_;
  const std::map<std::string, uint32_t> worlds_ = {
      {"engine-a", 2}, {"engine-b", 1}, {"trainer", 2}};
  Fleet fleet_;
  uint64_t version_ = 0;
};

TEST(CoordinatorSoak, LiveEnginesReachTheLastVersionOnceFaultsStop) {
  constexpr uint64_t kSeeds = 400;
  std::map<std::string, int> reached;
  for (uint64_t seed = FirstSeed(); seed < FirstSeed() + kSeeds; ++seed) {
    Soak soak(seed);
    soak.Play();
    for (const auto& [branch, count] : soak.reached) reached[branch] += count;
    ASSERT_FALSE(::testing::Test::HasFailure()) << "WEIGHTWIRE_SEED=" << seed;
  }
  std::cout << "seeds " << FirstSeed() << " … +" << kSeeds << "\n";
  for (const char* branch : {"published", "lost", "restart", "committed", "aborted", "aborting",
                             "missing_rank", "preparing", "transferring"}) {
    EXPECT_GT(reached[branch], 0) << branch;
  }
}

}  // namespace
}  // namespace weightwire::coordinator::testing
