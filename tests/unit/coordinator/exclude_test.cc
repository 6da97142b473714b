#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <utility>

#include "tests/unit/coordinator/fleet.h"

// An engine that is lost while bytes move: the epoch goes on without it, whoever it reads from is
// told, and it is neither fenced nor committed.
namespace weightwire::coordinator::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

const Status kEnded(Code::kAborted, Reason::kMemberLost, "the process ended");

class CoordinatorExclude : public ::testing::Test {
 protected:
  void Start(Fanout fanout, uint64_t features = control::kFeatureExclude) {
    Options options = options_;
    options.fanout = fanout;
    fleet_ = std::make_unique<Fleet>(std::move(options));
    fleet_->agent_features |= features;
    trainer_ = fleet_->Trainer(2);
    for (const char* name : {"a", "b", "c"}) engines_[name] = fleet_->Engine(name, 2);
    Publish(1);
    ASSERT_EQ(Committed(), Version(1));
  }
  void Publish(uint64_t version, bool manual = false) {
    fleet_->PublishAll(trainer_, version, manual);
    fleet_->Run();
  }
  FakeAgent& AgentOf(const std::string& group) { return fleet_->Agent(group + "-agent"); }
  /// What it is told to move waits for GoOn.
  void Hold(const std::string& group) {
    AgentOf(group).deaf = [this, group](const epoch::Command& command) {
      if (!std::holds_alternative<epoch::TransferCommand>(command)) return false;
      held_[group].push_back(command);
      return true;
    };
  }
  void GoOn(const std::string& group) {
    AgentOf(group).deaf = nullptr;
    for (const auto& command : std::exchange(held_[group], {})) AgentOf(group).OnCommand(command);
    fleet_->Run();
  }
  void Lose(const std::string& engine, uint32_t rank = 0) {
    AgentOf(engine).Report(epoch::LostReport{engines_[engine][rank], kEnded});
    fleet_->Run();
  }
  void Fail(const std::string& engine) {
    AgentOf(engine).Report(epoch::FailedReport{
        fleet_->Newest().epoch, engines_[engine][0],
        Status(Code::kUnavailable, Reason::kTransportFailed, "connection refused"), false});
    fleet_->Run();
  }
  std::vector<epoch::ExcludeCommand> ToldToDrop(const std::string& group) {
    return AgentOf(group).All<epoch::ExcludeCommand>();
  }
  /// Of both ranks of `group`, and nobody else.
  void ExpectOnlyToldToDrop(const std::string& group, const std::string& engine) {
    const auto told = ToldToDrop(group);
    ASSERT_EQ(told.size(), 2u);
    for (uint32_t rank = 0; rank < 2; ++rank) {
      EXPECT_EQ(told[rank].member, (group == "trainer" ? trainer_ : engines_[group])[rank]);
      EXPECT_EQ(told[rank].epoch, fleet_->Newest().epoch);
      EXPECT_THAT(told[rank].readers, ElementsAre(engines_[engine][0].id, engines_[engine][1].id));
      const auto prepare = AgentOf("trainer").Last<epoch::PrepareCommand>();
      EXPECT_EQ(told[rank].plan, prepare->assignments[0].plan);
    }
    for (const char* other : {"trainer", "a", "b", "c"}) {
      EXPECT_TRUE(other == group || ToldToDrop(other).empty()) << other;
    }
  }
  Version Committed() const { return fleet_->coordinator->Snapshot().committed_version; }

  Options options_;
  std::unique_ptr<Fleet> fleet_;
  std::vector<epoch::Member> trainer_;
  std::map<std::string, std::vector<epoch::Member>> engines_;
  std::map<std::string, std::vector<epoch::Command>> held_;
};

