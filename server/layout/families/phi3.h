#pragma once

#include "server/layout/families/parts.h"

namespace weightwire::layout {

/// Phi-3, Phi-3.5 and Phi-4: Llama with q, k and v stored as one tensor, and gate and up as
/// another; no biases.
namespace phi3 {

inline constexpr SizeOf kQkRows = [](const ModelConfig& c) {
  return (c.heads + c.kv_heads) * c.head_dim;
};
inline constexpr SizeOf kQkvRows = [](const ModelConfig& c) {
  return (c.heads + 2 * c.kv_heads) * c.head_dim;
};
inline constexpr SizeOf kTwiceIntermediate = [](const ModelConfig& c) {
  return 2 * c.intermediate;
};

inline constexpr TensorTemplate kGateUpWeight = {
    .name = "model.layers.{layer}.mlp.gate_up_proj.weight",
    .shape = {kTwiceIntermediate, parts::kHidden},
    .parts = {Part{.role = Role::kGateWeight, .slice = 0, .slices = 2},
              Part{.role = Role::kUpWeight, .slice = 1, .slices = 2}}};

}  // namespace phi3

inline constexpr TensorTemplate kPhi3Tensors[] = {
    parts::kEmbed,
    parts::kLmHead,
    parts::kFinalNorm,
    parts::kInputNorm,
    parts::kPostAttentionNorm,
    {.name = "model.layers.{layer}.self_attn.qkv_proj.weight",
     .shape = {phi3::kQkvRows, parts::kHidden},
     .parts =
         {Part{.role = Role::kQWeight, .row_count = parts::kQRows},
          Part{.role = Role::kKWeight, .row_count = parts::kKvRows, .first_row = parts::kQRows},
          Part{.role = Role::kVWeight, .row_count = parts::kKvRows, .first_row = phi3::kQkRows}}},
    parts::kOWeight,
    phi3::kGateUpWeight,
    parts::kDownWeight,
};

inline constexpr Family kPhi3 = {.model_type = "phi3", .tensors = kPhi3Tensors};

}  // namespace weightwire::layout
