#pragma once

#include "server/layout/families/parts.h"

namespace weightwire::layout {

/// Llama 2 and 3, Granite 3; biases only with `attention_bias` and `mlp_bias`.
namespace llama {

inline constexpr TensorTemplate kGateBias =
    parts::Vector(Role::kGateBias, "model.layers.{layer}.mlp.gate_proj.bias", parts::kIntermediate,
                  parts::kDenseWithBias);
inline constexpr TensorTemplate kUpBias =
    parts::Vector(Role::kUpBias, "model.layers.{layer}.mlp.up_proj.bias", parts::kIntermediate,
                  parts::kDenseWithBias);
inline constexpr TensorTemplate kDownBias =
    parts::Vector(Role::kDownBias, "model.layers.{layer}.mlp.down_proj.bias", parts::kHidden,
                  parts::kDenseWithBias);

}  // namespace llama

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
    llama::kGateBias,
    llama::kUpBias,
    llama::kDownBias,
};

/// Mistral and Ministral 3 have no biases, whatever config.json says.
inline Status ReadMistral(const Json&, ModelConfig& config) {
  config.attention_bias = false;
  config.mlp_bias = false;
  return OkStatus();
}

inline constexpr Family kLlama = {"llama", kLlamaTensors};
inline constexpr Family kGranite = {"granite", kLlamaTensors};
inline constexpr Family kMistral = {.model_type = "mistral",
                                    .tensors = kLlamaTensors,
                                    .read = ReadMistral,
                                    .defaults = {.kv_heads = 8}};
inline constexpr Family kMinistral3 = {.model_type = "ministral3",
                                       .tensors = kLlamaTensors,
                                       .read = ReadMistral,
                                       .defaults = {.kv_heads = 8, .head_dim = 128}};

}  // namespace weightwire::layout
