#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <utility>

#include "tests/unit/coordinator/fleet.h"

// What an engine that leaves, hangs or cannot be reached costs: its own place, not the version's.
namespace weightwire::coordinator::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::HasSubstr;

const Status kEnded(Code::kAborted, Reason::kMemberLost, "the process ended");

template <typename T>
bool Is(const epoch::Command& command) {
  return std::holds_alternative<T>(command);
}

const CommitPolicy kAll{};
const CommitPolicy kQuorum{CommitPolicy::Kind::kQuorum, 1, seconds(1)};

class CoordinatorAttempts : public ::testing::TestWithParam<CommitPolicy> {
 protected:
  void Start(int engines, uint64_t features = 0) {
    Options options;
    options.commit_policy = GetParam();
    fleet_ = std::make_unique<Fleet>(std::move(options));
    fleet_->agent_features |= features;
    trainer_ = fleet_->Trainer(1);
    for (int i = 0; i < engines; ++i) {
      ranks_.push_back(fleet_->Engine("engine-" + std::to_string(i), 2));
    }
    Publish(1);
    ASSERT_EQ(fleet_->coordinator->Snapshot().committed_version, Version(1));
  }
  void Publish(uint64_t version, Nanos deadline = seconds(120), bool manual = false) {
    fleet_->PublishAll(trainer_, version, manual, deadline);
    fleet_->Run();
  }
  FakeAgent& AgentOf(int engine) {
    return fleet_->Agent("engine-" + std::to_string(engine) + "-agent");
  }
  EngineStatus Engine(int engine) {
    return fleet_->EngineNamed("engine-" + std::to_string(engine));
  }
  void Lose(int engine) {
    AgentOf(engine).Report(epoch::LostReport{ranks_[static_cast<size_t>(engine)][0], kEnded});
    fleet_->Run();
  }
  Version Committed() const { return fleet_->coordinator->Snapshot().committed_version; }
  /// The leader is asked again what it has not answered.
  void Swap(int engine) {
    const auto asked = AgentOf(engine).All<epoch::CommitCommand>();
    for (const epoch::CommitCommand& commit : asked) {
      const bool last = commit.epoch == asked.back().epoch;
      if (last && commit.leader) {
        AgentOf(engine).Report(epoch::SwappedReport{commit.epoch, commit.member, 0.1});
      }
    }
    fleet_->Run();
  }
  /// Its connections to the trainer are refused until `until`.
  void Refuse(int engine, Nanos until) {
    AgentOf(engine).deaf = [this, engine, until](const epoch::Command& command) {
      const auto* transfer = std::get_if<epoch::TransferCommand>(&command);
      if (transfer == nullptr || fleet_->sim.Now() >= until) return false;
      AgentOf(engine).Report(epoch::FailedReport{
          transfer->epoch, transfer->member,
          Status(Code::kUnavailable, Reason::kTransportFailed, "connection refused"), false});
      return true;
    };
  }
  std::unique_ptr<Fleet> fleet_;
  std::vector<epoch::Member> trainer_;
  std::vector<std::vector<epoch::Member>> ranks_;
};
INSTANTIATE_TEST_SUITE_P(Policies, CoordinatorAttempts, ::testing::Values(kAll, kQuorum),
                         [](const auto& policy) {
                           return policy.param.kind == CommitPolicy::Kind::kAll ? "All" : "Quorum";
                         });

TEST_P(CoordinatorAttempts, B7AStragglerIsWaitedForOnce) {
  Start(2);
  AgentOf(1).deaf = Is<epoch::CommitCommand>;
  Publish(2);
  fleet_->Run(fleet_->options.commit_deadline);
  AgentOf(1).deaf = nullptr;
  const size_t asked = AgentOf(1).All<epoch::PrepareCommand>().size();
  for (uint64_t version = 3; version <= 6; ++version) {
    Publish(version);
    EXPECT_EQ(Engine(0).version, Version(version)) << "100 ms after it was published";
    EXPECT_EQ(fleet_->Newest().phase, epoch::Phase::kCommitted);
  }
  EXPECT_EQ(AgentOf(1).All<epoch::PrepareCommand>().size(), asked) << "nothing new is asked of it";
  EXPECT_TRUE(AgentOf(1).All<epoch::EvictCommand>().empty());
  EXPECT_EQ(Engine(1).state, EngineState::kServing);
  EXPECT_EQ(Engine(1).version, Version(1)) << "it serves on";
  EXPECT_FALSE(Engine(1).ready);
  EXPECT_THAT(Engine(1).last_error, HasSubstr("engine-1/0"));
  EXPECT_THAT(fleet_->coordinator->Snapshot().waiting_for, HasSubstr("engine-1: has not swapped"));

  Swap(1);
  EXPECT_EQ(Engine(1).version, Version(6)) << "it answered, and is filled";
  EXPECT_TRUE(Engine(1).ready);
  Publish(7);
  EXPECT_EQ(Engine(1).version, Version(7)) << "it is one of them again";
}