TEST_F(CoordinatorExclude, ASourceIsToldAndTheAttemptCommitsAtTheOthers) {
  Start(Fanout::kStar);
  for (const char* group : {"trainer", "a", "b"}) Hold(group);
  Publish(2);  // and c is staged already
  EXPECT_TRUE(AgentOf("trainer").Last<epoch::PrepareCommand>()->drops_readers);
  EXPECT_FALSE(AgentOf("a").Last<epoch::PrepareCommand>()->drops_readers);
  const int64_t bytes_of_one = [&] {
    const auto epochs = fleet_->coordinator->Snapshot().epochs;
    return std::ranges::find(epochs, Version(1), &EpochStatus::version)->bytes / 3;
  }();
  EXPECT_EQ(fleet_->Newest().bytes, bytes_of_one);
  Lose("c", 1);
  EXPECT_EQ(fleet_->Newest().phase, epoch::Phase::kTransferring);
  EXPECT_EQ(fleet_->Newest().bytes, 0) << "what is not part of it is not delivered";
  ExpectOnlyToldToDrop("trainer", "c");
  for (const char* group : {"trainer", "a", "b"}) GoOn(group);
  EXPECT_EQ(Committed(), Version(2));
  EXPECT_EQ(fleet_->Newest().attempt, 1u);
  EXPECT_THAT(fleet_->Newest().left_out, ElementsAre("c"));
  EXPECT_THAT(fleet_->Newest().engines, ElementsAre("a", "b"));
  EXPECT_EQ(fleet_->Newest().bytes, 2 * bytes_of_one);
  EXPECT_EQ(fleet_->Released(trainer_[0], 2), OkStatus());
}

TEST_F(CoordinatorExclude, WhoRelaysIsToldOfItsReader) {
  Start(Fanout::kChain);
  for (const char* group : {"trainer", "a", "b", "c"}) Hold(group);
  Publish(2);
  Lose("c");
  EXPECT_EQ(fleet_->Newest().phase, epoch::Phase::kTransferring);
  ExpectOnlyToldToDrop("b", "c");
  for (const char* group : {"trainer", "a", "b"}) GoOn(group);
  EXPECT_EQ(Committed(), Version(2));
  EXPECT_EQ(fleet_->Newest().attempt, 1u);
}

TEST_F(CoordinatorExclude, OneThatOthersReadFromEndsTheAttempt) {
  Start(Fanout::kChain);
  for (const char* group : {"trainer", "a", "b", "c"}) Hold(group);
  Publish(2);
  Lose("b");
  EXPECT_THAT(ToldToDrop("a"), IsEmpty());
  for (const char* group : {"trainer", "a", "c"}) GoOn(group);
  EXPECT_EQ(Committed(), Version(2));
  EXPECT_EQ(fleet_->Newest().attempt, 2u);
}

TEST_F(CoordinatorExclude, WhereAnAgentThatIsReadFromDoesNotKnowItTheAttemptEnds) {
  Start(Fanout::kStar, 0);
  for (const char* group : {"trainer", "a", "b", "c"}) Hold(group);
  Publish(2);
  EXPECT_FALSE(AgentOf("trainer").Last<epoch::PrepareCommand>()->drops_readers);
  Lose("c");
  EXPECT_THAT(ToldToDrop("trainer"), IsEmpty());
  for (const char* group : {"trainer", "a", "b"}) GoOn(group);
  EXPECT_EQ(Committed(), Version(2));
  EXPECT_EQ(fleet_->Newest().attempt, 2u);
}

TEST_F(CoordinatorExclude, OneThatFailsBesideAQuorumIsFilled) {
  options_.commit_policy = {CommitPolicy::Kind::kQuorum, 2, seconds(1)};
  Start(Fanout::kStar);
  for (const char* group : {"trainer", "a", "b", "c"}) Hold(group);
  Publish(2);
  Fail("c");
  EXPECT_EQ(fleet_->Newest().phase, epoch::Phase::kTransferring);
  AgentOf("c").deaf = nullptr;
  for (const char* group : {"trainer", "a", "b"}) GoOn(group);
  const auto epochs = fleet_->coordinator->Snapshot().epochs;
  const auto version = std::ranges::find(epochs, epoch::Kind::kPublish, &EpochStatus::kind);
  EXPECT_EQ(version->attempt, 1u);
  EXPECT_THAT(version->left_out, ElementsAre("c"));
  EXPECT_EQ(fleet_->metrics.Value("engines_left_behind_total"), 1);
  fleet_->Run(seconds(1));
  EXPECT_EQ(fleet_->EngineNamed("c").version, Version(2)) << "filled";
  EXPECT_THAT(AgentOf("c").All<epoch::EvictCommand>(), IsEmpty());
}

