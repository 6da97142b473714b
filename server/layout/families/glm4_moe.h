#pragma once

#include "server/layout/families/deepseek.h"
#include "server/layout/families/parts.h"

namespace weightwire::layout {

/// GLM-4.5: grouped attention with biases on q, k and v, norms on heads where `use_qk_norm` says
/// so, a dense beginning, shared experts stored as one, and MTP layers as in DeepSeek-V3.
inline constexpr TensorTemplate kGlm4MoeTensors[] = {
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
    parts::QNorm(parts::kWithQkNorm),
    parts::KNorm(parts::kWithQkNorm),
    parts::kGateWeight,
    parts::kUpWeight,
    parts::kDownWeight,
    deepseek::Router(),
    deepseek::Correction(),
    parts::kExpertGate,
    parts::kExpertUp,
    parts::kExpertDown,
    deepseek::kSharedGate,
    deepseek::kSharedUp,
    deepseek::kSharedDown,
    deepseek::kMtpEmbedNorm,
    deepseek::kMtpHiddenNorm,
    deepseek::MtpProjection(),
    deepseek::kMtpFinalNorm,
};

inline Status ReadGlm4Moe(const Json& json, ModelConfig& config) {
  config.router_correction = true;
  WW_ASSIGN_OR_STATUS(config.mtp_layers, ReadCountOr(json, "num_nextn_predict_layers", 0));
  WW_ASSIGN_OR_STATUS(config.qk_norm, ReadFlagOr(json, "use_qk_norm", false));
  WW_ASSIGN_OR_STATUS(config.experts, ReadExpertsOr(json, 128));
  WW_ASSIGN_OR_STATUS(config.moe_intermediate, ReadSizeOr(json, "moe_intermediate_size", 1'408));
  WW_ASSIGN_OR_STATUS(const int64_t shared, ReadCountOr(json, "n_shared_experts", 1));
  config.shared_intermediate = shared * config.moe_intermediate;
  WW_ASSIGN_OR_STATUS(const int64_t dense, ReadCountOr(json, "first_k_dense_replace", 1));
  return SetMoeLayers(json, dense, 1, "mlp_only_layers", config);
}

inline constexpr Family kGlm4Moe = {.model_type = "glm4_moe",
                                    .tensors = kGlm4MoeTensors,
                                    .read = ReadGlm4Moe,
                                    .mtp_copies = kDeepseekMtpCopies,
                                    .defaults = {.kv_heads = 8}};

}  // namespace weightwire::layout
