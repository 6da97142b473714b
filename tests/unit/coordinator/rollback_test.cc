#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/unit/coordinator/fleet.h"

namespace weightwire::coordinator::testing {
namespace {

using std::chrono::seconds;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

/// Two engines that serve version 2 and hold version 1.
class CoordinatorRollback : public ::testing::Test {
 protected:
  CoordinatorRollback() {
    trainer_ = fleet_.Trainer(1);
    fleet_.Engine("engine-a", 2);
    fleet_.Engine("engine-b");
    PublishUpTo(2);
  }
  void PublishUpTo(uint64_t last) {
    while (fleet_.coordinator->Snapshot().committed_version.value < last) {
      fleet_.PublishAll(trainer_, fleet_.coordinator->Snapshot().committed_version.value + 1);
      fleet_.Run();
    }
  }
  /// The answer is there when it has come within `span`.
  std::optional<Result<RolledBack>> Ask(uint64_t version,
                                        Nanos span = std::chrono::milliseconds(100)) {
    auto answer = std::make_shared<std::optional<Result<RolledBack>>>();
    fleet_.coordinator->Rollback(Version(version), [answer](auto result) { *answer = result; });
    fleet_.Run(span);
    return *answer;
  }
  Status Refused(uint64_t version) {
    const auto answer = Ask(version);
    EXPECT_TRUE(answer.has_value() && !answer->has_value());
    return answer->error();
  }
  CommitRecord LastCommit() {
    CommitRecord last;
    for (const auto& record : fleet_.journal.durable()) {
      if (const auto* commit = std::get_if<CommitRecord>(&record)) last = *commit;
    }
    return last;
  }
  Status Lose(const std::string& engine) { return fleet_.coordinator->Evict(engine, "test"); }

