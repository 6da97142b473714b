#pragma once

#include "server/layout/families/parts.h"

namespace weightwire::layout {

/// Qwen2, Qwen2.5 and Qwen2-MoE: biases on q, k and v, whatever config.json says.
inline constexpr TensorTemplate kQwen2Tensors[] = {
    parts::kEmbed,
    parts::kLmHead,
    parts::kFinalNorm,
    parts::kInputNorm,
    parts::kPostAttentionNorm,
    parts::kQWeight,
    parts::kKWeight,
    parts::kVWeight,
    parts::kOWeight,
    parts::QBias(parts::kAlways),
    parts::KBias(parts::kAlways),
    parts::VBias(parts::kAlways),
    parts::kGateWeight,
    parts::kUpWeight,
    parts::kDownWeight,
    parts::kRouter,
    parts::kExpertGate,
    parts::kExpertUp,
    parts::kExpertDown,
    parts::Matrix(Role::kSharedGate, "model.layers.{layer}.mlp.shared_expert.gate_proj.weight",
                  parts::kSharedIntermediate, parts::kHidden, parts::kMoeWithShared),
    parts::Matrix(Role::kSharedUp, "model.layers.{layer}.mlp.shared_expert.up_proj.weight",
                  parts::kSharedIntermediate, parts::kHidden, parts::kMoeWithShared),
    parts::Matrix(Role::kSharedDown, "model.layers.{layer}.mlp.shared_expert.down_proj.weight",
                  parts::kHidden, parts::kSharedIntermediate, parts::kMoeWithShared),
    parts::Matrix(Role::kSharedExpertGate, "model.layers.{layer}.mlp.shared_expert_gate.weight",
                  parts::kOne, parts::kHidden, parts::kMoeWithShared),
};

inline Status ReadQwen2Moe(const Json& json, ModelConfig& config) {
  WW_ASSIGN_OR_STATUS(config.experts, ReadExpertsOr(json, 60));
  WW_ASSIGN_OR_STATUS(config.moe_intermediate, ReadSizeOr(json, "moe_intermediate_size", 1'408));
  WW_ASSIGN_OR_STATUS(config.shared_intermediate,
                      ReadSizeOr(json, "shared_expert_intermediate_size", 5'632));
  WW_ASSIGN_OR_STATUS(const int64_t step, ReadSizeOr(json, "decoder_sparse_step", 1));
  return SetMoeLayers(json, 0, step, "mlp_only_layers", config);
}

inline constexpr Family kQwen2 = {"qwen2", kQwen2Tensors};
inline constexpr Family kQwen2Moe = {"qwen2_moe", kQwen2Tensors, ReadQwen2Moe};

}  // namespace weightwire::layout
