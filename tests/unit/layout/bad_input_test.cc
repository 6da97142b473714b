// Configs and parallel specs that must be refused, each with the reason that the header lists.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include <algorithm>

#include "server/layout/scheme.h"

namespace weightwire::layout {
namespace {

constexpr int64_t kTwoTo62 = int64_t{1} << 62;

nlohmann::json GoodConfig() {
  return {{"model_type", "qwen2"},    {"hidden_size", 16},        {"num_hidden_layers", 6},
          {"num_attention_heads", 8}, {"num_key_value_heads", 4}, {"intermediate_size", 24},
          {"vocab_size", 100}};
}

struct BadConfig {
  const char* what;
  nlohmann::json patch;  ///< merged into the good config; null removes
  Reason reason;
};

TEST(CanonicalFromConfig, RefusesBadValues) {
  const std::vector<BadConfig> table = {
      {"no model_type", {{"model_type", nullptr}}, Reason::kInvalidRequest},
      {"model_type a number", {{"model_type", 3}}, Reason::kInvalidRequest},
      {"unknown model", {{"model_type", "gpt2"}}, Reason::kUnknownModel},
      {"empty model_type", {{"model_type", ""}}, Reason::kUnknownModel},
      {"no hidden_size", {{"hidden_size", nullptr}}, Reason::kInvalidRequest},
      {"no layers", {{"num_hidden_layers", nullptr}}, Reason::kInvalidRequest},
      {"no heads", {{"num_attention_heads", nullptr}}, Reason::kInvalidRequest},
      {"no intermediate", {{"intermediate_size", nullptr}}, Reason::kInvalidRequest},
      {"no vocab", {{"vocab_size", nullptr}}, Reason::kInvalidRequest},
      {"hidden zero", {{"hidden_size", 0}}, Reason::kInvalidRequest},
      {"hidden negative", {{"hidden_size", -16}}, Reason::kInvalidRequest},
      {"hidden a text", {{"hidden_size", "16"}}, Reason::kInvalidRequest},
      {"hidden a fraction", {{"hidden_size", 16.5}}, Reason::kInvalidRequest},
      {"hidden a list", {{"hidden_size", {16}}}, Reason::kInvalidRequest},
      {"vocab over int64", {{"vocab_size", 18'446'744'073'709'551'615u}}, Reason::kInvalidRequest},
      {"kv heads zero", {{"num_key_value_heads", 0}}, Reason::kInvalidRequest},
      {"kv heads do not divide", {{"num_key_value_heads", 3}}, Reason::kInvalidRequest},
      {"kv heads over heads", {{"num_key_value_heads", 16}}, Reason::kInvalidRequest},
      {"heads do not divide hidden", {{"num_attention_heads", 12}}, Reason::kInvalidRequest},
      {"head_dim zero", {{"head_dim", 0}}, Reason::kInvalidRequest},
      {"head_dim a text", {{"head_dim", "8"}}, Reason::kInvalidRequest},
      {"tied a number", {{"tie_word_embeddings", 1}}, Reason::kInvalidRequest},
      {"attention_bias a text", {{"attention_bias", "yes"}}, Reason::kInvalidRequest},
      {"unknown dtype", {{"torch_dtype", "float12"}}, Reason::kInvalidRequest},
      {"dtype a number", {{"dtype", 16}}, Reason::kInvalidRequest},
      {"quantized", {{"quantization_config", {{"bits", 4}}}}, Reason::kInvalidRequest},
      {"vocab 2^62", {{"vocab_size", kTwoTo62}}, Reason::kShapeOverflow},
      {"head_dim 2^62", {{"head_dim", kTwoTo62}}, Reason::kShapeOverflow},
      {"intermediate 2^62", {{"intermediate_size", kTwoTo62}}, Reason::kShapeOverflow},
      {"intermediate 2^31", {{"intermediate_size", int64_t{1} << 31}}, Reason::kShapeOverflow},
      {"hidden 2^31 squared",
       {{"hidden_size", (int64_t{1} << 31) - 8},
        {"intermediate_size", (int64_t{1} << 31) - 8},
        {"dtype", "float32"}},
       Reason::kShapeOverflow},
      {"hidden 2^40 squared", {{"hidden_size", int64_t{1} << 40}}, Reason::kShapeOverflow},
      {"a billion layers", {{"num_hidden_layers", 1'000'000'000}}, Reason::kLimitExceeded},
      {"2^62 layers", {{"num_hidden_layers", kTwoTo62}}, Reason::kShapeOverflow},
      {"mixtral without experts",
       {{"model_type", "mixtral"}, {"num_local_experts", 0}},
       Reason::kInvalidRequest},
      {"gpt_oss without experts",
       {{"model_type", "gpt_oss"}, {"num_local_experts", nullptr}, {"num_experts", 0}},
       Reason::kInvalidRequest},
      {"a million heads",
       {{"num_attention_heads", 1'048'576}, {"head_dim", 1}},
       Reason::kLimitExceeded},
  };
  for (const BadConfig& row : table) {
    SCOPED_TRACE(row.what);
    nlohmann::json config = GoodConfig();
    config.merge_patch(row.patch);
    const auto space = CanonicalFromConfig(config.dump());
    ASSERT_FALSE(space.has_value());
    EXPECT_EQ(space.error().reason(), row.reason) << space.error().ToString();
    EXPECT_EQ(space.error().code(), row.reason == Reason::kLimitExceeded ? Code::kResourceExhausted
                                                                         : Code::kInvalidArgument);
  }
  EXPECT_TRUE(CanonicalFromConfig(GoodConfig().dump()).has_value());
}

TEST(CanonicalFromConfig, RefusesWhatIsNoJsonObject) {
  for (const std::string text : {"", "{", "[]", "null", "3", "{\"model_type\":}", "\xff\xfe",
                                 R"({"model_type":"qwen2"} tail)"}) {
    const auto space = CanonicalFromConfig(text);
    ASSERT_FALSE(space.has_value()) << text;
    EXPECT_EQ(space.error().reason(), Reason::kInvalidRequest) << text;
  }
  EXPECT_FALSE(CanonicalFromConfig(std::string(1'000'000, '[')).has_value());
}

TEST(CanonicalFromConfig, NamesTheKnownModels) {
  const auto space = CanonicalFromConfig(R"({"model_type":"gpt2"})");
  ASSERT_FALSE(space.has_value());
  EXPECT_NE(space.error().ToString().find("mistral, mistral3, mixtral"), std::string::npos);
}

struct BadSpec {
  const char* spec;
  Reason reason;
};

TEST(LayoutFromScheme, RefusesBadSpecs) {
  // 6 layers, 8 heads, 4 kv heads, intermediate 24, vocabulary 100
  const std::vector<BadSpec> table = {
      {"zero:dp8", Reason::kUnknownScheme},
      {"hf:tp2", Reason::kUnknownScheme},
      {"hf:vocab_pad=4", Reason::kUnknownScheme},
      {"hf:mtp=some", Reason::kUnknownScheme},
      {"megatron:sp2", Reason::kUnknownScheme},
      {"megatron:order=pp-tp", Reason::kUnknownScheme},
      {"megatron:experts=some", Reason::kUnknownScheme},
      {"megatron:account_loss=2", Reason::kUnknownScheme},
      {"megatron:pp2,pipeline=ttt|ttx", Reason::kUnknownScheme},
      {"megatron:pp2,pipeline=(ttt|ttt", Reason::kUnknownScheme},
      {"megatron:pp2,pipeline=t*|t*", Reason::kUnknownScheme},
      {"megatron:pp2,pipeline=((t*9999999)*9999999)*9|t", Reason::kUnknownScheme},
      {"megatron:pp2,pipeline=Et*3|t*3L,first=3", Reason::kUnknownScheme},
      {"megatron:pp2,account_loss,first=3", Reason::kUnknownScheme},
      {"megatron:ep2", Reason::kShapeMismatch},
      {"megatron:etp2", Reason::kShapeMismatch},
      {"megatron:vpp2", Reason::kShapeMismatch},
      {"megatron:pp2,vpp2", Reason::kShapeMismatch},
      {"megatron:pp2,vpp3,first=4", Reason::kShapeMismatch},
      {"megatron:pp2,pipeline=Et*3|t*4L", Reason::kShapeMismatch},
      {"megatron:pp2,pipeline=Et*3|t*3mL", Reason::kShapeMismatch},  // the model has no MTP layer
      {"megatron:pp2,pipeline=tEtt|t*3L", Reason::kShapeMismatch},
      {"megatron:pp2,pipeline=Ettt|EtttL", Reason::kShapeMismatch},
      {"megatron:pp2,pipeline=EtttL|ttt", Reason::kShapeMismatch},
      {"megatron:pp2,pipeline=EtttL|tttL", Reason::kShapeMismatch},
      {"megatron:pp2,account_loss", Reason::kShapeMismatch},
      {"sglang:ep2", Reason::kShapeMismatch},
      {"vllm:up_first=2", Reason::kUnknownScheme},
      {"vllm:placement=random", Reason::kUnknownScheme},
      {"vllm:redundant=2", Reason::kShapeMismatch},
      {"megatron:tp=2", Reason::kUnknownScheme},
      {"megatron:first2", Reason::kUnknownScheme},
      {"megatron:vocab_pad_to=64", Reason::kUnknownScheme},
      {"megatron:spec=nemo", Reason::kUnknownScheme},
      {"megatron:spec", Reason::kUnknownScheme},
      {"megatron:vocab_pad=some", Reason::kUnknownScheme},
      {"megatron:vocab_pad=0", Reason::kUnknownScheme},
      {"megatron:vocab_pad=-1", Reason::kUnknownScheme},
      {"megatron:vocab_pad=99999999999999999999", Reason::kUnknownScheme},
      {"megatron:pp2,first=x", Reason::kUnknownScheme},
      {"megatron:pp2,first=0", Reason::kUnknownScheme},
      {"megatron:pp2,layers=3-x", Reason::kUnknownScheme},
      {"megatron:pp2,layers=3--3", Reason::kUnknownScheme},
      {"megatron:pp2,layers=3-3,first=3", Reason::kUnknownScheme},
      {"vllm:pp7", Reason::kShapeMismatch},
      {"vllm:pp2,layers=3-4", Reason::kShapeMismatch},
      {"vllm:ep2", Reason::kUnknownScheme},
      {"vllm:ep", Reason::kShapeMismatch},
      {"vllm:vocab_pad_to=0", Reason::kUnknownScheme},
      {"megatron:tp16", Reason::kShapeMismatch},
      {"megatron:tp3", Reason::kShapeMismatch},
      {"megatron:tp2,vocab_pad=101", Reason::kShapeMismatch},
      {"megatron:tp2,vocab_pad=98", Reason::kShapeMismatch},
      {"megatron:tp8,vocab_pad=none", Reason::kShapeMismatch},
      {"megatron:pp4", Reason::kShapeMismatch},
      {"megatron:pp8", Reason::kShapeMismatch},
      {"megatron:first=1", Reason::kShapeMismatch},
      {"megatron:pp2,first=7", Reason::kShapeMismatch},
      {"megatron:pp2,first=6", Reason::kShapeMismatch},
      {"megatron:pp2,first=2,last=2", Reason::kShapeMismatch},
      {"megatron:pp4,first=1,last=2", Reason::kShapeMismatch},
      {"megatron:pp2,last=9223372036854775807", Reason::kShapeMismatch},
      {"megatron:pp2,layers=3-4", Reason::kShapeMismatch},
      {"megatron:pp2,layers=2-2-2", Reason::kShapeMismatch},
      {"megatron:pp3,layers=9223372036854775807-9223372036854775807-8", Reason::kShapeMismatch},
      {"vllm:tp3", Reason::kShapeMismatch},
      {"vllm:tp8,vocab_pad_to=50", Reason::kShapeMismatch},
      {"megatron:vocab_pad=9223372036854775807", Reason::kShapeOverflow},
      {"vllm:vocab_pad_to=9223372036854775807", Reason::kShapeOverflow},
      {"megatron:tp8,dp65536", Reason::kLimitExceeded},
      {"megatron:tp65536,pp65536,cp65536,dp65536", Reason::kLimitExceeded},
      {"vllm:dp16385", Reason::kLimitExceeded},
  };
  for (const BadSpec& row : table) {
    SCOPED_TRACE(row.spec);
    const auto spec = ParseParallelSpec(row.spec);
    ASSERT_TRUE(spec.has_value());
    const auto layout = LayoutFromScheme(GoodConfig().dump(), *spec);
    ASSERT_FALSE(layout.has_value());
    EXPECT_EQ(layout.error().reason(), row.reason) << layout.error().ToString();
  }
}

TEST(LayoutFromScheme, BoundsThePiecesOfAllRanks) {
  nlohmann::json config = GoodConfig();
  config["num_hidden_layers"] = 5'000;
  const auto layout = LayoutFromScheme(config.dump(), *ParseParallelSpec("vllm:dp10000"));
  ASSERT_FALSE(layout.has_value());
  EXPECT_EQ(layout.error().reason(), Reason::kLimitExceeded);
}

TEST(LayoutFromScheme, BoundsThePiecesOfOneRank) {
  nlohmann::json config = GoodConfig();
  config["num_hidden_layers"] = 50;
  config["num_attention_heads"] = 65'536;
  config["num_key_value_heads"] = 65'536;
  config["head_dim"] = 1;
  const auto layout = LayoutFromScheme(config.dump(), *ParseParallelSpec("megatron"));
  ASSERT_FALSE(layout.has_value());
  EXPECT_EQ(layout.error().reason(), Reason::kLimitExceeded);
}

TEST(LayoutFromScheme, NamesTheKnownKeysAndSchemes) {
  const auto key = LayoutFromScheme(GoodConfig().dump(), *ParseParallelSpec("megatron:sp2"));
  ASSERT_FALSE(key.has_value());
  EXPECT_NE(key.error().remedy().find("cpN, dpN, epN, etpN, ppN, tpN, vppN, account_embedding="),
            std::string::npos);
  const auto scheme = LayoutFromScheme(GoodConfig().dump(), *ParseParallelSpec("zero:dp2"));
  ASSERT_FALSE(scheme.has_value());
  EXPECT_NE(scheme.error().remedy().find("fsdp, hf, megatron, sglang, vllm"), std::string::npos);
}

TEST(LayoutFromScheme, RemedyForUnevenStagesNamesTheOptions) {
  const auto layout = LayoutFromScheme(GoodConfig().dump(), *ParseParallelSpec("megatron:pp4"));
  ASSERT_FALSE(layout.has_value());
  EXPECT_NE(layout.error().remedy().find("layers=7-7-6"), std::string::npos);
}

/// Local layers by stage.
std::vector<int64_t> LayersByStage(const std::string& spec) {
  const auto layout = LayoutFromScheme(GoodConfig().dump(), *ParseParallelSpec(spec));
  EXPECT_TRUE(layout.has_value()) << spec;
  std::vector<int64_t> counts;
  for (const RankLayout& rank : layout->ranks) {
    counts.push_back(std::count_if(
        rank.tensors.begin(), rank.tensors.end(),
        [](const LocalTensor& tensor) { return tensor.name.ends_with("mlp.linear_fc2.weight"); }));
  }
  return counts;
}

TEST(MegatronScheme, DistributesLayersAsTold) {
  using Counts = std::vector<int64_t>;
  EXPECT_EQ(LayersByStage("megatron:pp3"), (Counts{2, 2, 2}));
  EXPECT_EQ(LayersByStage("megatron:pp3,first=4"), (Counts{4, 1, 1}));
  EXPECT_EQ(LayersByStage("megatron:pp3,last=2"), (Counts{2, 2, 2}));
  EXPECT_EQ(LayersByStage("megatron:pp4,first=1,last=1"), (Counts{1, 2, 2, 1}));
  EXPECT_EQ(LayersByStage("megatron:pp2,first=5,last=1"), (Counts{5, 1}));
  EXPECT_EQ(LayersByStage("megatron:pp1,first=6"), (Counts{6}));
  EXPECT_EQ(LayersByStage("megatron:pp4,layers=0-3-2-1"), (Counts{0, 3, 2, 1}));
}

Shape EmbeddingShape(const std::string& spec, const std::string& name) {
  const auto layout = LayoutFromScheme(GoodConfig().dump(), *ParseParallelSpec(spec));
  EXPECT_TRUE(layout.has_value()) << spec;
  for (const LocalTensor& tensor : layout->ranks[0].tensors) {
    if (tensor.name == name) return tensor.shape;
  }
  return {};
}

TEST(Schemes, PadTheVocabularyAsTold) {
  const std::string megatron = "embedding.word_embeddings.weight";
  EXPECT_EQ(EmbeddingShape("megatron:tp2", megatron), (Shape{128, 16}));
  EXPECT_EQ(EmbeddingShape("megatron:tp4,vocab_pad=none", megatron), (Shape{25, 16}));
  EXPECT_EQ(EmbeddingShape("megatron:tp4,vocab_pad=104", megatron), (Shape{26, 16}));
  const std::string vllm = "model.embed_tokens.weight";
  EXPECT_EQ(EmbeddingShape("vllm:tp4", vllm), (Shape{32, 16}));
  EXPECT_EQ(EmbeddingShape("vllm:tp4,vocab_pad_to=4", vllm), (Shape{25, 16}));
}

}  // namespace
}  // namespace weightwire::layout
