// A trainer of several models, and engines that each hold one of them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

#include "tests/unit/coordinator/fleet.h"

namespace weightwire::coordinator::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

/// Of odd sizes, and other tensors than the actor's SmallModel().
layout::CanonicalSpace Reward() {
  return {{{"a", layout::DType::kF32, {5, 2}}, {"score", layout::DType::kBF16, {3}}}};
}

control::LayoutOfModel Part(const std::string& name, const layout::CanonicalSpace& model,
                            uint32_t rank, uint32_t world) {
  control::LayoutOfModel part{name, rank, world, {}};
  part.layout.canonical = model;
  part.layout.layout = world > 0 ? RowShard(model, rank, world) : layout::RankLayout{};
  return part;
}

/// The actor is cut over both ranks of the trainer, the reward model is on the second one.
class CoordinatorModels : public ::testing::Test {
 protected:
  Result<control::LayoutReply> Submit(const epoch::Member& member,
                                      std::vector<control::LayoutOfModel> models) {
    control::LayoutSubmission submission;
    submission.member = member;
    submission.models = std::move(models);
    return fleet_.Submit(std::move(submission));
  }
  epoch::Member Register(const std::string& group, uint32_t rank, uint32_t world) {
    const auto role =
        group == "trainer" ? control::GroupRole::kTrainer : control::GroupRole::kEngine;
    const auto member = fleet_.Register(group + "-agent", role, group, rank, world);
    EXPECT_TRUE(member.has_value());
    return *member;
  }
  void Trainer() {
    for (uint32_t rank : {0U, 1U}) {
      trainer_.push_back(Register("trainer", rank, 2));
      const auto reply = Submit(trainer_.back(), {Part("reward", Reward(), 0, rank),
                                                  Part("actor", SmallModel(), rank, 2)});
      ASSERT_TRUE(reply.has_value()) << reply.error().ToString();
      replies_.push_back(*reply);
    }
  }
  epoch::Member Engine(const std::string& name, const std::string& model) {
    const epoch::Member member = Register(name, 0, 1);
    const auto& canonical = model == "actor" ? SmallModel() : Reward();
    const auto reply = Submit(member, {Part(model, canonical, 0, 1)});
    EXPECT_TRUE(reply.has_value()) << reply.error().ToString();
    fleet_.Run();
    return member;
  }
  void Publish(uint64_t version) {
    fleet_.PublishAll(trainer_, version);
    fleet_.Run();
  }
  std::string Refused(const epoch::Member& member, std::vector<control::LayoutOfModel> models) {
    const auto reply = Submit(member, std::move(models));
    EXPECT_FALSE(reply.has_value());
    return reply.has_value() ? "" : reply.error().ToString();
  }
  /// The engine receives a version for as long as it may.
  void Stall(const std::string& engine) {
    fleet_.Agent(engine + "-agent").deaf = [](const epoch::Command& command) {
      return std::holds_alternative<epoch::TransferCommand>(command);
    };
  }
  /// The engine's canary does not want this version.
  void Refuse(const std::string& engine, Version version) {
    FakeAgent& agent = fleet_.Agent(engine + "-agent");
    agent.deaf = [&agent, version](const epoch::Command& command) {
      const auto* commit = std::get_if<epoch::CommitCommand>(&command);
      if (commit == nullptr || commit->version != version) return false;
      agent.Report(epoch::FailedReport{
          commit->epoch, commit->member,
          Status(Code::kAborted, Reason::kAbortRequested, "a canary sang"), true});
      return true;
    };
  }
  /// The sources' tensors that the plan of the engine's last epoch reads, and the target's.
  std::set<std::string> Read(const std::string& engine) {
    const auto prepare = fleet_.Agent(engine + "-agent").Last<epoch::PrepareCommand>();
    const auto plan = fleet_.coordinator->FindPlan(prepare->assignments.at(0).plan);
    std::set<std::string> read;
    for (const plan::Stream& stream : (*plan)->streams) {
      for (const plan::CopyOp& op : stream.ops) {
        read.insert(std::to_string(stream.source_rank) + ":" +
                    replies_[stream.source_rank].agreed->tensors[op.source_tensor].name);
      }
    }
    return read;
  }
  std::optional<Result<RolledBack>> GoBack(uint64_t version) {
    auto answer = std::make_shared<std::optional<Result<RolledBack>>>();
    fleet_.coordinator->Rollback(Version(version), [answer](auto result) { *answer = result; });
    fleet_.Run();
    return *answer;
  }

