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

inline Status ReadGemma(const Json& json, ModelConfig& config) {
  if (!json.contains("head_dim")) config.head_dim = 256;
  WW_ASSIGN_OR_STATUS(config.tied, ReadFlagOr(json, "tie_word_embeddings", true));
  return OkStatus();
}
inline Status ReadGemma3Text(const Json& json, ModelConfig& config) {
  config.qk_norm = true;
  return ReadGemma(json, config);
}

inline constexpr Family kGemma = {"gemma", kGemmaTensors, ReadGemma};
inline constexpr Family kGemma2 = {"gemma2", kGemma2Tensors, ReadGemma};
inline constexpr Family kGemma3Text = {"gemma3_text", kGemma2Tensors, ReadGemma3Text};

}  // namespace weightwire::layout