TEST_P(CoordinatorAttempts, B7AStragglerThatStaysSilentServesOn) {
  Start(2);
  AgentOf(1).deaf = Is<epoch::CommitCommand>;
  Publish(2);
  fleet_->Run(10 * fleet_->options.commit_deadline);
  EXPECT_TRUE(AgentOf(1).All<epoch::EvictCommand>().empty());
  EXPECT_EQ(Engine(1).version, Version(1));
  Publish(3);
  EXPECT_EQ(Engine(0).version, Version(3)) << "100 ms after it was published";
}

TEST_P(CoordinatorAttempts, B7AStragglerThatIsCutOffAndBackIsNotWaitedForAgain) {
  Start(2);
  AgentOf(1).deaf = Is<epoch::CommitCommand>;
  Publish(2);
  fleet_->Run(fleet_->options.commit_deadline);
  control::RejoinState staged;
  staged.serving = {Epoch(1), Version(1)};
  staged.staged = staged.content = Epoch(2);
  staged.version = Version(2);
  staged.told = true;
  for (uint64_t version = 3; version <= 4; ++version) {
    fleet_->coordinator->Disconnected(AgentOf(1).id());
    fleet_->Run();
    AgentOf(1).commands.clear();
    ASSERT_TRUE(AgentOf(1).Open().has_value());
    for (uint32_t rank = 0; rank < 2; ++rank) {
      const epoch::Member member = ranks_[1][rank];
      ASSERT_TRUE(fleet_
                      ->Register("engine-1-agent", control::GroupRole::kEngine, "engine-1", rank, 2,
                                 member.incarnation.value, staged)
                      .has_value());
      ASSERT_TRUE(fleet_->SubmitRows(member, rank, 2).ok());
    }
    fleet_->Run();
    Publish(version);
    EXPECT_EQ(Engine(0).version, Version(version)) << "100 ms after it was published";
    EXPECT_EQ(Engine(1).version, Version(1)) << "it serves on";
  }
  AgentOf(1).deaf = nullptr;
  fleet_->Run(2 * fleet_->options.commit_deadline);
  EXPECT_EQ(Engine(1).version, Version(4)) << "asked again, it swaps and is filled";
  EXPECT_TRUE(AgentOf(1).All<epoch::EvictCommand>().empty());
}

TEST_P(CoordinatorAttempts, B7WithoutAnyOtherEngineAVersionWaitsForTheStraggler) {
  Start(1);
  AgentOf(0).deaf = Is<epoch::CommitCommand>;
  Publish(2);
  fleet_->Run(fleet_->options.commit_deadline);
  AgentOf(0).deaf = nullptr;
  Publish(3);
  EXPECT_EQ(Engine(0).version, Version(1)) << "it serves on";
  EXPECT_THAT(fleet_->coordinator->Snapshot().waiting_for,
              HasSubstr("have not swapped yet: engine-0"));
  Swap(0);
  fleet_->Run();
  EXPECT_EQ(Engine(0).version, Version(3));
  EXPECT_TRUE(AgentOf(0).All<epoch::EvictCommand>().empty());
}