  Fleet fleet_;
  std::vector<epoch::Member> trainer_;
  std::vector<control::LayoutReply> replies_;
};

TEST_F(CoordinatorModels, EachEngineGetsItsOwnModelInOneEpoch) {
  Trainer();
  Engine("actor-a", "actor");
  Engine("reward-a", "reward");
  Publish(1);
  for (const char* name : {"actor-a", "reward-a"}) {
    EXPECT_EQ(fleet_.EngineNamed(name).version, Version(1)) << name;
    EXPECT_EQ(fleet_.EngineNamed(name).serving, fleet_.coordinator->Snapshot().committed);
  }
  EXPECT_THAT(Read("actor-a"), ElementsAre("0:actor::a", "0:actor::b", "1:actor::a", "1:actor::b"));
  EXPECT_THAT(Read("reward-a"), ElementsAre("1:reward::a", "1:reward::score"));
  size_t commits = 0;
  for (const auto& record : fleet_.journal.durable()) {
    commits += std::holds_alternative<CommitRecord>(record) ? 1 : 0;
  }
  EXPECT_EQ(commits, 1U) << "one decision for both";
}

TEST_F(CoordinatorModels, AnEngineKeepsItsOwnNamesAndATrainersHaveTheModels) {
  Trainer();
  std::vector<std::string> names;
  for (const auto& tensor : replies_[1].agreed->tensors) names.push_back(tensor.name);
  EXPECT_THAT(names, ElementsAre("reward::a", "reward::score", "actor::a", "actor::b"))
      << "in the order in which the models were submitted";
  const auto reply = Submit(Register("reward-a", 0, 1), {Part("reward", Reward(), 0, 1)});
  names.clear();
  for (const auto& tensor : reply->agreed->tensors) names.push_back(tensor.name);
  EXPECT_THAT(names, ElementsAre("a", "score"));
}

TEST_F(CoordinatorModels, WhenOneModelIsNotStagedTheOtherIsNotServed) {
  Trainer();
  Engine("actor-a", "actor");
  Engine("reward-a", "reward");
  Publish(1);
  Stall("reward-a");
  fleet_.PublishAll(trainer_, 2, false, 3 * fleet_.options.transfer_deadline);
  fleet_.Run();
  EXPECT_EQ(fleet_.EngineNamed("actor-a").version, Version(1));
  EXPECT_EQ(fleet_.EngineNamed("reward-a").version, Version(1));
  fleet_.Agent("reward-a-agent").deaf = nullptr;
  fleet_.Run(fleet_.options.transfer_deadline + std::chrono::seconds(5));
  EXPECT_EQ(fleet_.EngineNamed("actor-a").version, Version(2));
  EXPECT_EQ(fleet_.EngineNamed("reward-a").version, Version(2));
}

TEST_F(CoordinatorModels, AnEngineIsFilledFromOneOfItsModel) {
  Trainer();
  Engine("actor-a", "actor");  // first by name, and no holder of the reward model
  Engine("reward-a", "reward");
  Publish(1);
  const size_t before = fleet_.Agent("actor-a-agent").commands.size();
  Engine("reward-b", "reward");
  fleet_.Run();
  EXPECT_EQ(fleet_.EngineNamed("reward-b").version, Version(1));
  EXPECT_EQ(fleet_.Agent("actor-a-agent").commands.size(), before);
  const auto source = fleet_.Agent("reward-a-agent").Last<epoch::PrepareCommand>();
  EXPECT_EQ(source->role, epoch::Role::kSource);
  EXPECT_EQ(source->kind, epoch::Kind::kFill);
}

