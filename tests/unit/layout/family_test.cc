#include "server/layout/families/family.h"

#include <gtest/gtest.h>

#include <set>
#include <span>

#include "server/layout/scheme.h"
#include "tests/support/safetensors.h"

namespace weightwire::layout {
namespace {

std::string Config(const std::string& model_type, const std::string& more = "") {
  return R"({"model_type":")" + model_type +
         R"(","hidden_size":8,"num_hidden_layers":2,"num_attention_heads":4,)"
         R"("intermediate_size":12,"vocab_size":10)" +
         (more.empty() ? "" : "," + more) + "}";
}

ModelConfig Parse(const std::string& json) {
  const auto config = ParseModelConfig(json);
  EXPECT_TRUE(config.has_value()) << (config ? "" : config.error().ToString());
  return config.value_or(ModelConfig{});
}

int64_t TotalBytes(const CanonicalSpace& space) {
  int64_t total = 0;
  for (const TensorSpec& tensor : space.tensors) {
    total += *StorageBytes(tensor.dtype, tensor.shape);
  }
  return total;
}

TEST(Families, Qwen25HalfBillionHasItsTrueSize) {
  const auto space = CanonicalFromConfig(
      testing::ReadText(testing::SourceDir() + "/tests/data/configs/qwen2.5-0.5b.json"));
  ASSERT_TRUE(space.has_value());
  EXPECT_EQ(space->tensors.size(), 290u);
  EXPECT_EQ(TotalBytes(*space), 2 * int64_t{494'032'768});
}

