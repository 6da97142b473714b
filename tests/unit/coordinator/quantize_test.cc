// A trainer of floats with engines of which some hold fp8: who may move what, and who fills whom.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/unit/coordinator/fleet.h"

namespace weightwire::coordinator::testing {
namespace {

using layout::DType;

layout::CanonicalSpace Floats() { return {{{"w", DType::kBF16, {8, 6}}}}; }
layout::CanonicalSpace Codes() {
  return {{{"w", DType::kF8E4M3, {8, 6}, {4, 4}}, {"w_scale_inv", DType::kF32, {2, 2}}}};
}

constexpr uint64_t kOld = control::kFeatureContentHash;
constexpr uint64_t kQuantizing = kOld | control::kFeatureQuantize;
constexpr uint64_t kNew = kQuantizing | control::kFeatureGather;

/// `features`: of the trainer's agent.
struct Quantizing : Fleet {
  explicit Quantizing(uint64_t features = kNew, const layout::CanonicalSpace& floats = Floats()) {
    agent_features = features;
    trainer = Whole("trainer", floats);
    agent_features = kNew;
  }

  /// A group of one rank that holds all of `model`.
  epoch::Member Whole(const std::string& group, const layout::CanonicalSpace& model) {
    const auto role =
        group == "trainer" ? control::GroupRole::kTrainer : control::GroupRole::kEngine;
    const auto member = Register(group + "-agent", role, group, 0, 1);
    EXPECT_TRUE(member.has_value());
    control::LayoutSubmission submission;
    submission.member = *member;
    submission.canonical = model;
    submission.layout = RowShard(model, 0, 1);
    const auto reply = Submit(submission);
    EXPECT_TRUE(reply.has_value()) << reply.error().ToString();
    return *member;
  }
  Status Publish(uint64_t version) {
    PublishAll({trainer}, version);
    Run();
    return Released(trainer, version).value_or(OkStatus());
  }

