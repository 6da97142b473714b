#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/unit/coordinator/fleet.h"

namespace weightwire::coordinator::testing {
namespace {

using Draining = Coordinator::Draining;
using DrainOf = Coordinator::DrainOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

/// Two engines that serve version 1.
class CoordinatorDrain : public ::testing::Test {
 protected:
  CoordinatorDrain() {
    trainer_ = fleet_.Trainer(1);
    for (const char* name : {"engine-a", "engine-b"}) engines_[name] = fleet_.Engine(name).front();
    Publish(1);
  }
  void Publish(uint64_t version) {
    fleet_.PublishAll(trainer_, version);
    fleet_.Run();
  }
  std::vector<std::string> Drain(const std::string& name, Draining what = Draining::kDrain) {
    const auto engines = Asked(name, what);
    EXPECT_TRUE(engines.has_value()) << engines.error().ToString();
    return engines.value_or(std::vector<std::string>{});
  }
  Result<std::vector<std::string>> Asked(const std::string& name, Draining what,
                                         DrainOf which = DrainOf::kEngineOrAgent) {
    std::optional<Result<std::vector<std::string>>> answer;
    fleet_.coordinator->Drain(name, what, which,
                              [&](auto engines) { answer = std::move(engines); });
    EXPECT_FALSE(answer.has_value()) << "nothing is answered in the call";
    fleet_.Run();
    EXPECT_TRUE(answer.has_value());
    return answer.value_or(std::vector<std::string>{});
  }
  EngineStatus Named(const std::string& name) const { return fleet_.EngineNamed(name); }
  /// Another coordinator on the same journal; the agents come back to it, their ranks do not yet.
  void Restart() {
    fleet_.Restart();
    for (auto& [name, agent] : fleet_.agents) ASSERT_TRUE(agent->Open().has_value());
  }
  /// The trainer and both engines come back as they were, serving version 1.
  void ComeBack() {
    control::RejoinState released;
    released.released = Version(1);
    Register(control::GroupRole::kTrainer, "trainer", trainer_.front(), released);
    control::RejoinState serving;
    serving.serving = {Epoch(1), Version(1)};
    for (auto& [name, member] : engines_) {
      Register(control::GroupRole::kEngine, name, member, serving);
    }
    fleet_.Run();
  }
  void Register(control::GroupRole role, const std::string& group, epoch::Member& member,
                const control::RejoinState& claim) {
    const auto again =
        fleet_.Register(group + "-agent", role, group, 0, 1, member.incarnation.value, claim);
    ASSERT_TRUE(again.has_value()) << again.error().ToString();
    member = *again;
    ASSERT_TRUE(fleet_.SubmitRows(member, 0, 1).ok());
  }
  /// The newest ones in the journal.
  std::vector<DrainMark> Marks() const {
    std::vector<DrainMark> marks;
    for (const JournalRecord& record : fleet_.journal.durable()) {
      if (const auto* drain = std::get_if<DrainRecord>(&record)) marks = drain->marks;
    }
    return marks;
  }
  /// A version outlives an attempt.
  static Options ShortTransfers() {
    Options options;
    options.transfer_deadline = std::chrono::seconds(20);
    return options;
  }

