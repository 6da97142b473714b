#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "server/coordinator/version_queue.h"
#include "tests/unit/coordinator/fleet.h"

// A trainer's rank takes back what it published, in every phase. `number` tells its calls apart,
// for two calls of an agent may overtake each other.
namespace weightwire::coordinator::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

class CoordinatorWithdraw : public ::testing::Test {
 protected:
  void Start(uint32_t ranks) {
    trainer_ = fleet_.Trainer(ranks);
    fleet_.Engine("engine-a");
  }
  Status Publish(uint32_t rank, uint64_t version, uint64_t number, bool manual = false) {
    control::PublishRequest request{trainer_.at(rank), Version(version), manual, seconds(100)};
    request.number = number;
    return Ask([&](control::Done done) { fleet_.coordinator->Publish(request, done); });
  }
  Status Withdraw(uint32_t rank, uint64_t version, uint64_t number) {
    return Ask([&](control::Done done) {
      fleet_.coordinator->Withdraw({trainer_.at(rank), Version(version), number}, done);
    });
  }
  Status Ask(const std::function<void(control::Done)>& call) {
    std::optional<Status> answer;
    call([&](Status status) { answer = std::move(status); });
    fleet_.sim.RunReady();
    EXPECT_TRUE(answer.has_value());
    return *answer;
  }
  /// From `phase` on the trainer's agent does not answer.
  template <typename Command>
  void StopAt() {
    fleet_.Agent("trainer-agent").deaf = [](const epoch::Command& command) {
      return std::holds_alternative<Command>(command);
    };
  }
  void ExpectServed(uint64_t version) {
    fleet_.Run(seconds(1));
    EXPECT_EQ(fleet_.EngineNamed("engine-a").version, Version(version));
    for (const auto& member : trainer_) {
      ASSERT_TRUE(fleet_.Released(member, version).has_value());
      EXPECT_TRUE(fleet_.Released(member, version)->ok());
    }
  }

  Fleet fleet_;
  std::vector<epoch::Member> trainer_;
};

TEST_F(CoordinatorWithdraw, ARankThatTookItsPartBackIsWaitedForAnew) {
  Start(2);
  ASSERT_TRUE(Publish(0, 1, 1).ok());
  EXPECT_TRUE(Withdraw(0, 1, 1).ok());
  ASSERT_TRUE(Publish(1, 1, 1).ok());
  fleet_.Run(seconds(1));
  EXPECT_TRUE(fleet_.coordinator->Snapshot().epochs.empty());
  EXPECT_THAT(fleet_.coordinator->Snapshot().waiting_for, ::testing::HasSubstr("trainer/0"));
  ASSERT_TRUE(Publish(0, 1, 2).ok());
  ExpectServed(1);
}

TEST_F(CoordinatorWithdraw, AVersionThatNobodyHoldsMayBePublishedAgain) {
  Start(1);
  StopAt<epoch::PrepareCommand>();
  ASSERT_TRUE(Publish(0, 1, 1).ok());
  fleet_.Run();
  EXPECT_TRUE(Withdraw(0, 1, 1).ok());
  fleet_.Run();
  EXPECT_EQ(fleet_.coordinator->Snapshot().waiting_for, "");
  EXPECT_EQ(fleet_.Newest().phase, epoch::Phase::kAborted);
  EXPECT_EQ(fleet_.Newest().why.reason(), Reason::kAbortRequested);
  EXPECT_EQ(fleet_.Newest().why.rank(), "trainer/0");
  fleet_.Agent("trainer-agent").deaf = nullptr;
  ASSERT_TRUE(Publish(0, 1, 2).ok());
  ExpectServed(1);
  EXPECT_EQ(fleet_.Newest().attempt, 1u) << "what was withdrawn is no failed attempt";
}

TEST_F(CoordinatorWithdraw, EndsAnAttemptWhilePlansAreMade) {
  Start(2);
  ASSERT_TRUE(Publish(0, 1, 1).ok());
  Status published, withdrawn;
  control::PublishRequest request{trainer_[1], Version(1), false, seconds(100)};
  request.number = 1;
  fleet_.coordinator->Publish(request, [&](Status status) { published = std::move(status); });
  fleet_.coordinator->Withdraw({trainer_[0], Version(1), 1},
                               [&](Status status) { withdrawn = std::move(status); });
  fleet_.Run(seconds(1));
  EXPECT_TRUE(published.ok() && withdrawn.ok());
  EXPECT_TRUE(fleet_.Agent("engine-a-agent").All<epoch::PrepareCommand>().empty());
  ASSERT_TRUE(Publish(0, 1, 2).ok());
  ExpectServed(1);
}