TEST_F(CoordinatorExclude, NothingAbortsAReleasedVersionWhileAnyEngineHoldsIt) {
  options_.commit_policy = {CommitPolicy::Kind::kQuorum, 3, seconds(1)};
  Start(Fanout::kStar);
  Publish(2, /*manual=*/true);
  ASSERT_EQ(fleet_->Newest().phase, epoch::Phase::kStaged);
  ASSERT_EQ(fleet_->Released(trainer_[0], 2), OkStatus());
  const Epoch staged = fleet_->Newest().epoch;
  Lose("a");
  Fail("b");
  EXPECT_EQ(fleet_->Newest().phase, epoch::Phase::kStaged) << "although it was a quorum of three";
  EXPECT_THAT(ToldToDrop("trainer"), IsEmpty()) << "nobody reads any more";
  EXPECT_EQ(fleet_->coordinator->Commit(staged), OkStatus());
  fleet_->Run();
  EXPECT_EQ(fleet_->EngineNamed("c").version, Version(2));
}

/// It has staged all of it, but nobody has compared its sums.
TEST_F(CoordinatorExclude, WhoComesBackWithAnEpochThatWentOnWithoutItIsFilled) {
  for (const bool committed_before : {false, true}) {
    held_.clear();
    Start(Fanout::kStar);
    for (const char* group : {"trainer", "a", "b"}) Hold(group);
    Publish(2);
    const Epoch epoch = fleet_->Newest().epoch;
    const auto before = fleet_->coordinator->Snapshot().committed;
    fleet_->coordinator->Disconnected(AgentOf("c").id());
    fleet_->Run();
    if (committed_before) {
      for (const char* group : {"trainer", "a", "b"}) GoOn(group);
      ASSERT_EQ(Committed(), Version(2));
    }
    AgentOf("c").commands.clear();
    ASSERT_TRUE(AgentOf("c").Open().has_value());
    control::RejoinState claim;
    claim.serving = {before, Version(1)};
    claim.staged = claim.content = epoch;
    claim.version = Version(2);
    for (uint32_t rank = 0; rank < 2; ++rank) {
      const auto again = fleet_->Register("c-agent", control::GroupRole::kEngine, "c", rank, 2,
                                          engines_["c"][rank].incarnation.value, claim);
      ASSERT_TRUE(again.has_value());
      ASSERT_TRUE(fleet_->SubmitRows(*again, rank, 2).ok());
    }
    fleet_->Run();
    EXPECT_EQ(AgentOf("c").All<epoch::AbortCommand>().size(), 2u);
    if (!committed_before) {
      for (const char* group : {"trainer", "a", "b"}) GoOn(group);
    }
    for (const auto& commit : AgentOf("c").All<epoch::CommitCommand>()) {
      EXPECT_GT(commit.epoch, epoch) << "a fill's";
    }
    fleet_->Run(seconds(1));
    EXPECT_EQ(fleet_->EngineNamed("c").version, Version(2));
    EXPECT_TRUE(fleet_->EngineNamed("c").ready);
    EXPECT_THAT(AgentOf("c").All<epoch::EvictCommand>(), IsEmpty());
  }
}

TEST_F(CoordinatorExclude, AFillGoesOnWithoutAReaderThatIsLost) {
  Start(Fanout::kStar);
  for (const char* name : {"a", "b"}) Lose(name);
  for (const char* name : {"a", "b"}) {
    Lose(name, 1);
    Hold(name);
    engines_[name] = fleet_->Engine(name, 2);
  }
  fleet_->Run();
  ASSERT_EQ(fleet_->Newest().kind, epoch::Kind::kFill);
  ASSERT_THAT(fleet_->Newest().engines, ::testing::Contains("a"));
  Lose("a");
  GoOn("b");
  EXPECT_EQ(fleet_->EngineNamed("b").version, Version(1));
}

}  // namespace
}  // namespace weightwire::coordinator::testing
