#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include <cstdlib>
#include <fstream>
#include <sstream>

#include "server/layout/scheme.h"
#include "tests/unit/coordinator/fleet.h"

namespace weightwire::coordinator::testing {
namespace {

using control::GroupRole;

/// A file under tests/data.
std::string Data(const std::string& name) {
  const char* root = std::getenv("WEIGHTWIRE_SOURCE_DIR");
  std::ifstream file(std::string(root == nullptr ? "." : root) + "/tests/data/" + name);
  std::stringstream text;
  text << file.rdbuf();
  EXPECT_FALSE(text.str().empty()) << name;
  return text.str();
}

/// What a live rank reports, taken from the scheme itself.
std::vector<layout::ObservedTensor> ObservedBy(const std::string& config, const std::string& spec,
                                               uint32_t rank) {
  const auto model = layout::LayoutFromScheme(config, *layout::ParseParallelSpec(spec));
  EXPECT_TRUE(model.has_value());
  std::vector<layout::ObservedTensor> observed;
  for (const auto& tensor : model->ranks.at(rank).tensors) {
    observed.push_back({tensor.name, tensor.dtype, tensor.shape});
  }
  return observed;
}

control::LayoutSubmission Scheme(const epoch::Member& member, const std::string& config,
                                 const std::string& spec, uint32_t rank) {
  control::LayoutSubmission submission;
  submission.member = member;
  submission.config_json = config;
  submission.spec = spec;
  submission.observed = ObservedBy(config, spec, rank);
  return submission;
}

struct Negotiation : ::testing::Test {
  Negotiation() : config(Data("configs/qwen2.5-0.5b.json")) {
    for (uint32_t rank = 0; rank < 2; ++rank) {
      members.push_back(*fleet.Register("t", GroupRole::kTrainer, "trainer", rank, 2));
    }
  }
  Fleet fleet;
  std::string config;
  std::vector<epoch::Member> members;
};

TEST_F(Negotiation, SchemeIsAgreedWithEveryRankAndEpochsRunOnIt) {
  for (uint32_t rank = 0; rank < 2; ++rank) {
    const auto reply = fleet.Submit(Scheme(members[rank], config, "megatron:tp2", rank));
    ASSERT_TRUE(reply.has_value()) << reply.error().ToString();
    EXPECT_EQ(reply->agreed->tensors.size(), ObservedBy(config, "megatron:tp2", rank).size());
  }
  const auto engine = fleet.Register("e", GroupRole::kEngine, "engine-a", 0, 1);
  ASSERT_TRUE(fleet.Submit(Scheme(*engine, config, "vllm:tp1", 0)).has_value());
  fleet.PublishAll(members, 1);
  fleet.Run();
  EXPECT_EQ(fleet.coordinator->Snapshot().committed_version, Version(1));
  EXPECT_EQ(fleet.coordinator->Snapshot().participants.back().spec, "megatron:tp2");
}

TEST_F(Negotiation, AgreedLayoutKeepsTheReportedOrder) {
  auto submission = Scheme(members[0], config, "megatron:tp2", 0);
  std::reverse(submission.observed.begin(), submission.observed.end());
  const auto reply = fleet.Submit(submission);
  ASSERT_TRUE(reply.has_value());
  EXPECT_EQ(reply->agreed->tensors.front().name, submission.observed.front().name);
}

TEST_F(Negotiation, RepeatedSubmissionHasTheSameAnswerAndAnotherIsRefused) {
  auto submission = Scheme(members[0], config, "megatron:tp2", 0);
  ASSERT_TRUE(fleet.Submit(submission).has_value());
  EXPECT_TRUE(fleet.Submit(submission).has_value());
  std::swap(submission.observed[0], submission.observed[1]);
  EXPECT_EQ(fleet.Submit(submission).error().reason(), Reason::kInvalidRequest);
}

TEST_F(Negotiation, WrongShapeAndDtypeNameTheTensorAndRank) {
  auto submission = Scheme(members[1], config, "megatron:tp2", 1);
  submission.observed[3].shape[0] += 1;
  const auto shape = fleet.Submit(submission);
  EXPECT_EQ(shape.error().reason(), Reason::kShapeMismatch);
  EXPECT_EQ(shape.error().rank(), "trainer/1");
  EXPECT_EQ(shape.error().tensor(), submission.observed[3].name);
  EXPECT_EQ(fleet.metrics.Value("layout_rejections_total{reason=shape_mismatch}"), 1);

  submission = Scheme(members[1], config, "megatron:tp2", 1);
  submission.observed.pop_back();
  EXPECT_EQ(fleet.Submit(submission).error().reason(), Reason::kTensorMissing);
  submission = Scheme(members[1], config, "megatron:tp2", 1);
  submission.observed.push_back({"surprise", layout::DType::kBF16, {1}});
  EXPECT_EQ(fleet.Submit(submission).error().reason(), Reason::kTensorUnexpected);
}

TEST_F(Negotiation, DtypesThatCannotBeCastFailTheEpoch) {
  Fleet own;
  const auto trainer = own.Trainer(1);
  const auto engine = own.Register("e", GroupRole::kEngine, "engine-a", 0, 1);
  control::LayoutSubmission submission;
  submission.member = *engine;
  submission.canonical = SmallModel();
  submission.layout = RowShard(SmallModel(), 0, 1);
  submission.layout->tensors[0].dtype = layout::DType::kI32;
  ASSERT_TRUE(own.Submit(submission).has_value());
  own.PublishAll(trainer, 1);
  own.Run();
  EXPECT_EQ(own.Released(trainer[0], 1)->reason(), Reason::kDtypeMismatch);
}

TEST_F(Negotiation, UnknownModelAndSchemeAreRefused) {
  auto submission = Scheme(members[0], config, "megatron:tp2", 0);
  submission.config_json = R"({"model_type": "tomorrow"})";
  EXPECT_EQ(fleet.Submit(submission).error().reason(), Reason::kUnknownModel);
  submission.config_json = "not json";
  EXPECT_EQ(fleet.Submit(submission).error().reason(), Reason::kInvalidRequest);
  submission = Scheme(members[0], config, "megatron:tp2", 0);
  submission.spec = "deepspeed:z3";
  EXPECT_EQ(fleet.Submit(submission).error().reason(), Reason::kUnknownScheme);
}

TEST_F(Negotiation, SpecMustHaveAsManyRanksAsTheGroup) {
  const auto reply = fleet.Submit(Scheme(members[0], config, "megatron:tp2,pp2", 0));
  EXPECT_EQ(reply.error().reason(), Reason::kInvalidRequest);
  EXPECT_THAT(reply.error().message(), ::testing::HasSubstr("world_size 2"));
}

TEST_F(Negotiation, RanksOfAGroupHaveOneCanonicalSpace) {
  ASSERT_TRUE(fleet.Submit(Scheme(members[0], config, "megatron:tp2", 0)).has_value());
  const std::string larger = Data("configs/qwen2.5-1.5b.json");
  const auto reply = fleet.Submit(Scheme(members[1], larger, "megatron:tp2", 1));
  EXPECT_EQ(reply.error().reason(), Reason::kShapeMismatch);
  EXPECT_EQ(fleet.SubmitRows(members[1], 1, 2).reason(), Reason::kShapeMismatch);
}

TEST_F(Negotiation, ExplicitBoxesAreValidated) {
  control::LayoutSubmission submission;
  submission.member = members[0];
  submission.canonical = SmallModel();
  submission.layout = RowShard(SmallModel(), 0, 2);
  auto overlapping = submission;
  overlapping.layout->tensors[0].pieces.push_back(overlapping.layout->tensors[0].pieces[0]);
  EXPECT_EQ(fleet.Submit(overlapping).error().reason(), Reason::kOverlappingShards);
  auto outside = submission;
  outside.layout->tensors[0].pieces[0].box.begin[0] = 6;
  EXPECT_EQ(fleet.Submit(outside).error().reason(), Reason::kShapeMismatch);
  auto unsorted = submission;
  std::swap(unsorted.canonical->tensors[0], unsorted.canonical->tensors[1]);
  EXPECT_FALSE(fleet.Submit(unsorted).has_value());
  EXPECT_FALSE(fleet.coordinator->Snapshot().participants[0].has_layout) << "I12";
  EXPECT_TRUE(fleet.Submit(submission).has_value());
}

TEST_F(Negotiation, SubmissionIsEitherSchemeOrBoxes) {
  control::LayoutSubmission neither;
  neither.member = members[0];
  EXPECT_EQ(fleet.Submit(neither).error().reason(), Reason::kInvalidRequest);
  auto both = Scheme(members[0], config, "megatron:tp2", 0);
  both.canonical = SmallModel();
  both.layout = RowShard(SmallModel(), 0, 2);
  EXPECT_EQ(fleet.Submit(both).error().reason(), Reason::kInvalidRequest);
  auto half = neither;
  half.layout = RowShard(SmallModel(), 0, 2);
  EXPECT_EQ(fleet.Submit(half).error().reason(), Reason::kInvalidRequest);
}

/// What the recorded loader filled, flat.
std::vector<layout::ObservedTensor> FilledBy(const std::vector<layout::TraceRow>& rows,
                                             const layout::CanonicalSpace& canonical) {
  const auto layout = layout::LayoutFromTrace(canonical, rows);
  std::vector<layout::ObservedTensor> observed;
  for (const auto& tensor : layout->tensors) {
    observed.push_back({tensor.name, tensor.dtype, tensor.shape});
  }
  return observed;
}

TEST_F(Negotiation, TraceWinsOverTheSchemeAndSaysWhereTheyDisagree) {
  const auto trace = layout::ParseTrace(Data("vllm-traces/qwen2-tp2.json"));
  ASSERT_TRUE(trace.has_value());
  const auto canonical = layout::CanonicalFromConfig(trace->config_json);
  control::LayoutSubmission submission;
  submission.member = members[0];
  submission.config_json = trace->config_json;
  submission.trace = trace->ranks[1];
  submission.observed = FilledBy(trace->ranks[1], *canonical);
  submission.observed.push_back({"a.buffer", layout::DType::kF32, {3}});

  auto unknown = submission;
  unknown.trace[0].source = "model.of.another";
  EXPECT_EQ(fleet.Submit(unknown).error().reason(), Reason::kTensorMissing);
  auto unreported = submission;
  unreported.observed.erase(unreported.observed.begin());
  EXPECT_EQ(fleet.Submit(unreported).error().reason(), Reason::kTensorMissing);
  auto small = submission;
  small.observed[0].shape = {1};
  EXPECT_EQ(fleet.Submit(small).error().reason(), Reason::kShapeMismatch);
  auto cast = submission;
  cast.observed[0].dtype = layout::DType::kF32;
  EXPECT_EQ(fleet.Submit(cast).error().reason(), Reason::kDtypeMismatch);

  submission.spec = "vllm:tp2";  // rank 0 of it: the other half
  const auto reply = fleet.Submit(submission);
  ASSERT_TRUE(reply.has_value()) << reply.error().ToString();
  EXPECT_THAT(reply->notes, ::testing::Contains(::testing::HasSubstr("q_proj.weight: the loader")));
  EXPECT_THAT(reply->notes, ::testing::Not(::testing::Contains(::testing::HasSubstr("layernorm"))));
  EXPECT_EQ(reply->agreed->tensors.size(), submission.observed.size());
  EXPECT_TRUE(reply->agreed->tensors.back().pieces.empty());
  submission.member = members[1];
  EXPECT_THAT(fleet.Submit(submission)->notes, ::testing::IsEmpty());
}

TEST_F(Negotiation, TraceNeedsNoScheme) {
  const auto trace = layout::ParseTrace(Data("vllm-traces/qwen3-moe-tp2.json"));
  ASSERT_TRUE(trace.has_value());
  control::LayoutSubmission submission;
  submission.member = members[0];
  submission.config_json = trace->config_json;
  submission.trace = trace->ranks[0];
  submission.observed = FilledBy(trace->ranks[0], *layout::CanonicalFromConfig(trace->config_json));
  const auto reply = fleet.Submit(submission);
  ASSERT_TRUE(reply.has_value()) << reply.error().ToString();
  EXPECT_THAT(reply->notes, ::testing::IsEmpty());
}

TEST_F(Negotiation, TraceNeedsNoFamilyWhereItSaysWhatTheCheckpointHas) {
  control::LayoutSubmission submission;
  submission.member = members[0];
  submission.config_json = R"({"model_type": "tomorrow"})";
  submission.spec = "vllm:tp2";
  submission.trace = {
      {"b", {{"narrow", {0, 0, 2}}}, "param", 0, {2, 3}, {3, 1}, layout::DType::kBF16}};
  submission.observed = {{"param", layout::DType::kBF16, {2, 3}}};
  const auto refused = fleet.Submit(submission);
  EXPECT_EQ(refused.error().reason(), Reason::kUnknownModel);
  EXPECT_THAT(refused.error().message(), ::testing::HasSubstr("tomorrow"));
  EXPECT_THAT(refused.error().remedy(), ::testing::HasSubstr("checkpoint="));
  submission.checkpoint = {{"b", layout::DType::kBF16, {4, 3}}, {"a", layout::DType::kF32, {1}}};
  const auto reply = fleet.Submit(submission);
  ASSERT_TRUE(reply.has_value()) << reply.error().ToString();
  EXPECT_THAT(reply->notes, ::testing::ElementsAre(::testing::HasSubstr("no scheme")));
  EXPECT_EQ(reply->agreed->tensors[0].pieces[0].tensor, 1u) << "sorted by name";
  // Another rank must describe the same model.
  submission.member = members[1];
  submission.checkpoint.pop_back();
  EXPECT_EQ(fleet.Submit(submission).error().tensor(), "a");
  submission.checkpoint.push_back({"a", layout::DType::kF32, {1}});
  EXPECT_TRUE(fleet.Submit(submission).has_value());
}

/// No scheme describes engines with INT4. The trace says what the rank holds, config.json what the
/// groups are: without them floats could not be packed for it.
TEST_F(Negotiation, TraceOfAQuantizedModelKnowsItsGroups) {
  const auto trace = layout::ParseTrace(Data("vllm-traces/qwen3-moe-tp2.json"));
  ASSERT_TRUE(trace.has_value());
  auto json = nlohmann::json::parse(trace->config_json);
  json["quantization_config"] = {{"quant_method", "compressed-tensors"},
                                 {"format", "pack-quantized"},
                                 {"ignore", {"lm_head"}},
                                 {"config_groups",
                                  {{"group_0",
                                    {{"targets", {"Linear"}},
                                     {"weights",
                                      {{"num_bits", 4},
                                       {"type", "int"},
                                       {"strategy", "group"},
                                       {"group_size", 8},
                                       {"symmetric", true}}}}}}}};
  control::LayoutSubmission submission;
  submission.member = members[0];
  submission.config_json = json.dump();
  submission.spec = "vllm:tp2";
  const auto canonical = layout::CanonicalFromConfig(submission.config_json);
  ASSERT_TRUE(canonical.has_value()) << canonical.error().ToString();
  const std::string name = "model.layers.0.self_attn.o_proj.weight_packed";
  const layout::TensorSpec& weight = canonical->tensors[canonical->Find(name).value()];
  const layout::Shape& shape = weight.shape;
  submission.trace = {{name, {}, "param", 0, shape, {shape[1], 1}, weight.dtype}};
  submission.observed = {{"param", weight.dtype, shape}};
  submission.checkpoint = {{name, weight.dtype, shape}};
  const auto reply = fleet.Submit(submission);
  ASSERT_TRUE(reply.has_value()) << reply.error().ToString();
  EXPECT_EQ(reply->canonical, layout::FingerprintOf(*canonical));
  EXPECT_THAT(reply->notes, ::testing::ElementsAre(::testing::HasSubstr("no scheme")));
}

TEST_F(Negotiation, LimitsAreStated) {
  auto long_config = Scheme(members[0], config, "megatron:tp2", 0);
  long_config.config_json = std::string(5 << 20, ' ');
  EXPECT_EQ(fleet.Submit(long_config).error().reason(), Reason::kLimitExceeded);
  auto long_spec = Scheme(members[0], config, "megatron:tp2", 0);
  long_spec.spec = std::string(300, 'x');
  EXPECT_EQ(fleet.Submit(long_spec).error().reason(), Reason::kLimitExceeded);
}

TEST_F(Negotiation, StrangersAreRefused) {
  control::LayoutSubmission submission;
  submission.canonical = SmallModel();
  submission.layout = RowShard(SmallModel(), 0, 2);
  submission.member = {ParticipantId(99), Incarnation(1)};
  EXPECT_EQ(fleet.Submit(submission).error().reason(), Reason::kNotRegistered);
  submission.member = {members[0].id, Incarnation(1)};
  EXPECT_EQ(fleet.Submit(submission).error().reason(), Reason::kStaleIncarnation);
}

TEST_F(Negotiation, RankThatIsLostMeanwhileIsToldSo) {
  std::optional<Reason> reason;
  fleet.coordinator->SubmitLayout(
      Scheme(members[0], config, "megatron:tp2", 0),
      [&](const auto& reply) { reason = reply ? Reason::kNone : reply.error().reason(); });
  fleet.coordinator->CloseSession(fleet.Agent("t").id());
  fleet.Run();
  EXPECT_EQ(reason, Reason::kStaleIncarnation);
}

/// The actor is cut over both ranks, the draft lies on the second one.
TEST_F(Negotiation, ModelsByTheirOwnSchemes) {
  const auto submission = [&](uint32_t rank) {
    control::LayoutSubmission all;
    all.member = members[rank];
    all.models = {{"draft", 0, rank, {}}, {"actor", rank, 2, {}}};
    all.models[0].layout = Scheme({}, config, "megatron:tp1", 0);
    if (rank == 0) all.models[0].layout.observed.clear();
    all.models[1].layout = Scheme({}, config, "megatron:tp2", rank);
    return all;
  };
  const auto first = fleet.Submit(submission(0)), second = fleet.Submit(submission(1));
  ASSERT_TRUE(first.has_value()) << first.error().ToString();
  ASSERT_TRUE(second.has_value()) << second.error().ToString();
  EXPECT_EQ(first->canonical, second->canonical);
  const size_t half = ObservedBy(config, "megatron:tp2", 0).size();
  const size_t whole = ObservedBy(config, "megatron:tp1", 0).size();
  EXPECT_EQ(first->agreed->tensors.size(), half);
  EXPECT_EQ(second->agreed->tensors.size(), half + whole);

  control::LayoutSubmission reports = submission(0);
  reports.models[0].layout = Scheme({}, config, "megatron:tp1", 0);
  const auto refused = fleet.Submit(reports);
  EXPECT_THAT(refused.error().message(), ::testing::HasSubstr("model draft: world_size is 0"));
  control::LayoutSubmission wrong = submission(1);
  wrong.models[1].layout.observed[0].shape[0] += 1;
  const std::string tensor = "actor::" + wrong.models[1].layout.observed[0].name;
  EXPECT_EQ(fleet.Submit(wrong).error().tensor(), tensor);
}

}  // namespace
}  // namespace weightwire::coordinator::testing
