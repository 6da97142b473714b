#pragma once

#include "server/layout/families/qwen3_next.h"
#include "server/layout/families/qwen3_vl.h"

namespace weightwire::layout {

/// Qwen3.5: text models with the gated delta rule behind Qwen3-VL's tower, which has one merger.
inline Status ReadQwen35Vision(const Json& json, ModelConfig& config) {
  WW_RETURN_IF_ERROR(ReadQwen3VlVision(json, config));
  config.vision.mergers = 0;
  return OkStatus();
}

inline constexpr TextType kQwen35Texts[] = {{"qwen3_5_text", "qwen3_5_text"}};
inline constexpr TextType kQwen35MoeTexts[] = {{"qwen3_5_moe_text", "qwen3_5_moe_fused"}};
inline constexpr Wrapper kQwen35Wrapper = {.texts = kQwen35Texts,
                                           .model = "model.language_model.",
                                           .head = "lm_head.",
                                           .tower = kQwen3VlTower,
                                           .read = ReadQwen35Vision};
inline constexpr Wrapper kQwen35MoeWrapper = {.texts = kQwen35MoeTexts,
                                              .model = "model.language_model.",
                                              .head = "lm_head.",
                                              .tower = kQwen3VlTower,
                                              .read = ReadQwen35Vision};
inline constexpr Family kQwen35 = {.model_type = "qwen3_5", .wrapper = &kQwen35Wrapper};
inline constexpr Family kQwen35Moe = {.model_type = "qwen3_5_moe", .wrapper = &kQwen35MoeWrapper};

}  // namespace weightwire::layout
