#pragma once

#include "server/layout/families/parts.h"

namespace weightwire::layout {

/// Qwen3 and Qwen3-MoE: norms on the heads of q and k; biases only with `attention_bias`.
inline constexpr TensorTemplate kQwen3Tensors[] = {
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
    parts::OBias(parts::kWithAttentionBias),
    parts::QNorm(parts::kAlways),
    parts::KNorm(parts::kAlways),
    parts::kGateWeight,
    parts::kUpWeight,
    parts::kDownWeight,
    parts::kRouter,
    parts::kExpertGate,
    parts::kExpertUp,
    parts::kExpertDown,
};

inline Status ReadQwen3Moe(const Json& json, ModelConfig& config) {
  WW_ASSIGN_OR_STATUS(config.experts, ReadExpertsOr(json, 128));
  WW_ASSIGN_OR_STATUS(config.moe_intermediate, ReadSizeOr(json, "moe_intermediate_size", 768));
  WW_ASSIGN_OR_STATUS(const int64_t step, ReadSizeOr(json, "decoder_sparse_step", 1));
  return SetMoeLayers(json, 0, step, "mlp_only_layers", config);
}

inline constexpr Family kQwen3 = {
    .model_type = "qwen3", .tensors = kQwen3Tensors, .defaults = {.kv_heads = 32, .head_dim = 128}};
inline constexpr Family kQwen3Moe = {.model_type = "qwen3_moe",
                                     .tensors = kQwen3Tensors,
                                     .read = ReadQwen3Moe,
                                     .defaults = {.kv_heads = 4}};

}  // namespace weightwire::layout