  Fleet fleet_{ShortTransfers()};
  std::vector<epoch::Member> trainer_;
  std::map<std::string, epoch::Member> engines_;
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
  fleet_.Agent("engine-b-agent").Report(epoch::SwappedReport{Epoch(2), commit->member});
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

TEST_F(CoordinatorDrain, OfAnAgentIsNotOfAnEngineOfThatName) {
  EXPECT_FALSE(Asked("engine-b", Draining::kDrain, DrainOf::kAgent).has_value());
  fleet_.Join(control::GroupRole::kEngine, "third", 1, "engine-b");
  const auto drained = Asked("engine-b", Draining::kDrain, DrainOf::kAgent);
  ASSERT_TRUE(drained.has_value());
  EXPECT_THAT(*drained, ElementsAre("third"));
  EXPECT_FALSE(Named("engine-b").drained);
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
  const auto trainer = Asked("trainer-agent", Draining::kDrain);
  ASSERT_FALSE(trainer.has_value());
  EXPECT_EQ(trainer.error().reason(), Reason::kNotReady);
  for (const char* name : {"nobody", "trainer", ""}) {
    const auto nobody = Asked(name, Draining::kDrain);
    ASSERT_FALSE(nobody.has_value()) << name;
    EXPECT_EQ(nobody.error().reason(), Reason::kNotRegistered) << name;
  }
}

TEST_F(CoordinatorDrain, TheNextCoordinatorGivesItNothingToDoEither) {
  Drain("engine-b");
  Restart();
  ComeBack();
  EXPECT_TRUE(Named("engine-b").drained);
  EXPECT_FALSE(Named("engine-a").drained);
  Publish(2);
  EXPECT_THAT(fleet_.Newest().engines, ElementsAre("engine-a"));
  EXPECT_EQ(Named("engine-b").version, Version(1)) << "it serves on";
  Drain("engine-b", Draining::kUndo);
  EXPECT_EQ(Named("engine-b").version, Version(2));
  Restart();
  ASSERT_TRUE(fleet_.Register("engine-b-agent", control::GroupRole::kEngine, "engine-b", 0, 1,
                              engines_["engine-b"].incarnation.value));
  EXPECT_FALSE(Named("engine-b").drained) << "nor does it forget what was undone";
}

TEST_F(CoordinatorDrain, WhatTheLastCoordinatorDecidedIsSomethingThatItIsIn) {
  fleet_.Agent("engine-b-agent").deaf = [](const epoch::Command& command) {
    return std::holds_alternative<epoch::CommitCommand>(command);
  };
  Publish(2);
  fleet_.journal.FailNext(/*kept=*/false);  // so that the next one decides nothing
  Restart();
  control::RejoinState staged;
  staged.serving = {Epoch(1), Version(1)};
  staged.staged = Epoch(2);
  staged.content = Epoch(2);
  Register(control::GroupRole::kEngine, "engine-b", engines_["engine-b"], staged);
  Drain("engine-b");
  ASSERT_EQ(Named("engine-b").busy_with.size(), 1u) << "it would swap under the next coordinator";
  EXPECT_THAT(Named("engine-b").busy_with[0], HasSubstr("epoch 2 (version 2): is decided"));
}

TEST_F(CoordinatorDrain, OfAnAgentIsKnownToTheNextCoordinatorToo) {
  Drain("engine-b-agent");
  Restart();
  fleet_.Engine("engine-b");
  fleet_.Run();
  EXPECT_TRUE(Named("engine-b").drained) << "a new engine at the same agent";
  EXPECT_THAT(Drain("engine-b-agent", Draining::kUndo), ElementsAre("engine-b"));
  EXPECT_THAT(Marks(), IsEmpty());
}

TEST_F(CoordinatorDrain, OneThatIsNotBackYetIsDrainedForTheCoordinatorAfterTheNextOne) {
  Drain("engine-b");
  Restart();
  Drain("engine-a-agent");
  Restart();
  ComeBack();
  EXPECT_TRUE(Named("engine-a").drained);
  EXPECT_TRUE(Named("engine-b").drained);
}

TEST_F(CoordinatorDrain, WhatCameInItsPlaceBetweenTwoCoordinatorsTakesPart) {
  Drain("engine-b");
  Restart();
  fleet_.Engine("engine-b");
  fleet_.Run();
  EXPECT_FALSE(Named("engine-b").drained);
}

TEST_F(CoordinatorDrain, WhoHasLeftIsInTheJournalNoMore) {
  Drain("engine-b");
  ASSERT_THAT(Marks(), ElementsAre(DrainMark{"engine-b", engines_["engine-b"].incarnation}));
  ASSERT_TRUE(fleet_.coordinator->Evict("engine-b", "stopped").ok());
  fleet_.Run();
  EXPECT_THAT(Marks(), IsEmpty());
  Drain("engine-a-agent");
  EXPECT_EQ(Marks().size(), 2u) << "the agent and its engine";
  fleet_.coordinator->CloseSession(fleet_.Agent("engine-a-agent").id());
  fleet_.Run();
  EXPECT_THAT(Marks(), IsEmpty());
}

TEST_F(CoordinatorDrain, ACoordinatorThatStopsForgetsNobody) {
  Drain("engine-b");
  fleet_.coordinator->Shutdown([](const Status&) {});
  fleet_.Run();
  EXPECT_EQ(Marks().size(), 1u);
}

TEST_F(CoordinatorDrain, SaysWhenTheJournalDoesNotTakeIt) {
  fleet_.journal.FailNext(/*kept=*/false);
  const auto failed = Asked("engine-b", Draining::kDrain);
  ASSERT_FALSE(failed.has_value());
  EXPECT_EQ(failed.error().reason(), Reason::kJournalFailed);
  EXPECT_TRUE(Named("engine-b").drained) << "here it is";
}

}  // namespace
}  // namespace weightwire::coordinator::testing
