#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/unit/coordinator/fleet.h"

namespace weightwire::coordinator::testing {
namespace {

using ::testing::HasSubstr;

/// Two engines that serve version 1; "picky" does not want version 2.
class CoordinatorRefusal : public ::testing::Test {
 protected:
  void Start(Options options = {}, bool others_hold = true) {
    fleet_ = std::make_unique<Fleet>(std::move(options));
    trainer_ = fleet_->Trainer(1);
    fleet_->Engine("engine-a");
    fleet_->Agent("engine-a-agent").retain = others_hold ? 1 : 0;
    fleet_->Engine("picky", 2);
    Publish(1);
    FakeAgent& agent = fleet_->Agent("picky-agent");
    agent.deaf = [&agent](const epoch::Command& command) {
      const auto* commit = std::get_if<epoch::CommitCommand>(&command);
      if (commit == nullptr || commit->version != Version(2)) return false;
      if (commit->leader) {
        agent.Report(epoch::FailedReport{
            commit->epoch, commit->member,
            Status(Code::kAborted, Reason::kAbortRequested, "a canary sang"), true});
      }
      return true;
    };
    Publish(2);
  }
  void Publish(uint64_t version) {
    fleet_->PublishAll(trainer_, version);
    fleet_->Run();
  }
  double Count(const std::string& outcome) {
    return fleet_->metrics.Value("versions_refused_total{outcome=" + outcome + "}");
  }
  bool PickyIsFenced() {
    for (const epoch::Command& command : fleet_->Agent("picky-agent").commands) {
      const auto* evict = std::get_if<epoch::EvictCommand>(&command);
      if (evict != nullptr && evict->why.ToString().find("a canary sang") != std::string::npos) {
        return true;
      }
    }
    return false;
  }
  std::unique_ptr<Fleet> fleet_;
  std::vector<epoch::Member> trainer_;
};

TEST_F(CoordinatorRefusal, FencesTheEngineAndTakesTheVersionBackEverywhere) {
  Start();
  EXPECT_TRUE(PickyIsFenced());
  const auto status = fleet_->coordinator->Snapshot();
  EXPECT_EQ(status.committed_version, Version(1));
  EXPECT_EQ(fleet_->EngineNamed("engine-a").version, Version(1));
  EXPECT_EQ(fleet_->Newest().kind, epoch::Kind::kRollback);
  EXPECT_EQ(fleet_->Released(trainer_[0], 2), OkStatus()) << "the trainer goes on";
  EXPECT_EQ(Count("rolled_back"), 1);
  Publish(3);
  EXPECT_EQ(fleet_->EngineNamed("engine-a").version, Version(3));
}

TEST_F(CoordinatorRefusal, KeepsTheVersionWhereItIsConfiguredSo) {
  Options options;
  options.rollback_refused = false;
  Start(options);
  EXPECT_TRUE(PickyIsFenced());
  EXPECT_EQ(fleet_->coordinator->Snapshot().committed_version, Version(2));
  EXPECT_EQ(fleet_->EngineNamed("engine-a").version, Version(2));
  EXPECT_EQ(Count("kept"), 1);
}

TEST_F(CoordinatorRefusal, KeepsAVersionThatNobodyCanGoBackFrom) {
  Start({}, /*others_hold=*/false);
  EXPECT_EQ(fleet_->coordinator->Snapshot().committed_version, Version(2));
  EXPECT_EQ(Count("no_holder"), 1);
}

/// D5: whether an engine wants what was committed is for its leader to say.
TEST_F(CoordinatorRefusal, D5AnotherRankThanTheLeaderTakesNothingBack) {
  Fleet fleet;
  const auto trainer = fleet.Trainer(1);
  fleet.Engine("engine-a");
  const auto odd = fleet.Engine("odd", 2);
  fleet.PublishAll(trainer, 1);
  fleet.Run();
  FakeAgent& agent = fleet.Agent("odd-agent");
  agent.deaf = [&](const epoch::Command& command) {
    const auto* commit = std::get_if<epoch::CommitCommand>(&command);
    if (commit == nullptr || !commit->leader) return false;
    agent.Report(epoch::FailedReport{
        commit->epoch, odd[1], Status(Code::kAborted, Reason::kAbortRequested, "not me"), true});
    return false;
  };
  fleet.PublishAll(trainer, 2);
  fleet.Run();
  EXPECT_EQ(fleet.coordinator->Snapshot().committed_version, Version(2));
  for (const char* name : {"engine-a", "odd"}) {
    EXPECT_EQ(fleet.EngineNamed(name).version, Version(2)) << name;
  }
  EXPECT_TRUE(agent.All<epoch::EvictCommand>().empty());
  EXPECT_EQ(fleet.Newest().kind, epoch::Kind::kPublish) << "no rollback";
}

TEST_F(CoordinatorRefusal, AFailureThatIsNoRefusalFencesTheEngineOnly) {
  Start();
  fleet_->Engine("engine-c");
  fleet_->Agent("engine-c-agent").deaf = [&](const epoch::Command& command) {
    const auto* commit = std::get_if<epoch::CommitCommand>(&command);
    if (commit == nullptr) return false;
    fleet_->Agent("engine-c-agent")
        .Report(epoch::FailedReport{commit->epoch, commit->member,
                                    Status(Code::kInternal, Reason::kInternal, "test"), false});
    return true;
  };
  Publish(4);
  EXPECT_EQ(fleet_->coordinator->Snapshot().committed_version, Version(4));
  EXPECT_EQ(fleet_->EngineNamed("engine-a").version, Version(4));
}

}  // namespace
}  // namespace weightwire::coordinator::testing
