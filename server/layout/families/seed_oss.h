#pragma once

#include "server/layout/families/llama.h"

namespace weightwire::layout {

/// Seed-OSS: Llama whose biases of q, k and v (`attention_bias`) and of o (`attention_out_bias`)
/// are chosen apart.
inline constexpr TensorTemplate kSeedOssTensors[] = {
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
    parts::OBias([](const ModelConfig& c, const LayerKind&) { return c.output_bias; }),
    parts::kGateWeight,
    parts::kUpWeight,
    parts::kDownWeight,
    llama::kGateBias,
    llama::kUpBias,
    llama::kDownBias,
};

inline Status ReadSeedOss(const Json& json, ModelConfig& config) {
  WW_ASSIGN_OR_STATUS(config.attention_bias, ReadFlagOr(json, "attention_bias", true));
  WW_ASSIGN_OR_STATUS(config.output_bias, ReadFlagOr(json, "attention_out_bias", false));
  return OkStatus();
}

inline constexpr Family kSeedOss = {.model_type = "seed_oss",
                                    .tensors = kSeedOssTensors,
                                    .read = ReadSeedOss,
                                    .defaults = {.kv_heads = 8, .head_dim = 128}};

}  // namespace weightwire::layout