TEST_P(CoordinatorAttempts, B7AStragglerThatRefusesOrLeavesIsOneNoMore) {
  for (const bool refuses : {true, false}) {
    ranks_.clear();
    Start(2);
    AgentOf(1).deaf = Is<epoch::CommitCommand>;
    Publish(2);
    fleet_->Run(fleet_->options.commit_deadline);
    AgentOf(1).deaf = nullptr;
    const auto commit = AgentOf(1).Last<epoch::CommitCommand>();
    if (refuses) {
      AgentOf(1).Report(epoch::FailedReport{
          commit->epoch, ranks_[1][0],
          Status(Code::kAborted, Reason::kAbortRequested, "a canary sang"), true});
      fleet_->Run();
    } else {
      Lose(1);
    }
    EXPECT_EQ(Engine(1).state, EngineState::kDirty);
    EXPECT_EQ(Committed(), Version(2)) << "the others keep it";
    fleet_->Engine("engine-1", 2);
    fleet_->Run();
    EXPECT_EQ(Engine(1).version, Version(2)) << "filled";
    Publish(3);
    EXPECT_EQ(Engine(1).version, Version(3));
  }
}

/// A quorum goes on without it when its grace has ended, all when it is lost: in the attempt that
/// runs.
TEST_P(CoordinatorAttempts, D6AnEngineThatIsLateCostsItsOwnPlaceAndNotAnAttempt) {
  Start(3, control::kFeatureExclude);
  AgentOf(2).deaf = Is<epoch::TransferCommand>;
  Publish(2);
  EXPECT_EQ(Committed(), Version(1)) << "nobody was late yet";
  fleet_->Run(GetParam().grace);
  if (GetParam().kind == CommitPolicy::Kind::kAll) {
    fleet_->Run(seconds(10));
    EXPECT_EQ(Committed(), Version(1)) << "all are waited for";
    Lose(2);
  } else {
    EXPECT_TRUE(AgentOf(2).All<epoch::EvictCommand>().empty()) << "it serves on";
  }
  EXPECT_EQ(Committed(), Version(2));
  const auto epochs = fleet_->coordinator->Snapshot().epochs;
  const auto publish = std::ranges::find(epochs, epoch::Kind::kPublish, &EpochStatus::kind);
  EXPECT_EQ(std::ranges::count(epochs, epoch::Kind::kPublish, &EpochStatus::kind), 2);
  EXPECT_EQ(publish->attempt, 1u);
  EXPECT_THAT(publish->left_out, ::testing::ElementsAre("engine-2"));
}

TEST_P(CoordinatorAttempts, D6EnginesThatLeaveDuringAVersionDoNotUseItUp) {
  Start(8);
  for (int i = 0; i < 8; ++i) AgentOf(i).deaf = Is<epoch::TransferCommand>;
  Publish(2);
  for (int i = 0; i < 5; ++i) {
    if (i == 4) {
      for (int j = 0; j < 8; ++j) AgentOf(j).deaf = nullptr;
    }
    Lose(i);
  }
  EXPECT_EQ(fleet_->Released(trainer_[0], 2), OkStatus());
  EXPECT_EQ(Committed(), Version(2));
  const auto epochs = fleet_->coordinator->Snapshot().epochs;
  const auto last = std::ranges::find(epochs, epoch::Kind::kPublish, &EpochStatus::kind);
  EXPECT_EQ(last->attempt, 6u) << "more than attempts_max, one after another";
}

/// Engines leave faster than an attempt takes: it is 200 ms, with a loss and a new one each 100 ms.
class CoordinatorChurn : public ::testing::Test {
 protected:
  CoordinatorChurn() { options_.fanout = Fanout::kStar; }

