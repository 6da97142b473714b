#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/unit/coordinator/fleet.h"

// Agents that are cut off a coordinator that lives: their ranks keep their places and what they
// serve, and resume as the same incarnations. Nothing is published to make things right.
namespace weightwire::coordinator::testing {
namespace {

using control::GroupRole;
using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::HasSubstr;

class CoordinatorCut : public ::testing::Test {
 protected:
  CoordinatorCut() {
    trainer_ = fleet_.Trainer(2);
    engine_ = fleet_.Engine("engine-a", 2);
  }
  void Publish(uint64_t version) {
    fleet_.PublishAll(trainer_, version);
    fleet_.Run();
  }
  FakeAgent& EngineAgent() { return fleet_.Agent("engine-a-agent"); }
  FakeAgent& TrainerAgent() { return fleet_.Agent("trainer-agent"); }
  EngineStatus Engine() { return fleet_.EngineNamed("engine-a"); }
  control::RejoinState Serving(uint64_t version) {
    control::RejoinState claim;
    claim.serving = {fleet_.coordinator->Snapshot().committed, Version(version)};
    return claim;
  }
  void Cut(FakeAgent& agent) { fleet_.coordinator->Disconnected(agent.id()); }
  void Silence(FakeAgent& agent) {
    agent.StopHeartbeats();
    fleet_.Run(seconds(7));
  }
  void Open(FakeAgent& agent) {
    agent.deaf = nullptr;
    agent.commands.clear();
    ASSERT_TRUE(agent.Open().has_value());
  }
  Result<epoch::Member> RegisterAgain(GroupRole role, const std::string& group, uint32_t rank,
                                      const epoch::Member& before,
                                      const control::RejoinState& claim) {
    return fleet_.Register(group + "-agent", role, group, rank, 2, before.incarnation.value, claim);
  }
  void Resume(GroupRole role, const std::string& group, const std::vector<epoch::Member>& members,
              const control::RejoinState& claim) {
    for (uint32_t rank = 0; rank < 2; ++rank) {
      const auto again = RegisterAgain(role, group, rank, members[rank], claim);
      ASSERT_TRUE(again.has_value()) << again.error().ToString();
      EXPECT_EQ(*again, members[rank]) << "the same member as before";
      ASSERT_TRUE(fleet_.SubmitRows(*again, rank, 2).ok());
    }
    fleet_.Run();
  }
  void ResumeEngine(const control::RejoinState& claim) {
    Open(EngineAgent());
    Resume(GroupRole::kEngine, "engine-a", engine_, claim);
  }
  void ResumeTrainer(const control::RejoinState& claim = {}) {
    Open(TrainerAgent());
    Resume(GroupRole::kTrainer, "trainer", trainer_, claim);
  }
  /// Registers another process in the place; the answer comes when it comes.
  std::shared_ptr<std::optional<Result<control::RegisterReply>>> RegisterAnother(
      const std::string& agent, uint64_t incarnation, Incarnation previous = {}) {
    control::RegisterRequest request;
    request.agent = fleet_.Agent(agent).id();
    request.job = "default";
    request.role = GroupRole::kEngine;
    request.group = "engine-a";
    request.world_size = 2;
    request.incarnation = Incarnation(incarnation);
    request.previous = previous;
    auto answer = std::make_shared<std::optional<Result<control::RegisterReply>>>();
    fleet_.coordinator->Register(request, [answer](auto reply) { *answer = std::move(reply); });
    fleet_.Run(milliseconds(1));
    return answer;
  }