  epoch::Member trainer;
};

TEST(CoordinatorQuantize, OneVersionReachesEnginesOfBothKinds) {
  Quantizing fleet;
  fleet.Whole("plain", Floats());
  fleet.Whole("fp8", Codes());
  EXPECT_EQ(fleet.Publish(1), OkStatus());
  EXPECT_EQ(fleet.EngineNamed("plain").version, Version(1));
  EXPECT_EQ(fleet.EngineNamed("fp8").version, Version(1));
}

TEST(CoordinatorQuantize, AnAgentThatCannotIsNamed) {
  for (const bool at_source : {true, false}) {
    Quantizing fleet(at_source ? kOld : kNew);
    fleet.agent_features = at_source ? kNew : kOld;
    fleet.Whole("fp8", Codes());
    const Status why = fleet.Publish(1);
    EXPECT_EQ(why.reason(), Reason::kProtocolVersion) << why.ToString();
    EXPECT_EQ(why.rank(), at_source ? "fp8, trainer/0" : "fp8, fp8/0") << why.ToString();
    EXPECT_NE(why.remedy().find("version of weightwired"), std::string::npos);
  }
}

TEST(CoordinatorQuantize, AnAgentThatKnowsNotAllRulesIsNamed) {
  struct Format {
    uint64_t feature;
    const char* words;
    layout::CanonicalSpace codes;
  };
  using layout::ScaleRule;
  const Format formats[] = {
      {control::kFeatureScaleRules,
       "by the engine's rule",
       {{{"w", DType::kF8E4M3, {8, 6}, {4, 4}, ScaleRule::kPowerOfTwo},
         {"w_scale_inv", DType::kF32, {2, 2}}}}},
      {control::kFeatureOwnQuotient,
       "as modelopt does",
       {{{"w", DType::kF8E4M3, {8, 6}, {8, 6}, ScaleRule::kOwnQuotient},
         {"w_scale", DType::kF32, {1, 1}}}}},
      {control::kFeatureFourBits,
       "four bits",
       {{{"w_packed", DType::kU8, {8, 32}, {1, 16}, ScaleRule::kMxFp4Rounded, 2},
         {"w_scale", DType::kU8, {8, 2}}}}}};
  constexpr uint64_t kAll =
      kNew | control::kFeatureScaleRules | control::kFeatureFourBits | control::kFeatureOwnQuotient;
  for (const Format& format : formats) {
    for (const bool lacks : {false, true}) {
      SCOPED_TRACE(std::string(format.words) + (lacks ? " is not known" : " is known"));
      const bool four_bits = format.feature == control::kFeatureFourBits;
      Quantizing fleet(kAll, {{{"w", DType::kBF16, {8, four_bits ? 64 : 6}}}});
      fleet.agent_features = lacks ? kAll & ~format.feature : kAll;
      fleet.Whole("quantized", format.codes);
      const Status why = fleet.Publish(1);
      if (!lacks) {
        EXPECT_EQ(why, OkStatus());
        EXPECT_EQ(fleet.EngineNamed("quantized").version, Version(1));
        continue;
      }
      EXPECT_EQ(why.reason(), Reason::kProtocolVersion) << why.ToString();
      EXPECT_EQ(why.rank(), "quantized, quantized/0") << why.ToString();
      EXPECT_NE(why.message().find(format.words), std::string::npos) << why.ToString();
    }
  }
}

/// Two trainer ranks of which each holds a part of the block in the middle.
struct SplitBlocks : Fleet {
  explicit SplitBlocks(uint64_t trainer_features) {
    agent_features = trainer_features;
    for (uint32_t rank = 0; rank < 2; ++rank) {
      const auto member =
          Register("trainer-agent", control::GroupRole::kTrainer, "trainer", rank, 2);
      EXPECT_TRUE(member.has_value());
      trainer.push_back(*member);
      control::LayoutSubmission submission;
      submission.member = *member;
      submission.canonical = Floats();
      submission.layout = layout::RankLayout{
          {{"w",
            DType::kBF16,
            {rank == 0 ? 3 : 5, 6},
            {{0, {{rank == 0 ? 0 : 3, 0}, {rank == 0 ? 3 : 5, 6}}, 0, {6, 1}}}}}};
      const auto reply = Submit(submission);
      EXPECT_TRUE(reply.has_value()) << reply.error().ToString();
    }
  }
  void AddEngine(uint64_t features) {
    agent_features = features;
    const auto member = Register("fp8-agent", control::GroupRole::kEngine, "fp8", 0, 1);
    EXPECT_TRUE(member.has_value());
    control::LayoutSubmission submission;
    submission.member = *member;
    submission.canonical = Codes();
    submission.layout = RowShard(Codes(), 0, 1);
    EXPECT_TRUE(Submit(submission).has_value());
  }
  Status Publish(uint64_t version) {
    PublishAll(trainer, version);
    Run();
    return Released(trainer[0], version).value_or(OkStatus());
  }
  std::vector<epoch::Member> trainer;
};

TEST(CoordinatorQuantize, BlocksOfTwoRanksAreGatheredByWhoCan) {
  SplitBlocks fleet(kQuantizing);  // who sends floats need not know what becomes of them
  fleet.AddEngine(kNew);
  EXPECT_EQ(fleet.Publish(1), OkStatus());
  EXPECT_EQ(fleet.EngineNamed("fp8").version, Version(1));
}

TEST(CoordinatorQuantize, AnAgentThatCannotGatherIsNamed) {
  SplitBlocks fleet(kNew);
  fleet.AddEngine(kQuantizing);
  const Status why = fleet.Publish(1);
  EXPECT_EQ(why.reason(), Reason::kProtocolVersion) << why.ToString();
  EXPECT_EQ(why.rank(), "fp8, fp8/0") << why.ToString();
  EXPECT_NE(why.message().find("no trainer rank holds all"), std::string::npos) << why.ToString();
}

TEST(CoordinatorQuantize, WithoutFp8EnginesNobodyNeedsTo) {
  Quantizing fleet(kOld);
  fleet.agent_features = kOld;
  fleet.Whole("plain", Floats());
  EXPECT_EQ(fleet.Publish(1), OkStatus());
}

TEST(CoordinatorQuantize, EnginesAreFilledFromTheirOwnKind) {
  Quantizing fleet;
  fleet.Whole("a-plain", Floats());
  fleet.Whole("b-fp8", Codes());
  ASSERT_EQ(fleet.Publish(1), OkStatus());
  fleet.Whole("c-fp8", Codes());
  fleet.Run();
  EXPECT_EQ(fleet.EngineNamed("c-fp8").version, Version(1));
  const auto source = fleet.Agent("b-fp8-agent").Last<epoch::PrepareCommand>();
  EXPECT_EQ(source->kind, epoch::Kind::kFill);
  EXPECT_EQ(source->role, epoch::Role::kSource);
  EXPECT_EQ(fleet.Agent("a-plain-agent").Last<epoch::PrepareCommand>()->kind,
            epoch::Kind::kPublish);
}

TEST(CoordinatorQuantize, AnFp8EngineIsNeverMadeOfWhatAnotherEngineHolds) {
  Quantizing fleet;
  fleet.Whole("a-plain", Floats());
  ASSERT_EQ(fleet.Publish(1), OkStatus());
  fleet.Whole("b-fp8", Codes());
  fleet.Run();
  const EngineStatus waiting = fleet.EngineNamed("b-fp8");
  EXPECT_NE(waiting.state, EngineState::kServing);
  EXPECT_NE(waiting.last_error.find("a-plain"), std::string::npos) << waiting.last_error;
  EXPECT_NE(waiting.last_error.find("publish the next version"), std::string::npos)
      << waiting.last_error;
  EXPECT_EQ(fleet.Publish(2), OkStatus());
  EXPECT_EQ(fleet.EngineNamed("b-fp8").version, Version(2));
}

}  // namespace
}  // namespace weightwire::coordinator::testing
