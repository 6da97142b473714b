#pragma once

#include "server/layout/families/parts.h"

namespace weightwire::layout {

/// Llama 4 (text): some layers are dense, the others have experts and one shared expert. The
/// experts are stored as one tensor with inputs first, gate before up in the last dimension.
/// `intermediate_size` is an expert's, `intermediate_size_mlp` that of a dense layer.
inline constexpr TensorTemplate kLlama4Tensors[] = {
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
    parts::Matrix(Role::kGateWeight, "model.layers.{layer}.feed_forward.gate_proj.weight",
                  parts::kIntermediate, parts::kHidden, parts::kDense),
    parts::Matrix(Role::kUpWeight, "model.layers.{layer}.feed_forward.up_proj.weight",
                  parts::kIntermediate, parts::kHidden, parts::kDense),
    parts::Matrix(Role::kDownWeight, "model.layers.{layer}.feed_forward.down_proj.weight",
                  parts::kHidden, parts::kIntermediate, parts::kDense),
    parts::Matrix(Role::kRouter, "model.layers.{layer}.feed_forward.router.weight", parts::kExperts,
                  parts::kHidden, parts::kMoe),
    parts::GateUpExperts("model.layers.{layer}.feed_forward.experts.gate_up_proj"),
    parts::DownExperts("model.layers.{layer}.feed_forward.experts.down_proj"),
    parts::Matrix(Role::kSharedGate,
                  "model.layers.{layer}.feed_forward.shared_expert.gate_proj.weight",
                  parts::kSharedIntermediate, parts::kHidden, parts::kMoeWithShared),
    parts::Matrix(Role::kSharedUp, "model.layers.{layer}.feed_forward.shared_expert.up_proj.weight",
                  parts::kSharedIntermediate, parts::kHidden, parts::kMoeWithShared),
    parts::Matrix(Role::kSharedDown,
                  "model.layers.{layer}.feed_forward.shared_expert.down_proj.weight",
                  parts::kHidden, parts::kSharedIntermediate, parts::kMoeWithShared),
};

inline Status ReadLlama4(const Json& json, ModelConfig& config) {
  config.rotary_pairs = true;
  WW_ASSIGN_OR_STATUS(config.moe_intermediate, ReadSize(json, "intermediate_size"));
  config.shared_intermediate = config.moe_intermediate;
  WW_ASSIGN_OR_STATUS(config.intermediate, ReadSizeOr(json, "intermediate_size_mlp", 16'384));
  WW_ASSIGN_OR_STATUS(config.experts, ReadExpertsOr(json, 16));
  if (json.contains("moe_layers") && !json.at("moe_layers").is_null()) {
    return SetListedMoeLayers(json, "moe_layers", config);
  }
  WW_ASSIGN_OR_STATUS(const int64_t step, ReadSizeOr(json, "interleave_moe_layer_step", 1));
  return SetMoeLayers(json, 0, step, "", config);
}

inline constexpr Family kLlama4Text = {.model_type = "llama4_text",
                                       .tensors = kLlama4Tensors,
                                       .read = ReadLlama4,
                                       .defaults = {.kv_heads = 8, .head_dim = 128}};

}  // namespace weightwire::layout
