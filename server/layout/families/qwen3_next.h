#pragma once

#include <algorithm>
#include <array>

#include "server/layout/families/linear_attention.h"
#include "server/layout/families/qwen2.h"

namespace weightwire::layout {

/// Qwen3-Next and the text models of Qwen3.5: layers with the gated delta rule among layers of
/// attention whose q has gates of the output. An MTP layer ("mtp.…") is one of attention, there
/// where the parallel spec says so; transformers builds none, and Qwen3-Next's config.json is
/// silent.
namespace qwen_next {

inline constexpr SizeOf kGatedQRows = [](const ModelConfig& c) { return 2 * c.heads * c.head_dim; };
/// q and k of every group, v and z of every head.
inline constexpr SizeOf kQkvzRows = [](const ModelConfig& c) {
  return 2 * c.linear.GroupRows() + 2 * c.linear.HeadRows();
};
inline constexpr SizeOf kBaRows = [](const ModelConfig& c) { return 2 * c.linear.heads; };

inline constexpr TensorTemplate kQWeight =
    parts::Matrix(Role::kQWeight, "model.layers.{layer}.self_attn.q_proj.weight", kGatedQRows,
                  parts::kHidden, linear::kAttention);
inline constexpr TensorTemplate kKWeight = linear::Where(linear::kAttention, parts::kKWeight);
inline constexpr TensorTemplate kVWeight = linear::Where(linear::kAttention, parts::kVWeight);
inline constexpr TensorTemplate kOWeight = linear::Where(linear::kAttention, parts::kOWeight);
inline constexpr TensorTemplate kQNorm = parts::QNorm(linear::kAttention);
inline constexpr TensorTemplate kKNorm = parts::KNorm(linear::kAttention);

inline constexpr TensorTemplate kConv =
    linear::Conv("model.layers.{layer}.linear_attn.conv1d.weight", linear::kDelta);
inline constexpr TensorTemplate kALog = parts::Vector(
    Role::kLinearALog, "model.layers.{layer}.linear_attn.A_log", linear::kHeads, linear::kDelta);
inline constexpr TensorTemplate kDtBias =
    parts::Vector(Role::kLinearDtBias, "model.layers.{layer}.linear_attn.dt_bias", linear::kHeads,
                  linear::kDelta);
inline constexpr TensorTemplate kNorm =
    parts::Vector(Role::kLinearNorm, "model.layers.{layer}.linear_attn.norm.weight",
                  linear::kHeadDim, linear::kDelta);
inline constexpr TensorTemplate kOut =
    parts::Matrix(Role::kLinearOut, "model.layers.{layer}.linear_attn.out_proj.weight",
                  parts::kHidden, linear::kHeadRows, linear::kDelta);
inline constexpr IsPresent kSingle = [](const ModelConfig&, const LayerKind& l) {
  return l.moe && !l.fused_experts;
};
inline constexpr IsPresent kFused = [](const ModelConfig&, const LayerKind& l) {
  return l.moe && l.fused_experts;
};

constexpr TensorTemplate In(Role role, std::string_view name, SizeOf rows) {
  return parts::Matrix(role, name, rows, parts::kHidden, linear::kDelta);
}

}  // namespace qwen_next

/// What all of them have.
inline constexpr TensorTemplate kDeltaTensors[] = {
    parts::kEmbed,
    parts::kLmHead,
    parts::kFinalNorm,
    parts::kInputNorm,
    parts::kPostAttentionNorm,
    qwen_next::kQWeight,
    qwen_next::kKWeight,
    qwen_next::kVWeight,
    qwen_next::kOWeight,
    qwen_next::kQNorm,
    qwen_next::kKNorm,
    qwen_next::kConv,
    qwen_next::kALog,
    qwen_next::kDtBias,
    qwen_next::kNorm,
    qwen_next::kOut,
    parts::kGateWeight,
    parts::kUpWeight,
    parts::kDownWeight,
    parts::kRouter,
    qwen2::kSharedGate,
    qwen2::kSharedUp,
    qwen2::kSharedDown,
    qwen2::kSharedExpertGate,
    parts::When(qwen_next::kSingle, parts::kExpertGate),
    parts::When(qwen_next::kSingle, parts::kExpertUp),
    parts::When(qwen_next::kSingle, parts::kExpertDown),
    parts::OfMtp(
        parts::Vector(Role::kMtpEmbedNorm, "mtp.pre_fc_norm_embedding.weight", parts::kHidden)),
    parts::OfMtp(
        parts::Vector(Role::kMtpHiddenNorm, "mtp.pre_fc_norm_hidden.weight", parts::kHidden)),
    parts::OfMtp(
        parts::Matrix(Role::kMtpProjection, "mtp.fc.weight", parts::kHidden, parts::kTwiceHidden)),
    parts::OfMtp(parts::Vector(Role::kMtpFinalNorm, "mtp.norm.weight", parts::kHidden)),
};
inline constexpr TensorTemplate kQwen3NextOwn[] = {
    qwen_next::In(Role::kLinearQkvz, "model.layers.{layer}.linear_attn.in_proj_qkvz.weight",
                  qwen_next::kQkvzRows),
    qwen_next::In(Role::kLinearBa, "model.layers.{layer}.linear_attn.in_proj_ba.weight",
                  qwen_next::kBaRows),
};
inline constexpr TensorTemplate kQwen35Own[] = {
    qwen_next::In(Role::kLinearQkv, "model.layers.{layer}.linear_attn.in_proj_qkv.weight",
                  linear::kChannels),
    qwen_next::In(Role::kLinearZ, "model.layers.{layer}.linear_attn.in_proj_z.weight",
                  linear::kHeadRows),
    qwen_next::In(Role::kLinearB, "model.layers.{layer}.linear_attn.in_proj_b.weight",
                  linear::kHeads),
    qwen_next::In(Role::kLinearA, "model.layers.{layer}.linear_attn.in_proj_a.weight",
                  linear::kHeads),
    parts::When(qwen_next::kFused,
                parts::GateUpExpertRows("model.layers.{layer}.mlp.experts.gate_up_proj")),
    parts::When(qwen_next::kFused,
                parts::DownExpertRows("model.layers.{layer}.mlp.experts.down_proj")),
};

template <size_t Own>
constexpr auto DeltaTensors(const TensorTemplate (&own)[Own]) {
  std::array<TensorTemplate, std::size(kDeltaTensors) + Own> all{};
  const auto end = std::copy(std::begin(kDeltaTensors), std::end(kDeltaTensors), all.begin());
  std::copy(std::begin(own), std::end(own), end);
  return all;
}
inline constexpr auto kQwen3NextTensors = DeltaTensors(kQwen3NextOwn);
inline constexpr auto kQwen35Tensors = DeltaTensors(kQwen35Own);

/// `layer_types`, or every `full_attention_interval`-th layer has attention.
inline Status SetDeltaLayers(const Json& json, ModelConfig& config) {
  const auto types = json.find("layer_types");
  const bool listed = types != json.end() && !types->is_null();
  WW_ASSIGN_OR_STATUS(const int64_t interval, ReadSizeOr(json, "full_attention_interval", 4));
  if (listed && (!types->is_array() || std::ssize(*types) != config.layers)) {
    return {Code::kInvalidArgument, Reason::kInvalidRequest,
            "the field layer_types is no list with a word for each layer"};
  }
  for (int64_t layer = 0; layer < config.layers; ++layer) {
    const auto at = static_cast<size_t>(layer);
    bool attention = (layer + 1) % interval == 0;
    if (listed) {
      const Json& word = types->at(at);
      attention = word == "full_attention";
      if (!attention && word != "linear_attention") {
        return {Code::kInvalidArgument, Reason::kInvalidRequest,
                "the field layer_types has a word that is neither \"linear_attention\" nor "
                "\"full_attention\""};
      }
    }
    config.kinds[at].mixer = attention ? Mixer::kAttention : Mixer::kGatedDelta;
  }
  return OkStatus();
}

inline Status ReadGatedDelta(const Json& json, ModelConfig& config) {
  WW_RETURN_IF_ERROR(linear::CheckUnset(json, "attention_bias"));
  config.attention_bias = false;
  config.output_gate = true;
  WW_ASSIGN_OR_STATUS(const bool gate, ReadFlagOr(json, "attn_output_gate", true));
  if (!gate) {
    return Status(Code::kInvalidArgument, Reason::kInvalidRequest,
                  "config.json's attn_output_gate is false: vLLM follows it, transformers does not")
        .Remedy("send explicit layouts");
  }
  constexpr std::array<const char*, 5> kKeys = {"linear_num_key_heads", "linear_num_value_heads",
                                                "linear_key_head_dim", "linear_value_head_dim",
                                                "linear_conv_kernel_dim"};
  constexpr LinearConfig kDefaults = {
      .groups = 16, .heads = 32, .state = 128, .head_dim = 128, .kernel = 4};
  WW_RETURN_IF_ERROR(ReadLinear(json, kKeys, kDefaults, config));
  return SetDeltaLayers(json, config);
}

inline Status ReadDeltaExperts(const Json& json, int64_t experts, ModelConfig& config) {
  WW_ASSIGN_OR_STATUS(config.experts, ReadExpertsOr(json, experts));
  WW_ASSIGN_OR_STATUS(config.moe_intermediate, ReadSizeOr(json, "moe_intermediate_size", 512));
  WW_ASSIGN_OR_STATUS(config.shared_intermediate,
                      ReadSizeOr(json, "shared_expert_intermediate_size", 512));
  return ReadGatedDelta(json, config);
}

inline Status ReadQwen3Next(const Json& json, ModelConfig& config) {
  WW_RETURN_IF_ERROR(ReadDeltaExperts(json, 512, config));
  WW_ASSIGN_OR_STATUS(const int64_t step, ReadSizeOr(json, "decoder_sparse_step", 1));
  return SetMoeLayers(json, 0, step, "mlp_only_layers", config);
}

inline Status ReadQwen35Moe(const Json& json, ModelConfig& config) {
  WW_RETURN_IF_ERROR(ReadDeltaExperts(json, 256, config));
  return SetMoeLayers(json, 0, 1, "", config);
}

inline Status ReadQwen35MoeFused(const Json& json, ModelConfig& config) {
  WW_RETURN_IF_ERROR(ReadQwen35Moe(json, config));
  for (LayerKind& kind : config.kinds) kind.fused_experts = true;
  return OkStatus();
}

/// One layer, whose fc and norms have no number.
inline Status AddDeltaMtp(const Json& json, bool fused, ModelConfig& config) {
  WW_ASSIGN_OR_STATUS(
      const int64_t count,
      ReadSynonymsOr(json, {"mtp_num_hidden_layers", "num_nextn_predict_layers"}, 1));
  if (count != 1) {
    return BadMtp(config, "one MTP layer is described, and it has " + std::to_string(count));
  }
  WW_RETURN_IF_ERROR(linear::CheckUnset(json, "mtp_use_dedicated_embeddings"));
  const auto moe = std::ranges::count(config.kinds, true, &LayerKind::moe);
  if (moe != 0 && moe != config.layers) {
    return BadMtp(config, "some of its layers have experts, and nothing says whether MTP's has");
  }
  if (fused && moe == 0) return BadMtp(config, "it has no experts that could be fused");
  config.kinds.push_back({.moe = moe != 0, .mtp = true, .fused_experts = fused});
  config.mtp_layers = 1;
  return OkStatus();
}

inline Status AddQwen3NextMtp(const Json& json, bool fused, ModelConfig& config) {
  if (fused) return BadMtp(config, "its experts are a tensor each: mtp=single");
  return AddDeltaMtp(json, fused, config);
}

inline constexpr Family kQwen3Next = {.model_type = "qwen3_next",
                                      .tensors = kQwen3NextTensors,
                                      .read = ReadQwen3Next,
                                      .defaults = {.kv_heads = 2, .head_dim = 256},
                                      .mtp = AddQwen3NextMtp,
                                      .mtp_layers = "mtp.layers."};
inline constexpr Family kQwen35Text = {.model_type = "qwen3_5_text",
                                       .tensors = kQwen35Tensors,
                                       .read = ReadGatedDelta,
                                       .defaults = {.kv_heads = 4, .head_dim = 256},
                                       .mtp = AddDeltaMtp,
                                       .mtp_layers = "mtp.layers."};
inline constexpr Family kQwen35MoeText = {.model_type = "qwen3_5_moe_text",
                                          .tensors = kQwen35Tensors,
                                          .read = ReadQwen35Moe,
                                          .defaults = {.kv_heads = 2, .head_dim = 256},
                                          .mtp = AddDeltaMtp,
                                          .mtp_layers = "mtp.layers."};
/// Within the wrapper, as its releases and transformers' own model have it. Never a model of its
/// own.
inline constexpr Family kQwen35MoeFused = {.model_type = "qwen3_5_moe_fused",
                                           .tensors = kQwen35Tensors,
                                           .read = ReadQwen35MoeFused,
                                           .defaults = {.kv_heads = 2, .head_dim = 256},
                                           .mtp = AddDeltaMtp,
                                           .mtp_layers = "mtp.layers."};

}  // namespace weightwire::layout