TEST_F(CoordinatorWithdraw, EndsAnAttemptThatMovesAndTheOthersKeepTheVersion) {
  Start(2);
  StopAt<epoch::TransferCommand>();
  ASSERT_TRUE(Publish(0, 1, 1).ok());
  ASSERT_TRUE(Publish(1, 1, 1).ok());
  fleet_.Run();
  ASSERT_EQ(fleet_.Newest().phase, epoch::Phase::kTransferring);
  EXPECT_TRUE(Withdraw(1, 1, 1).ok());
  fleet_.Agent("trainer-agent").deaf = nullptr;
  fleet_.Run(seconds(1));
  EXPECT_EQ(fleet_.EngineNamed("engine-a").version, Version(0));
  EXPECT_FALSE(fleet_.Released(trainer_[0], 1).has_value()) << "it goes on holding it";
  EXPECT_EQ(fleet_.coordinator->Snapshot().epochs.size(), 1u) << "nothing is tried without it";
  ASSERT_TRUE(Publish(1, 1, 2).ok());
  ExpectServed(1);
}

TEST_F(CoordinatorWithdraw, TheRankMayBeBackBeforeItsAttemptIsDrained) {
  Start(1);
  StopAt<epoch::TransferCommand>();
  ASSERT_TRUE(Publish(0, 1, 1).ok());
  fleet_.Run();
  StopAt<epoch::AbortCommand>();
  EXPECT_TRUE(Withdraw(0, 1, 1).ok());
  fleet_.Run();
  ASSERT_EQ(fleet_.Newest().phase, epoch::Phase::kAborting);
  ASSERT_TRUE(Publish(0, 1, 2).ok());
  const Epoch epoch = fleet_.Newest().epoch;
  fleet_.Agent("trainer-agent").deaf = nullptr;
  fleet_.Agent("trainer-agent").Report(epoch::DrainedReport{epoch, trainer_[0]});
  ExpectServed(1);
}

TEST_F(CoordinatorWithdraw, IsTooLateOnceEveryByteIsStaged) {
  Start(1);
  ASSERT_TRUE(Publish(0, 1, 1, /*manual=*/true).ok());
  fleet_.Run();
  ASSERT_EQ(fleet_.Newest().phase, epoch::Phase::kStaged);
  EXPECT_EQ(Withdraw(0, 1, 1).reason(), Reason::kStaleEpoch);
  ASSERT_TRUE(fleet_.coordinator->Commit(fleet_.Newest().epoch).ok());
  ExpectServed(1);
  EXPECT_TRUE(Withdraw(0, 1, 1).ok()) << "nothing is left to take back";
  EXPECT_EQ(fleet_.EngineNamed("engine-a").version, Version(1));
}

TEST_F(CoordinatorWithdraw, APublishThatItOvertookIsRefused) {
  Start(1);
  EXPECT_TRUE(Withdraw(0, 1, 1).ok());
  EXPECT_EQ(Publish(0, 1, 1).reason(), Reason::kAbortRequested);
  fleet_.Run(seconds(1));
  EXPECT_TRUE(fleet_.coordinator->Snapshot().epochs.empty());
  ASSERT_TRUE(Publish(0, 1, 2).ok());
  ExpectServed(1);
}

TEST_F(CoordinatorWithdraw, LeavesWhatWasPublishedAfterItAlone) {
  Start(2);
  ASSERT_TRUE(Publish(0, 1, 1).ok());
  ASSERT_TRUE(Publish(0, 1, 2).ok()) << "it overtook the withdrawal of the first";
  EXPECT_TRUE(Withdraw(0, 1, 1).ok());
  ASSERT_TRUE(Publish(1, 1, 1).ok());
  ExpectServed(1);
}

TEST_F(CoordinatorWithdraw, OfAMemberThatIsGoneIsFenced) {
  Start(1);
  EXPECT_EQ(
      Ask([&](control::Done done) {
        fleet_.coordinator->Withdraw({{trainer_[0].id, Incarnation(77)}, Version(1), 1}, done);
      }).reason(),
      Reason::kStaleIncarnation);
}

TEST_F(CoordinatorWithdraw, ARegisterWhoseAnswerWasLostIsAnsweredAgain) {
  Start(1);
  const auto again = fleet_.Register("trainer-agent", control::GroupRole::kTrainer, "trainer", 0, 1,
                                     trainer_[0].incarnation.value);
  ASSERT_TRUE(again.has_value());
  EXPECT_EQ(*again, trainer_[0]);
}

}  // namespace
}  // namespace weightwire::coordinator::testing
