#include "kernels/keyed_sum.h"
#include "server/content/identity.h"
#include "tests/unit/agent/agent_fixture.h"

namespace weightwire::agent {
namespace {

/// An engine rank that serves epoch 1 from its first buffer.
class AgentContentHash : public AgentTest {
 protected:
  explicit AgentContentHash(bool checks_copies = false) {
    Start();
    rollout_ = StagedEngine(0, 1, 0, checks_copies);
    buffers_ = agent->OpenStage(rollout_->handle)->buffers;
    Serve(*rollout_, 1, 7);
    for (size_t buffer = 0; buffer < 2; ++buffer) {
      for (size_t i = 0; i < 74; ++i) buffers_[buffer]->data()[i] = std::byte(i * 7 + buffer);
    }
  }
  void Ask(uint64_t content, uint64_t number = 5) {
    Command(epoch::HashCommand{number, Epoch(content), rollout_->member, kPlan, 0});
    sim.RunReady();
  }
  epoch::HashedReport Answer() {
    const auto all = coordinator.All<epoch::HashedReport>();
    EXPECT_FALSE(all.empty());
    return all.empty() ? epoch::HashedReport{} : all.back();
  }
  /// Of both tensors, as one run of bytes each.
  std::vector<std::array<uint64_t, 2>> Expected(size_t buffer) const {
    std::vector<std::array<uint64_t, 2>> sums;
    const auto add = [&](const char* name, size_t at, int64_t count, kernels::Element element) {
      kernels::KeyedSum sum;
      kernels::AddKeyed(sum, content::SeedOf(name), buffers_[buffer]->data() + at,
                        {1, {count}, {1}, {1}}, element, element, 0);
      sums.push_back({sum.lane[0], sum.lane[1]});
    };
    add("canonical.a", 0, 12, kernels::Element::kOpaque4);
    add("canonical.b", 64, 5, kernels::Element::kOpaque2);
    return sums;
  }
  void BeginToWrite(uint64_t epoch, uint64_t version) {
    Command(TargetPrepare(*rollout_, epoch, version));
    Command(epoch::TransferCommand{Epoch(epoch), rollout_->member});
  }
  std::unique_ptr<Rank> rollout_;
  std::vector<std::shared_ptr<memory::MemoryRegion>> buffers_;
};

TEST_F(AgentContentHash, SaysThatItCan) {
  EXPECT_NE(coordinator.hellos.at(0).features & control::kFeatureContentHash, 0u);
}

TEST_F(AgentContentHash, SumsTheLiveBuffer) {
  Ask(1);
  const epoch::HashedReport report = Answer();
  EXPECT_TRUE(report.why.ok()) << report.why.ToString();
  EXPECT_EQ(report.verification, 5u);
  EXPECT_EQ(report.epoch, Epoch{1});
  EXPECT_EQ(report.sums, Expected(0));
  Serve(*rollout_, 2, 8);
  Ask(2);
  EXPECT_EQ(Answer().sums, Expected(1));
}

TEST_F(AgentContentHash, GoesOnWhileAnEpochWritesTheOtherBuffer) {
  BeginToWrite(2, 8);
  Ask(1);
  EXPECT_EQ(Answer().sums, Expected(0));
}

TEST_F(AgentContentHash, IsNotDisturbedByASwapAlone) {
  coordinator.hold_replies = true;
  Ask(1);
  coordinator.hold_replies = false;
  Serve(*rollout_, 2, 8);
  coordinator.Answer();
  sim.RunReady();
  EXPECT_EQ(Answer().sums, Expected(0)) << "the bytes of epoch 1 are still whole";
}

TEST_F(AgentContentHash, IsSupersededWhenItsBytesBeginToBeWritten) {
  coordinator.hold_replies = true;
  Ask(1);
  coordinator.hold_replies = false;
  Serve(*rollout_, 2, 8);
  BeginToWrite(3, 9);
  EXPECT_THAT(coordinator.All<epoch::HashedReport>(), IsEmpty());
  coordinator.Answer();
  sim.RunReady();
  const epoch::HashedReport report = Answer();
  EXPECT_EQ(report.why.reason(), Reason::kStaleEpoch);
  EXPECT_THAT(report.why.ToString(), HasSubstr("superseded"));
  EXPECT_EQ(report.why.rank(), "engine-a/0");
  EXPECT_TRUE(report.sums.empty());
}

TEST_F(AgentContentHash, RefusesWhatIsNotServed) {
  Ask(2);
  EXPECT_EQ(Answer().why.reason(), Reason::kStaleEpoch);
  EXPECT_THAT(Answer().why.ToString(), HasSubstr("epoch 1 is served by now"));
  EXPECT_EQ(coordinator.fetches, 1) << "of the plan; nothing for this";
}

TEST_F(AgentContentHash, RefusesASliceThatDoesNotFitItsMemory) {
  plan::RankSlice wrong = SliceFor(plan::Side::kSource);
  wrong.streams[0].ops[0].source_offset = 1;
  coordinator.slices[{kPlan, plan::Side::kSource, 0}] = wrong;
  Ask(1);
  EXPECT_EQ(Answer().why.reason(), Reason::kShapeMismatch);
  EXPECT_TRUE(Answer().sums.empty());
}

TEST_F(AgentContentHash, ANewerQuestionReplacesAnOlderOne) {
  coordinator.hold_replies = true;
  Ask(1, 5);
  Ask(1, 6);
  coordinator.hold_replies = false;
  coordinator.Answer();
  sim.RunReady();
  const auto all = coordinator.All<epoch::HashedReport>();
  ASSERT_EQ(all.size(), 2u);
  for (const auto& report : all) {
    EXPECT_EQ(report.why.ok(), report.verification == 6) << report.why.ToString();
  }
}

TEST_F(AgentContentHash, AFencedProcessIsAnsweredFor) {
  agent->Detach(rollout_->handle, Status(Code::kCancelled, Reason::kMemberLost, "left"));
  sim.RunReady();
  Ask(1);
  EXPECT_EQ(Answer().why.reason(), Reason::kStaleIncarnation);
}

/// One that serves from copies of its stage.
class AgentAttestCopies : public AgentContentHash {
 protected:
  AgentAttestCopies() : AgentContentHash(true) { rollout_->application.told.clear(); }
  void Say(Status why = {}, uint64_t number = 5) {
    EXPECT_TRUE(agent->CopyChecked(rollout_->handle, number, std::move(why)).ok());
    sim.RunReady();
  }
};

TEST_F(AgentAttestCopies, AnswersWhenBothAreLookedAt) {
  Ask(1);
  EXPECT_THAT(rollout_->application.told, ElementsAre("check 5 of e1"));
  EXPECT_THAT(coordinator.All<epoch::HashedReport>(), IsEmpty());
  Say({}, 4);  // to a question before
  EXPECT_THAT(coordinator.All<epoch::HashedReport>(), IsEmpty());
  Say();
  EXPECT_EQ(Answer().sums, Expected(0));
  Say();
  EXPECT_EQ(coordinator.All<epoch::HashedReport>().size(), 1u);
}

TEST_F(AgentAttestCopies, SaysWhatTheApplicationFound) {
  coordinator.hold_replies = true;
  Ask(1);
  Say(Status(Code::kAborted, Reason::kDigestMismatch, "zeros").AtTensor("w"));  // before the sums
  coordinator.Answer();
  sim.RunReady();
  EXPECT_EQ(Answer().why.reason(), Reason::kDigestMismatch);
  EXPECT_EQ(Answer().why.rank(), "engine-a/0");
  EXPECT_TRUE(Answer().sums.empty());
}

TEST_F(AgentAttestCopies, IsSupersededWhileTheApplicationLooks) {
  Ask(1);
  Serve(*rollout_, 2, 8);
  BeginToWrite(3, 9);
  EXPECT_EQ(Answer().why.reason(), Reason::kStaleEpoch);
  Say();
  EXPECT_EQ(coordinator.All<epoch::HashedReport>().size(), 1u);
}

TEST_F(AgentAttestCopies, ANewerQuestionReplacesOneThatWasNotAnswered) {
  Ask(1);
  Ask(1, 6);
  EXPECT_EQ(Answer().verification, 5u);
  EXPECT_EQ(Answer().why.reason(), Reason::kStaleEpoch);
  Say({}, 6);
  EXPECT_EQ(Answer().verification, 6u);
  EXPECT_EQ(Answer().sums, Expected(0));
}

}  // namespace
}  // namespace weightwire::agent
