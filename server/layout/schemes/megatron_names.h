#pragma once

#include <span>

#include "server/layout/scheme.h"

namespace weightwire::layout {

/// `expected`, a rank of `megatron`, by the names that its process reports where it has a newer
/// megatron-core than 0.16:
///
///   mtp_model_layer        for transformer_layer, in MTP layers (0.17)
///   linear_qkv_down_proj   for linear_q_down_proj and linear_kv_down_proj in one matrix, q's rows
///                          first (mla_down_proj_fusion), and its layer_norm_weight for
///                          input_layernorm.weight
///
/// What is not reported by such a name stays, in all other schemes everything.
RankLayout NamedAsReported(const RankLayout& expected, std::span<const ObservedTensor> observed);

}  // namespace weightwire::layout