TEST_F(CoordinatorModels,
       AnEngineWhoseModelNobodyHoldsWaitsForTheNextVersionAndKeepsNobodyWaiting) {
  Trainer();
  Engine("actor-a", "actor");
  Publish(1);
  Engine("a-reward", "reward");  // before every other by name
  Engine("actor-b", "actor");
  fleet_.Run();
  EXPECT_EQ(fleet_.EngineNamed("actor-b").version, Version(1));
  EXPECT_EQ(fleet_.EngineNamed("a-reward").state, EngineState::kEmpty);
  EXPECT_EQ(fleet_.EngineNamed("a-reward").last_error, "");
  EXPECT_EQ(fleet_.metrics.Value("epochs_total{outcome=fill_committed}"), 1);
  Publish(2);
  for (const char* name : {"a-reward", "actor-a", "actor-b"}) {
    EXPECT_EQ(fleet_.EngineNamed(name).version, Version(2)) << name;
  }
}

/// A fill of somebody who holds the weights in another dtype takes whoever waits for them along.
TEST_F(CoordinatorModels, NobodyIsTakenAlongToAFillOfAnotherModel) {
  Trainer();
  Engine("actor-a", "actor");
  Publish(1);
  fleet_.Agent("actor-a-agent").deaf = [](const epoch::Command& command) {
    const auto* prepare = std::get_if<epoch::PrepareCommand>(&command);
    return prepare != nullptr && prepare->kind == epoch::Kind::kFill;  // the first fill hangs
  };
  Engine("actor-b", "actor");
  Engine("a-reward", "reward");
  layout::CanonicalSpace other = SmallModel();
  other.tensors[0].dtype = layout::DType::kBF16;
  ASSERT_TRUE(Submit(Register("actor-c", 0, 1), {Part("actor", other, 0, 1)}).has_value());
  fleet_.Agent("actor-a-agent").deaf = nullptr;
  fleet_.Run(fleet_.options.prepare_deadline + std::chrono::seconds(20));
  for (const char* name : {"actor-b", "actor-c"}) {
    EXPECT_EQ(fleet_.EngineNamed(name).version, Version(1)) << name;
  }
  EXPECT_EQ(fleet_.EngineNamed("a-reward").last_error, "");
}

TEST_F(CoordinatorModels, ARollbackTakesAllModelsBack) {
  Trainer();
  Engine("actor-a", "actor");
  Engine("reward-a", "reward");
  Publish(1);
  Publish(2);
  const auto answer = GoBack(1);
  ASSERT_TRUE(answer.has_value() && answer->has_value());
  EXPECT_THAT((**answer).engines, ElementsAre("actor-a", "reward-a"));
  for (const char* name : {"actor-a", "reward-a"}) {
    EXPECT_EQ(fleet_.EngineNamed(name).version, Version(1)) << name;
  }
}

TEST_F(CoordinatorModels, NoRollbackToWhatTheEnginesOfOneModelHoldAlone) {
  Trainer();
  Engine("actor-a", "actor");
  Publish(1);
  Engine("reward-a", "reward");
  Publish(2);
  const auto answer = GoBack(1);
  ASSERT_TRUE(answer.has_value() && !answer->has_value());
  EXPECT_EQ(answer->error().reason(), Reason::kStaleVersion);
  EXPECT_THAT(answer->error().message(), HasSubstr("no engine of reward still holds version 1"));
  for (const char* name : {"actor-a", "reward-a"}) {
    EXPECT_EQ(fleet_.EngineNamed(name).version, Version(2)) << name;
  }
}

TEST_F(CoordinatorModels, AVersionThatOneModelsEngineRefusesIsTakenBackFromAll) {
  Trainer();
  Engine("actor-a", "actor");
  Engine("reward-a", "reward");
  Engine("reward-b", "reward");
  Publish(1);
  Refuse("reward-b", Version(2));
  Publish(2);
  for (const char* name : {"actor-a", "reward-a"}) {
    EXPECT_EQ(fleet_.EngineNamed(name).version, Version(1)) << name;
  }
}

