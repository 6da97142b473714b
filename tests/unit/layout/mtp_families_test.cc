// MTP layers whose names begin with "mtp.": what Megatron-Bridge 0.6.2 maps (qwen3_next_bridge.py,
// qwen35_bridge.py, nemotron_h_bridge.py) and vLLM 0.32.0's draft models load (qwen3_next_mtp.py,
// qwen3_5_mtp.py, nemotron_h_mtp.py), name by name.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>

#include "server/layout/scheme.h"

namespace weightwire::layout {
namespace {

/// Sizes that all of them share; `more` follows.
std::string Config(const std::string& type, const std::string& more) {
  return R"({"model_type":")" + type +
         R"(","hidden_size":16,"num_attention_heads":4,"num_key_value_heads":2,"head_dim":8,
            "vocab_size":32,"num_hidden_layers":2,"dtype":"bfloat16","tie_word_embeddings":false)" +
         more + "}";
}
constexpr const char* kDelta =
    R"(,"layer_types":["linear_attention","full_attention"],"linear_num_key_heads":2,
       "linear_num_value_heads":4,"linear_key_head_dim":4,"linear_value_head_dim":6)";
constexpr const char* kExperts =
    R"(,"num_experts":2,"moe_intermediate_size":6,"shared_expert_intermediate_size":10)";

std::string Next(const std::string& more = "") {
  return Config("qwen3_next", std::string(kDelta) + kExperts + R"(,"intermediate_size":12)" + more);
}
std::string Dense(const std::string& more = "") {
  return Config("qwen3_5_text", kDelta + std::string(R"(,"intermediate_size":12)") + more);
}
std::string Moe(const std::string& more = R"(,"mtp_num_hidden_layers":1)") {
  return Config("qwen3_5_moe_text", std::string(kDelta) + kExperts + more);
}
/// The released form: a wrapper, whose decoder has its experts fused.
std::string Wrapped() {
  return R"({"model_type":"qwen3_5_moe","text_config":)" + Moe() +
         R"(,"vision_config":{"depth":1,"hidden_size":8,"intermediate_size":12,"num_heads":2,
            "in_channels":3,"patch_size":2,"temporal_patch_size":2,"spatial_merge_size":2,
            "out_hidden_size":16,"num_position_embeddings":16}})";
}
std::string Nemotron(const std::string& mtp = R"(,"mtp_hybrid_override_pattern":"*E")") {
  return Config("nemotron_h",
                R"(,"hybrid_override_pattern":"M*","intermediate_size":12,"mamba_num_heads":4,
                   "mamba_head_dim":4,"ssm_state_size":6,"n_groups":2,"n_routed_experts":2,
                   "moe_intermediate_size":6,"moe_shared_expert_intermediate_size":10,
                   "moe_latent_size":4,"num_nextn_predict_layers":1)" +
                    mtp);
}

Result<ModelLayout> Derived(const std::string& config, const std::string& spec) {
  return LayoutFromScheme(config, *ParseParallelSpec(spec));
}

using Shapes = std::map<std::string, Shape>;
/// The canonical tensors of MTP layers.
Shapes MtpOf(const std::string& config, const std::string& spec) {
  const auto layout = Derived(config, spec);
  if (!layout) return {{layout.error().ToString(), {}}};
  Shapes shapes;
  for (const TensorSpec& tensor : layout->canonical.tensors) {
    if (tensor.name.starts_with("mtp.")) shapes[tensor.name] = tensor.shape;
  }
  return shapes;
}

Shapes Joined(Shapes first, const Shapes& second) {
  first.insert(second.begin(), second.end());
  return first;
}
const Shapes kShared = {{"mtp.fc.weight", {16, 32}},
                        {"mtp.pre_fc_norm_embedding.weight", {16}},
                        {"mtp.pre_fc_norm_hidden.weight", {16}},
                        {"mtp.norm.weight", {16}},
                        {"mtp.layers.0.input_layernorm.weight", {16}},
                        {"mtp.layers.0.post_attention_layernorm.weight", {16}},
                        {"mtp.layers.0.self_attn.q_proj.weight", {64, 16}},
                        {"mtp.layers.0.self_attn.k_proj.weight", {16, 16}},
                        {"mtp.layers.0.self_attn.v_proj.weight", {16, 16}},
                        {"mtp.layers.0.self_attn.o_proj.weight", {16, 32}},
                        {"mtp.layers.0.self_attn.q_norm.weight", {8}},
                        {"mtp.layers.0.self_attn.k_norm.weight", {8}}};
