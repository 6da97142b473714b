#pragma once

#include "server/layout/families/phi3.h"

namespace weightwire::layout {

/// GLM-4-0414 (dense): gate and up as one tensor, norms also of what attention and the MLP add,
/// biases of q, k and v unless denied.
inline constexpr TensorTemplate kGlm4Tensors[] = {
    parts::kEmbed,
    parts::kLmHead,
    parts::kFinalNorm,
    parts::kInputNorm,
    parts::kPostAttentionNorm,
    parts::Vector(Role::kAttentionOutputNorm,
                  "model.layers.{layer}.post_self_attn_layernorm.weight", parts::kHidden),
    parts::Vector(Role::kMlpOutputNorm, "model.layers.{layer}.post_mlp_layernorm.weight",
                  parts::kHidden),
    parts::kQWeight,
    parts::kKWeight,
    parts::kVWeight,
    parts::kOWeight,
    parts::QBias(parts::kWithAttentionBias),
    parts::KBias(parts::kWithAttentionBias),
    parts::VBias(parts::kWithAttentionBias),
    phi3::kGateUpWeight,
    parts::kDownWeight,
};

inline Status ReadGlm4(const Json& json, ModelConfig& config) {
  WW_ASSIGN_OR_STATUS(config.attention_bias, ReadFlagOr(json, "attention_bias", true));
  return OkStatus();
}

inline constexpr Family kGlm4 = {.model_type = "glm4",
                                 .tensors = kGlm4Tensors,
                                 .read = ReadGlm4,
                                 .defaults = {.kv_heads = 2, .head_dim = 128},
                                 .not_in_megatron = "norms"};

}  // namespace weightwire::layout