TEST(Families, Qwen2SevenBillionHasItsTrueSize) {
  const auto space = CanonicalFromConfig(
      testing::ReadText(testing::SourceDir() + "/tests/data/configs/qwen2-7b.json"));
  ASSERT_TRUE(space.has_value());
  EXPECT_EQ(space->tensors.size(), 339u);
  EXPECT_EQ(TotalBytes(*space), 2 * int64_t{7'615'616'512});
}

TEST(ParseModelConfig, FillsInWhatTransformersDoes) {
  const ModelConfig config = Parse(Config("llama"));
  EXPECT_EQ(config.kv_heads, 4);
  EXPECT_EQ(config.head_dim, 2);
  EXPECT_FALSE(config.tied);
  EXPECT_FALSE(config.attention_bias);
  EXPECT_EQ(config.dtype, DType::kBF16);
}

TEST(ParseModelConfig, TakesNullForAbsent) {
  const ModelConfig config = Parse(Config(
      "qwen2",
      R"("head_dim":null,"num_key_value_heads":null,"tie_word_embeddings":null,"dtype":null)"));
  EXPECT_EQ(config.kv_heads, 4);
  EXPECT_EQ(config.head_dim, 2);
  EXPECT_FALSE(config.tied);
}

TEST(ParseModelConfig, NullIsNotSilence) {
  const std::string heads = R"("hidden_size":64,"num_attention_heads":32)";
  EXPECT_EQ(Parse(Config("mistral", heads)).kv_heads, 8);
  EXPECT_EQ(Parse(Config("mistral", heads + R"(,"num_key_value_heads":null)")).kv_heads, 32);
}

TEST(ParseModelConfig, HeadDimNeedNotBeHiddenOverHeads) {
  EXPECT_EQ(Parse(Config("qwen3", R"("head_dim":16)")).head_dim, 16);
  EXPECT_EQ(Parse(Config("qwen3")).head_dim, 128);
  EXPECT_EQ(Parse(Config("qwen3", R"("head_dim":null)")).head_dim, 2);
}

TEST(ParseModelConfig, ReadsEitherSpellingOfTheDtype) {
  EXPECT_EQ(Parse(Config("qwen2", R"("torch_dtype":"float32")")).dtype, DType::kF32);
  EXPECT_EQ(Parse(Config("qwen2", R"("dtype":"float16")")).dtype, DType::kF16);
  EXPECT_EQ(Parse(Config("qwen2", R"("dtype":"float16","torch_dtype":"float32")")).dtype,
            DType::kF16);
}

TEST(CanonicalFromConfig, HasTheBiasesThatTheFamilyHas) {
  const auto has = [](const std::string& config, const std::string& tensor) {
    return CanonicalFromConfig(config)->Find("model.layers.1." + tensor).has_value();
  };
  EXPECT_TRUE(has(Config("qwen2"), "self_attn.q_proj.bias"));
  EXPECT_FALSE(has(Config("qwen2", R"("attention_bias":true)"), "self_attn.o_proj.bias"));
  EXPECT_FALSE(has(Config("llama"), "self_attn.q_proj.bias"));
  EXPECT_TRUE(has(Config("llama", R"("attention_bias":true)"), "self_attn.o_proj.bias"));
  EXPECT_FALSE(has(Config("llama", R"("attention_bias":true)"), "mlp.up_proj.bias"));
  EXPECT_TRUE(has(Config("llama", R"("mlp_bias":true)"), "mlp.down_proj.bias"));
  EXPECT_TRUE(has(Config("qwen3", R"("attention_bias":true)"), "self_attn.v_proj.bias"));
  EXPECT_TRUE(has(Config("qwen3"), "self_attn.k_norm.weight"));
}

TEST(ParseModelConfig, RefusesBiasesThatDeepseekDoesNotDescribe) {
  const auto config =
      ParseModelConfig(Config("deepseek_v3", R"("attention_bias":true,"kv_lora_rank":4)"));
  ASSERT_FALSE(config.has_value());
  EXPECT_EQ(config.error().reason(), Reason::kInvalidRequest);
  EXPECT_NE(config.error().ToString().find("attention_bias"), std::string::npos);
}

TEST(ParseModelConfig, NeedsTheSizesOfAVisionTower) {
  const auto reason = [](const std::string& more) {
    const auto config = ParseModelConfig(Config("qwen2_5_vl", more));
    return config ? Reason::kNone : config.error().reason();
  };
  EXPECT_EQ(reason(""), Reason::kInvalidRequest);
  EXPECT_EQ(reason(R"("vision_config":7)"), Reason::kInvalidRequest);
  EXPECT_EQ(reason(R"("vision_config":{"hidden_size":10,"num_heads":4})"), Reason::kInvalidRequest);
  EXPECT_EQ(reason(R"("vision_config":{"spatial_merge_size":1025})"), Reason::kInvalidRequest);
  EXPECT_EQ(reason(R"("vision_config":{})"), Reason::kNone);
}

TEST(CanonicalFromConfig, IsSortedAndTiedTensorsAppearOnce) {
  const auto space =
      CanonicalFromConfig(Config("qwen2", R"("tie_word_embeddings":true,"num_hidden_layers":11)"));
  ASSERT_TRUE(space.has_value());
  EXPECT_EQ(Validate({*space, {}}), OkStatus());
  EXPECT_FALSE(space->Find("lm_head.weight"));
  EXPECT_TRUE(space->Find("model.layers.10.mlp.up_proj.weight"));
}

TEST(HfScheme, HoldsEachTensorWhole) {
  const auto layout = LayoutFromScheme(Config("qwen3"), {"hf", {}, {}});
  ASSERT_TRUE(layout.has_value());
  ASSERT_EQ(layout->ranks.size(), 1u);
  ASSERT_EQ(Validate(*layout), OkStatus());
  const auto& tensors = layout->ranks[0].tensors;
  ASSERT_EQ(tensors.size(), layout->canonical.tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    const TensorSpec& spec = layout->canonical.tensors[i];
    EXPECT_EQ(tensors[i].name, spec.name);
    EXPECT_EQ(tensors[i].shape, spec.shape);
    ASSERT_EQ(tensors[i].pieces.size(), 1u);
    testing::ForEachElement(tensors[i].pieces[0], spec.shape,
                            [](int64_t from, int64_t to) { ASSERT_EQ(from, to); });
  }
}

/// config.json of a listing, with `patch` over it.
std::string Patched(const std::string& listing, const char* patch) {
  const std::string path = "/tests/data/transformers/" + listing + ".json";
  nlohmann::json config =
      nlohmann::json::parse(testing::ReadText(testing::SourceDir() + path)).at("config");
  config.update(nlohmann::json::parse(patch));
  return config.dump();
}

struct ConfigCase {
  const char* listing;
  const char* patch;
  const char* says;
};

void ExpectRefused(std::span<const ConfigCase> table) {
  for (const ConfigCase& row : table) {
    SCOPED_TRACE(std::string(row.listing) + " " + row.patch);
    const auto space = CanonicalFromConfig(Patched(row.listing, row.patch));
    ASSERT_FALSE(space.has_value());
    EXPECT_EQ(space.error().code(), Code::kInvalidArgument);
    EXPECT_NE(space.error().ToString().find(row.says), std::string::npos)
        << space.error().ToString();
  }
}

/// What no release has, or loaders read differently, is refused by the field's name.
TEST(LinearAttention, RefusesConfigsThatItDoesNotDescribe) {
  const ConfigCase table[] = {
      {"qwen3_next-plain", R"({"attention_bias": true})", "attention_bias"},
      {"qwen3_next-plain", R"({"attn_output_gate": false})", "attn_output_gate"},
      {"qwen3_5_text-plain", R"({"attn_output_gate": false})", "attn_output_gate"},
      {"qwen3_next-plain", R"({"layer_types": ["full_attention"]})", "layer_types"},
      {"qwen3_next-plain", R"({"layer_types": ["a", "a", "a", "a", "a"]})", "layer_types"},
      {"qwen3_next-plain", R"({"linear_num_value_heads": 7})", "linear_num_value_heads"},
      {"qwen3_5_moe_text-plain", R"({"full_attention_interval": 0, "layer_types": null})",
       "full_attention_interval"},
      {"nemotron_h-plain", R"({"n_shared_experts": 2})", "n_shared_experts"},
      {"nemotron_h-plain", R"({"mlp_bias": true})", "mlp_bias"},
      {"nemotron_h-plain", R"({"tie_word_embeddings": true})", "tie_word_embeddings"},
      {"nemotron_h-plain", R"({"layers_block_type": ["mlp", "other"]})", "layers_block_type"},
      {"nemotron_h-pattern", R"({"hybrid_override_pattern": "MX"})", "hybrid_override_pattern"},
      {"nemotron_h-plain", R"({"n_groups": 4})", "mamba_num_heads"},
      {"nemotron_h-plain", R"({"hybrid_override_pattern": "M-*EE"})",
       "layers_block_type M-*EM and hybrid_override_pattern M-*EE"},
      {"nemotron_h-plain", R"({"layer_types": ["mlp"]})", "layer_types -"},
      {"nemotron_h-pattern", R"({"num_hidden_layers": 5})", "num_hidden_layers 5 and"},
      {"nemotron_h-plain", R"({"mamba_n_groups": 1})", "n_groups 2 and mamba_n_groups 1"},
      {"nemotron_h-plain", R"({"attention_head_dim": 12})", "head_dim 10 and"}};
  ExpectRefused(table);
}

TEST(MinimaxM2, RefusesWhatMiniMaxsOtherModelsHave) {
  const ConfigCase table[] = {{"minimax_m2-plain", R"({"use_qk_norm": false})", "use_qk_norm"},
                              {"minimax_m2-plain", R"({"qk_norm_type": "per_head"})", "per_layer"},
                              {"minimax_m2-plain", R"({"shared_intermediate_size": 8})", "shared"}};
  ExpectRefused(table);
  EXPECT_TRUE(CanonicalFromConfig(
                  Patched("minimax_m2-plain", R"({"use_qk_norm": true, "qk_norm_type": "per_layer",
                          "shared_intermediate_size": 0})"))
                  .has_value());
}

TEST(LinearAttention, WhatIsSaidTwiceAlikeIsRead) {
  const auto plain = CanonicalFromConfig(Patched("nemotron_h-plain", "{}"));
  const auto twice = CanonicalFromConfig(
      Patched("nemotron_h-plain", R"({"hybrid_override_pattern": "M-*EM", "num_hidden_layers": 5,
              "mamba_n_groups": 2, "attention_head_dim": 10, "mamba_d_conv": null})"));
  ASSERT_TRUE(twice.has_value()) << twice.error().ToString();
  EXPECT_EQ(*twice, *plain);
}

/// Layers of several sizes: what loaders read differently, or nobody reads.
TEST(LayerSizes, RefusesConfigsThatItDoesNotDescribe) {
  const ConfigCase table[] = {
      {"gemma4_text-released", R"({"layer_types": ["full_attention"]})", "layer_types"},
      {"gemma4_text-experts", R"({"layer_types": ["full_attention", "other", "full_attention"]})",
       "layer_types"},
      {"gemma4_text-plain", R"({"num_kv_shared_layers": 7})", "num_kv_shared_layers"},
      {"gemma4_text-experts", R"({"enable_moe_block": false})", "enable_moe_block"},
      {"gemma4_text-plain", R"({"num_experts": 4})", "enable_moe_block"},
      {"gemma4_text-plain", R"({"per_layer_config": {"7": {}}})", "\"7\", which is no layer"},
      {"gemma4_text-plain", R"({"per_layer_config": {"-1": {}}})", "\"-1\", which is no layer"},
      {"gemma4_text-plain", R"({"per_layer_config": [7]})", "per_layer_config"},
      {"gemma4_text-plain", R"({"per_layer_config": {"5": {"sliding_window": 7}}})",
       "sliding_window"},
      {"gemma4_text-plain", R"({"per_layer_config": {"5": {"num_key_value_heads": 4}}})",
       "layer 5"},
      {"gemma4_text-plain", R"({"per_layer_config": {"5": {"head_dim": 0}}})", "head_dim"},
      {"llama-plain", R"({"per_layer_config": {"0": {"head_dim": 4}}})", "per_layer_config"},
      {"gemma4-plain", R"({"audio_config": {"subsampling_conv_channels": [9]}})",
       "subsampling_conv_channels"},
      {"gemma4-plain", R"({"audio_config": 7})", "audio_config"},
      {"gemma4-plain", R"({"vision_config": null})", "vision_config"}};
  ExpectRefused(table);
  EXPECT_TRUE(
      CanonicalFromConfig(Patched("llama-plain", R"({"per_layer_config": {}})")).has_value());
}

/// A kv head of a layer with fewer of them than ranks is on several; where it is neither, the layer
/// refuses the cut. What has no description is refused by its name.
TEST(LayerSizes, CutsEachLayerByItsOwnHeads) {
  const auto refusal = [](const char* listing, const char* patch, const char* spec) {
    const auto layout = LayoutFromScheme(Patched(listing, patch), *ParseParallelSpec(spec));
    return layout ? OkStatus() : layout.error();
  };
  EXPECT_EQ(refusal("gemma4_text-experts", "{}", "vllm:tp2"), OkStatus());
  // Nothing is cut that is not there: the default of 262,144 tokens with inputs of their own.
  EXPECT_EQ(refusal("gemma4_text-untied",
                    R"({"vocab_size_per_layer_input": 262144, "vocab_size": 192,
                        "intermediate_size": 51, "num_key_value_heads": 3})",
                    "vllm:tp3"),
            OkStatus());
  const char* three = R"({"per_layer_config": {"2": {"num_key_value_heads": 3}}})";
  const Status heads = refusal("gemma4_text-experts", three, "vllm:tp2");
  EXPECT_EQ(heads.tensor(), "model.layers.2.self_attn.k_proj.weight") << heads.ToString();
  for (const char* spec : {"megatron:tp2", "sglang:tp2"}) {
    EXPECT_EQ(refusal("gemma4_text-plain", "{}", spec).reason(), Reason::kUnknownScheme) << spec;
  }
  EXPECT_EQ(refusal("gemma4_text-experts", "{}", "fsdp:dp2"), OkStatus());
  EXPECT_EQ(refusal("gemma4_text-experts", "{}", "fsdp:dp2,tp2").tensor(),
            "model.layers.0.router.per_expert_scale");
}