/// The only engine of its model refuses what nobody of that model can go back to.
TEST_F(CoordinatorModels, ARefusedVersionStaysWhereOneModelHasNoEarlierOne) {
  Trainer();
  Engine("actor-a", "actor");
  Publish(1);
  Engine("reward-a", "reward");
  Engine("reward-b", "reward");
  Refuse("reward-b", Version(2));
  Publish(2);
  for (const char* name : {"actor-a", "reward-a"}) {
    EXPECT_EQ(fleet_.EngineNamed(name).version, Version(2)) << name;
  }
  EXPECT_EQ(fleet_.metrics.Value("versions_refused_total{outcome=no_holder}"), 1);
}

/// Two of three engines are a quorum, and none of them is of the reward model.
TEST_F(CoordinatorModels, AQuorumHasAnEngineOfEveryModel) {
  fleet_.options.commit_policy = {CommitPolicy::Kind::kQuorum, 2, std::chrono::milliseconds(500)};
  fleet_.agent_features |= control::kFeatureExclude;
  fleet_.Restart();
  Trainer();
  Engine("actor-a", "actor");
  Engine("actor-b", "actor");
  Engine("reward-a", "reward");
  Publish(1);
  Stall("actor-b");
  Publish(2);
  fleet_.Run(std::chrono::seconds(1));
  EXPECT_EQ(fleet_.EngineNamed("actor-a").version, Version(2)) << "without actor-b";
  EXPECT_EQ(fleet_.EngineNamed("reward-a").version, Version(2));
  fleet_.Agent("actor-b-agent").deaf = nullptr;
  fleet_.Run(std::chrono::seconds(200));
  Stall("reward-a");
  fleet_.PublishAll(trainer_, 3, false, std::chrono::seconds(1000));
  fleet_.Run(std::chrono::seconds(10));
  for (const char* name : {"actor-a", "actor-b", "reward-a"}) {
    EXPECT_EQ(fleet_.EngineNamed(name).version, Version(2)) << name;
  }
  fleet_.Agent("reward-a-agent").deaf = nullptr;
  fleet_.Run(fleet_.options.transfer_deadline + std::chrono::seconds(5));
  for (const char* name : {"actor-a", "actor-b", "reward-a"}) {
    EXPECT_EQ(fleet_.EngineNamed(name).version, Version(3)) << name;
  }
}

/// Where engines come and go faster than an attempt takes, fewer are asked.
TEST_F(CoordinatorModels, OfFewerEnginesThatAreAskedOneIsOfEveryModel) {
  fleet_.options.commit_policy = {CommitPolicy::Kind::kQuorum, 2, std::chrono::milliseconds(500)};
  fleet_.Restart();
  Trainer();
  std::vector<std::string> engines = {"z-reward"};  // the last one by name
  for (const char letter : std::string("abcdefgh")) {
    engines.push_back(std::string("actor-") + letter);
    Engine(engines.back(), "actor");
  }
  Engine("z-reward", "reward");
  Publish(1);
  for (const std::string& engine : engines) Stall(engine);
  Publish(2);
  for (const char* gone : {"actor-a", "actor-b", "actor-c"}) {
    if (gone == std::string("actor-c")) {
      for (const std::string& engine : engines) fleet_.Agent(engine + "-agent").deaf = nullptr;
    }
    fleet_.coordinator->Disconnected(fleet_.Agent(std::string(gone) + "-agent").id());
    fleet_.Run();
  }
  fleet_.Run(std::chrono::seconds(1));
  EXPECT_EQ(fleet_.EngineNamed("z-reward").version, Version(2));
  EXPECT_EQ(fleet_.EngineNamed("actor-h").version, Version(2));
  const auto& epochs = fleet_.coordinator->Snapshot().epochs;
  const auto publish = std::ranges::find(epochs, epoch::Kind::kPublish, &EpochStatus::kind);
  ASSERT_NE(publish, epochs.end());
  EXPECT_EQ(publish->engines.size(), 3U) << "half of those that are left";
}

