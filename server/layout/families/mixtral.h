#pragma once

#include "server/layout/families/parts.h"

namespace weightwire::layout {

/// Mixtral: every layer has experts; w1 is gate, w3 up, w2 down. `intermediate_size` is an
/// expert's.
namespace mixtral {

inline constexpr TensorTemplate kExpertGate = parts::Matrix(
    Role::kExpertGate, "model.layers.{layer}.block_sparse_moe.experts.{expert}.w1.weight",
    parts::kMoeIntermediate, parts::kHidden);
inline constexpr TensorTemplate kExpertUp = parts::Matrix(
    Role::kExpertUp, "model.layers.{layer}.block_sparse_moe.experts.{expert}.w3.weight",
    parts::kMoeIntermediate, parts::kHidden);
inline constexpr TensorTemplate kExpertDown = parts::Matrix(
    Role::kExpertDown, "model.layers.{layer}.block_sparse_moe.experts.{expert}.w2.weight",
    parts::kHidden, parts::kMoeIntermediate);

}  // namespace mixtral

inline constexpr TensorTemplate kMixtralTensors[] = {
    parts::kEmbed,
    parts::kLmHead,
    parts::kFinalNorm,
    parts::kInputNorm,
    parts::kPostAttentionNorm,
    parts::kQWeight,
    parts::kKWeight,
    parts::kVWeight,
    parts::kOWeight,
    parts::Matrix(Role::kRouter, "model.layers.{layer}.block_sparse_moe.gate.weight",
                  parts::kExperts, parts::kHidden),
    mixtral::kExpertGate,
    mixtral::kExpertUp,
    mixtral::kExpertDown,
};

inline Status ReadMixtral(const Json& json, ModelConfig& config) {
  WW_ASSIGN_OR_STATUS(config.experts, ReadExpertsOr(json, 8));
  WW_ASSIGN_OR_STATUS(config.moe_intermediate, ReadSize(json, "intermediate_size"));
  return SetMoeLayers(json, 0, 1, "mlp_only_layers", config);
}

inline constexpr Family kMixtral = {.model_type = "mixtral",
                                    .tensors = kMixtralTensors,
                                    .read = ReadMixtral,
                                    .defaults = {.kv_heads = 8}};

}  // namespace weightwire::layout