/// vLLM 0.32 makes all of it on every pipeline stage of Gemma 4, by its source.
TEST(LayerSizes, EveryStageHasWhatStandsOutsideLayers) {
  const auto layout =
      LayoutFromScheme(Patched("gemma4_text-plain", "{}"), *ParseParallelSpec("vllm:pp2"));
  ASSERT_TRUE(layout.has_value()) << layout.error().ToString();
  for (const RankLayout& rank : layout->ranks) {
    std::multiset<std::string> outside;
    for (const LocalTensor& tensor : rank.tensors) {
      if (tensor.name.find(".layers.") == std::string::npos) outside.insert(tensor.name);
    }
    EXPECT_EQ(outside, (std::multiset<std::string>{
                           "model.embed_tokens.weight", "model.embed_tokens_per_layer.weight",
                           "model.norm.weight", "model.per_layer_model_projection.weight",
                           "model.per_layer_projection_norm.weight"}));
  }
}

/// megatron-core's HybridModel has attention and MLP as layers of their own.
TEST(HybridModel, IsRefusedWhereItIsNotDescribed) {
  const ConfigCase table[] = {{"qwen2-plain", "megatron:pp2,vpp2,model=hybrid", "layers="},
                              {"qwen2-plain", "megatron:spec=local,model=hybrid", "spec"},
                              {"qwen2-plain", "megatron:pp7,model=hybrid", "6 layers"},
                              {"qwen2-plain", "megatron:model=mamba", "model"},
                              {"deepseek_v3-plain", "megatron:model=hybrid", "latent attention"},
                              {"glm4_moe-plain", "megatron:model=hybrid", "MTP layers"}};
  for (const ConfigCase& row : table) {
    SCOPED_TRACE(std::string(row.listing) + " " + row.patch);
    const auto layout = LayoutFromScheme(Patched(row.listing, "{}"), *ParseParallelSpec(row.patch));
    ASSERT_FALSE(layout.has_value());
    EXPECT_NE(layout.error().ToString().find(row.says), std::string::npos)
        << layout.error().ToString();
  }
}