/// Two actors are a quorum, but the reward model's other engine is gone.
TEST_F(CoordinatorModels, WhoWasLateIsAskedAgainWhereItIsTheLastOneOfItsModel) {
  fleet_.options.commit_policy = {CommitPolicy::Kind::kQuorum, 2, std::chrono::milliseconds(500)};
  fleet_.Restart();
  Trainer();
  for (const char* engine : {"actor-a", "actor-b"}) Engine(engine, "actor");
  const epoch::Member reward_a = Engine("reward-a", "reward");
  Engine("reward-b", "reward");
  Publish(1);
  Stall("reward-b");
  Publish(2);
  Stall("reward-a");  // from the second attempt on
  fleet_.Run(std::chrono::milliseconds(600));
  ASSERT_THAT(fleet_.Newest().engines, ElementsAre("actor-a", "actor-b", "reward-a"));
  fleet_.Agent("reward-b-agent").deaf = nullptr;
  fleet_.Agent("reward-a-agent")
      .Report(epoch::LostReport{reward_a, Status(Code::kAborted, Reason::kMemberLost, "killed")});
  fleet_.Run(std::chrono::seconds(1));
  EXPECT_EQ(fleet_.EngineNamed("reward-b").version, Version(2));
}

/// What keeps the engines of a model away for a while leaves none of them a version behind: nobody
/// else could fill them. No version follows that would make it right.
class CoordinatorModelsAway : public CoordinatorModels {
 protected:
  /// Sources that can drop a reader: an engine that is lost could be left out.
  CoordinatorModelsAway() {
    fleet_.agent_features |= control::kFeatureExclude;
    fleet_.Restart();
    Trainer();
    actor_ = Engine("actor-a", "actor");
    reward_ = Engine("reward-a", "reward");
    Publish(1);
    ExpectServed(1, 1);
    claim_.serving = {fleet_.coordinator->Snapshot().committed, Version(1)};
  }
  void ExpectServed(uint64_t actor, uint64_t reward) {
    EXPECT_EQ(fleet_.EngineNamed("actor-a").version, Version(actor));
    EXPECT_EQ(fleet_.EngineNamed("reward-a").version, Version(reward));
  }
  FakeAgent& RewardAgent() { return fleet_.Agent("reward-a-agent"); }
  /// Version 2, which the reward model's engine receives for as long as it may.
  void BeginVersion2() {
    Stall("reward-a");
    Publish(2);
    ASSERT_EQ(fleet_.Newest().phase, epoch::Phase::kTransferring);
  }
  /// Version 2, beside which engines hold version 1.
  void PublishSecond() {
    Publish(2);
    ExpectServed(2, 2);
    claim_.holds = {claim_.serving};
    claim_.serving = {fleet_.coordinator->Snapshot().committed, Version(2)};
  }
  void Cut() {
    fleet_.coordinator->Disconnected(RewardAgent().id());
    fleet_.Run();
  }
  /// The same process as before says what it serves.
  void Resume(const std::string& group, const epoch::Member& member, const std::string& model) {
    const auto& canonical = model == "actor" ? SmallModel() : Reward();
    const auto again = fleet_.Register(group + "-agent", control::GroupRole::kEngine, group, 0, 1,
                                       member.incarnation.value, claim_);
    ASSERT_TRUE(again.has_value()) << again.error().ToString();
    ASSERT_TRUE(Submit(*again, {Part(model, canonical, 0, 1)}).has_value());
    fleet_.Run();
  }
  /// It is cut off again before its layout is known.
  void ResumeRewardAndCut() {
    ASSERT_TRUE(RewardAgent().Open().has_value());
    ASSERT_TRUE(fleet_
                    .Register("reward-a-agent", control::GroupRole::kEngine, "reward-a", 0, 1,
                              reward_.incarnation.value, claim_)
                    .has_value());
    Cut();
  }
  void ResumeReward(bool opens = true) {
    RewardAgent().deaf = nullptr;
    if (opens) {
      ASSERT_TRUE(RewardAgent().Open().has_value());
    }
    Resume("reward-a", reward_, "reward");
  }
  /// Another coordinator, to which everybody has come but the reward model's engine.
  void RestartWithoutReward() {
    fleet_.Restart();
    for (auto& [name, agent] : fleet_.agents) ASSERT_TRUE(agent->Open().has_value());
    trainer_.clear();
    replies_.clear();
    Trainer();
    Resume("actor-a", actor_, "actor");
  }

