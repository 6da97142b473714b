#pragma once

#include "server/layout/families/parts.h"

namespace weightwire::layout {

/// gpt-oss: biases everywhere, attention sinks, and experts stored as one tensor with inputs first.
/// gate and up alternate in the last dimension, which the canonical shape therefore splits in two.
inline constexpr TensorTemplate kGptOssTensors[] = {
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
    parts::Vector(Role::kSinks, "model.layers.{layer}.self_attn.sinks", parts::kHeads),
    parts::Matrix(Role::kRouter, "model.layers.{layer}.mlp.router.weight", parts::kExperts,
                  parts::kHidden),
    parts::Vector(Role::kRouterBias, "model.layers.{layer}.mlp.router.bias", parts::kExperts),
    {.name = "model.layers.{layer}.mlp.experts.gate_up_proj",
     .shape = {parts::kExperts, parts::kHidden, parts::kMoeIntermediate, parts::kTwo},
     .parts = {Part{.role = Role::kExpertGate,
                    .row_dim = 2,
                    .column_dim = 1,
                    .expert_dim = 0,
                    .fixed_dim = 3,
                    .fixed_index = 0},
               Part{.role = Role::kExpertUp,
                    .row_dim = 2,
                    .column_dim = 1,
                    .expert_dim = 0,
                    .fixed_dim = 3,
                    .fixed_index = 1}},
     .joined = true},
    {.name = "model.layers.{layer}.mlp.experts.gate_up_proj_bias",
     .shape = {parts::kExperts, parts::kMoeIntermediate, parts::kTwo},
     .parts = {Part{.role = Role::kExpertGateBias,
                    .row_dim = 1,
                    .column_dim = -1,
                    .expert_dim = 0,
                    .fixed_dim = 2,
                    .fixed_index = 0},
               Part{.role = Role::kExpertUpBias,
                    .row_dim = 1,
                    .column_dim = -1,
                    .expert_dim = 0,
                    .fixed_dim = 2,
                    .fixed_index = 1}},
     .joined = true},
    {.name = "model.layers.{layer}.mlp.experts.down_proj",
     .shape = {parts::kExperts, parts::kMoeIntermediate, parts::kHidden},
     .parts = {Part{.role = Role::kExpertDown, .row_dim = 2, .column_dim = 1, .expert_dim = 0}}},
    {.name = "model.layers.{layer}.mlp.experts.down_proj_bias",
     .shape = {parts::kExperts, parts::kHidden},
     .parts = {Part{
         .role = Role::kExpertDownBias, .row_dim = 1, .column_dim = -1, .expert_dim = 0}}},
};

inline Status ReadGptOss(const Json& json, ModelConfig& config) {
  WW_ASSIGN_OR_STATUS(config.attention_bias, ReadFlagOr(json, "attention_bias", true));
  WW_ASSIGN_OR_STATUS(config.experts, ReadExpertsOr(json, 128));
  WW_ASSIGN_OR_STATUS(config.moe_intermediate, ReadSize(json, "intermediate_size"));
  return SetMoeLayers(json, 0, 1, "mlp_only_layers", config);
}

inline constexpr Family kGptOss = {.model_type = "gpt_oss",
                                   .tensors = kGptOssTensors,
                                   .read = ReadGptOss,
                                   .defaults = {.kv_heads = 8, .head_dim = 64}};

}  // namespace weightwire::layout