  void Start(size_t engines) {
    fleet_ = std::make_unique<Fleet>(options_);
    fleet_->agent_features |= features_;
    trainer_ = fleet_->Trainer(1);
    // As a real one, it is done when those have read that were not excluded.
    SlowDown(fleet_->Agent("trainer-agent"));
    while (engines_.size() < engines) Join();
  }
  void SlowDown(FakeAgent& agent) {
    agent.deaf = [this, &agent](const epoch::Command& command) {
      const auto* transfer = std::get_if<epoch::TransferCommand>(&command);
      if (transfer == nullptr) return false;
      fleet_->sim.PostAfter(milliseconds(200), [&agent, again = *transfer] {
        const auto deaf = std::exchange(agent.deaf, nullptr);
        agent.OnCommand(again);
        agent.deaf = deaf;
      });
      return true;
    };
  }
  void Join() {
    const std::string name = "engine-" + std::to_string(next_++);
    engines_.emplace_back(name, fleet_->Engine(name)[0]);
    SlowDown(fleet_->Agent(name + "-agent"));
  }
  /// Ten seconds of it; a version is published when the one before it was released.
  void Churn() {
    std::mt19937 random(7);
    fleet_->PublishAll(trainer_, version_, false, seconds(120));
    for (int round = 0; round < 100; ++round) {
      fleet_->Run(milliseconds(100));
      const auto leaver =
          engines_.begin() + static_cast<std::ptrdiff_t>(random() % engines_.size());
      fleet_->Agent(leaver->first + "-agent").Report(epoch::LostReport{leaver->second, kEnded});
      engines_.erase(leaver);
      Join();
      const auto released = fleet_->Released(trainer_[0], version_);
      if (!released.has_value()) continue;
      given_up_ += released->ok() ? 0 : 1;
      for (const EpochStatus& epoch : fleet_->coordinator->Snapshot().epochs) {
        if (epoch.kind == epoch::Kind::kPublish && epoch.version == Version(version_)) {
          attempts_most_ = std::max(attempts_most_, epoch.attempt);
        }
      }
      fleet_->PublishAll(trainer_, ++version_, false, seconds(120));
    }
  }

  void ChurnCostsPlacesOnly() {
    Churn();
    EXPECT_EQ(given_up_, 0u);
    EXPECT_EQ(attempts_most_, 1u) << "each leaver costs its own place";
    EXPECT_GE(version_, 30u) << "none takes longer than an attempt: 10 s have passed";
  }

  Options options_;
  uint64_t features_ = control::kFeatureExclude;
  std::unique_ptr<Fleet> fleet_;
  std::vector<epoch::Member> trainer_;
  std::vector<std::pair<std::string, epoch::Member>> engines_;
  int next_ = 0;
  uint64_t version_ = 1, given_up_ = 0;
  uint32_t attempts_most_ = 0;
};

TEST_F(CoordinatorChurn, D6AVersionOfAQuorumGoesThroughAlthoughEnginesComeAndGo) {
  options_.commit_policy = {CommitPolicy::Kind::kQuorum, 10, seconds(1)};
  Start(200);
  ChurnCostsPlacesOnly();
}

TEST_F(CoordinatorChurn, D6AVersionOfAllGoesThroughAlthoughEnginesComeAndGo) {
  Start(200);
  ChurnCostsPlacesOnly();
}

TEST_F(CoordinatorChurn, D6AgentsThatCannotDropAReaderCostAttemptsOfAQuorumAndNoVersion) {
  options_.commit_policy = {CommitPolicy::Kind::kQuorum, 10, seconds(1)};
  features_ = 0;
  Start(200);
  Churn();
  EXPECT_EQ(given_up_, 0u);
  EXPECT_GT(attempts_most_, 1u);
  EXPECT_GE(version_, 3u) << "none takes long: 10 s have passed";
}

TEST_F(CoordinatorChurn, D6AfterRelaysWereLostAllReadFromTheTrainer) {
  options_.fanout = Fanout::kChain;
  Start(200);
  Churn();
  EXPECT_EQ(given_up_, 0u);
  EXPECT_LE(attempts_most_, 3u) << "two that were lost with relays, and a star";
  EXPECT_GE(version_, 12u);
}

TEST_P(CoordinatorAttempts, D6APortThatRefusesForTwoSecondsDoesNotUseAVersionUp) {
  Start(3);
  const Nanos start = fleet_->sim.Now();
  for (int i = 0; i < 3; ++i) Refuse(i, start + seconds(2));
  Publish(2);
  bool said = false;
  while (fleet_->sim.Now() < start + seconds(2)) {
    const std::string waiting = fleet_->coordinator->Snapshot().waiting_for;
    said |= waiting.find("; the last one: UNAVAILABLE (transport_failed)") != std::string::npos;
    fleet_->Run(milliseconds(10));
  }
  EXPECT_TRUE(said) << fleet_->coordinator->Snapshot().waiting_for;
  EXPECT_FALSE(fleet_->Released(trainer_[0], 2).has_value());
  fleet_->Run(seconds(6));
  EXPECT_EQ(fleet_->Released(trainer_[0], 2), OkStatus());
  EXPECT_EQ(Committed(), Version(2));
}

