#pragma once

#include <algorithm>
#include <array>

#include "server/layout/families/linear_attention.h"
#include "server/layout/families/qwen2.h"

namespace weightwire::layout {

/// Qwen3-Next and the text models of Qwen3.5: layers with the gated delta rule among layers of
/// attention whose q has gates of the output. Their MTP layers ("mtp.…") are not described, as
/// transformers does not build them.
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
};
inline constexpr TensorTemplate kQwen3NextIn[] = {
    qwen_next::In(Role::kLinearQkvz, "model.layers.{layer}.linear_attn.in_proj_qkvz.weight",
                  qwen_next::kQkvzRows),
    qwen_next::In(Role::kLinearBa, "model.layers.{layer}.linear_attn.in_proj_ba.weight",
                  qwen_next::kBaRows),
};
inline constexpr TensorTemplate kQwen35In[] = {
    qwen_next::In(Role::kLinearQkv, "model.layers.{layer}.linear_attn.in_proj_qkv.weight",
                  linear::kChannels),
    qwen_next::In(Role::kLinearZ, "model.layers.{layer}.linear_attn.in_proj_z.weight",
                  linear::kHeadRows),
    qwen_next::In(Role::kLinearB, "model.layers.{layer}.linear_attn.in_proj_b.weight",
                  linear::kHeads),
    qwen_next::In(Role::kLinearA, "model.layers.{layer}.linear_attn.in_proj_a.weight",
                  linear::kHeads),
};
inline constexpr TensorTemplate kSingleExperts[] = {parts::kExpertGate, parts::kExpertUp,
                                                    parts::kExpertDown};
inline constexpr TensorTemplate kFusedExperts[] = {
    parts::GateUpExpertRows("model.layers.{layer}.mlp.experts.gate_up_proj"),
    parts::DownExpertRows("model.layers.{layer}.mlp.experts.down_proj"),
};

template <size_t In, size_t Experts>
constexpr auto DeltaTensors(const TensorTemplate (&in)[In],
                            const TensorTemplate (&experts)[Experts]) {
  std::array<TensorTemplate, std::size(kDeltaTensors) + In + Experts> all{};
  auto end = std::copy(std::begin(kDeltaTensors), std::end(kDeltaTensors), all.begin());
  end = std::copy(std::begin(in), std::end(in), end);
  std::copy(std::begin(experts), std::end(experts), end);
  return all;
}
inline constexpr auto kQwen3NextTensors = DeltaTensors(kQwen3NextIn, kSingleExperts);
inline constexpr auto kQwen35Tensors = DeltaTensors(kQwen35In, kSingleExperts);
inline constexpr auto kQwen35FusedTensors = DeltaTensors(kQwen35In, kFusedExperts);

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

inline constexpr Family kQwen3Next = {.model_type = "qwen3_next",
                                      .tensors = kQwen3NextTensors,
                                      .read = ReadQwen3Next,
                                      .defaults = {.kv_heads = 2, .head_dim = 256}};
inline constexpr Family kQwen35Text = {.model_type = "qwen3_5_text",
                                       .tensors = kQwen35Tensors,
                                       .read = ReadGatedDelta,
                                       .defaults = {.kv_heads = 4, .head_dim = 256}};
inline constexpr Family kQwen35MoeText = {.model_type = "qwen3_5_moe_text",
                                          .tensors = kQwen35Tensors,
                                          .read = ReadQwen35Moe,
                                          .defaults = {.kv_heads = 2, .head_dim = 256}};
/// Within the wrapper, as its releases and transformers' own model have it. Never a model of its
/// own.
inline constexpr Family kQwen35MoeFused = {.model_type = "qwen3_5_moe_fused",
                                           .tensors = kQwen35FusedTensors,
                                           .read = ReadQwen35Moe,
                                           .defaults = {.kv_heads = 2, .head_dim = 256}};

}  // namespace weightwire::layout
