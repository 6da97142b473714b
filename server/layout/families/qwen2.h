#pragma once

#include "server/layout/families/parts.h"

namespace weightwire::layout {

/// A shared expert that counts as much as its own gate says.
namespace qwen2 {

inline constexpr TensorTemplate kSharedGate =
    parts::Matrix(Role::kSharedGate, "model.layers.{layer}.mlp.shared_expert.gate_proj.weight",
                  parts::kSharedIntermediate, parts::kHidden, parts::kMoeWithShared);
inline constexpr TensorTemplate kSharedUp =
    parts::Matrix(Role::kSharedUp, "model.layers.{layer}.mlp.shared_expert.up_proj.weight",
                  parts::kSharedIntermediate, parts::kHidden, parts::kMoeWithShared);
inline constexpr TensorTemplate kSharedDown =
    parts::Matrix(Role::kSharedDown, "model.layers.{layer}.mlp.shared_expert.down_proj.weight",
                  parts::kHidden, parts::kSharedIntermediate, parts::kMoeWithShared);
inline constexpr TensorTemplate kSharedExpertGate =
    parts::Matrix(Role::kSharedExpertGate, "model.layers.{layer}.mlp.shared_expert_gate.weight",
                  parts::kOne, parts::kHidden, parts::kMoeWithShared);

}  // namespace qwen2

/// Qwen2, Qwen2.5 and Qwen2-MoE: biases on q, k and v, which only `qkv_bias` of the latter can
/// deny.
inline constexpr TensorTemplate kQwen2Tensors[] = {
    parts::kEmbed,
    parts::kLmHead,
    parts::kFinalNorm,
    parts::kInputNorm,
    parts::kPostAttentionNorm,
    parts::kQWeight,
    parts::kKWeight,
    parts::kVWeight,
    parts::kOWeight,
    parts::QBias(parts::kWithAttentionBias),
    parts::KBias(parts::kWithAttentionBias),
    parts::VBias(parts::kWithAttentionBias),
    parts::kGateWeight,
    parts::kUpWeight,
    parts::kDownWeight,
    parts::kRouter,
    parts::kExpertGate,
    parts::kExpertUp,
    parts::kExpertDown,
    qwen2::kSharedGate,
    qwen2::kSharedUp,
    qwen2::kSharedDown,
    qwen2::kSharedExpertGate,
};

inline Status ReadQwen2(const Json&, ModelConfig& config) {
  config.attention_bias = true;
  return OkStatus();
}

inline Status ReadQwen2Moe(const Json& json, ModelConfig& config) {
  WW_ASSIGN_OR_STATUS(config.attention_bias, ReadFlagOr(json, "qkv_bias", true));
  WW_ASSIGN_OR_STATUS(config.experts, ReadExpertsOr(json, 60));
  WW_ASSIGN_OR_STATUS(config.moe_intermediate, ReadSizeOr(json, "moe_intermediate_size", 1'408));
  WW_ASSIGN_OR_STATUS(config.shared_intermediate,
                      ReadSizeOr(json, "shared_expert_intermediate_size", 5'632));
  WW_ASSIGN_OR_STATUS(const int64_t step, ReadSizeOr(json, "decoder_sparse_step", 1));
  return SetMoeLayers(json, 0, step, "mlp_only_layers", config);
}

inline constexpr Family kQwen2 = {.model_type = "qwen2",
                                  .tensors = kQwen2Tensors,
                                  .read = ReadQwen2,
                                  .defaults = {.kv_heads = 32}};
inline constexpr Family kQwen2Moe = {.model_type = "qwen2_moe",
                                     .tensors = kQwen2Tensors,
                                     .read = ReadQwen2Moe,
                                     .defaults = {.kv_heads = 16}};

}  // namespace weightwire::layout