TEST_P(CoordinatorAttempts, D6AVersionEndsAtItsDeadlineAfterAttemptsThatBackOff) {
  Start(2);
  for (int i = 0; i < 2; ++i) Refuse(i, seconds(1'000'000));
  Publish(2, seconds(60));
  fleet_->Run(seconds(59));
  EXPECT_FALSE(fleet_->Released(trainer_[0], 2).has_value());
  const uint32_t attempts = fleet_->Newest().attempt;
  EXPECT_GT(attempts, 3u);
  EXPECT_LT(attempts, 90u) << "they back off";
  fleet_->Run(seconds(2));
  const auto why = fleet_->Released(trainer_[0], 2);
  ASSERT_TRUE(why.has_value());
  EXPECT_EQ(why->reason(), Reason::kDeadlineExceeded);
  EXPECT_THAT(why->message(), HasSubstr("attempts; last: "));
  EXPECT_THAT(why->message(), HasSubstr("connection refused"));
}

TEST_P(CoordinatorAttempts, D6AnEngineThatLeavesWhilePlansAreMadeIsLeftOutOfTheSameAttempt) {
  Start(3);
  control::PublishRequest request;
  request.member = trainer_[0];
  request.version = Version(2);
  request.deadline = seconds(100);
  fleet_->coordinator->Publish(request, [](const Status& status) { EXPECT_TRUE(status.ok()); });
  fleet_->coordinator->Report(AgentOf(1).id(), epoch::LostReport{ranks_[1][0], kEnded});
  fleet_->Run();
  EXPECT_EQ(fleet_->Newest().attempt, 1u);
  EXPECT_EQ(Committed(), Version(2));
  EXPECT_THAT(fleet_->Newest().left_out, ::testing::ElementsAre("engine-1"));
}

TEST_P(CoordinatorAttempts, N7AnEngineThatIsLostBeforeTheManualCommitCostsItsPlaceOnly) {
  Start(3);
  Publish(2, seconds(100), /*manual=*/true);
  ASSERT_EQ(fleet_->Newest().phase, epoch::Phase::kStaged);
  ASSERT_EQ(fleet_->Released(trainer_[0], 2), OkStatus());
  const Epoch staged = fleet_->Newest().epoch;
  Lose(1);
  ASSERT_EQ(fleet_->Newest().phase, epoch::Phase::kStaged);
  EXPECT_THAT(fleet_->Newest().left_out, ::testing::ElementsAre("engine-1"));
  EXPECT_EQ(fleet_->coordinator->Commit(staged), OkStatus());
  fleet_->Run();
  EXPECT_EQ(Engine(0).version, Version(2));
  EXPECT_EQ(Engine(2).version, Version(2));
  CommitRecord last;
  for (const auto& record : fleet_->journal.durable()) {
    if (const auto* commit = std::get_if<CommitRecord>(&record)) last = *commit;
  }
  EXPECT_EQ(last.engines, (EngineSum{"engine-0", "engine-2"}));
}

TEST(CoordinatorRollbackAttempts, ARollbackGoesOnWithoutAnEngineThatIsLost) {
  Fleet fleet;
  const auto trainer = fleet.Trainer(1);
  for (const char* name : {"engine-a", "engine-b"}) fleet.Engine(name);
  const auto dying = fleet.Engine("engine-c");
  for (uint64_t version : {1, 2}) {
    fleet.PublishAll(trainer, version);
    fleet.Run();
  }
  fleet.Agent("engine-c-agent").deaf = Is<epoch::TransferCommand>;
  std::optional<Result<RolledBack>> back;
  fleet.coordinator->Rollback(Version(1), [&](auto result) { back = std::move(result); });
  fleet.Run();
  ASSERT_FALSE(back.has_value());
  fleet.Agent("engine-c-agent").Report(epoch::LostReport{dying[0], kEnded});
  fleet.Run();
  ASSERT_TRUE(back.has_value());
  ASSERT_TRUE(back->has_value()) << back->error().ToString();
  EXPECT_EQ(fleet.Newest().attempt, 1u);
  EXPECT_THAT((*back)->engines, ::testing::ElementsAre("engine-a", "engine-b"));
}

}  // namespace
}  // namespace weightwire::coordinator::testing
