#pragma once

#include "server/layout/families/dense.h"

namespace weightwire::layout {

/// Qwen3, dense: norms on the heads of q and k; biases only with `attention_bias`.
inline constexpr TensorTemplate kQwen3Tensors[] = {
    dense::kEmbed,
    dense::kLmHead,
    dense::kFinalNorm,
    dense::kInputNorm,
    dense::kPostAttentionNorm,
    dense::kQWeight,
    dense::kKWeight,
    dense::kVWeight,
    dense::kOWeight,
    dense::QBias(When::kAttentionBias),
    dense::KBias(When::kAttentionBias),
    dense::VBias(When::kAttentionBias),
    dense::kOBias,
    {Role::kQNorm, "model.layers.{layer}.self_attn.q_norm.weight", Extent::kHeadDim},
    {Role::kKNorm, "model.layers.{layer}.self_attn.k_norm.weight", Extent::kHeadDim},
    dense::kGateWeight,
    dense::kUpWeight,
    dense::kDownWeight,
};
/// transformers' Qwen3Config has head_dim 128 where config.json is silent.
inline constexpr Family kQwen3 = {"qwen3", kQwen3Tensors, 128};

}  // namespace weightwire::layout