  Fleet fleet_;
  std::vector<epoch::Member> trainer_, engine_;
};

TEST_F(CoordinatorCut, AConnectionThatEndsTakesNothing) {
  Publish(1);
  Cut(EngineAgent());
  fleet_.Run();
  EXPECT_EQ(Engine().state, EngineState::kCutOff);
  EXPECT_EQ(Engine().version, Version(1));
  EXPECT_FALSE(Engine().ready);
  const auto participants = fleet_.coordinator->Snapshot().participants;
  EXPECT_EQ(std::ranges::count(participants, "suspect", &ParticipantStatus::presence), 2);
  ResumeEngine(Serving(1));
  EXPECT_EQ(Engine().state, EngineState::kServing);
  EXPECT_EQ(Engine().version, Version(1));
  EXPECT_TRUE(Engine().ready);
  EXPECT_TRUE(EngineAgent().All<epoch::EvictCommand>().empty());
  EXPECT_TRUE(EngineAgent().All<epoch::PrepareCommand>().empty()) << "it has to be filled";
  EXPECT_EQ(fleet_.metrics.Value("members_resumed_total{role=engine}"), 2);
}

TEST_F(CoordinatorCut, ALeaseThatEndsTakesNothingWhileNobodyElseAsks) {
  Publish(1);
  for (const bool by_silence : {true, false}) {
    by_silence ? Silence(EngineAgent()) : Cut(EngineAgent());
    fleet_.Run(seconds(30));
    EXPECT_EQ(Engine().state, EngineState::kCutOff);
    const auto participants = fleet_.coordinator->Snapshot().participants;
    EXPECT_EQ(std::ranges::count(participants, "absent", &ParticipantStatus::presence), 2);
    ResumeEngine(Serving(1));
    EXPECT_EQ(Engine().state, EngineState::kServing);
    EXPECT_TRUE(Engine().ready);
    EXPECT_TRUE(EngineAgent().All<epoch::EvictCommand>().empty());
  }
  EXPECT_EQ(fleet_.metrics.Value("lease_expiries_total{role=engine}"), 4);
}

TEST_F(CoordinatorCut, AnotherProcessWaitsForASuspectsPlaceUntilItsLeaseEnds) {
  Publish(1);
  Cut(EngineAgent());
  const auto answer = RegisterAnother("other", 77);
  fleet_.Run(seconds(2));
  EXPECT_FALSE(answer->has_value()) << "the lease has not ended";
  fleet_.Run(seconds(5));
  ASSERT_TRUE(answer->has_value());
  ASSERT_TRUE((*answer)->has_value()) << (**answer).error().ToString();
  Open(EngineAgent());
  const auto late = RegisterAgain(GroupRole::kEngine, "engine-a", 0, engine_[0], Serving(1));
  EXPECT_EQ(late.error().reason(), Reason::kStaleIncarnation) << "its place was given away";
}

TEST_F(CoordinatorCut, ASuspectThatResumesKeepsItsPlaceFromWhoWaits) {
  Publish(1);
  Cut(EngineAgent());
  const auto answer = RegisterAnother("other", 77);
  ResumeEngine(Serving(1));
  ASSERT_TRUE(answer->has_value());
  EXPECT_EQ((**answer).error().reason(), Reason::kDuplicateRank);
  EXPECT_EQ(Engine().state, EngineState::kServing);
}

TEST_F(CoordinatorCut, TheSameProcessGetsItsPlaceAtOnceUnderANewIncarnation) {
  Publish(1);
  Cut(EngineAgent());
  const auto answer = RegisterAnother("other", 77, engine_[0].incarnation);
  ASSERT_TRUE(answer->has_value());
  EXPECT_TRUE((*answer)->has_value());
  const auto stranger = RegisterAnother("other", 78, Incarnation(5));
  ASSERT_TRUE(stranger->has_value());
  EXPECT_EQ((**stranger).error().reason(), Reason::kDuplicateRank);
}

TEST_F(CoordinatorCut, AProcessThatLeftWhileItsAgentWasCutOffGivesItsPlaceBack) {
  Publish(1);
  Cut(EngineAgent());
  Open(EngineAgent());
  EngineAgent().Report(epoch::LostReport{
      engine_[0], Status(Code::kAborted, Reason::kMemberLost, "the process left")});
  fleet_.Run();
  EXPECT_EQ(Engine().state, EngineState::kDirty);
  const auto answer = RegisterAnother("engine-a-agent", 77);
  ASSERT_TRUE(answer->has_value());
  EXPECT_TRUE((*answer)->has_value());
}

TEST_F(CoordinatorCut, NobodyElsesAgentGivesAPlaceBack) {
  Publish(1);
  Cut(EngineAgent());
  fleet_.Agent("other").Report(
      epoch::LostReport{engine_[0], Status(Code::kAborted, Reason::kMemberLost, "a lie")});
  fleet_.Run();
  EXPECT_EQ(Engine().state, EngineState::kCutOff);
}

TEST_F(CoordinatorCut, ASingleRankThatIsCutOffResumesAmongTheOthers) {
  fleet_.coordinator->CloseSession(EngineAgent().id());
  engine_ = {fleet_.Join(GroupRole::kEngine, "engine-b", 1, "a")[0]};
  // One engine of two ranks on two agents.
  const auto first = fleet_.Register("a", GroupRole::kEngine, "pair", 0, 2);
  const auto second = fleet_.Register("b", GroupRole::kEngine, "pair", 1, 2);
  ASSERT_TRUE(fleet_.SubmitRows(*first, 0, 2).ok());
  ASSERT_TRUE(fleet_.SubmitRows(*second, 1, 2).ok());
  Publish(1);
  Cut(fleet_.Agent("b"));
  fleet_.Run();
  EXPECT_EQ(fleet_.EngineNamed("pair").state, EngineState::kCutOff);
  Open(fleet_.Agent("b"));
  const auto again =
      fleet_.Register("b", GroupRole::kEngine, "pair", 1, 2, second->incarnation.value, Serving(1));
  ASSERT_TRUE(again.has_value());
  ASSERT_TRUE(fleet_.SubmitRows(*again, 1, 2).ok());
  fleet_.Run();
  EXPECT_EQ(fleet_.EngineNamed("pair").state, EngineState::kServing);
  EXPECT_TRUE(fleet_.EngineNamed("pair").ready);
  EXPECT_TRUE(fleet_.Agent("a").All<epoch::EvictCommand>().empty());
  EXPECT_TRUE(fleet_.Agent("b").All<epoch::EvictCommand>().empty());
}

TEST_F(CoordinatorCut, ATrainerThatIsCutOffMidTransferKeepsItsVersion) {
  Publish(1);
  TrainerAgent().deaf = [](const epoch::Command& command) {
    return std::holds_alternative<epoch::TransferCommand>(command);
  };
  Publish(2);
  Cut(TrainerAgent());
  fleet_.Run();
  EXPECT_EQ(fleet_.Released(trainer_[0], 2), std::nullopt);
  control::RejoinState claim;
  claim.released = Version(1);
  ResumeTrainer(claim);
  for (const auto& member : trainer_) {
    ASSERT_TRUE(fleet_.Released(member, 2).has_value());
    EXPECT_TRUE(fleet_.Released(member, 2)->ok()) << fleet_.Released(member, 2)->ToString();
  }
  EXPECT_EQ(Engine().version, Version(2));
}

TEST_F(CoordinatorCut, AReleaseThatATrainerMissedIsToldAgain) {
  Publish(1);
  Publish(2);
  ASSERT_TRUE(fleet_.Released(trainer_[0], 2).has_value());
  Cut(TrainerAgent());  // the release was on its way: ResumeTrainer forgets what came
  control::RejoinState claim;
  claim.released = Version(1);
  ResumeTrainer(claim);
  ASSERT_EQ(fleet_.Released(trainer_[0], 2), std::nullopt);
  fleet_.PublishAll(trainer_, 2);
  fleet_.Run();
  for (const auto& member : trainer_) {
    ASSERT_TRUE(fleet_.Released(member, 2).has_value());
    EXPECT_TRUE(fleet_.Released(member, 2)->ok());
  }
  EXPECT_EQ(fleet_.coordinator->Snapshot().epochs.size(), 2u) << "nothing moves again";
}

TEST_F(CoordinatorCut, AVersionThatWasGivenUpMeanwhileIsNotToldToBeCommitted) {
  Publish(1);
  ASSERT_TRUE(fleet_.Publish(trainer_[0], 2, false, seconds(1)).ok());
  Cut(TrainerAgent());
  fleet_.Run(seconds(3));  // its deadline passes: rank 1 never published it
  control::RejoinState claim;
  claim.released = Version(1);
  ResumeTrainer(claim);
  ASSERT_TRUE(fleet_.Publish(trainer_[0], 2).ok());
  fleet_.Run();
  ASSERT_TRUE(fleet_.Released(trainer_[0], 2).has_value());
  EXPECT_EQ(fleet_.Released(trainer_[0], 2)->reason(), Reason::kMissingRank);
}

TEST_F(CoordinatorCut, ASwapThatWasDecidedIsMadeWhenTheEngineIsBack) {
  fleet_.Engine("engine-b");
  Publish(1);
  const Epoch first = fleet_.coordinator->Snapshot().committed;
  EngineAgent().deaf = [](const epoch::Command& command) {
    return std::holds_alternative<epoch::CommitCommand>(command);
  };
  Publish(2);
  const Epoch second = fleet_.coordinator->Snapshot().committed;
  ASSERT_GT(second, first);
  Cut(EngineAgent());
  fleet_.Run();
  EXPECT_EQ(fleet_.Newest().phase, epoch::Phase::kCommitted) << "it waits for nobody";
  EXPECT_EQ(fleet_.EngineNamed("engine-b").version, Version(2));
  Publish(3);  // while it is away
  EXPECT_EQ(fleet_.EngineNamed("engine-b").version, Version(3));
  control::RejoinState claim;
  claim.serving = {first, Version(1)};
  claim.staged = claim.content = second;
  claim.version = Version(2);
  claim.told = true;
  ResumeEngine(claim);
  fleet_.Run(seconds(1));
  const auto commits = EngineAgent().All<epoch::CommitCommand>();
  ASSERT_FALSE(commits.empty());
  EXPECT_EQ(commits[0].version, Version(2)) << "the swap that it was told of";
  EXPECT_EQ(Engine().version, Version(3)) << "and then it is filled";
  EXPECT_TRUE(EngineAgent().All<epoch::EvictCommand>().empty());
}

TEST_F(CoordinatorCut, WhoWasDrainedIsDrainedWhenItIsBack) {
  Publish(1);
  fleet_.coordinator->Drain("engine-a-agent", Coordinator::Draining::kDrain,
                            Coordinator::DrainOf::kAgent, [](const auto&) {});
  fleet_.Run();
  Cut(EngineAgent());
  fleet_.Run(seconds(10));
  ResumeEngine(Serving(1));
  EXPECT_TRUE(Engine().drained);
}

TEST_F(CoordinatorCut, GoodbyeFreesThePlacesAtOnce) {
  Publish(1);
  fleet_.coordinator->CloseSession(EngineAgent().id());
  const auto answer = RegisterAnother("other", 77);
  ASSERT_TRUE(answer->has_value());
  EXPECT_TRUE((*answer)->has_value());
}

}  // namespace
}  // namespace weightwire::coordinator::testing