  void ExpectVersion2AfterOneLease() {
    Publish(2);
    fleet_.Run(fleet_.options.lease - std::chrono::milliseconds(700));
    EXPECT_EQ(fleet_.EngineNamed("actor-a").version, Version(1));
    fleet_.Run(std::chrono::seconds(1));
    EXPECT_EQ(fleet_.EngineNamed("actor-a").version, Version(2));
  }

  epoch::Member actor_, reward_;
  control::RejoinState claim_;  ///< of an engine that comes back
};

TEST_F(CoordinatorModelsAway, ACutWhileBytesMoveLeavesNoModelBehind) {
  BeginVersion2();
  Cut();
  fleet_.Run(std::chrono::seconds(3));
  ExpectServed(1, 1);
  EXPECT_THAT(fleet_.coordinator->Snapshot().waiting_for,
              HasSubstr("no engine of reward is here; it goes on without one in 1.9 s"));
  ResumeReward();
  ExpectServed(2, 2);
}

TEST_F(CoordinatorModelsAway, ACutBeforeAVersionLeavesNoModelBehind) {
  Cut();
  Publish(2);
  fleet_.Run(std::chrono::seconds(3));
  ExpectServed(1, 1);
  ResumeReward();
  ExpectServed(2, 2);
}

TEST_F(CoordinatorModelsAway, AnotherCoordinatorLeavesNoModelBehind) {
  RestartWithoutReward();
  Publish(2);
  fleet_.Run(std::chrono::seconds(3));
  EXPECT_EQ(fleet_.EngineNamed("actor-a").version, Version(1));
  ResumeReward(false);
  ExpectServed(2, 2);
}

TEST_F(CoordinatorModelsAway, AModelThatStaysAwayIsWaitedForOneLease) {
  Cut();
  ExpectVersion2AfterOneLease();
}

TEST_F(CoordinatorModelsAway, AModelThatDoesNotComeToAnotherCoordinatorIsWaitedForOneLease) {
  RestartWithoutReward();
  ExpectVersion2AfterOneLease();
}

TEST_F(CoordinatorModelsAway, AVersionWhoseDeadlinePassesMeanwhileSaysWhatItWaitedFor) {
  Cut();
  fleet_.PublishAll(trainer_, 2, false, std::chrono::seconds(2));
  fleet_.Run(std::chrono::seconds(3));
  EXPECT_THAT(fleet_.Released(trainer_[0], 2)->message(),
              HasSubstr("found no engine of reward before its deadline"));
}

TEST_F(CoordinatorModelsAway, AnEngineThatIsKnownToBeGoneIsNotWaitedFor) {
  BeginVersion2();
  RewardAgent().Report(
      epoch::LostReport{reward_, Status(Code::kAborted, Reason::kMemberLost, "killed")});
  fleet_.Run();
  EXPECT_EQ(fleet_.EngineNamed("actor-a").version, Version(2));
}

TEST_F(CoordinatorModelsAway, AnEngineThatComesAndGoesIsLeftBehindInTheEnd) {
  BeginVersion2();
  for (int times = 0; times < 3; ++times) {
    ExpectServed(1, 1);
    Cut();
    if (times == 2) break;
    ASSERT_TRUE(RewardAgent().Open().has_value());
    Resume("reward-a", reward_, "reward");
    ASSERT_EQ(fleet_.Newest().phase, epoch::Phase::kTransferring);
  }
  fleet_.Run();
  EXPECT_EQ(fleet_.EngineNamed("actor-a").version, Version(2));
}

TEST_F(CoordinatorModelsAway, AnEngineThatIsCutOffBeforeItSaysWhatItHoldsIsWaitedForAsWell) {
  Cut();
  Publish(2);
  fleet_.Run(std::chrono::seconds(4));
  ResumeRewardAndCut();
  fleet_.Run(std::chrono::seconds(3));
  ExpectServed(1, 1);
  ResumeReward();
  ExpectServed(2, 2);
}

