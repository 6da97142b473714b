#pragma once

#include "server/layout/families/parts.h"

namespace weightwire::layout {

/// Llama 2 and 3; biases only with `attention_bias` and `mlp_bias`.
inline constexpr TensorTemplate kLlamaTensors[] = {
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
    parts::Vector(Role::kGateBias, "model.layers.{layer}.mlp.gate_proj.bias", parts::kIntermediate,
                  parts::kDenseWithBias),
    parts::Vector(Role::kUpBias, "model.layers.{layer}.mlp.up_proj.bias", parts::kIntermediate,
                  parts::kDenseWithBias),
    parts::Vector(Role::kDownBias, "model.layers.{layer}.mlp.down_proj.bias", parts::kHidden,
                  parts::kDenseWithBias),
};
inline constexpr Family kLlama = {"llama", kLlamaTensors};
/// Mistral has no biases, whatever config.json says; its config has no field for them.
inline constexpr Family kMistral = {"mistral", kLlamaTensors};

}  // namespace weightwire::layout
