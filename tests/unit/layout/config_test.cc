// What config.json may leave out, what it may say twice, and what is refused by its name instead of
// being guessed.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "server/layout/scheme.h"

namespace weightwire::layout {
namespace {

using Json = nlohmann::json;

Json With(Json config, const Json& patch) {
  if (!patch.is_null()) config.merge_patch(patch);
  return config;
}

Json Qwen3Moe(const Json& patch = Json::object()) {
  return With({{"model_type", "qwen3_moe"},
               {"hidden_size", 16},
               {"num_hidden_layers", 2},
               {"num_attention_heads", 4},
               {"num_key_value_heads", 2},
               {"head_dim", 6},
               {"intermediate_size", 24},
               {"moe_intermediate_size", 10},
               {"num_experts", 4},
               {"vocab_size", 100}},
              patch);
}

Json DeepseekV3(const Json& patch = Json::object()) {
  return With({{"model_type", "deepseek_v3"},
               {"hidden_size", 18},
               {"num_hidden_layers", 2},
               {"num_attention_heads", 4},
               {"kv_lora_rank", 6},
               {"q_lora_rank", 8},
               {"qk_nope_head_dim", 4},
               {"qk_rope_head_dim", 2},
               {"v_head_dim", 4},
               {"intermediate_size", 24},
               {"moe_intermediate_size", 10},
               {"n_routed_experts", 8},
               {"first_k_dense_replace", 1},
               {"vocab_size", 100}},
              patch);
}

Shape ShapeOf(const std::string& config, const std::string& tensor) {
  const auto space = CanonicalFromConfig(config);
  if (!space) {
    ADD_FAILURE() << space.error().ToString();
    return {};
  }
  const auto at = space->Find(tensor);
  return at ? space->tensors[*at].shape : Shape{};
}

std::string Refusal(const std::string& config) {
  const auto space = CanonicalFromConfig(config);
  if (space) return "accepted";
  EXPECT_EQ(space.error().code(), Code::kInvalidArgument);
  EXPECT_EQ(space.error().reason(), Reason::kInvalidRequest);
  return space.error().ToString();
}

TEST(ModelConfig, TwoNumbersOfExpertsAreRefusedAndNullIsAbsent) {
  const std::string router = "model.layers.1.mlp.gate.weight";
  for (const char* key : {"num_experts", "num_local_experts"}) {
    const std::string why = Refusal(DeepseekV3({{key, 4}}).dump());
    EXPECT_NE(why.find(std::string(key) + " 4"), std::string::npos) << why;
    EXPECT_NE(why.find("n_routed_experts 8"), std::string::npos) << why;
    EXPECT_EQ(ShapeOf(DeepseekV3({{key, 8}}).dump(), router), (Shape{8, 18}));
    Json null = DeepseekV3();
    null[key] = nullptr;
    EXPECT_EQ(ShapeOf(null.dump(), router), (Shape{8, 18})) << key;
  }
}

TEST(ModelConfig, AModelOfExpertsAloneNeedsNoIntermediateSize) {
  Json config = Qwen3Moe();
  const auto whole = CanonicalFromConfig(config.dump());
  config.erase("intermediate_size");
  const auto without = CanonicalFromConfig(config.dump());
  ASSERT_TRUE(without.has_value()) << without.error().ToString();
  EXPECT_EQ(*without, *whole);
  config["intermediate_size"] = nullptr;
  EXPECT_EQ(*CanonicalFromConfig(config.dump()), *whole);
  config["mlp_only_layers"] = {1};
  const std::string why = Refusal(config.dump());
  EXPECT_NE(why.find("intermediate_size is missing, and layer 1 has no experts"), std::string::npos)
      << why;
}

TEST(ModelConfig, ExpertsOfTheIntermediateSizeNeedIt) {
  for (const char* family : {"mixtral", "gpt_oss", "llama4_text"}) {
    Json config = Qwen3Moe({{"model_type", family}, {"intermediate_size_mlp", 20}});
    EXPECT_TRUE(CanonicalFromConfig(config.dump())) << family;
    config.erase("intermediate_size");
    EXPECT_NE(Refusal(config.dump()).find("intermediate_size"), std::string::npos) << family;
  }
}

TEST(ModelConfig, LatentAttentionNeedsNoHeadDim) {
  // 18 / 4 is no integer
  EXPECT_EQ(ShapeOf(DeepseekV3().dump(), "model.layers.0.self_attn.q_b_proj.weight"),
            (Shape{24, 8}));
  Json grouped = Qwen3Moe({{"hidden_size", 18}});
  grouped.erase("head_dim");
  EXPECT_NE(Refusal(grouped.dump()).find("head_dim"), std::string::npos);
}

TEST(ModelConfig, PythonsInfinityAndNaNAreReadAndAreNoSizes) {
  const std::string text = Qwen3Moe().dump();
  const auto with = [&text](const std::string& more) {
    return text.substr(0, text.size() - 1) + ", " + more + "}";
  };
  const CanonicalSpace plain = *CanonicalFromConfig(text);
  for (const char* more : {R"("time_step_limit": [0.0, Infinity])", R"("x": NaN)",
                           R"("x": -Infinity)", R"("x":[-Infinity,NaN])"}) {
    const auto space = CanonicalFromConfig(with(more));
    ASSERT_TRUE(space.has_value()) << more << ": " << space.error().ToString();
    EXPECT_EQ(*space, plain) << more;
  }
  EXPECT_NE(Refusal(with(R"("num_local_experts": Infinity)")).find("num_local_experts"),
            std::string::npos);
  EXPECT_NE(Refusal(with(R"("num_local_experts": NaN)")).find("num_local_experts"),
            std::string::npos);
  // Inside a text they are that text, behind a quoted quote too.
  const std::string key = "Infinity \\\" NaN";
  EXPECT_NE(Refusal(with(R"("dtype": ")" + key + R"(")")).find("Infinity"), std::string::npos);
  EXPECT_NE(Refusal(with(R"("x": Infinityx)")).find("line 1, column"), std::string::npos);
  EXPECT_NE(Refusal(with(R"("x": xNaN)")).find("line 1, column"), std::string::npos);
}

TEST(ModelConfig, ThePlaceOfAMistakeIsNamed) {
  EXPECT_NE(Refusal("{\n  \"model_type\": \"qwen3\",\n  \"hidden_size\": ,\n}")
                .find("config.json is not JSON: parse error at line 3, column 18"),
            std::string::npos)
      << Refusal("{\n  \"model_type\": \"qwen3\",\n  \"hidden_size\": ,\n}");
  EXPECT_NE(Refusal("{\"a\": Infinity, \"b\": }").find("line 1, column 22"), std::string::npos);
}

Json QwenVl(const Json& outer, const Json& inner) {
  Json config = {{"model_type", "qwen2_5_vl"}, {"vision_config", {{"depth", 1}}}};
  Json text = Qwen3Moe();
  for (const char* key : {"model_type", "num_experts", "moe_intermediate_size"}) text.erase(key);
  config["text_config"] = With(text, inner);
  return With(config, outer);
}

TEST(ModelConfig, ATieThatOnlyOneOfTwoReadersSeesIsRefused) {
  const auto tied = [](const Json& config) {
    return ShapeOf(config.dump(), "lm_head.weight").empty();
  };
  const Json yes = {{"tie_word_embeddings", true}}, no = {{"tie_word_embeddings", false}};
  EXPECT_FALSE(tied(QwenVl({}, {})));
  EXPECT_FALSE(tied(QwenVl(no, {})));
  EXPECT_TRUE(tied(QwenVl({}, yes)));  // transformers and vLLM read text_config
  EXPECT_TRUE(tied(QwenVl(yes, yes)));
  for (const Json& config : {QwenVl(yes, {}), QwenVl(yes, no), QwenVl(no, yes)}) {
    const auto space = CanonicalFromConfig(config.dump());
    ASSERT_FALSE(space.has_value()) << config.dump();
    EXPECT_EQ(space.error().tensor(), "lm_head.weight");
    EXPECT_NE(space.error().ToString().find("tie_word_embeddings"), std::string::npos);
  }
}

/// The text_config of Gemma-3-4B's release: transformers' Gemma3TextConfig has the rest.
TEST(ModelConfig, Gemma3sReleaseIsSilentAboutHeadsAndVocabulary) {
  const std::string text = R"({"hidden_size":2560,"intermediate_size":10240,
      "model_type":"gemma3_text","num_hidden_layers":34,"sliding_window":1024})";
  const std::string wrapper = R"({"model_type":"gemma3","text_config":)" + text +
                              R"(,"vision_config":{"hidden_size":1152,"intermediate_size":4304,
      "image_size":896,"num_attention_heads":16,"num_hidden_layers":27,"patch_size":14}})";
  const std::string layer = "model.layers.33.self_attn.";
  EXPECT_EQ(ShapeOf(text, "model.embed_tokens.weight"), (Shape{262'208, 2'560}));
  EXPECT_EQ(ShapeOf(text, layer + "q_proj.weight"), (Shape{2'048, 2'560}));
  EXPECT_EQ(ShapeOf(text, layer + "k_proj.weight"), (Shape{1'024, 2'560}));
  EXPECT_EQ(ShapeOf(wrapper, "language_model." + layer + "q_proj.weight"), (Shape{2'048, 2'560}));
  EXPECT_EQ(ShapeOf(wrapper, "language_model.model.embed_tokens.weight"), (Shape{262'208, 2'560}));
  // Its text model is tied by default, and only some loaders would see this.
  Json untied = Json::parse(wrapper);
  untied["tie_word_embeddings"] = false;
  EXPECT_NE(Refusal(untied.dump()).find("tie_word_embeddings"), std::string::npos);
}

TEST(ModelConfig, TwoQuantizationsAreRefused) {
  const Json fp8 = {{"quant_method", "fp8"},
                    {"weight_block_size", {4, 4}},
                    {"modules_to_not_convert", {"visual"}}};
  const auto quantized = [&fp8](const Json& outer, const Json& inner) {
    return QwenVl(outer.is_null() ? Json::object() : Json{{"quantization_config", outer}},
                  inner.is_null() ? Json::object() : Json{{"quantization_config", inner}})
        .dump();
  };
  EXPECT_TRUE(CanonicalFromConfig(quantized(fp8, {})));
  EXPECT_EQ(*CanonicalFromConfig(quantized({}, fp8)), *CanonicalFromConfig(quantized(fp8, {})));
  EXPECT_EQ(*CanonicalFromConfig(quantized(fp8, fp8)), *CanonicalFromConfig(quantized(fp8, {})));
  Json other = fp8;
  other["weight_block_size"] = {8, 8};
  EXPECT_NE(Refusal(quantized(fp8, other)).find("one quantization_config in text_config"),
            std::string::npos);
}

}  // namespace
}  // namespace weightwire::layout