TEST_F(CoordinatorModelsAway, AVersionWaitsForThreeLeasesAtMost) {
  Cut();
  Publish(2);
  for (int times = 0; times < 3; ++times) {
    fleet_.Run(std::chrono::seconds(4));
    ExpectServed(1, 1);
    ResumeRewardAndCut();
  }
  fleet_.Run(std::chrono::seconds(3));
  EXPECT_EQ(fleet_.EngineNamed("actor-a").version, Version(2)) << "15.6 s after it was published";
}

TEST_F(CoordinatorModelsAway, ARollbackThatIsCutGoesOnWithAllModels) {
  PublishSecond();
  RewardAgent().deaf = [](const epoch::Command& command) {
    return std::holds_alternative<epoch::PrepareCommand>(command);
  };
  std::optional<Result<RolledBack>> answer;
  fleet_.coordinator->Rollback(Version(1), [&](auto result) { answer = std::move(result); });
  fleet_.Run();
  Cut();
  fleet_.Run(std::chrono::seconds(3));
  EXPECT_FALSE(answer.has_value());
  ExpectServed(2, 2);
  ResumeReward();
  fleet_.Run();
  ASSERT_TRUE(answer.has_value() && answer->has_value());
  ExpectServed(1, 1);
}

TEST_F(CoordinatorModelsAway, ARollbackWaitsForAllModels) {
  PublishSecond();
  Cut();
  std::optional<Result<RolledBack>> answer;
  fleet_.coordinator->Rollback(Version(1), [&](auto result) { answer = std::move(result); });
  fleet_.Run(std::chrono::seconds(3));
  EXPECT_FALSE(answer.has_value());
  ExpectServed(2, 2);
  EXPECT_THAT(fleet_.coordinator->Snapshot().waiting_for,
              HasSubstr("rollback to version 1: no engine of reward is here"));
  ResumeReward();
  ASSERT_TRUE(answer.has_value() && answer->has_value());
  ExpectServed(1, 1);
}

/// One model ties its head to the embedding, the other does not.
TEST_F(CoordinatorModels, HeadsAreComparedModelByModel) {
  const layout::TensorSpec embed{"model.embed_tokens.weight", layout::DType::kBF16, {6, 2}};
  const layout::TensorSpec head{"lm_head.weight", layout::DType::kBF16, {6, 2}};
  const layout::CanonicalSpace tied{{embed}}, untied{{head, embed}};
  trainer_ = {Register("trainer", 0, 1)};
  ASSERT_TRUE(
      Submit(trainer_[0], {Part("draft", tied, 0, 1), Part("actor", untied, 0, 1)}).has_value());
  ASSERT_TRUE(Submit(Register("draft-a", 0, 1), {Part("draft", tied, 0, 1)}).has_value());
  ASSERT_TRUE(Submit(Register("actor-a", 0, 1), {Part("actor", untied, 0, 1)}).has_value());
  Publish(1);
  EXPECT_EQ(fleet_.EngineNamed("draft-a").version, Version(1));
  EXPECT_EQ(fleet_.EngineNamed("actor-a").version, Version(1));
  ASSERT_TRUE(Submit(Register("actor-tied", 0, 1), {Part("actor", tied, 0, 1)}).has_value());
  Publish(2);
  EXPECT_THAT(fleet_.Released(trainer_[0], 2)->message(), HasSubstr("ties lm_head"));
}

TEST_F(CoordinatorModels, TheStatusSaysWhichModelARankHas) {
  Trainer();
  Engine("reward-a", "reward");
  std::vector<std::string> specs;
  for (const auto& participant : fleet_.coordinator->Snapshot().participants) {
    specs.push_back(participant.spec);
  }
  EXPECT_THAT(specs, ::testing::UnorderedElementsAre("reward actor", "reward actor", "reward"));
}

