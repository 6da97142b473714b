#pragma once

#include "server/layout/families/family.h"

/// Templates that dense decoders of the Llama line share: their files list what is theirs.
namespace weightwire::layout::dense {

inline constexpr TensorTemplate kEmbed = {Role::kEmbed, "model.embed_tokens.weight", Extent::kVocab,
                                          Extent::kHidden};
inline constexpr TensorTemplate kLmHead = {Role::kLmHead, "lm_head.weight", Extent::kVocab,
                                           Extent::kHidden, When::kUntied};
inline constexpr TensorTemplate kFinalNorm = {Role::kFinalNorm, "model.norm.weight",
                                              Extent::kHidden};
inline constexpr TensorTemplate kInputNorm = {
    Role::kInputNorm, "model.layers.{layer}.input_layernorm.weight", Extent::kHidden};
inline constexpr TensorTemplate kPostAttentionNorm = {
    Role::kPostAttentionNorm, "model.layers.{layer}.post_attention_layernorm.weight",
    Extent::kHidden};
inline constexpr TensorTemplate kQWeight = {Role::kQWeight,
                                            "model.layers.{layer}.self_attn.q_proj.weight",
                                            Extent::kQRows, Extent::kHidden};
inline constexpr TensorTemplate kKWeight = {Role::kKWeight,
                                            "model.layers.{layer}.self_attn.k_proj.weight",
                                            Extent::kKvRows, Extent::kHidden};
inline constexpr TensorTemplate kVWeight = {Role::kVWeight,
                                            "model.layers.{layer}.self_attn.v_proj.weight",
                                            Extent::kKvRows, Extent::kHidden};
inline constexpr TensorTemplate kOWeight = {Role::kOWeight,
                                            "model.layers.{layer}.self_attn.o_proj.weight",
                                            Extent::kHidden, Extent::kQRows};
inline constexpr TensorTemplate kGateWeight = {Role::kGateWeight,
                                               "model.layers.{layer}.mlp.gate_proj.weight",
                                               Extent::kIntermediate, Extent::kHidden};
inline constexpr TensorTemplate kUpWeight = {Role::kUpWeight,
                                             "model.layers.{layer}.mlp.up_proj.weight",
                                             Extent::kIntermediate, Extent::kHidden};
inline constexpr TensorTemplate kDownWeight = {Role::kDownWeight,
                                               "model.layers.{layer}.mlp.down_proj.weight",
                                               Extent::kHidden, Extent::kIntermediate};

constexpr TensorTemplate QBias(When when) {
  return {Role::kQBias, "model.layers.{layer}.self_attn.q_proj.bias", Extent::kQRows, Extent::kNone,
          when};
}
constexpr TensorTemplate KBias(When when) {
  return {Role::kKBias, "model.layers.{layer}.self_attn.k_proj.bias", Extent::kKvRows,
          Extent::kNone, when};
}
constexpr TensorTemplate VBias(When when) {
  return {Role::kVBias, "model.layers.{layer}.self_attn.v_proj.bias", Extent::kKvRows,
          Extent::kNone, when};
}
inline constexpr TensorTemplate kOBias = {Role::kOBias,
                                          "model.layers.{layer}.self_attn.o_proj.bias",
                                          Extent::kHidden, Extent::kNone, When::kAttentionBias};

}  // namespace weightwire::layout::dense
