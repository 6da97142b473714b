#pragma once

#include "server/layout/families/dense.h"

namespace weightwire::layout {

/// Qwen2 and Qwen2.5: biases on q, k and v, whatever config.json says.
inline constexpr TensorTemplate kQwen2Tensors[] = {
    dense::kEmbed,
    dense::kLmHead,
    dense::kFinalNorm,
    dense::kInputNorm,
    dense::kPostAttentionNorm,
    dense::kQWeight,
    dense::kKWeight,
    dense::kVWeight,
    dense::kOWeight,
    dense::QBias(When::kAlways),
    dense::KBias(When::kAlways),
    dense::VBias(When::kAlways),
    dense::kGateWeight,
    dense::kUpWeight,
    dense::kDownWeight,
};
inline constexpr Family kQwen2 = {"qwen2", kQwen2Tensors, std::nullopt};

}  // namespace weightwire::layout