TEST_F(CoordinatorModels, AnEngineThatNamesNoModelOrAnotherFailsTheVersionByWords) {
  Trainer();
  fleet_.Engine("plain");
  Publish(1);
  EXPECT_THAT(fleet_.Released(trainer_[0], 1)->message(),
              HasSubstr("does not say which it holds: actor, reward"));
  EXPECT_TRUE(fleet_.coordinator->Evict("plain", "test").ok());
  Engine("other", "critic");
  Publish(2);
  EXPECT_THAT(fleet_.Released(trainer_[0], 2)->message(),
              HasSubstr("holds the model \"critic\"; the trainer publishes actor, reward"));
}

TEST_F(CoordinatorModels, AnEngineThatNamesTheModelOfATrainerWithoutNamesFailsTheVersion) {
  trainer_ = fleet_.Trainer(1);
  Engine("actor-a", "actor");
  Publish(1);
  EXPECT_THAT(fleet_.Released(trainer_[0], 1)->message(), HasSubstr("which has no name"));
}

TEST_F(CoordinatorModels, RefusesLayoutsThatContradictThemselves) {
  const epoch::Member engine = Register("engine", 0, 1);
  for (const char* name : {"a b", "a::b", "", "\xc3\xa4"}) {
    EXPECT_THAT(Refused(engine, {Part(name, SmallModel(), 0, 1)}), HasSubstr("can be called"));
  }
  EXPECT_THAT(Refused(engine, {Part("a", SmallModel(), 0, 1), Part("b", Reward(), 0, 1)}),
              HasSubstr("an engine holds one model"));
  EXPECT_THAT(Refused(engine, {Part("a", SmallModel(), 0, 2)}), HasSubstr("rank 0 of 2"));

  const epoch::Member trainer = Register("trainer", 0, 2);
  EXPECT_THAT(Refused(trainer, {Part("a", SmallModel(), 1, 1)}), HasSubstr("rank 1 of 1"));
  EXPECT_THAT(Refused(trainer, {Part("a", SmallModel(), 0, 1), Part("a", Reward(), 0, 1)}),
              HasSubstr("named twice"));
  control::LayoutOfModel absent = Part("a", SmallModel(), 0, 1);
  absent.world_size = 0;
  EXPECT_THAT(Refused(trainer, {absent}), HasSubstr("world_size is 0"));
  control::LayoutOfModel nested = Part("a", SmallModel(), 0, 1);
  nested.layout = {};
  nested.layout.models = {Part("b", SmallModel(), 0, 1)};
  EXPECT_THAT(Refused(trainer, {nested}), HasSubstr("has models itself"));
}

TEST_F(CoordinatorModels, TwoRanksAreNotTheSameRankOfAModel) {
  ASSERT_TRUE(Submit(Register("trainer", 0, 3), {Part("a", SmallModel(), 1, 2)}).has_value());
  const epoch::Member second = Register("trainer", 1, 3);
  const auto same = Submit(second, {Part("a", SmallModel(), 1, 2)});
  EXPECT_EQ(same.error().reason(), Reason::kDuplicateRank);
  EXPECT_THAT(same.error().message(), HasSubstr("trainer/0 is rank 1 of 2"));
  const auto other = Submit(second, {Part("a", SmallModel(), 0, 3)});
  EXPECT_THAT(other.error().message(), HasSubstr("trainer/0 is rank 1 of 2"));
  EXPECT_TRUE(Submit(second, {Part("a", SmallModel(), 0, 2)}).has_value());
  EXPECT_TRUE(Submit(Register("trainer", 2, 3), {Part("a", SmallModel(), 0, 0)}).has_value());
}

TEST_F(CoordinatorModels, RanksOfOneGroupNameTheSameModels) {
  ASSERT_TRUE(Submit(Register("trainer", 0, 2), {Part("a", SmallModel(), 0, 1)}).has_value());
  const auto other = Submit(Register("trainer", 1, 2), {Part("b", Reward(), 0, 1)});
  EXPECT_EQ(other.error().reason(), Reason::kShapeMismatch);
}

}  // namespace
}  // namespace weightwire::coordinator::testing