  Fleet fleet_;
  std::vector<epoch::Member> trainer_;
};

TEST_F(CoordinatorRollback, ServesTheVersionBeforeUnderAHigherEpoch) {
  const Epoch before = fleet_.coordinator->Snapshot().committed;
  EXPECT_EQ(fleet_.EngineNamed("engine-a").held, (epoch::Contents{{Epoch(1), Version(1)}}));
  const size_t trainer_commands = fleet_.Agent("trainer-agent").commands.size();
  const auto answer = Ask(1);
  ASSERT_TRUE(answer.has_value() && answer->has_value());
  const RolledBack& result = **answer;
  EXPECT_GT(result.epoch, before);
  EXPECT_EQ(result.held, Epoch(1));
  EXPECT_THAT(result.engines, ElementsAre("engine-a", "engine-b"));
  EXPECT_TRUE(result.filling.empty());
  for (const char* name : {"engine-a", "engine-b"}) {
    const EngineStatus engine = fleet_.EngineNamed(name);
    EXPECT_EQ(engine.version, Version(1));
    EXPECT_EQ(engine.serving, result.epoch);
    EXPECT_EQ(engine.lag, Version(0));
    EXPECT_EQ(engine.held, (epoch::Contents{{before, Version(2)}})) << "the way back";
  }
  EXPECT_EQ(fleet_.Newest().kind, epoch::Kind::kRollback);
  EXPECT_EQ(fleet_.Newest().bytes, 0);
  EXPECT_EQ(LastCommit(),
            (CommitRecord{result.epoch, Version(1), {"engine-a", "engine-b"}, Epoch(1)}));
  EXPECT_EQ(fleet_.Agent("trainer-agent").commands.size(), trainer_commands)
      << "the trainer is never troubled";
  EXPECT_EQ(fleet_.metrics.Value("epochs_total{outcome=rollback_committed}"), 1);
}

TEST_F(CoordinatorRollback, GoesForwardAgain) {
  const Epoch second = fleet_.coordinator->Snapshot().committed;
  ASSERT_TRUE(Ask(1)->has_value());
  const auto answer = Ask(2);
  ASSERT_TRUE(answer.has_value() && answer->has_value());
  EXPECT_EQ((**answer).held, second);
  EXPECT_EQ(fleet_.EngineNamed("engine-a").version, Version(2));
}

TEST_F(CoordinatorRollback, GoesBackToAnyVersionThatIsRetained) {
  fleet_.Agent("engine-a-agent").retain = 4;
  fleet_.Agent("engine-b-agent").retain = 3;
  PublishUpTo(6);
  const auto versions = [this](const char* engine) {
    std::vector<uint64_t> held;
    for (const epoch::Content& content : fleet_.EngineNamed(engine).held) {
      held.push_back(content.version.value);
    }
    return held;
  };
  EXPECT_THAT(versions("engine-a"), ElementsAre(5, 4, 3, 2));
  EXPECT_THAT(versions("engine-b"), ElementsAre(5, 4, 3));
  EXPECT_THAT(
      Refused(1).message(),
      HasSubstr("engine-b serves version 6 (epoch 6) and holds version 5 (epoch 5), version "
                "4 (epoch 4), version 3 (epoch 3)"));
  const auto answer = Ask(3);
  ASSERT_TRUE(answer.has_value() && answer->has_value());
  EXPECT_EQ((**answer).held, Epoch(3));
  EXPECT_THAT((**answer).engines, ElementsAre("engine-a", "engine-b"));
  EXPECT_THAT(versions("engine-a"), ElementsAre(6, 5, 4, 2)) << "3 is served";
  EXPECT_THAT(versions("engine-b"), ElementsAre(6, 5, 4));
  const auto further = Ask(2);
  ASSERT_TRUE(further.has_value() && further->has_value());
  EXPECT_THAT((**further).engines, ElementsAre("engine-a"));
  EXPECT_THAT((**further).filling, ElementsAre("engine-b"));
  fleet_.Run();
  EXPECT_EQ(fleet_.EngineNamed("engine-b").version, Version(2));
  EXPECT_THAT(versions("engine-b"), ElementsAre(3, 6, 5)) << "the fill took the oldest one's room";
  ASSERT_TRUE(Ask(6)->has_value()) << "and forward again";
  EXPECT_THAT(versions("engine-b"), ElementsAre(2, 3, 5));
}

TEST_F(CoordinatorRollback, WhatIsRetainedBeyondTheBufferThatIsWrittenSurvivesAnAbort) {
  fleet_.Agent("engine-a-agent").retain = 2;
  PublishUpTo(4);
  fleet_.Agent("engine-a-agent").deaf = [](const epoch::Command& command) {
    return std::holds_alternative<epoch::TransferCommand>(command);
  };
  fleet_.PublishAll(trainer_, 5);
  fleet_.Run();
  const epoch::Contents left = {{Epoch(3), Version(3)}};
  EXPECT_EQ(fleet_.EngineNamed("engine-a").held, left) << "version 2 gives way to version 5";
  ASSERT_TRUE(fleet_.coordinator->Abort(Epoch(5), "test").ok());
  fleet_.Agent("engine-a-agent").deaf = nullptr;
  fleet_.Run();
  const auto answer = Ask(3);
  ASSERT_TRUE(answer.has_value() && answer->has_value());
  EXPECT_THAT((**answer).engines, ElementsAre("engine-a"));
}

TEST_F(CoordinatorRollback, WhatIsCommittedAlreadyIsDone) {
  const Epoch before = fleet_.coordinator->Snapshot().committed;
  const auto answer = Ask(2);
  ASSERT_TRUE(answer.has_value() && answer->has_value());
  EXPECT_EQ((**answer).epoch, before);
  EXPECT_EQ((**answer).held, Epoch());
  EXPECT_EQ(fleet_.coordinator->Snapshot().committed, before);
}

TEST_F(CoordinatorRollback, WithoutAHolderSaysWhoHoldsWhatAndTheRemedy) {
  PublishUpTo(3);
  ASSERT_TRUE(Lose("engine-b").ok());
  const Status status = Refused(1);
  EXPECT_EQ(status.reason(), Reason::kStaleVersion);
  EXPECT_THAT(status.message(),
              HasSubstr("no engine still holds version 1; available: 2; "
                        "it was committed in epoch 1 by engine-a engine-b; "
                        "engine-a serves version 3 (epoch 3) and holds version 2 (epoch 2); "
                        "engine-b is not complete"));
  EXPECT_THAT(status.remedy(), HasSubstr("weightwire.checkpoint push"));
  EXPECT_THAT(Refused(7).message(), HasSubstr("it was not committed here"));
  EXPECT_EQ(fleet_.coordinator->Snapshot().committed_version, Version(3));
}

TEST_F(CoordinatorRollback, FillsWhoDoesNotHoldIt) {
  fleet_.Agent("one-agent").retain = 0;
  fleet_.Engine("one");
  fleet_.Engine("late");
  fleet_.Run();
  const auto answer = Ask(1);
  ASSERT_TRUE(answer.has_value() && answer->has_value());
  EXPECT_THAT((**answer).engines, ElementsAre("engine-a", "engine-b"));
  EXPECT_THAT((**answer).filling, ElementsAre("late", "one"));
  fleet_.Run();
  for (const char* name : {"engine-a", "engine-b", "late", "one"}) {
    EXPECT_EQ(fleet_.EngineNamed(name).version, Version(1)) << name;
    EXPECT_EQ(fleet_.EngineNamed(name).serving, (**answer).epoch) << name;
  }
}

TEST_F(CoordinatorRollback, IsTriedAgainWithoutAnEngineThatDoesNotHoldItAfterAll) {
  fleet_.Agent("engine-a-agent").deaf = [&](const epoch::Command& command) {
    const auto* prepare = std::get_if<epoch::PrepareCommand>(&command);
    if (prepare == nullptr || prepare->kind != epoch::Kind::kRollback) return false;
    fleet_.Agent("engine-a-agent")
        .Report(epoch::FailedReport{
            prepare->epoch, prepare->member,
            Status(Code::kFailedPrecondition, Reason::kStaleEpoch, "not held")});
    return true;
  };
  const auto answer = Ask(1);
  ASSERT_TRUE(answer.has_value() && answer->has_value());
  EXPECT_THAT((**answer).engines, ElementsAre("engine-b"));
  EXPECT_THAT((**answer).filling, ElementsAre("engine-a"));
  EXPECT_EQ(LastCommit().engines, EngineSum{"engine-b"});
  fleet_.Run();
  EXPECT_EQ(fleet_.EngineNamed("engine-a").version, Version(1));
}

TEST_F(CoordinatorRollback, GoesOnWithoutALostEngine) {
  fleet_.Agent("engine-a-agent").deaf = [](const auto&) { return true; };
  EXPECT_FALSE(Ask(1).has_value());
  ASSERT_TRUE(Lose("engine-a").ok());
  fleet_.Run();
  EXPECT_EQ(fleet_.EngineNamed("engine-b").version, Version(1));
  EXPECT_EQ(fleet_.Newest().attempt, 1u);
}

TEST_F(CoordinatorRollback, ARepeatSharesItsEndAndAnotherOneIsRefused) {
  fleet_.Agent("engine-a-agent").deaf = [](const auto&) { return true; };
  std::vector<Result<RolledBack>> answers;
  for (int i = 0; i < 2; ++i) {
    fleet_.coordinator->Rollback(Version(1), [&](auto result) { answers.push_back(result); });
  }
  fleet_.Run();
  EXPECT_TRUE(answers.empty());
  EXPECT_EQ(Refused(2).reason(), Reason::kNotReady);
  ASSERT_TRUE(Lose("engine-a").ok());
  ASSERT_TRUE(Lose("engine-b").ok());
  fleet_.Run(seconds(1));
  ASSERT_EQ(answers.size(), 2u);
  for (const auto& answer : answers) {
    EXPECT_THAT(answer.error().message(), HasSubstr("no engine still holds version 1"));
  }
}

TEST_F(CoordinatorRollback, IsRefusedWhileAnEpochIsInProgress) {
  fleet_.Agent("engine-a-agent").deaf = [](const auto&) { return true; };
  fleet_.PublishAll(trainer_, 3);
  fleet_.Run();
  const Status status = Refused(1);
  EXPECT_EQ(status.reason(), Reason::kNotReady);
  EXPECT_THAT(status.remedy(), HasSubstr("wwctl abort 3"));
}

TEST_F(CoordinatorRollback, AnEpochThatBeganToMoveHasOverwrittenIt) {
  fleet_.Agent("engine-a-agent").deaf = [](const epoch::Command& command) {
    return std::holds_alternative<epoch::TransferCommand>(command);
  };
  fleet_.PublishAll(trainer_, 3);
  fleet_.Run();
  EXPECT_THAT(fleet_.EngineNamed("engine-a").held, ::testing::IsEmpty());
  ASSERT_TRUE(fleet_.coordinator->Abort(Epoch(3), "test").ok());
  fleet_.Run();
  EXPECT_THAT(Refused(1).message(), HasSubstr("engine-a serves version 2 (epoch 2) and holds "
                                              "nothing else"));
}

TEST_F(CoordinatorRollback, TheLivingTrainerGoesOnAboveItsOwnNumbers) {
  ASSERT_TRUE(Ask(1)->has_value());
  EXPECT_EQ(fleet_.Publish(trainer_[0], 2).reason(), Reason::kStaleVersion);
  fleet_.PublishAll(trainer_, 3);
  fleet_.Run();
  EXPECT_EQ(fleet_.EngineNamed("engine-a").version, Version(3));
}

TEST_F(CoordinatorRollback, ANewTrainerMayUseANumberThatWasTakenBack) {
  ASSERT_TRUE(Ask(1)->has_value());
  ASSERT_TRUE(fleet_.coordinator->Evict("trainer", "restart").ok());
  fleet_.Run();
  trainer_ = fleet_.Trainer(1);
  EXPECT_EQ(fleet_.Publish(trainer_[0], 1).reason(), Reason::kStaleVersion);
  fleet_.PublishAll(trainer_, 2);
  fleet_.Run();
  EXPECT_EQ(fleet_.EngineNamed("engine-a").version, Version(2));
}

TEST_F(CoordinatorRollback, ACoordinatorThatRestartsGoesOnFromIt) {
  const auto answer = Ask(1);
  ASSERT_TRUE(answer.has_value() && answer->has_value());
  fleet_.Restart();
  EXPECT_EQ(fleet_.coordinator->Snapshot().committed, (**answer).epoch);
  EXPECT_EQ(fleet_.coordinator->Snapshot().committed_version, Version(1));
}

TEST_F(CoordinatorRollback, AFillGivesWay) {
  fleet_.Agent("late-agent").deaf = [](const epoch::Command& command) {
    return std::holds_alternative<epoch::TransferCommand>(command);
  };
  fleet_.Engine("late");
  fleet_.Run();
  ASSERT_EQ(fleet_.Newest().kind, epoch::Kind::kFill);
  fleet_.Agent("late-agent").deaf = nullptr;
  ASSERT_TRUE(Ask(1)->has_value());
  fleet_.Run();
  EXPECT_EQ(fleet_.EngineNamed("late").version, Version(1));
}

TEST_F(CoordinatorRollback, StopsWithTheJournal) {
  fleet_.journal.FailNext(false);
  const auto answer = Ask(1);
  ASSERT_TRUE(answer.has_value() && !answer->has_value());
  EXPECT_EQ(answer->error().reason(), Reason::kJournalFailed);
  EXPECT_EQ(fleet_.EngineNamed("engine-a").version, Version(2));
  EXPECT_EQ(Refused(1).reason(), Reason::kJournalFailed);
}

}  // namespace
}  // namespace weightwire::coordinator::testing
