#pragma once

#include "server/layout/families/dense.h"

namespace weightwire::layout {

/// Llama 2 and 3; biases only with `attention_bias` and `mlp_bias`.
inline constexpr TensorTemplate kLlamaTensors[] = {
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
    dense::kGateWeight,
    dense::kUpWeight,
    dense::kDownWeight,
    {Role::kGateBias, "model.layers.{layer}.mlp.gate_proj.bias", Extent::kIntermediate,
     Extent::kNone, When::kMlpBias},
    {Role::kUpBias, "model.layers.{layer}.mlp.up_proj.bias", Extent::kIntermediate, Extent::kNone,
     When::kMlpBias},
    {Role::kDownBias, "model.layers.{layer}.mlp.down_proj.bias", Extent::kHidden, Extent::kNone,
     When::kMlpBias},
};
inline constexpr Family kLlama = {"llama", kLlamaTensors, std::nullopt};

}  // namespace weightwire::layout
