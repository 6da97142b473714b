#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/unit/coordinator/fleet.h"

namespace weightwire::coordinator::testing {
namespace {

using Draining = Coordinator::Draining;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

/// Two engines that serve version 1.
class CoordinatorDrain : public ::testing::Test {
 protected:
  CoordinatorDrain() {
    trainer_ = fleet_.Trainer(1);
    fleet_.Engine("engine-a");
    fleet_.Engine("engine-b");
    Publish(1);
  }
  void Publish(uint64_t version) {
    fleet_.PublishAll(trainer_, version);
    fleet_.Run();
  }
  std::vector<std::string> Drain(const std::string& name, Draining what = Draining::kDrain) {
    const auto engines = fleet_.coordinator->Drain(name, what);
    EXPECT_TRUE(engines.has_value()) << engines.error().ToString();
    fleet_.Run();
    return engines.value_or(std::vector<std::string>{});
  }
  EngineStatus Named(const std::string& name) const { return fleet_.EngineNamed(name); }
  /// A version outlives an attempt.
  static Options ShortTransfers() {
    Options options;
    options.transfer_deadline = std::chrono::seconds(20);
    return options;
  }

  Fleet fleet_{ShortTransfers()};
  std::vector<epoch::Member> trainer_;
};

TEST_F(CoordinatorDrain, NoVersionWaitsForADrainedEngineWhichServesOn) {
  EXPECT_THAT(Drain("engine-b"), ElementsAre("engine-b"));
  EXPECT_TRUE(Named("engine-b").drained);
  EXPECT_THAT(Named("engine-b").busy_with, IsEmpty());
  fleet_.Agent("engine-b-agent").deaf = [](const epoch::Command&) { return true; };
  Publish(2);
  EXPECT_EQ(fleet_.coordinator->Snapshot().committed_version, Version(2));
  EXPECT_THAT(fleet_.Newest().engines, ElementsAre("engine-a"));
  EXPECT_EQ(Named("engine-b").version, Version(1));
  EXPECT_FALSE(Named("engine-b").ready);
  EXPECT_EQ(fleet_.metrics.Value("engines_drained"), 1);
  EXPECT_EQ(fleet_.metrics.Value("engines_not_ready"), 0) << "it is meant to be behind";
}

TEST_F(CoordinatorDrain, UndoFillsItAndItTakesPartAgain) {
  Drain("engine-b");
  Publish(2);
  EXPECT_EQ(Named("engine-b").version, Version(1)) << "not filled while it is drained";
  Drain("engine-b", Draining::kUndo);
  EXPECT_EQ(Named("engine-b").version, Version(2));
  EXPECT_FALSE(Named("engine-b").drained);
  Publish(3);
  EXPECT_THAT(fleet_.Newest().engines, ElementsAre("engine-a", "engine-b"));
}

TEST_F(CoordinatorDrain, NobodyIsFilledFromIt) {
  Drain("engine-a");
  fleet_.Agent("engine-a-agent").deaf = [](const epoch::Command&) { return true; };
  fleet_.Engine("late");
  fleet_.Run();
  EXPECT_EQ(Named("late").version, Version(1));
  Drain("engine-b");
  fleet_.Engine("later");
  fleet_.Run();
  EXPECT_EQ(Named("later").version, Version(1)) << "from the late one";
}

TEST_F(CoordinatorDrain, IsNoHolderOfARollbackEither) {
  Publish(2);
  Drain("engine-a");
  Drain("engine-b");
  std::optional<Status> refused;
  fleet_.coordinator->Rollback(Version(1), [&](auto result) { refused = result.error(); });
  fleet_.Run();
  ASSERT_TRUE(refused.has_value());
  EXPECT_THAT(refused->message(), HasSubstr("engine-a is drained"));
}

TEST_F(CoordinatorDrain, FinishesWhatItIsInAndSaysWhatThatIs) {
  fleet_.Agent("engine-b-agent").deaf = [](const epoch::Command& command) {
    return std::holds_alternative<epoch::CommitCommand>(command);
  };
  Publish(2);
  Drain("engine-b");
  ASSERT_EQ(Named("engine-b").busy_with.size(), 1u);
  EXPECT_THAT(Named("engine-b").busy_with[0], HasSubstr("epoch 2 (version 2): committing"));
  Drain("engine-a");
  EXPECT_THAT(Named("engine-a").busy_with, IsEmpty()) << "it has swapped";
  const auto commit = fleet_.Agent("engine-b-agent").Last<epoch::CommitCommand>();
  fleet_.Agent("engine-b-agent").Report(epoch::AppliedReport{Epoch(2), commit->member});
  fleet_.Run();
  EXPECT_THAT(Named("engine-b").busy_with, IsEmpty());
  EXPECT_EQ(Named("engine-b").version, Version(2));
}

TEST_F(CoordinatorDrain, AnAttemptThatFailsIsFollowedByOneWithoutIt) {
  fleet_.Agent("engine-b-agent").deaf = [](const epoch::Command& command) {
    return std::holds_alternative<epoch::TransferCommand>(command);
  };
  Publish(2);
  Drain("engine-b");
  fleet_.Run(2 * fleet_.options.transfer_deadline);
  EXPECT_EQ(fleet_.coordinator->Snapshot().committed_version, Version(2));
  EXPECT_THAT(fleet_.Newest().engines, ElementsAre("engine-a"));
}

TEST_F(CoordinatorDrain, AVersionWithoutAnyEngineLeftWaitsAndSaysWhy) {
  Drain("engine-a");
  Drain("engine-b");
  Publish(2);
  EXPECT_THAT(fleet_.coordinator->Snapshot().waiting_for,
              HasSubstr("0 of 1 engines are complete; drained: engine-a, engine-b"));
  Drain("engine-a", Draining::kUndo);
  EXPECT_EQ(fleet_.coordinator->Snapshot().committed_version, Version(2));
}

TEST_F(CoordinatorDrain, OfAnAgentIsOfItsEnginesAndOfThoseThatComeThere) {
  fleet_.Join(control::GroupRole::kEngine, "third", 1, "engine-b-agent");
  fleet_.Run();
  EXPECT_THAT(Drain("engine-b-agent"), ElementsAre("engine-b", "third"));
  fleet_.Join(control::GroupRole::kEngine, "fourth", 1, "engine-b-agent");
  fleet_.Run();
  EXPECT_TRUE(Named("fourth").drained);
  EXPECT_EQ(Named("fourth").serving, Epoch()) << "not filled";
  EXPECT_THAT(Drain("engine-b-agent", Draining::kUndo), ElementsAre("engine-b", "fourth", "third"));
  EXPECT_EQ(Named("fourth").version, Version(1));
}

TEST_F(CoordinatorDrain, IsForgottenWhenTheEngineLeaves) {
  Drain("engine-b");
  ASSERT_TRUE(fleet_.coordinator->Evict("engine-b", "stopped").ok());
  fleet_.Run();
  EXPECT_EQ(fleet_.coordinator->Snapshot().waiting_for, "") << "nothing waits for it";
  fleet_.Engine("engine-b");
  fleet_.Run();
  EXPECT_FALSE(Named("engine-b").drained);
  EXPECT_EQ(Named("engine-b").version, Version(1));
}

TEST_F(CoordinatorDrain, RefusesTheTrainersAgentAndWhoIsNotThere) {
  const auto trainer = fleet_.coordinator->Drain("trainer-agent", Draining::kDrain);
  ASSERT_FALSE(trainer.has_value());
  EXPECT_EQ(trainer.error().reason(), Reason::kNotReady);
  for (const char* name : {"nobody", "trainer", ""}) {
    const auto nobody = fleet_.coordinator->Drain(name, Draining::kDrain);
    ASSERT_FALSE(nobody.has_value()) << name;
    EXPECT_EQ(nobody.error().reason(), Reason::kNotRegistered) << name;
  }
}

}  // namespace
}  // namespace weightwire::coordinator::testing
