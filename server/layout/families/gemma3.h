#pragma once

#include "server/layout/families/gemma.h"
#include "server/layout/families/tower.h"

namespace weightwire::layout {

/// Gemma 3 with its SigLIP tower: names are those of the releases and of transformers 4 (5 leaves
/// out ".vision_model"). The pooling head is there unless `vision_use_head` denies it, as the
/// releases do; vLLM never holds it.
inline constexpr TowerTensor kGemma3Tower[] = {
    {.name = "multi_modal_projector.mm_input_projection_weight",
     .shape = {tower::kHidden, parts::kHidden}},
    {.name = "multi_modal_projector.mm_soft_emb_norm.weight", .shape = {tower::kHidden}},
    {.name = "vision_tower.vision_model.embeddings.patch_embedding.weight",
     .shape = {tower::kHidden, tower::kChannels, tower::kPatch, tower::kPatch}},
    {.name = "vision_tower.vision_model.embeddings.patch_embedding.bias",
     .shape = {tower::kHidden}},
    {.name = "vision_tower.vision_model.embeddings.position_embedding.weight",
     .shape = {tower::kPositions, tower::kHidden}},
    {.name = "vision_tower.vision_model.encoder.layers.{block}.layer_norm1.weight",
     .shape = {tower::kHidden}},
    {.name = "vision_tower.vision_model.encoder.layers.{block}.layer_norm1.bias",
     .shape = {tower::kHidden}},
    {.name = "vision_tower.vision_model.encoder.layers.{block}.layer_norm2.weight",
     .shape = {tower::kHidden}},
    {.name = "vision_tower.vision_model.encoder.layers.{block}.layer_norm2.bias",
     .shape = {tower::kHidden}},
    tower::HeadRows("vision_tower.vision_model.encoder.layers.{block}.self_attn.q_proj.weight",
                    "vision_tower.vision_model.encoder.layers.{block}.self_attn.qkv_proj.weight"),
    tower::HeadRows("vision_tower.vision_model.encoder.layers.{block}.self_attn.k_proj.weight",
                    "vision_tower.vision_model.encoder.layers.{block}.self_attn.qkv_proj.weight"),
    tower::HeadRows("vision_tower.vision_model.encoder.layers.{block}.self_attn.v_proj.weight",
                    "vision_tower.vision_model.encoder.layers.{block}.self_attn.qkv_proj.weight"),
    tower::HeadBias("vision_tower.vision_model.encoder.layers.{block}.self_attn.q_proj.bias",
                    "vision_tower.vision_model.encoder.layers.{block}.self_attn.qkv_proj.bias"),
    tower::HeadBias("vision_tower.vision_model.encoder.layers.{block}.self_attn.k_proj.bias",
                    "vision_tower.vision_model.encoder.layers.{block}.self_attn.qkv_proj.bias"),
    tower::HeadBias("vision_tower.vision_model.encoder.layers.{block}.self_attn.v_proj.bias",
                    "vision_tower.vision_model.encoder.layers.{block}.self_attn.qkv_proj.bias"),
    tower::Columns("vision_tower.vision_model.encoder.layers.{block}.self_attn.out_proj.weight",
                   tower::kHidden, tower::kHidden),
    {.name = "vision_tower.vision_model.encoder.layers.{block}.self_attn.out_proj.bias",
     .shape = {tower::kHidden}},
    tower::Rows("vision_tower.vision_model.encoder.layers.{block}.mlp.fc1.weight",
                tower::kIntermediate, tower::kHidden),
    tower::Rows("vision_tower.vision_model.encoder.layers.{block}.mlp.fc1.bias",
                tower::kIntermediate),
    tower::Columns("vision_tower.vision_model.encoder.layers.{block}.mlp.fc2.weight",
                   tower::kHidden, tower::kIntermediate),
    {.name = "vision_tower.vision_model.encoder.layers.{block}.mlp.fc2.bias",
     .shape = {tower::kHidden}},
    {.name = "vision_tower.vision_model.post_layernorm.weight", .shape = {tower::kHidden}},
    {.name = "vision_tower.vision_model.post_layernorm.bias", .shape = {tower::kHidden}},
    tower::Pooling("vision_tower.vision_model.head.probe", parts::kOne, parts::kOne,
                   tower::kHidden),
    tower::Pooling("vision_tower.vision_model.head.attention.in_proj_weight", tower::kThreeHidden,
                   tower::kHidden),
    tower::Pooling("vision_tower.vision_model.head.attention.in_proj_bias", tower::kThreeHidden),
    tower::Pooling("vision_tower.vision_model.head.attention.out_proj.weight", tower::kHidden,
                   tower::kHidden),
    tower::Pooling("vision_tower.vision_model.head.attention.out_proj.bias", tower::kHidden),
    tower::Pooling("vision_tower.vision_model.head.layernorm.weight", tower::kHidden),
    tower::Pooling("vision_tower.vision_model.head.layernorm.bias", tower::kHidden),
    tower::Pooling("vision_tower.vision_model.head.mlp.fc1.weight", tower::kIntermediate,
                   tower::kHidden),
    tower::Pooling("vision_tower.vision_model.head.mlp.fc1.bias", tower::kIntermediate),
    tower::Pooling("vision_tower.vision_model.head.mlp.fc2.weight", tower::kHidden,
                   tower::kIntermediate),
    tower::Pooling("vision_tower.vision_model.head.mlp.fc2.bias", tower::kHidden),
};

inline Status ReadGemma3Vision(const Json& json, ModelConfig& config) {
  WW_ASSIGN_OR_STATUS(const Json given, VisionJson(json));
  VisionConfig& vision = config.vision;
  WW_ASSIGN_OR_STATUS(vision.depth, ReadSizeOr(given, "num_hidden_layers", 12));
  WW_ASSIGN_OR_STATUS(vision.hidden, ReadSizeOr(given, "hidden_size", 768));
  WW_ASSIGN_OR_STATUS(vision.intermediate, ReadSizeOr(given, "intermediate_size", 3'072));
  WW_ASSIGN_OR_STATUS(vision.heads, ReadSizeOr(given, "num_attention_heads", 12));
  WW_ASSIGN_OR_STATUS(vision.channels, ReadSizeOr(given, "num_channels", 3));
  WW_ASSIGN_OR_STATUS(vision.patch, ReadSizeOr(given, "patch_size", 16));
  WW_ASSIGN_OR_STATUS(vision.pooling, ReadFlagOr(given, "vision_use_head", true));
  WW_ASSIGN_OR_STATUS(const int64_t image, ReadSizeOr(given, "image_size", 224));
  return SetPositions(image, 0, vision);
}

inline constexpr TextType kGemma3Texts[] = {{"gemma3_text", "gemma3_text"}};
inline constexpr Wrapper kGemma3Wrapper = {.texts = kGemma3Texts,
                                           .model = "language_model.model.",
                                           .head = "language_model.lm_head.",
                                           .tower = kGemma3Tower,
                                           .read = ReadGemma3Vision};
inline constexpr Family kGemma3 = {.model_type = "gemma3", .wrapper = &kGemma3Wrapper};

}  // namespace weightwire::layout