const Shapes kRouted = {{"mtp.layers.0.mlp.gate.weight", {2, 16}},
                        {"mtp.layers.0.mlp.shared_expert.gate_proj.weight", {10, 16}},
                        {"mtp.layers.0.mlp.shared_expert.up_proj.weight", {10, 16}},
                        {"mtp.layers.0.mlp.shared_expert.down_proj.weight", {16, 10}},
                        {"mtp.layers.0.mlp.shared_expert_gate.weight", {1, 16}}};
const Shapes kSingle = {{"mtp.layers.0.mlp.experts.0.gate_proj.weight", {6, 16}},
                        {"mtp.layers.0.mlp.experts.0.up_proj.weight", {6, 16}},
                        {"mtp.layers.0.mlp.experts.0.down_proj.weight", {16, 6}},
                        {"mtp.layers.0.mlp.experts.1.gate_proj.weight", {6, 16}},
                        {"mtp.layers.0.mlp.experts.1.up_proj.weight", {6, 16}},
                        {"mtp.layers.0.mlp.experts.1.down_proj.weight", {16, 6}}};
const Shapes kFused = {{"mtp.layers.0.mlp.experts.gate_up_proj", {2, 12, 16}},
                       {"mtp.layers.0.mlp.experts.down_proj", {2, 16, 6}}};
const Shapes kDenseMlp = {{"mtp.layers.0.mlp.gate_proj.weight", {12, 16}},
                          {"mtp.layers.0.mlp.up_proj.weight", {12, 16}},
                          {"mtp.layers.0.mlp.down_proj.weight", {16, 12}}};
const Shapes kNemotron = {{"mtp.layers.0.enorm.weight", {16}},
                          {"mtp.layers.0.hnorm.weight", {16}},
                          {"mtp.layers.0.eh_proj.weight", {16, 32}},
                          {"mtp.layers.0.norm.weight", {16}},
                          {"mtp.layers.0.mixer.q_proj.weight", {32, 16}},
                          {"mtp.layers.0.mixer.k_proj.weight", {16, 16}},
                          {"mtp.layers.0.mixer.v_proj.weight", {16, 16}},
                          {"mtp.layers.0.mixer.o_proj.weight", {16, 32}},
                          {"mtp.layers.1.norm.weight", {16}},
                          {"mtp.layers.1.final_layernorm.weight", {16}},
                          {"mtp.layers.1.mixer.gate.weight", {2, 16}},
                          {"mtp.layers.1.mixer.gate.e_score_correction_bias", {2}},
                          {"mtp.layers.1.mixer.fc1_latent_proj.weight", {4, 16}},
                          {"mtp.layers.1.mixer.fc2_latent_proj.weight", {16, 4}},
                          {"mtp.layers.1.mixer.experts.0.up_proj.weight", {6, 4}},
                          {"mtp.layers.1.mixer.experts.0.down_proj.weight", {4, 6}},
                          {"mtp.layers.1.mixer.experts.1.up_proj.weight", {6, 4}},
                          {"mtp.layers.1.mixer.experts.1.down_proj.weight", {4, 6}},
                          {"mtp.layers.1.mixer.shared_experts.up_proj.weight", {10, 16}},
                          {"mtp.layers.1.mixer.shared_experts.down_proj.weight", {16, 10}}};

TEST(MtpFamilies, HaveTheNamesThatEnginesLoad) {
  EXPECT_EQ(MtpOf(Next(), "hf:mtp=single"), Joined(Joined(kShared, kRouted), kSingle));
  EXPECT_EQ(MtpOf(Dense(), "hf:mtp=single"), Joined(kShared, kDenseMlp));
  EXPECT_EQ(MtpOf(Nemotron(), "hf:mtp=single"), kNemotron);
  EXPECT_EQ(MtpOf(Nemotron(R"(,"mtp_layers_block_type":["attention","moe"])"), "hf:mtp=single"),
            kNemotron);
}

TEST(MtpFamilies, HaveExpertsAsTheSpecSaysWhateverTheDecoderHas) {
  for (const std::string& config : {Moe(), Wrapped()}) {
    EXPECT_EQ(MtpOf(config, "hf:mtp=single"), Joined(Joined(kShared, kRouted), kSingle));
    EXPECT_EQ(MtpOf(config, "hf:mtp=fused"), Joined(Joined(kShared, kRouted), kFused));
  }
}

