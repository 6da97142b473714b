#pragma once

#include "server/layout/families/deepseek.h"
#include "server/layout/families/mixtral.h"

namespace weightwire::layout {

/// MiniMax-M2, 2.5 and 2.7: Mixtral's names, norms of q and k over all heads, and a correction
/// beside the router, not in it. Every layer has experts; `intermediate_size` is an expert's. No
/// release has tensors for `use_mtp`.
namespace minimax {

constexpr TensorTemplate Router() {
  TensorTemplate router =
      parts::Matrix(Role::kRouter, "model.layers.{layer}.block_sparse_moe.gate.weight",
                    parts::kExperts, parts::kHidden);
  router.full_precision = true;
  return router;
}

constexpr TensorTemplate Correction() {
  TensorTemplate bias = parts::Vector(
      Role::kRouterCorrection, "model.layers.{layer}.block_sparse_moe.e_score_correction_bias",
      parts::kExperts);
  bias.dtype = DType::kF32;
  return bias;
}

}  // namespace minimax

inline constexpr TensorTemplate kMinimaxM2Tensors[] = {
    parts::kEmbed,
    parts::kLmHead,
    parts::kFinalNorm,
    parts::kInputNorm,
    parts::kPostAttentionNorm,
    parts::kQWeight,
    parts::kKWeight,
    parts::kVWeight,
    parts::kOWeight,
    parts::Vector(Role::kQNorm, "model.layers.{layer}.self_attn.q_norm.weight", parts::kQRows),
    parts::Vector(Role::kKNorm, "model.layers.{layer}.self_attn.k_norm.weight", parts::kKvRows),
    minimax::Router(),
    minimax::Correction(),
    mixtral::kExpertGate,
    mixtral::kExpertUp,
    mixtral::kExpertDown,
};

inline Status ReadMinimaxM2(const Json& json, ModelConfig& config) {
  config.router_correction = true;
  config.whole_qk_norm = true;
  // Of MiniMax's other models: names and shapes that no release of this type has.
  WW_ASSIGN_OR_STATUS(const bool norms, ReadFlagOr(json, "use_qk_norm", true));
  WW_ASSIGN_OR_STATUS(const auto kind, OptionalString(json, "qk_norm_type"));
  WW_ASSIGN_OR_STATUS(const int64_t shared, ReadCountOr(json, "shared_intermediate_size", 0));
  if (!norms || kind.value_or("per_layer") != "per_layer" || shared > 0) {
    return Status(Code::kInvalidArgument, Reason::kInvalidRequest,
                  "config.json has no use_qk_norm, another qk_norm_type than per_layer, or a "
                  "shared_intermediate_size, which this family does not describe")
        .Remedy("send explicit layouts");
  }
  WW_ASSIGN_OR_STATUS(config.experts, ReadExpertsOr(json, 256));
  WW_ASSIGN_OR_STATUS(config.moe_intermediate, ReadSize(json, "intermediate_size"));
  return SetMoeLayers(json, 0, 1, "", config);
}

inline constexpr Family kMinimaxM2 = {.model_type = "minimax_m2",
                                      .tensors = kMinimaxM2Tensors,
                                      .read = ReadMinimaxM2,
                                      .defaults = {.kv_heads = 8, .head_dim = 128}};

}  // namespace weightwire::layout