TEST(HybridModel, IsWhatNemotronIsAnyhow) {
  const std::string config = Patched("nemotron_h-plain", "{}");
  const auto plain = LayoutFromScheme(config, *ParseParallelSpec("megatron:tp2,spec=te"));
  const auto said =
      LayoutFromScheme(config, *ParseParallelSpec("megatron:tp2,spec=te,model=hybrid"));
  ASSERT_TRUE(plain.has_value() && said.has_value()) << said.error().ToString();
  EXPECT_EQ(plain->ranks, said->ranks);
}

/// Tensor parallelism that groups of heads do not allow; a single group of Mamba is shared by
/// engines, as vLLM has it, and refused by Megatron.
TEST(LinearAttention, CutsBetweenGroups) {
  const auto derive = [](const char* listing, const char* patch, const char* spec) {
    return LayoutFromScheme(Patched(listing, patch), *ParseParallelSpec(spec));
  };
  const auto refused = derive("qwen3_next-plain", "{}", "vllm:tp3");
  ASSERT_FALSE(refused.has_value());
  EXPECT_EQ(refused.error().reason(), Reason::kShapeMismatch);
  const char* one_group = R"({"n_groups": 1})";
  EXPECT_TRUE(derive("nemotron_h-plain", one_group, "vllm:tp2,skip=*.A_log").has_value());
  const auto megatron = derive("nemotron_h-plain", one_group, "megatron:tp2,spec=te");
  ASSERT_FALSE(megatron.has_value());
  EXPECT_NE(megatron.error().ToString().find("n_groups"), std::string::npos);
  const auto fsdp = derive("qwen3_next-plain", "{}", "fsdp:dp2,tp2");
  ASSERT_FALSE(fsdp.has_value());
  EXPECT_TRUE(derive("qwen3_next-plain", "{}", "fsdp:dp2").has_value());
  EXPECT_FALSE(derive("qwen3_5_text-plain", "{}", "sglang:tp2").has_value());
}

/// SGLang has attention with output gates in the layer itself, by its source.
TEST(LinearAttention, SglangHasGatedAttentionInTheLayer) {
  const std::string path = "/tests/data/transformers/qwen3_next-plain.json";
  const auto config =
      nlohmann::json::parse(testing::ReadText(testing::SourceDir() + path)).at("config");
  const auto layout = LayoutFromScheme(config.dump(), *ParseParallelSpec("sglang:tp2"));
  ASSERT_TRUE(layout.has_value()) << layout.error().ToString();
  std::set<std::string> names;
  for (const LocalTensor& tensor : layout->ranks[0].tensors) names.insert(tensor.name);
  EXPECT_TRUE(names.contains("model.layers.3.qkv_proj.weight"));
  EXPECT_TRUE(names.contains("model.layers.3.q_norm.weight"));
  EXPECT_TRUE(names.contains("model.layers.0.linear_attn.in_proj_qkvz.weight"));
}

}  // namespace
}  // namespace weightwire::layout
