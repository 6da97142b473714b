#pragma once

#include "server/layout/families/parts.h"

namespace weightwire::layout {

/// EXAONE 4: no norms before attention and MLP, only of what they add; norms on the heads of q and
/// k.
inline constexpr TensorTemplate kExaone4Tensors[] = {
    parts::kEmbed,
    parts::kLmHead,
    parts::kFinalNorm,
    parts::Vector(Role::kAttentionOutputNorm,
                  "model.layers.{layer}.post_attention_layernorm.weight", parts::kHidden),
    parts::Vector(Role::kMlpOutputNorm, "model.layers.{layer}.post_feedforward_layernorm.weight",
                  parts::kHidden),
    parts::kQWeight,
    parts::kKWeight,
    parts::kVWeight,
    parts::kOWeight,
    parts::QNorm(parts::kAlways),
    parts::KNorm(parts::kAlways),
    parts::kGateWeight,
    parts::kUpWeight,
    parts::kDownWeight,
};

inline constexpr Family kExaone4 = {.model_type = "exaone4",
                                    .tensors = kExaone4Tensors,
                                    .defaults = {.kv_heads = 32},
                                    .not_in_megatron = "norms"};

}  // namespace weightwire::layout
