#pragma once

#include "server/layout/families/parts.h"

namespace weightwire::layout {

/// Gemma 1 to 3 (text): tied embeddings unless config.json says otherwise. Gemma 2 norms what
/// attention and the MLP add; `post_attention_layernorm` is such a norm there, and
/// `pre_feedforward_layernorm` stands before the MLP. Gemma 3 also norms the heads of q and k.
inline constexpr TensorTemplate kGemmaTensors[] = {
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
    parts::kGateWeight,
    parts::kUpWeight,
    parts::kDownWeight,
};
inline constexpr TensorTemplate kGemma2Tensors[] = {
    parts::kEmbed,
    parts::kLmHead,
    parts::kFinalNorm,
    parts::kInputNorm,
    parts::Vector(Role::kAttentionOutputNorm,
                  "model.layers.{layer}.post_attention_layernorm.weight", parts::kHidden),
    parts::Vector(Role::kPostAttentionNorm, "model.layers.{layer}.pre_feedforward_layernorm.weight",
                  parts::kHidden),
    parts::Vector(Role::kMlpOutputNorm, "model.layers.{layer}.post_feedforward_layernorm.weight",
                  parts::kHidden),
    parts::kQWeight,
    parts::kKWeight,
    parts::kVWeight,
    parts::kOWeight,
    parts::QBias(parts::kWithAttentionBias),
    parts::KBias(parts::kWithAttentionBias),
    parts::VBias(parts::kWithAttentionBias),
    parts::OBias(parts::kWithAttentionBias),
    parts::QNorm(parts::kWithQkNorm),
    parts::KNorm(parts::kWithQkNorm),
    parts::kGateWeight,
    parts::kUpWeight,
    parts::kDownWeight,
};

/// Releases are silent about them inside their wrapper; transformers' defaults.
inline Status PrepareGemma3Text(Json& json) {
  if (!json.contains("num_attention_heads")) json["num_attention_heads"] = 8;
  if (!json.contains("vocab_size")) json["vocab_size"] = 262'208;
  return OkStatus();
}

inline Status ReadGemma3Text(const Json&, ModelConfig& config) {
  config.qk_norm = true;
  return OkStatus();
}

inline constexpr Family kGemma = {.model_type = "gemma",
                                  .tensors = kGemmaTensors,
                                  .defaults = {.kv_heads = 16, .head_dim = 256, .tied = true}};
inline constexpr Family kGemma2 = {.model_type = "gemma2",
                                   .tensors = kGemma2Tensors,
                                   .defaults = {.kv_heads = 4, .head_dim = 256, .tied = true}};
inline constexpr Family kGemma3Text = {.model_type = "gemma3_text",
                                       .tensors = kGemma2Tensors,
                                       .read = ReadGemma3Text,
                                       .defaults = {.kv_heads = 4, .head_dim = 256, .tied = true},
                                       .prepare = PrepareGemma3Text};

}  // namespace weightwire::layout
