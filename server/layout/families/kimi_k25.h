#pragma once

#include "server/layout/families/deepseek.h"
#include "server/layout/families/tower.h"

namespace weightwire::layout {

/// Kimi-K2.5 and K2.6: Kimi-K2 behind a MoonViT tower. Names are the release's; fields of
/// `vision_config` are called one way there ("vt_…") and another in transformers 5.
inline constexpr TowerTensor kKimiK25Tower[] = {
    tower::Whole("mm_projector.pre_norm.weight", tower::kHidden),
    tower::Whole("mm_projector.pre_norm.bias", tower::kHidden),
    tower::Named("mm_projector.proj.0.weight", "mm_projector.linear_1.weight", tower::kMerged,
                 tower::kMerged),
    tower::Named("mm_projector.proj.0.bias", "mm_projector.linear_1.bias", tower::kMerged),
    tower::Named("mm_projector.proj.2.weight", "mm_projector.linear_2.weight", parts::kHidden,
                 tower::kMerged),
    tower::Named("mm_projector.proj.2.bias", "mm_projector.linear_2.bias", parts::kHidden),
    tower::Whole("vision_tower.patch_embed.proj.weight", tower::kHidden, tower::kChannels,
                 tower::kPatch, tower::kPatch),
    tower::Whole("vision_tower.patch_embed.proj.bias", tower::kHidden),
    tower::Whole("vision_tower.patch_embed.pos_emb.weight", tower::kPositions,
                 tower::kPositionsAcross, tower::kHidden),
    tower::Whole("vision_tower.encoder.final_layernorm.weight", tower::kHidden),
    tower::Whole("vision_tower.encoder.final_layernorm.bias", tower::kHidden),
    tower::Whole("vision_tower.encoder.blocks.{block}.norm0.weight", tower::kHidden),
    tower::Whole("vision_tower.encoder.blocks.{block}.norm0.bias", tower::kHidden),
    tower::Whole("vision_tower.encoder.blocks.{block}.norm1.weight", tower::kHidden),
    tower::Whole("vision_tower.encoder.blocks.{block}.norm1.bias", tower::kHidden),
    tower::Qkv("vision_tower.encoder.blocks.{block}.wqkv.weight"),
    tower::QkvBias("vision_tower.encoder.blocks.{block}.wqkv.bias"),
    tower::Columns("vision_tower.encoder.blocks.{block}.wo.weight", tower::kHidden, tower::kHidden),
    tower::Whole("vision_tower.encoder.blocks.{block}.wo.bias", tower::kHidden),
    tower::Rows("vision_tower.encoder.blocks.{block}.mlp.fc0.weight", tower::kIntermediate,
                tower::kHidden),
    tower::Rows("vision_tower.encoder.blocks.{block}.mlp.fc0.bias", tower::kIntermediate),
    tower::Columns("vision_tower.encoder.blocks.{block}.mlp.fc1.weight", tower::kHidden,
                   tower::kIntermediate),
    tower::Whole("vision_tower.encoder.blocks.{block}.mlp.fc1.bias", tower::kHidden),
};

/// The field by its name in the release, or by transformers' name.
inline Result<int64_t> ReadEither(const Json& json, const char* released, const char* other,
                                  int64_t fallback) {
  return ReadSizeOr(json, json.contains(released) ? released : other, fallback);
}

inline Status ReadKimiVision(const Json& json, ModelConfig& config) {
  WW_ASSIGN_OR_STATUS(const Json given, VisionJson(json));
  VisionConfig& vision = config.vision;
  vision.channels = 3;
  WW_ASSIGN_OR_STATUS(vision.depth,
                      ReadEither(given, "vt_num_hidden_layers", "num_hidden_layers", 27));
  WW_ASSIGN_OR_STATUS(vision.hidden, ReadEither(given, "vt_hidden_size", "hidden_size", 1'152));
  WW_ASSIGN_OR_STATUS(vision.intermediate,
                      ReadEither(given, "vt_intermediate_size", "intermediate_size", 4'304));
  WW_ASSIGN_OR_STATUS(vision.heads,
                      ReadEither(given, "vt_num_attention_heads", "num_attention_heads", 16));
  WW_ASSIGN_OR_STATUS(vision.patch, ReadSizeOr(given, "patch_size", 14));
  WW_ASSIGN_OR_STATUS(vision.positions,
                      ReadEither(given, "init_pos_emb_height", "pos_emb_height", 64));
  WW_ASSIGN_OR_STATUS(vision.positions_across,
                      ReadEither(given, "init_pos_emb_width", "pos_emb_width", 64));
  WW_RETURN_IF_ERROR(SetMerged(given, "merge_kernel_size", 2, vision));
  WW_ASSIGN_OR_STATUS(const auto projector, OptionalString(given, "mm_projector_type"));
  WW_ASSIGN_OR_STATUS(const int64_t released, ReadSizeOr(given, "mm_hidden_size", vision.hidden));
  WW_ASSIGN_OR_STATUS(const int64_t size, ReadSizeOr(json, "projection_hidden_size", released));
  if (projector.value_or("patchmerger") != "patchmerger" || released != vision.hidden ||
      size != vision.hidden) {
    return Status(Code::kInvalidArgument, Reason::kInvalidRequest,
                  "config.json has a mm_projector_type that is not patchmerger, or a "
                  "mm_hidden_size or projection_hidden_size that is not the tower's hidden size, "
                  "which engines take for it")
        .Remedy("send explicit layouts");
  }
  return CheckVision(vision);
}

/// transformers 5 calls the text model deepseek_v3.
inline constexpr TextType kKimiK25Texts[] = {{"kimi_k2", "kimi_k2"}, {"deepseek_v3", "kimi_k2"}};
inline constexpr NamePrefix kKimiK25Megatron[] = {{"vision_tower.", "vision_tower."},
                                                  {"mm_projector.", "mm_projector."}};
inline constexpr Wrapper kKimiK25Wrapper = {.texts = kKimiK25Texts,
                                            .model = "language_model.model.",
                                            .head = "language_model.lm_head.",
                                            .tower = kKimiK25Tower,
                                            .read = ReadKimiVision,
                                            .megatron = kKimiK25Megatron};
inline constexpr Family kKimiK25 = {.model_type = "kimi_k25", .wrapper = &kKimiK25Wrapper};

}  // namespace weightwire::layout