/// As transformers has them and most trainers: config.json alone makes no tensor.
TEST(MtpFamilies, AreWithoutThemUnlessTheSpecSaysSo) {
  for (const std::string& config : {Next(), Dense(), Moe(), Wrapped(), Nemotron()}) {
    for (const char* spec : {"hf", "hf:mtp=none", "fsdp:dp2", "vllm:tp2,skip=*.A_log"}) {
      EXPECT_EQ(MtpOf(config, spec), Shapes{}) << config << spec;
    }
  }
}

TEST(MtpFamilies, AreInNoTargetEngineAndInItsCanonicalSpace) {
  const auto layout = Derived(Wrapped(), "vllm:tp2,mtp=fused");
  ASSERT_TRUE(layout.has_value()) << layout.error().ToString();
  EXPECT_TRUE(layout->canonical.Find("mtp.layers.0.mlp.experts.gate_up_proj").has_value());
  for (const LocalTensor& tensor : layout->ranks[1].tensors) {
    for (const Piece& piece : tensor.pieces) {
      EXPECT_FALSE(layout->canonical.tensors[piece.tensor].name.starts_with("mtp.")) << tensor.name;
    }
  }
}

/// Megatron's names of a rank's MTP layers, each with the checkpoint's names of what it holds.
std::map<std::string, std::set<std::string>> Mapped(const std::string& config,
                                                    const std::string& spec) {
  const auto layout = Derived(config, spec);
  if (!layout) return {{layout.error().ToString(), {}}};
  std::map<std::string, std::set<std::string>> mapped;
  for (const LocalTensor& tensor : layout->ranks[0].tensors) {
    if (!tensor.name.starts_with("mtp.")) continue;
    for (const Piece& piece : tensor.pieces) {
      mapped[tensor.name].insert(layout->canonical.tensors[piece.tensor].name);
    }
  }
  return mapped;
}

TEST(MtpFamilies, AreMappedAsMegatronBridgeMapsThem) {
  const std::string at = "mtp.layers.0.", in = at + "transformer_layer.", hf = "mtp.layers.0.";
  const std::string qkv = in + "self_attention.linear_qkv.", mlp = in + "mlp.";
  std::map<std::string, std::set<std::string>> want = {
      {at + "eh_proj.weight", {"mtp.fc.weight"}},
      {at + "enorm.weight", {"mtp.pre_fc_norm_embedding.weight"}},
      {at + "hnorm.weight", {"mtp.pre_fc_norm_hidden.weight"}},
      {at + "final_layernorm.weight", {"mtp.norm.weight"}},
      {qkv + "layer_norm_weight", {hf + "input_layernorm.weight"}},
      {qkv + "weight",
       {hf + "self_attn.q_proj.weight", hf + "self_attn.k_proj.weight",
        hf + "self_attn.v_proj.weight"}},
      {in + "self_attention.q_layernorm.weight", {hf + "self_attn.q_norm.weight"}},
      {in + "self_attention.k_layernorm.weight", {hf + "self_attn.k_norm.weight"}},
      {in + "self_attention.linear_proj.weight", {hf + "self_attn.o_proj.weight"}}};
  auto dense = want;
  dense[mlp + "linear_fc1.layer_norm_weight"] = {hf + "post_attention_layernorm.weight"};
  dense[mlp + "linear_fc1.weight"] = {hf + "mlp.gate_proj.weight", hf + "mlp.up_proj.weight"};
  dense[mlp + "linear_fc2.weight"] = {hf + "mlp.down_proj.weight"};
  EXPECT_EQ(Mapped(Dense(), "megatron:tp2,spec=te,out_norm=plain,mtp=single"), dense);
  want[in + "pre_mlp_layernorm.weight"] = {hf + "post_attention_layernorm.weight"};
  want[mlp + "router.weight"] = {hf + "mlp.gate.weight"};
  want[mlp + "shared_experts.linear_fc1.weight"] = {hf + "mlp.shared_expert.gate_proj.weight",
                                                    hf + "mlp.shared_expert.up_proj.weight"};
  want[mlp + "shared_experts.linear_fc2.weight"] = {hf + "mlp.shared_expert.down_proj.weight"};
  want[mlp + "shared_experts.gate_weight"] = {hf + "mlp.shared_expert_gate.weight"};
  auto fused = want;
  for (const std::string e : {"0", "1"}) {
    const std::string one = hf + "mlp.experts." + e + ".";
    want[mlp + "experts.linear_fc1.weight" + e] = {one + "gate_proj.weight",
                                                   one + "up_proj.weight"};
    want[mlp + "experts.linear_fc2.weight" + e] = {one + "down_proj.weight"};
    fused[mlp + "experts.linear_fc1.weight" + e] = {hf + "mlp.experts.gate_up_proj"};
    fused[mlp + "experts.linear_fc2.weight" + e] = {hf + "mlp.experts.down_proj"};
  }
  EXPECT_EQ(Mapped(Next(), "megatron:tp2,spec=te,out_norm=plain,mtp=single"), want);
  EXPECT_EQ(Mapped(Moe(), "megatron:tp2,spec=te,out_norm=plain,mtp=single"), want);
  EXPECT_EQ(Mapped(Moe(), "megatron:tp2,spec=te,out_norm=plain,mtp=fused"), fused);
}

