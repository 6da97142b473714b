// fp8 weights with block scales: what is read, what is refused and how it is said. Content is
// compared in tests/property/fp8_property_test.cc.
#include <gtest/gtest.h>

#include <functional>
#include <nlohmann/json.hpp>
#include <set>
#include <tuple>

#include "server/layout/families/weight_format.h"
#include "server/layout/scheme.h"
#include "server/layout/trace.h"
#include "server/plan/plan.h"
#include "tests/support/safetensors.h"

namespace weightwire::layout {
namespace {

/// Sizes that blocks of 4 x 4 divide at tp 2, except hidden.
nlohmann::json Qwen3(nlohmann::json patch = nlohmann::json::object()) {
  nlohmann::json config = {{"model_type", "qwen3"},
                           {"hidden_size", 10},
                           {"num_hidden_layers", 2},
                           {"num_attention_heads", 4},
                           {"num_key_value_heads", 2},
                           {"head_dim", 4},
                           {"intermediate_size", 24},
                           {"vocab_size", 32},
                           {"quantization_config",
                            {{"quant_method", "fp8"},
                             {"fmt", "e4m3"},
                             {"activation_scheme", "dynamic"},
                             {"weight_block_size", {4, 4}}}}};
  config.merge_patch(patch);
  return config;
}
nlohmann::json Qwen3Quantized(nlohmann::json quantization) {
  return Qwen3({{"quantization_config", std::move(quantization)}});
}

Result<ModelLayout> Layout(const nlohmann::json& config, const std::string& spec) {
  return LayoutFromScheme(config.dump(), *ParseParallelSpec(spec));
}

const LocalTensor* Named(const RankLayout& rank, const std::string& name) {
  for (const LocalTensor& tensor : rank.tensors) {
    if (tensor.name == name) return &tensor;
  }
  return nullptr;
}

std::string DeepseekV3() {
  return testing::ReadText(testing::SourceDir() + "/tests/data/configs/deepseek-v3-fp8.json");
}

TEST(BlockScales, RefusesOtherQuantizations) {
  const std::vector<std::pair<const char*, nlohmann::json>> table = {
      {"a list", nlohmann::json::array()},
      {"no method", {{"quant_method", nullptr}}},
      {"gptq", {{"quant_method", "gptq"}}},
      {"another format", {{"fmt", "e5m2"}}},
      {"static activations", {{"activation_scheme", "static"}}},
      {"one scale a tensor", {{"weight_block_size", nullptr}}},
      {"one size", {{"weight_block_size", {128}}}},
      {"a size of zero", {{"weight_block_size", {0, 128}}}},
      {"a size that is no number", {{"weight_block_size", {"128", 128}}}},
      {"a size over the limit", {{"weight_block_size", {65'537, 1}}}},
      {"modules that are no list", {{"modules_to_not_convert", "lm_head"}}},
      {"modules that are no names", {{"ignored_layers", {1}}}},
      {"a module without a name", {{"ignored_layers", {""}}}},
      {"a module of dots", {{"ignored_layers", {"."}}}},
      {"scales of another form", {{"scale_fmt", "ue5m3"}}},
      {"weights that are dequantized while loading", {{"dequantize", true}}},
      {"a field that is not understood", {{"store_dtype", "mxfp4"}}},
      {"modules of another method's key", {{"ignore", {"lm_head"}}}},
  };
  for (const auto& [what, patch] : table) {
    const auto layout = Layout(Qwen3Quantized(patch), "hf");
    ASSERT_FALSE(layout.has_value()) << what;
    EXPECT_EQ(layout.error().reason(), Reason::kInvalidRequest) << what;
    EXPECT_NE(layout.error().message().find("quantization_config"), std::string::npos) << what;
    EXPECT_NE(layout.error().remedy().find("weight_block_size"), std::string::npos) << what;
  }
  EXPECT_TRUE(Layout(Qwen3(), "hf").has_value());
  const auto old_key =
      Layout(Qwen3({{"compression_config", {{"quant_method", "compressed-tensors"}}}}), "hf");
  ASSERT_FALSE(old_key.has_value());
  EXPECT_NE(old_key.error().message().find("compression_config"), std::string::npos);
  const auto tower = Layout(
      Qwen3({{"vision_config", {{"quantization_config", Qwen3()["quantization_config"]}}}}), "hf");
  ASSERT_FALSE(tower.has_value());
  EXPECT_NE(tower.error().message().find("vision_config"), std::string::npos);
  EXPECT_TRUE(
      Layout(Qwen3({{"vision_config", {{"quantization_config", nullptr}}}}), "hf").has_value());
}

TEST(BlockScales, FieldsThatChangeNothingAreRead) {
  for (const nlohmann::json& patch :
       {nlohmann::json{{"scale_fmt", "float"}}, nlohmann::json{{"dequantize", false}},
        nlohmann::json{{"fmt", "float8_e4m3fn"}}}) {
    const auto layout = Layout(Qwen3Quantized(patch), "hf");
    ASSERT_TRUE(layout.has_value()) << layout.error().ToString();
    EXPECT_EQ(layout->canonical, Layout(Qwen3(), "hf")->canonical) << patch;
  }
  nlohmann::json null = Qwen3();
  null["quantization_config"]["modules_to_convert"] = nullptr;
  EXPECT_TRUE(Layout(null, "hf").has_value());
}

TEST(BlockScales, PatternsThatLoadersReadDifferentlyAreRefusedByName) {
  for (const char* pattern :
       {"re:.*mlp.gate$", "re:.*mlp\\.gate$", "*.mlp.gate", "*mlp.gate", "mlp.gate*", "mlp.gat?",
        "mlp.(gate|up)_proj", "^lm_head", "model.layers.[0-9].mlp", "model.layers.1*.mlp"}) {
    const auto layout = Layout(Qwen3Quantized({{"modules_to_not_convert", {pattern}}}), "hf");
    ASSERT_FALSE(layout.has_value()) << pattern;
    EXPECT_NE(layout.error().message().find(pattern), std::string::npos)
        << layout.error().ToString();
  }
}

TEST(BlockScales, AStarBetweenDotsStandsForAnyPart) {
  const auto layout = Layout(
      Qwen3Quantized({{"modules_to_not_convert", {"model.layers.*.self_attn", "lm_head"}}}), "hf");
  ASSERT_TRUE(layout.has_value()) << layout.error().ToString();
  int quantized = 0;
  for (const TensorSpec& tensor : layout->canonical.tensors) {
    if (tensor.dtype != DType::kF8E4M3) continue;
    ++quantized;
    EXPECT_NE(tensor.name.find(".mlp."), std::string::npos) << tensor.name;
  }
  EXPECT_EQ(quantized, 6);  // gate, up and down of two layers
  EXPECT_EQ(layout->canonical,
            Layout(Qwen3Quantized({{"modules_to_not_convert", {"self_attn"}}}), "hf")->canonical);
}

TEST(BlockScales, AnEntryWithoutAnEffectIsNamed) {
  const auto notes = [](std::vector<std::string> entries, bool tied = false) {
    nlohmann::json config = Qwen3Quantized({{"modules_to_not_convert", std::move(entries)}});
    config["tie_word_embeddings"] = tied;
    return NotesOfConfig(config.dump()).value();
  };
  EXPECT_TRUE(notes({"lm_head", "self_attn", "mlp.up_proj", "model.layers.*.mlp"}).empty());
  EXPECT_TRUE(notes({"lm_head"}, /*tied=*/true).empty());
  for (const char* entry : {"mlp.gat", ".self_attn", "self_attn.", "visual", "model.layers.7.mlp",
                            "model.layer.*.mlp", "typo.nothing"}) {
    const auto found = notes({entry, "lm_head"});
    ASSERT_EQ(found.size(), 1u) << entry;
    EXPECT_NE(found[0].find(std::string("\"") + entry + "\""), std::string::npos) << found[0];
  }
  nlohmann::json plain = Qwen3();
  plain.erase("quantization_config");
  EXPECT_TRUE(NotesOfConfig(plain.dump()).value().empty());
}

TEST(BlockScales, SkipsByWholePartsOfNames) {
  WeightFormat scales;
  scales.skipped = {"lm_head", "mlp.gate", "model.layers.1.self_attn", "experts.7"};
  EXPECT_TRUE(scales.Skips("lm_head.weight"));
  EXPECT_TRUE(scales.Skips("model.layers.3.mlp.gate.weight"));
  EXPECT_FALSE(scales.Skips("model.layers.3.mlp.gate_proj.weight"));
  EXPECT_TRUE(scales.Skips("model.layers.1.self_attn.q_proj.weight"));
  EXPECT_FALSE(scales.Skips("model.layers.11.self_attn.q_proj.weight"));
  EXPECT_FALSE(scales.Skips("model.layers.1.self_attn_2.q_proj.weight"));
  EXPECT_FALSE(scales.Skips("model.layers.0.mlp.experts.77.up_proj.weight"));
  EXPECT_TRUE(scales.Skips("model.layers.0.mlp.experts.7.up_proj.weight"));
}

/// The release's files have 688,586,727,753 bytes, of which a header has one entry for each tensor.
TEST(BlockScales, DeepseekV3HasItsTrueSize) {
  const auto layout = LayoutFromScheme(DeepseekV3(), *ParseParallelSpec("hf"));
  ASSERT_TRUE(layout.has_value()) << layout.error().ToString();
  int64_t bytes = 0;
  for (const LocalTensor& tensor : layout->ranks[0].tensors) {
    bytes += *StorageBytes(tensor.dtype, tensor.shape);
  }
  const int64_t headers = 688'586'727'753 - bytes;
  EXPECT_GT(headers, 100 * std::ssize(layout->ranks[0].tensors));
  EXPECT_LT(headers, 150 * std::ssize(layout->ranks[0].tensors));
}

TEST(BlockScales, FusedTensorsHaveTheEnginesNames) {
  const auto vllm = LayoutFromScheme(DeepseekV3(), *ParseParallelSpec("vllm:tp8,ep"));
  ASSERT_TRUE(vllm.has_value()) << vllm.error().ToString();
  const auto sglang = LayoutFromScheme(DeepseekV3(), *ParseParallelSpec("sglang:tp8,ep8"));
  ASSERT_TRUE(sglang.has_value()) << sglang.error().ToString();
  const std::string dense = "model.layers.0.", moe = "model.layers.3.mlp.";
  const std::vector<std::tuple<const ModelLayout*, std::string, Shape>> table = {
      {&*vllm, dense + "self_attn.fused_qkv_a_proj.weight_scale_inv", {17, 56}},
      {&*vllm, dense + "self_attn.kv_b_proj.weight_scale_inv", {32, 4}},
      {&*vllm, dense + "self_attn.o_proj.weight_scale_inv", {56, 16}},
      {&*vllm, dense + "mlp.gate_up_proj.weight_scale_inv", {36, 56}},
      {&*vllm, moe + "experts.routed_experts.w13_weight_scale_inv", {32, 32, 56}},
      {&*vllm, moe + "experts.routed_experts.w2_weight_scale_inv", {32, 56, 16}},
      {&*vllm, moe + "shared_experts.down_proj.weight_scale_inv", {56, 2}},
      {&*sglang, dense + "self_attn.fused_qkv_a_proj_with_mqa.weight_scale_inv", {17, 56}},
      {&*sglang, moe + "experts.w13_weight_scale_inv", {32, 32, 56}},
  };
  for (const auto& [layout, name, shape] : table) {
    const LocalTensor* scales = Named(layout->ranks[7], name);
    ASSERT_NE(scales, nullptr) << name;
    EXPECT_EQ(scales->dtype, DType::kF32) << name;
    EXPECT_EQ(scales->shape, shape) << name;
  }
  EXPECT_EQ(Named(vllm->ranks[0], moe + "gate.weight_scale_inv"), nullptr);
  EXPECT_EQ(Named(vllm->ranks[0], "lm_head.weight_scale_inv"), nullptr);
}

TEST(BlockScales, DeepseekV3ReachesBothEnginesWithProof) {
  const auto source = LayoutFromScheme(DeepseekV3(), *ParseParallelSpec("hf"));
  ASSERT_TRUE(source.has_value());
  for (const char* spec : {"vllm:tp8,ep", "sglang:tp8,ep8"}) {
    const auto target = LayoutFromScheme(DeepseekV3(), *ParseParallelSpec(spec));
    ASSERT_TRUE(target.has_value()) << target.error().ToString();
    const auto plan = plan::BuildPlan(*source, *target);
    ASSERT_TRUE(plan.has_value()) << plan.error().ToString();
    EXPECT_EQ(plan::VerifyPlan(*plan, *source, *target), OkStatus()) << spec;
    int64_t bytes = 0;  // the padded vocabulary of 129,280 rows has no padding
    for (const RankLayout& rank : target->ranks) {
      for (const LocalTensor& tensor : rank.tensors) {
        bytes += *StorageBytes(tensor.dtype, tensor.shape);
      }
    }
    EXPECT_EQ(plan->bytes_total, bytes) << spec;
  }
}

TEST(BlockScales, DeepseekV3InBf16ReachesBothEnginesQuantizedAndProved) {
  const auto trainer = LayoutFromScheme(
      DeepseekV3(), *ParseParallelSpec("megatron:tp4,ep8,etp1,dp2,spec=te,vocab_pad=none"));
  ASSERT_TRUE(trainer.has_value()) << trainer.error().ToString();
  for (const char* spec : {"vllm:tp8,ep", "sglang:tp8,ep8"}) {
    const auto target = LayoutFromScheme(DeepseekV3(), *ParseParallelSpec(spec));
    ASSERT_TRUE(target.has_value()) << target.error().ToString();
    const auto plan = plan::BuildPlan(*trainer, *target);
    ASSERT_TRUE(plan.has_value()) << plan.error().ToString();
    EXPECT_EQ(plan::VerifyPlan(*plan, *trainer, *target), OkStatus()) << spec;
    int64_t bytes = 0;
    for (const RankLayout& rank : target->ranks) {
      for (const LocalTensor& tensor : rank.tensors) {
        bytes += *StorageBytes(tensor.dtype, tensor.shape);
      }
    }
    EXPECT_EQ(plan->bytes_total, bytes) << spec;
    const plan::PlanReport report = plan::Report(*plan, *trainer, *target);
    EXPECT_LT(report.egress_over_bound, 1.02) << spec;
  }
}

struct Refusal {
  const char* what;
  nlohmann::json config;
  const char* spec;
  Reason reason;
  const char* tensor;
  std::vector<const char*> words;  ///< that message and remedy have together
};

TEST(BlockScales, RefusesWhatCutsOrFusesPartsOfBlocks) {
  const std::vector<Refusal> table = {
      {"tp cuts rows",
       Qwen3({{"num_attention_heads", 6}, {"head_dim", 2}}),
       "vllm:tp2",
       Reason::kShapeMismatch,
       "model.layers.0.self_attn.q_proj.weight",
       {"rows 0 to 6", "block of 4", "multiples of 4"}},
      {"tp cuts columns",
       Qwen3Quantized({{"weight_block_size", {4, 8}}}),
       "sglang:tp2",
       Reason::kShapeMismatch,
       "model.layers.0.mlp.down_proj.weight",
       {"columns 0 to 12", "block of 8"}},
      {"up begins inside a block",
       Qwen3({{"intermediate_size", 22}}),
       "vllm",
       Reason::kShapeMismatch,
       "model.layers.0.mlp.up_proj.weight",
       {"begin at 22", "mlp.gate_up_proj.weight", "block of 4"}},
      {"a part of qkv is quantized",
       Qwen3Quantized({{"modules_to_not_convert", {"layers.1.self_attn.k_proj"}}}),
       "sglang:tp2",
       Reason::kDtypeMismatch,
       "model.layers.1.self_attn.k_proj.weight",
       {"BF16", "F8_E4M3", "q_proj.weight", "qkv_proj.weight", "modules_to_not_convert"}},
      {"fsdp's tp cuts rows",
       Qwen3({{"intermediate_size", 22}}),
       "fsdp:tp2",
       Reason::kShapeMismatch,
       "model.layers.0.mlp.down_proj.weight",
       {"columns 0 to 11", "block of 4"}},
      {"flat parameters",
       Qwen3(),
       "fsdp:dp2,kind=fsdp1",
       Reason::kUnknownScheme,
       "",
       {"kind=fsdp1", "fp8"}},
  };
  for (const Refusal& row : table) {
    const auto layout = Layout(row.config, row.spec);
    ASSERT_FALSE(layout.has_value()) << row.what;
    const Status& status = layout.error();
    EXPECT_EQ(status.code(), Code::kInvalidArgument) << row.what;
    EXPECT_EQ(status.reason(), row.reason) << status.ToString();
    EXPECT_EQ(status.tensor(), row.tensor) << status.ToString();
    EXPECT_EQ(status.rank(), row.reason == Reason::kUnknownScheme ? "" : "0") << status.ToString();
    for (const char* word : row.words) {
      EXPECT_NE(status.ToString().find(word), std::string::npos)
          << word << ": " << status.ToString();
    }
  }
}

TEST(BlockScales, RefusesArrangementsThatAreNotDescribedUnlessTheyAreSkipped) {
  nlohmann::json config = Qwen3({{"model_type", "qwen2_5_vl"}, {"vision_config", {{"depth", 1}}}});
  const auto tower = Layout(config, "vllm");
  ASSERT_FALSE(tower.has_value());
  EXPECT_EQ(tower.error().reason(), Reason::kInvalidRequest);
  EXPECT_EQ(tower.error().tensor(), "visual.blocks.0.attn.qkv.weight");
  config["quantization_config"]["modules_to_not_convert"] = {"visual"};
  const auto text = Layout(config, "vllm:tp2");
  ASSERT_TRUE(text.has_value()) << text.error().ToString();
  EXPECT_EQ(Validate(*text), OkStatus());
  EXPECT_NE(Named(text->ranks[0], "language_model.model.layers.1.mlp.down_proj.weight_scale_inv"),
            nullptr);
  EXPECT_EQ(Layout(Qwen3({{"model_type", "gpt_oss"}}), "hf").error().reason(),
            Reason::kInvalidRequest);
}

TEST(BlockScales, MegatronAndAdaptersHoldTheModelsDtype) {
  nlohmann::json plain = Qwen3();
  plain.erase("quantization_config");
  for (const char* spec : {"megatron:tp2", "vllm:tp2,lora=4", "hf:lora=2"}) {
    const auto quantized = Layout(Qwen3(), spec);
    ASSERT_TRUE(quantized.has_value()) << quantized.error().ToString();
    EXPECT_EQ(*quantized, *Layout(plain, spec)) << spec;
  }
}

TEST(BlockScales, WeightsSayTheirBlocks) {
  const auto layout = Layout(Qwen3Quantized({{"weight_block_size", {4, 6}}}), "vllm:tp1");
  ASSERT_TRUE(layout.has_value()) << layout.error().ToString();
  const auto& canonical = layout->canonical;
  const auto weight = canonical.Find("model.layers.0.self_attn.q_proj.weight");
  const auto scales = canonical.Find("model.layers.0.self_attn.q_proj.weight_scale_inv");
  const auto norm = canonical.Find("model.norm.weight");
  ASSERT_TRUE(weight && scales && norm);
  EXPECT_EQ(canonical.tensors[*weight].block, (Shape{4, 6}));
  EXPECT_EQ(canonical.WeightOf(*scales), weight);
  EXPECT_TRUE(canonical.tensors[*scales].block.empty() && canonical.tensors[*norm].block.empty());
  EXPECT_FALSE(canonical.WeightOf(*weight) || canonical.WeightOf(*norm));
  ModelLayout other = *layout;
  other.canonical.tensors[*weight].block = {4, 5};  // the same number of blocks
  EXPECT_EQ(Validate(other), OkStatus());
  EXPECT_NE(FingerprintOf(other), FingerprintOf(*layout));
}

TEST(BlockScales, BlocksThatDoNotSuitTheirTensorsAreRefused) {
  const auto layout = Layout(Qwen3(), "vllm:tp2");
  ASSERT_TRUE(layout.has_value());
  const std::string name = "model.layers.0.self_attn.q_proj.weight";
  const uint32_t weight = *layout->canonical.Find(name);
  const uint32_t scales = *layout->canonical.Find(name + "_scale_inv");
  const std::vector<std::function<void(std::vector<TensorSpec>&)>> changes = {
      [&](auto& tensors) { tensors[weight].block = {4}; },
      [&](auto& tensors) {
        tensors[weight].block = {4, 0};
      },
      [&](auto& tensors) {
        tensors[weight].block = {65'537, 4};
      },
      [&](auto& tensors) {
        tensors[weight].block = {4, 10};
      },  // too few scales
      [&](auto& tensors) { tensors[weight].dtype = DType::kBF16; },
      [&](auto& tensors) { tensors[weight].shape.push_back(1); },
      [&](auto& tensors) { tensors[scales].dtype = DType::kBF16; },
      [&](auto& tensors) { tensors[scales].name += "s"; },
  };
  for (size_t i = 0; i < changes.size(); ++i) {
    ModelLayout changed{layout->canonical, {}};
    changes[i](changed.canonical.tensors);
    const Status status = Validate(changed);
    EXPECT_EQ(status.code(), Code::kInvalidArgument) << i;
    EXPECT_EQ(status.tensor(), name) << i << ": " << status.ToString();
  }
}

TEST(BlockScales, WeightsAreQuantizedOnTheWayAndNeverBack) {
  const auto bf16 = Layout(Qwen3(), "megatron:tp2,vocab_pad=none");
  const auto fp8 = Layout(Qwen3(), "vllm:tp2");
  ASSERT_TRUE(bf16.has_value() && fp8.has_value());
  const auto there = plan::BuildPlan(*bf16, *fp8);
  ASSERT_TRUE(there.has_value()) << there.error().ToString();
  EXPECT_EQ(plan::VerifyPlan(*there, *bf16, *fp8), OkStatus());
  const auto back = plan::BuildPlan(*fp8, *bf16);
  ASSERT_FALSE(back.has_value());
  EXPECT_EQ(back.error().reason(), Reason::kDtypeMismatch);
  EXPECT_EQ(back.error().tensor(), "model.layers.0.mlp.down_proj.weight");
  for (const char* words : {"source/0 holds F8_E4M3", "target/0 wants BF16"}) {
    EXPECT_NE(back.error().message().find(words), std::string::npos) << back.error().ToString();
  }
  EXPECT_NE(back.error().remedy().find("not dequantized"), std::string::npos);
}

TEST(BlockScales, AProcessWithOtherDtypesIsRefused) {
  const auto layout = Layout(Qwen3(), "vllm:tp2");
  ASSERT_TRUE(layout.has_value());
  std::vector<ObservedTensor> observed;
  for (const LocalTensor& tensor : layout->ranks[1].tensors) {
    observed.push_back({tensor.name, tensor.dtype, tensor.shape});
  }
  const auto agreed = Reconcile(layout->ranks[1], observed);
  ASSERT_TRUE(agreed.has_value()) << agreed.error().ToString();
  EXPECT_EQ(*agreed, layout->ranks[1]);
  for (ObservedTensor& tensor : observed) {
    if (tensor.dtype == DType::kF8E4M3) tensor.dtype = DType::kBF16;
  }
  const auto refused = Reconcile(layout->ranks[1], observed);
  ASSERT_FALSE(refused.has_value());
  EXPECT_EQ(refused.error().reason(), Reason::kDtypeMismatch);
  EXPECT_NE(refused.error().message().find("expected F8_E4M3, found BF16"), std::string::npos)
      << refused.error().ToString();
}

/// What a loader does with one fp8 weight and its scales at tp 2.
TEST(BlockScales, TracesBindWeightsAndScales) {
  const auto scheme = Layout(Qwen3(), "vllm:tp2");
  ASSERT_TRUE(scheme.has_value());
  const std::string at = "model.layers.1.self_attn.o_proj.weight";
  const std::vector<TraceRow> rows = {
      {at, {{"narrow", {1, 8, 8}}}, at, 0, {10, 8}, {8, 1}, DType::kF8E4M3},
      {at + "_scale_inv",
       {{"narrow", {1, 2, 2}}},
       at + "_scale_inv",
       0,
       {3, 2},
       {2, 1},
       DType::kF32}};
  const auto traced = LayoutFromTrace(scheme->canonical, rows);
  ASSERT_TRUE(traced.has_value()) << traced.error().ToString();
  std::vector<ObservedTensor> observed;
  for (const std::string& name : {at + "_scale_inv", at}) {
    const LocalTensor* expected = Named(scheme->ranks[1], name);
    ASSERT_NE(expected, nullptr) << name;
    EXPECT_EQ(*Named(*traced, name), *expected);
    observed.push_back({name, expected->dtype, expected->shape});
  }
  EXPECT_TRUE(BindTrace(*traced, observed).has_value());
  observed[1].dtype = DType::kBF16;
  const auto refused = BindTrace(*traced, observed);
  ASSERT_FALSE(refused.has_value());
  EXPECT_EQ(refused.error().reason(), Reason::kDtypeMismatch);
  EXPECT_EQ(refused.error().tensor(), at);
}

nlohmann::json Patched(nlohmann::json config, const nlohmann::json& patch) {
  config.merge_patch(patch);
  return config;
}

/// compressed-tensors' config of weights in 8 bits; `weights` is laid over.
nlohmann::json CompressedTensors(const nlohmann::json& weights,
                                 const nlohmann::json& patch = nlohmann::json::object()) {
  nlohmann::json args = {{"num_bits", 8},
                         {"type", "float"},
                         {"symmetric", true},
                         {"dynamic", false},
                         {"group_size", nullptr},
                         {"observer", "minmax"},
                         {"observer_kwargs", nlohmann::json::object()}};
  args.merge_patch(weights);
  return Patched({{"quant_method", "compressed-tensors"},
                  {"format", "float-quantized"},
                  {"quantization_status", "compressed"},
                  {"ignore", {"lm_head"}},
                  {"kv_cache_scheme", nullptr},
                  {"sparsity_config", nlohmann::json::object()},
                  {"config_groups",
                   {{"group_0",
                     {{"targets", {"Linear"}},
                      {"weights", args},
                      {"input_activations", {{"num_bits", 8}, {"dynamic", true}}},
                      {"output_activations", nullptr}}}}}},
                 patch);
}

nlohmann::json With(nlohmann::json quantization) {
  nlohmann::json config = Qwen3();
  config["quantization_config"] = std::move(quantization);
  config["dtype"] = "bfloat16";
  config["hidden_size"] = 64;
  return config;
}

nlohmann::json FourBits(const char* format, const nlohmann::json& weights) {
  nlohmann::json args = {{"num_bits", 4},
                         {"type", "float"},
                         {"strategy", "group"},
                         {"symmetric", true},
                         {"dynamic", false}};
  args.update(weights);
  return {{"quant_method", "compressed-tensors"},
          {"format", format},
          {"ignore", {"re:.*o_proj", "re:.*down_proj"}},  // of other sizes
          {"config_groups", {{"group_0", {{"targets", {"Linear"}}, {"weights", args}}}}}};
}

/// Codes, scales and what else a checkpoint has of q_proj, which is 16 x 64.
TEST(WeightFormats, FourBitsArePackedUnderTheNamesOfTheirDialect) {
  struct Row {
    const char* what;
    nlohmann::json config;
    DType codes;
    Shape stored;
    int64_t packed;
    Shape block;
    ScaleRule rule;
    DType scale;
    Shape scales;
    const char* beside;
    DType beside_dtype;
    Shape beside_shape;
  };
  const Row table[] = {
      {"MXFP4",
       FourBits("mxfp4-pack-quantized", {{"group_size", 32}, {"scale_dtype", "torch.uint8"}}),
       DType::kU8,
       {16, 32},
       2,
       {1, 16},
       ScaleRule::kMxFp4Rounded,
       DType::kU8,
       {16, 2},
       nullptr,
       DType::kU8,
       {}},
      {"NVFP4",
       FourBits("nvfp4-pack-quantized", {{"group_size", 16}, {"strategy", "tensor_group"}}),
       DType::kU8,
       {16, 32},
       2,
       {1, 8},
       ScaleRule::kNvFp4,
       DType::kF8E4M3,
       {16, 4},
       "_global_scale",
       DType::kF32,
       {1}},
      {"INT4",
       FourBits("pack-quantized", {{"group_size", 64}, {"type", "int"}}),
       DType::kI32,
       {16, 8},
       8,
       {1, 8},
       ScaleRule::kInt4,
       DType::kBF16,
       {16, 1},
       "_shape",
       DType::kI64,
       {2}},
  };
  for (const Row& row : table) {
    const auto layout = Layout(With(row.config), "hf");
    ASSERT_TRUE(layout.has_value()) << row.what << ": " << layout.error().ToString();
    EXPECT_EQ(Validate(*layout), OkStatus()) << row.what;
    const std::string name = "model.layers.1.self_attn.q_proj.weight";
    EXPECT_FALSE(layout->canonical.Find(name).has_value()) << row.what;
    const auto packed = layout->canonical.Find(name + "_packed");
    ASSERT_TRUE(packed.has_value()) << row.what;
    const TensorSpec& weight = layout->canonical.tensors[*packed];
    EXPECT_EQ(weight, (TensorSpec{name + "_packed", row.codes, row.stored, row.block, row.rule,
                                  row.packed}))
        << row.what;
    const LocalTensor* scales = Named(layout->ranks[0], name + "_scale");
    ASSERT_NE(scales, nullptr) << row.what;
    EXPECT_EQ(scales->dtype, row.scale) << row.what;
    EXPECT_EQ(scales->shape, row.scales) << row.what;
    if (row.beside == nullptr) continue;
    const LocalTensor* beside = Named(layout->ranks[0], name + row.beside);
    ASSERT_NE(beside, nullptr) << row.what;
    EXPECT_EQ(beside->dtype, row.beside_dtype) << row.what;
    EXPECT_EQ(beside->shape, row.beside_shape) << row.what;
  }
  const auto cut =
      Layout(With(FourBits("pack-quantized", {{"group_size", 24}, {"type", "int"}})), "hf");
  ASSERT_FALSE(cut.has_value());
  EXPECT_EQ(cut.error().reason(), Reason::kShapeMismatch);
  EXPECT_NE(cut.error().ToString().find("48 or 72"), std::string::npos) << cut.error().ToString();
}

nlohmann::json Modelopt(const char* algorithm, const nlohmann::json& patch = {}) {
  return Patched({{"quant_method", "modelopt"},
                  {"quant_algo", algorithm},
                  {"ignore", {"*o_proj", "*down_proj"}}},  // of other sizes
                 patch.is_null() ? nlohmann::json::object() : patch);
}

/// As modelopt's exporter writes them of a weight: q_proj is 16 x 64.
TEST(WeightFormats, ModeloptsNvFp4IsUnderTheWeightsOwnName) {
  for (const char* algorithm : {"NVFP4", "W4A16_NVFP4"}) {
    const auto layout = Layout(With(Modelopt(algorithm)), "hf");
    ASSERT_TRUE(layout.has_value()) << layout.error().ToString();
    EXPECT_EQ(Validate(*layout), OkStatus());
    const std::string module = "model.layers.1.self_attn.q_proj.";
    const auto codes = layout->canonical.Find(module + "weight");
    ASSERT_TRUE(codes.has_value());
    EXPECT_EQ(layout->canonical.tensors[*codes],
              (TensorSpec{
                  module + "weight", DType::kU8, {16, 32}, {1, 8}, ScaleRule::kNvFp4Modelopt, 2}));
    const std::vector<std::tuple<std::string, DType, Shape>> beside = {
        {"weight_scale", DType::kF8E4M3, {16, 4}},
        {"weight_scale_2", DType::kF32, {}},
        {"input_scale", DType::kF32, {}}};
    for (const auto& [name, dtype, shape] : beside) {
      const LocalTensor* tensor = Named(layout->ranks[0], module + name);
      if (name == "input_scale" && algorithm != std::string("NVFP4")) {
        EXPECT_EQ(tensor, nullptr);
        continue;
      }
      ASSERT_NE(tensor, nullptr) << name;
      EXPECT_EQ(tensor->dtype, dtype) << name;
      EXPECT_EQ(tensor->shape, shape) << name;
    }
  }
}

/// Names of what is calibrated beside q, k and v of a layer, with dtypes and shapes.
TEST(WeightFormats, CalibratedScalesAreListedUnderTheNamesOfTheirDialect) {
  const nlohmann::json fp8 = {
      {"num_bits", 8}, {"type", "float"}, {"strategy", "tensor"}, {"dynamic", false}};
  const nlohmann::json kv = {{"num_bits", 8}, {"type", "float"}, {"dynamic", false}};
  const nlohmann::json local = {
      {"num_bits", 4}, {"type", "float"}, {"strategy", "tensor_group"}, {"dynamic", "local"}};
  const auto of_inputs = [](const nlohmann::json& inputs) {
    return nlohmann::json{{"config_groups", {{"group_0", {{"input_activations", inputs}}}}}};
  };
  const nlohmann::json tensor = {{"strategy", "tensor"}};
  const std::vector<std::tuple<nlohmann::json, std::set<std::string>, DType, Shape>> table = {
      {Modelopt("FP8"), {"q.input_scale", "k.input_scale", "v.input_scale"}, DType::kF32, {}},
      {Modelopt("FP8", {{"kv_cache_scheme", kv}, {"ignore", {"*"}}}),
       {"k.k_scale", "v.v_scale"},
       DType::kF32,
       {}},
      {Modelopt("W4A16_NVFP4"), {}, DType::kF32, {}},
      {Modelopt("FP8_PER_CHANNEL_PER_TOKEN"), {}, DType::kF32, {}},
      {CompressedTensors(tensor, of_inputs(fp8)),
       {"q.input_scale", "k.input_scale", "v.input_scale"},
       DType::kBF16,
       {1}},
      {CompressedTensors(tensor, {{"kv_cache_scheme", fp8}}),
       {"k_scale", "v_scale"},
       DType::kBF16,
       {1}},
      {Patched(FourBits("nvfp4-pack-quantized", {{"group_size", 16}, {"strategy", "tensor_group"}}),
               of_inputs(local)),
       {"q.input_global_scale", "k.input_global_scale", "v.input_global_scale"},
       DType::kF32,
       {1}},
  };
  for (const auto& [config, names, dtype, shape] : table) {
    const auto layout = Layout(With(config), "hf");
    ASSERT_TRUE(layout.has_value()) << config << layout.error().ToString();
    const std::string attention = "model.layers.1.self_attn.";
    std::set<std::string> found;
    for (const LocalTensor& local_tensor : layout->ranks[0].tensors) {
      if (!IsCalibrated(local_tensor.name) || !local_tensor.name.starts_with(attention)) continue;
      if (local_tensor.name.find("o_proj") != std::string::npos) continue;
      std::string name = local_tensor.name.substr(attention.size());
      if (const size_t at = name.find("_proj"); at != std::string::npos) name.erase(at, 5);
      found.insert(name);
      EXPECT_EQ(local_tensor.dtype, dtype) << name;
      EXPECT_EQ(local_tensor.shape, shape) << name;
    }
    EXPECT_EQ(found, names) << config;
  }
}

/// The words of the refusal are those that a user adds, and then the plan is there.
TEST(WeightFormats, CalibratedScalesAreLeftOutByTheWordsOfTheRefusal) {
  nlohmann::json plain = Qwen3({{"hidden_size", 64}, {"dtype", "bfloat16"}});
  plain.erase("quantization_config");
  const nlohmann::json kv = {{"num_bits", 8}, {"type", "float"}, {"dynamic", false}};
  const nlohmann::json config = With(Modelopt("FP8", {{"kv_cache_scheme", kv}}));
  const auto source = Layout(plain, "megatron:tp2,vocab_pad=none");
  const auto target = Layout(config, "hf");
  ASSERT_TRUE(source.has_value() && target.has_value());
  const auto refused = plan::BuildPlan(*source, *target);
  ASSERT_FALSE(refused.has_value());
  EXPECT_EQ(refused.error().reason(), Reason::kTensorMissing);
  const std::string words = "hf:skip=*.input_scale|*.k_scale|*.v_scale";
  EXPECT_NE(refused.error().remedy().find(words + ";"), std::string::npos)
      << refused.error().ToString();
  const auto without = Layout(config, words);
  ASSERT_TRUE(without.has_value()) << without.error().ToString();
  const auto plan = plan::BuildPlan(*source, *without);
  ASSERT_TRUE(plan.has_value()) << plan.error().ToString();
  EXPECT_EQ(plan::VerifyPlan(*plan, *source, *without), OkStatus());
  // A release that has them sends them.
  EXPECT_TRUE(plan::BuildPlan(*target, *target).has_value());
}

/// What each dialect says, as its engines read it; q_proj is 16 x 64.
TEST(WeightFormats, EachDialectGivesItsGroupsNamesAndScales) {
  struct Row {
    const char* what;
    nlohmann::json config;
    Shape block;
    ScaleRule rule;
    const char* suffix;
    DType scale;
    Shape stored;
  };
  const nlohmann::json fp8 = Qwen3()["quantization_config"];
  const nlohmann::json groups = {
      {"strategy", "group"}, {"group_size", 32}, {"scale_dtype", "torch.uint8"}};
  const std::vector<Row> table = {
      {"fp8", fp8, {4, 4}, ScaleRule::kQuotient, "_scale_inv", DType::kF32, {4, 16}},
      {"ue8m0",
       Patched(fp8, {{"scale_fmt", "ue8m0"}}),
       {4, 4},
       ScaleRule::kPowerOfTwo,
       "_scale_inv",
       DType::kF32,
       {4, 16}},
      {"mxfp8",
       Patched(fp8, {{"quant_method", "mxfp8"}, {"weight_block_size", {1, 32}}}),
       {1, 32},
       ScaleRule::kPowerOfTwo,
       "_scale_inv",
       DType::kU8,
       {16, 2}},
      {"channels",
       CompressedTensors({{"strategy", "channel"}}),
       {1, 64},
       ScaleRule::kOwnKind,
       "_scale",
       DType::kBF16,
       {16, 1}},
      {"a tensor",
       CompressedTensors({{"strategy", "tensor"}}),
       {16, 64},
       ScaleRule::kOwnKind,
       "_scale",
       DType::kBF16,
       {1}},
      {"blocks",
       CompressedTensors({{"strategy", "block"}, {"block_structure", {8, 16}}}),
       {8, 16},
       ScaleRule::kOwnKind,
       "_scale",
       DType::kBF16,
       {2, 4}},
      {"compressed-tensors' MXFP8",
       CompressedTensors(groups),
       {1, 32},
       ScaleRule::kPowerOfTwoRounded,
       "_scale",
       DType::kU8,
       {16, 2}},
      {"modelopt's MXFP8",
       {{"quant_method", "modelopt"}, {"quant_algo", "MXFP8"}},
       {1, 32},
       ScaleRule::kPowerOfTwo,
       "_scale",
       DType::kU8,
       {16, 2}},
      {"modelopt's FP8",
       Modelopt("FP8"),
       {16, 64},
       ScaleRule::kOwnQuotient,
       "_scale",
       DType::kF32,
       {}},
      {"modelopt's FP8 of channels",
       Modelopt("FP8_PER_CHANNEL_PER_TOKEN"),
       {1, 64},
       ScaleRule::kQuotient,
       "_scale",
       DType::kF32,
       {16}},
  };
  for (const Row& row : table) {
    const auto layout = Layout(With(row.config), "hf");
    ASSERT_TRUE(layout.has_value()) << row.what << ": " << layout.error().ToString();
    EXPECT_EQ(Validate(*layout), OkStatus()) << row.what;
    const std::string name = "model.layers.1.self_attn.q_proj.weight";
    const TensorSpec& weight = layout->canonical.tensors[*layout->canonical.Find(name)];
    EXPECT_EQ(weight.dtype, DType::kF8E4M3) << row.what;
    EXPECT_EQ(weight.block, row.block) << row.what;
    EXPECT_EQ(weight.scale_rule, row.rule) << row.what;
    const LocalTensor* scales = Named(layout->ranks[0], name + row.suffix);
    ASSERT_NE(scales, nullptr) << row.what;
    EXPECT_EQ(scales->dtype, row.scale) << row.what;
    EXPECT_EQ(scales->shape, row.stored) << row.what;
    EXPECT_EQ(Named(layout->ranks[0], "model.embed_tokens.weight_scale"), nullptr) << row.what;
  }
}

TEST(WeightFormats, WhatIsUnderstoodAndNotMadeIsRefusedByName) {
  const nlohmann::json channel = {{"strategy", "channel"}};
  const nlohmann::json group = {{"config_groups", {{"group_1", nlohmann::json::object()}}}};
  const auto of_group = [](const nlohmann::json& patch) {
    return nlohmann::json{{"config_groups", {{"group_0", patch}}}};
  };
  const std::vector<std::pair<nlohmann::json, const char*>> table = {
      {CompressedTensors({{"num_bits", 4}, {"type", "int"}, {"strategy", "group"}}), "4 bits"},
      {CompressedTensors({{"num_bits", 4}, {"strategy", "tensor_group"}}), "4 bits, type float"},
      {CompressedTensors({{"num_bits", 3}, {"type", "int"}}), "3 bits"},
      {FourBits("pack-quantized", {{"type", "int"}, {"group_size", 12}}), "group_size 12"},
      {FourBits("pack-quantized", {{"type", "int"}, {"group_size", 512}}), "up to 256"},
      {FourBits("pack-quantized", {{"type", "float"}, {"group_size", 32}}), "pack-quantized"},
      {FourBits("nvfp4-pack-quantized", {{"strategy", "tensor_group"}, {"group_size", 32}}),
       "16 is described"},
      {FourBits("nvfp4-pack-quantized", {{"strategy", "group"}, {"group_size", 16}}), "strategy"},
      {FourBits("mxfp4-pack-quantized", {{"group_size", 16}}), "32 is described"},
      {FourBits("mxfp4-pack-quantized", {{"group_size", 32}, {"symmetric", false}}), "symmetric"},
      {FourBits("mxfp4-pack-quantized", {{"group_size", 32}, {"scale_dtype", "torch.bfloat16"}}),
       "scale_dtype"},
      {FourBits("pack-quantized", {{"type", "int"}, {"group_size", 32}, {"actorder", "group"}}),
       "actorder"},
      {CompressedTensors({{"strategy", "channel"}, {"symmetric", false}}), "symmetric"},
      {CompressedTensors({{"strategy", "channel"}, {"dynamic", true}}), "dynamic"},
      {CompressedTensors({{"strategy", "channel"}, {"actorder", "group"}}), "actorder"},
      {CompressedTensors({{"strategy", "group"}, {"group_size", 32}}), "groups of 32"},
      {CompressedTensors({{"strategy", "token"}}), "strategy"},
      {CompressedTensors(channel, of_group({{"input_activations", {{"dynamic", false}}}})),
       "input_activations"},
      {CompressedTensors(channel, of_group({{"targets", {"re:.*experts.*"}}})), "targets"},
      {CompressedTensors(channel, group), "more than one group"},
      {CompressedTensors(channel, {{"kv_cache_scheme", {{"num_bits", 8}}}}), "kv_cache_scheme"},
      {CompressedTensors(channel, {{"sparsity_config", {{"format", "sparse"}}}}), "sparsity"},
      {CompressedTensors(channel, {{"a_new_field", 1}}), "a_new_field"},
      {CompressedTensors(channel, {{"format", "dense"}}), "dense"},
      {CompressedTensors(channel, {{"format", "pack-quantized"}}), "pack-quantized"},
      {CompressedTensors(channel, {{"format", "mixed-precision"}}), "mixed-precision"},
      {CompressedTensors(channel, of_group({{"format", "pack-quantized"}})), "pack-quantized"},
      {{{"quant_method", "modelopt"}, {"quant_algo", "MXFP8"}, {"exclude_modules", {"lm_head"}}},
       "exclude_modules"},
      {Patched(Qwen3()["quantization_config"],
               {{"modules_to_not_convert", {"lm_head"}}, {"ignored_layers", {"mlp.down_proj"}}}),
       "of which a loader reads one"},
      {Modelopt("FP8_PB_WO"), "FP8_PB_WO"},
      {Modelopt("MIXED_PRECISION"), "MIXED_PRECISION"},
      {Modelopt("FP8", {{"kv_cache_scheme", "NVFP4"}}), "kv_cache_scheme \"NVFP4\""},
      {Modelopt("FP8", {{"exclude_modules", {"lm_head"}}}), "exclude_modules"},
      {Modelopt("NVFP4", {{"group_size", 32}}), "group_size 32"},
      {Modelopt("NVFP4", of_group({{"weights", {{"num_bits", 8}}}})),
       "config_groups.weights.num_bits 8"},
      {Modelopt("W4A16_NVFP4", of_group({{"input_activations", {{"num_bits", 4}}}})),
       "config_groups.input_activations"},
      {Modelopt("NVFP4", of_group({{"pre_quant_scale", true}})), "pre_quant_scale"},
      {CompressedTensors(channel, of_group({{"output_activations", {{"dynamic", true}}}})),
       "output_activations"},
      {CompressedTensors({{"strategy", "block"}, {"block_structure", {8, 16}}},
                         of_group({{"input_activations", {{"dynamic", "local"}}}})),
       "local"},
      {{{"quant_method", "mxfp4"}}, "mxfp4"},
      {{{"quant_method", "torchao"}, {"quant_type", "float8"}}, "torchao\", quant_type \"float8\""},
      {{{"quant_method", "torchao"},
        {"quant_type", {{"default", {{"_type", "Float8WeightOnlyConfig"}, {"_version", 2}}}}}},
       "quant_type \"Float8WeightOnlyConfig\": its weights are stored in parts"},
      {{{"quant_method", "mxfp8"}, {"weight_block_size", {1, 16}}}, "weight_block_size"},
  };
  for (const auto& [config, word] : table) {
    const auto layout = Layout(With(config), "hf");
    ASSERT_FALSE(layout.has_value()) << word;
    EXPECT_EQ(layout.error().reason(), Reason::kInvalidRequest) << word;
    EXPECT_NE(layout.error().ToString().find(word), std::string::npos)
        << word << ": " << layout.error().ToString();
  }
  for (const nlohmann::json& config :
       {CompressedTensors(channel, {{"format", "naive-quantized"}}),
        CompressedTensors(channel, Patched({{"format", "mixed-precision"}},
                                           of_group({{"format", "float-quantized"}}))),
        CompressedTensors(channel, {{"format", nullptr}}),
        Patched(Qwen3()["quantization_config"],
                {{"modules_to_not_convert", {"lm_head"}}, {"ignored_layers", {"lm_head"}}})}) {
    const auto layout = Layout(With(config), "hf");
    EXPECT_TRUE(layout.has_value()) << config << layout.error().ToString();
  }
  for (const char* spec : {"vllm:tp2", "sglang", "fsdp:dp2"}) {
    const auto layout = Layout(With(CompressedTensors(channel)), spec);
    ASSERT_FALSE(layout.has_value()) << spec;
    EXPECT_NE(layout.error().message().find("fp8-channel"), std::string::npos);
  }
  EXPECT_TRUE(
      Layout(With(Patched(Qwen3()["quantization_config"], {{"scale_fmt", "ue8m0"}})), "vllm:tp2")
          .has_value());
}

/// Names of modules of the two layers whose weights keep the model's dtype.
std::set<std::string> Kept(const nlohmann::json& config) {
  const auto layout = Layout(config, "hf");
  EXPECT_TRUE(layout.has_value()) << layout.error().ToString();
  std::set<std::string> kept;
  for (const TensorSpec& tensor : layout->canonical.tensors) {
    if (tensor.name.ends_with("_proj.weight") && tensor.dtype == DType::kBF16) {
      kept.insert(tensor.name.substr(0, tensor.name.size() - 7));
    }
  }
  return kept;
}

TEST(WeightFormats, IgnoreListsAreReadAsTheirLoadersDo) {
  const std::string at = "model.layers.1.self_attn.";
  const std::set<std::string> attention = {at + "q_proj", at + "k_proj", at + "v_proj",
                                           at + "o_proj"};
  const auto tensors = [](std::vector<std::string> ignore) {
    return With(CompressedTensors({{"strategy", "channel"}}, {{"ignore", std::move(ignore)}}));
  };
  // Names of modules, whole, and re.match, which begins where the name does and ends anywhere.
  EXPECT_EQ(Kept(tensors({at + "q_proj"})), (std::set<std::string>{at + "q_proj"}));
  EXPECT_TRUE(Kept(tensors({"model.layers.1.self_attn", "q_proj", "model.layers.1"})).empty());
  EXPECT_EQ(Kept(tensors({"re:.*layers\\.1\\.self_attn"})), attention);
  EXPECT_EQ(Kept(tensors({"re:model\\.layers\\.1\\.(self_attn|nothing)\\..*_proj$"})), attention);
  EXPECT_TRUE(Kept(tensors({"re:self_attn", "re:.*self_attn$"})).empty());
  // modelopt: globs, and what lies in a module that is named.
  const auto modelopt = [](std::vector<std::string> ignore) {
    return With({{"quant_method", "modelopt"}, {"quant_algo", "MXFP8"}, {"ignore", ignore}});
  };
  EXPECT_EQ(Kept(modelopt({"model.layers.1.self_attn*"})), attention);
  EXPECT_EQ(Kept(modelopt({"model.layers.1.self_attn"})), attention);
  EXPECT_EQ(Kept(modelopt({"*layers.1*_attn.?_proj"})), attention);
  EXPECT_TRUE(Kept(modelopt({"self_attn", "layers.1.*"})).empty());

  for (const auto& [config, entry] : std::vector<std::pair<nlohmann::json, std::string>>{
           {tensors({"lm_head", "model.layers.1.self_attn"}), "model.layers.1.self_attn"},
           {tensors({"lm_head", "re:.*gate$"}), "re:.*gate$"},
           {modelopt({"lm_head", "*router*"}), "*router*"}}) {
    const auto notes = NotesOfConfig(config.dump());
    ASSERT_TRUE(notes.has_value()) << notes.error().ToString();
    ASSERT_EQ(notes->size(), 1u) << entry;
    EXPECT_NE(notes->front().find("\"" + entry + "\""), std::string::npos) << notes->front();
  }
  for (const char* bad : {"re:(?!lm_head).*", "re:(", "re:(a*)*b", "re:.*.*.*.*.*x", "re:a{2}",
                          "re:\\Za", "a b", "mlp.(gate)"}) {
    const auto layout = Layout(tensors({bad}), "hf");
    ASSERT_FALSE(layout.has_value()) << bad;
    EXPECT_NE(layout.error().message().find(bad), std::string::npos) << layout.error().ToString();
  }
}

/// A trainer cut by tp holds parts of rows, which the engine gathers; one that is not quantizes.
TEST(WeightFormats, TrainersReachEnginesLoadersWithProof) {
  nlohmann::json plain = Qwen3({{"hidden_size", 64}, {"dtype", "bfloat16"}});
  plain.erase("quantization_config");
  const nlohmann::json fp8 = Qwen3()["quantization_config"];
  const nlohmann::json mxfp8 =
      Patched(fp8, {{"quant_method", "mxfp8"}, {"weight_block_size", {1, 32}}});
  for (const nlohmann::json& config :
       {CompressedTensors({{"strategy", "channel"}}), CompressedTensors({{"strategy", "tensor"}}),
        mxfp8, Patched(fp8, {{"scale_fmt", "ue8m0"}}), Modelopt("FP8"),
        Modelopt("FP8_PER_CHANNEL_PER_TOKEN")}) {
    const bool calibrated = config.value("quant_algo", "") == "FP8";
    const auto target = Layout(With(config), calibrated ? "hf:skip=*.input_scale" : "hf");
    ASSERT_TRUE(target.has_value()) << target.error().ToString();
    for (const char* spec : {"megatron:tp2,vocab_pad=none", "fsdp:dp3", "hf"}) {
      const auto source = Layout(plain, spec);
      ASSERT_TRUE(source.has_value()) << source.error().ToString();
      const auto plan = plan::BuildPlan(*source, *target);
      ASSERT_TRUE(plan.has_value()) << plan.error().ToString();
      EXPECT_EQ(plan::VerifyPlan(*plan, *source, *target), OkStatus()) << spec << config;
      plan::TransferPlan wrong = *plan;
      bool changed = false;
      for (plan::Stream& stream : wrong.streams) {
        for (plan::CopyOp& op : stream.ops) {
          if (changed || op.transform == plan::Transform::kElements) continue;
          const bool quotient = op.rule == ScaleRule::kQuotient;
          op.rule = quotient ? ScaleRule::kOwnQuotient : ScaleRule::kQuotient;
          changed = true;
        }
      }
      if (changed) {
        EXPECT_NE(plan::VerifyPlan(wrong, *source, *target), OkStatus()) << spec << config;
      }
    }
  }
  // fp32 has other quotients than the bf16 that compressed-tensors would have divided.
  plain["dtype"] = "float32";
  const auto source = Layout(plain, "hf");
  const auto target = Layout(With(CompressedTensors({{"strategy", "channel"}})), "hf");
  ASSERT_TRUE(source.has_value() && target.has_value());
  const auto plan = plan::BuildPlan(*source, *target);
  ASSERT_FALSE(plan.has_value());
  EXPECT_EQ(plan.error().reason(), Reason::kDtypeMismatch);
}

TEST(WeightFormats, OtherRulesForScalesAreNeverMixed) {
  const nlohmann::json fp8 = Qwen3()["quantization_config"];
  const auto quotients = Layout(With(fp8), "hf");
  const auto powers = Layout(With(Patched(fp8, {{"scale_fmt", "ue8m0"}})), "vllm:tp2");
  ASSERT_TRUE(quotients.has_value() && powers.has_value());
  EXPECT_NE(FingerprintOf(quotients->canonical), FingerprintOf(powers->canonical));
  const auto plan = plan::BuildPlan(*quotients, *powers);
  ASSERT_FALSE(plan.has_value());
  EXPECT_EQ(plan.error().reason(), Reason::kDtypeMismatch);
  EXPECT_NE(plan.error().remedy().find("scale_fmt"), std::string::npos);
}

TEST(WeightFormats, WhatConvertWritesIsReadAsTheSameFormat) {
  for (const char* name :
       {"fp8-block", "fp8-block-ue8m0", "mxfp8", "mxfp8-modelopt", "fp8-modelopt",
        "fp8-channel-modelopt", "nvfp4-modelopt", "nvfp4-w4a16-modelopt", "fp8-tensor",
        "fp8-channel", "fp8-block-compressed-tensors", "mxfp8-compressed-tensors"}) {
    const auto config = QuantizationConfigOf(name, {"lm_head"});
    ASSERT_TRUE(config.has_value()) << name;
    const auto read = ReadWeightFormat({{"quantization_config", *config}});
    ASSERT_TRUE(read.has_value() && read->has_value()) << name << ": " << read.error().ToString();
    EXPECT_EQ((*read)->name, name);
    EXPECT_TRUE((*read)->Skips("lm_head.weight")) << name;
  }
  const auto unknown = QuantizationConfigOf("int3", {});
  ASSERT_FALSE(unknown.has_value());
  EXPECT_NE(unknown.error().remedy().find("mxfp8-modelopt"), std::string::npos);
}

}  // namespace
}  // namespace weightwire::layout