/// Two levels in Megatron, one in the checkpoint.
TEST(MtpFamilies, NemotronsAreFlattenedAsMegatronBridgeFlattensThem) {
  const std::string at = "mtp.layers.0.", in = at + "mtp_model_layer.layers.";
  const std::string first = "mtp.layers.0.", second = "mtp.layers.1.";
  std::map<std::string, std::set<std::string>> want = {
      {at + "enorm.weight", {first + "enorm.weight"}},
      {at + "hnorm.weight", {first + "hnorm.weight"}},
      {at + "eh_proj.weight", {first + "eh_proj.weight"}},
      {at + "final_layernorm.weight", {second + "final_layernorm.weight"}},
      {in + "0.self_attention.linear_qkv.layer_norm_weight", {first + "norm.weight"}},
      {in + "0.self_attention.linear_qkv.weight",
       {first + "mixer.q_proj.weight", first + "mixer.k_proj.weight",
        first + "mixer.v_proj.weight"}},
      {in + "0.self_attention.linear_proj.weight", {first + "mixer.o_proj.weight"}},
      {in + "1.pre_mlp_layernorm.weight", {second + "norm.weight"}},
      {in + "1.mlp.router.weight", {second + "mixer.gate.weight"}},
      {in + "1.mlp.router.expert_bias", {second + "mixer.gate.e_score_correction_bias"}},
      {in + "1.mlp.fc1_latent_proj.weight", {second + "mixer.fc1_latent_proj.weight"}},
      {in + "1.mlp.fc2_latent_proj.weight", {second + "mixer.fc2_latent_proj.weight"}},
      {in + "1.mlp.shared_experts.linear_fc1.weight",
       {second + "mixer.shared_experts.up_proj.weight"}},
      {in + "1.mlp.shared_experts.linear_fc2.weight",
       {second + "mixer.shared_experts.down_proj.weight"}}};
  for (const std::string e : {"0", "1"}) {
    want[in + "1.mlp.experts.linear_fc1.weight" + e] = {second + "mixer.experts." + e +
                                                        ".up_proj.weight"};
    want[in + "1.mlp.experts.linear_fc2.weight" + e] = {second + "mixer.experts." + e +
                                                        ".down_proj.weight"};
  }
  EXPECT_EQ(Mapped(Nemotron(), "megatron:tp2,spec=te,mtp=single"), want);
}

TEST(MtpFamilies, RefuseWhatIsNotKnown) {
  const std::pair<std::string, std::string> kRefused[] = {
      {Next(), "fused"},
      {Dense(), "fused"},
      {Nemotron(), "fused"},
      {Next(R"(,"num_nextn_predict_layers":2)"), "single"},
      {Moe(R"(,"mtp_num_hidden_layers":0)"), "single"},
      {Next(R"(,"mlp_only_layers":[0])"), "single"},
      {Nemotron(R"(,"mtp_hybrid_override_pattern":"M*")"), "single"},
      {Nemotron(""), "single"},
      {Config("qwen3", R"(,"intermediate_size":12)"), "single"}};
  for (const auto& [config, word] : kRefused) {
    const auto refused = Derived(config, "hf:mtp=" + word);
    ASSERT_FALSE(refused.has_value()) << config << word;
    EXPECT_EQ(refused.error().reason(), Reason::kUnknownScheme) << refused.error().ToString();
  }
}

TEST(MtpFamilies, AreNamedByTheWordThatTakesThem) {
  const auto layout = Derived(Next(), "hf");
  ASSERT_TRUE(layout.has_value());
  const std::string name = "mtp.layers.0.mlp.experts.0.up_proj.weight";
  const auto refused = Reconcile(layout->ranks[0], {{name, DType::kBF16, {6, 16}}});
  ASSERT_FALSE(refused.has_value());
  EXPECT_NE(refused.error().ToString().find("mtp=single"), std::string::npos)
      << refused.error().ToString();
}

}  // namespace
}  // namespace weightwire::layout
