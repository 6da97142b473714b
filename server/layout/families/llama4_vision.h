#pragma once

#include "server/layout/families/llama4.h"
#include "server/layout/families/tower.h"

namespace weightwire::layout {

/// Llama 4 with its tower. Only the text model's rows of q and k are reordered by engines.
inline constexpr TowerTensor kLlama4Tower[] = {
    tower::Rows("multi_modal_projector.linear_1.weight", parts::kHidden, tower::kOut),
    tower::Whole("vision_model.class_embedding", tower::kHidden),
    tower::Whole("vision_model.positional_embedding_vlm", tower::kPositions, tower::kHidden),
    tower::Rows("vision_model.patch_embedding.linear.weight", tower::kHidden,
                tower::kPatchElements),
    tower::Whole("vision_model.layernorm_pre.weight", tower::kHidden),
    tower::Whole("vision_model.layernorm_pre.bias", tower::kHidden),
    tower::Whole("vision_model.layernorm_post.weight", tower::kHidden),
    tower::Whole("vision_model.layernorm_post.bias", tower::kHidden),
    tower::Rows("vision_model.vision_adapter.mlp.fc1.weight", tower::kProjector,
                tower::kIntermediate),
    tower::Columns("vision_model.vision_adapter.mlp.fc2.weight", tower::kProjector,
                   tower::kProjector),
    tower::Whole("vision_model.model.layers.{block}.input_layernorm.weight", tower::kHidden),
    tower::Whole("vision_model.model.layers.{block}.input_layernorm.bias", tower::kHidden),
    tower::Whole("vision_model.model.layers.{block}.post_attention_layernorm.weight",
                 tower::kHidden),
    tower::Whole("vision_model.model.layers.{block}.post_attention_layernorm.bias", tower::kHidden),
    tower::HeadRows("vision_model.model.layers.{block}.self_attn.q_proj.weight",
                    "vision_model.model.layers.{block}.self_attn.qkv_proj.weight"),
    tower::HeadRows("vision_model.model.layers.{block}.self_attn.k_proj.weight",
                    "vision_model.model.layers.{block}.self_attn.qkv_proj.weight"),
    tower::HeadRows("vision_model.model.layers.{block}.self_attn.v_proj.weight",
                    "vision_model.model.layers.{block}.self_attn.qkv_proj.weight"),
    tower::HeadBias("vision_model.model.layers.{block}.self_attn.q_proj.bias",
                    "vision_model.model.layers.{block}.self_attn.qkv_proj.bias"),
    tower::HeadBias("vision_model.model.layers.{block}.self_attn.k_proj.bias",
                    "vision_model.model.layers.{block}.self_attn.qkv_proj.bias"),
    tower::HeadBias("vision_model.model.layers.{block}.self_attn.v_proj.bias",
                    "vision_model.model.layers.{block}.self_attn.qkv_proj.bias"),
    tower::Columns("vision_model.model.layers.{block}.self_attn.o_proj.weight", tower::kHidden,
                   tower::kHidden),
    tower::Whole("vision_model.model.layers.{block}.self_attn.o_proj.bias", tower::kHidden),
    tower::Rows("vision_model.model.layers.{block}.mlp.fc1.weight", tower::kIntermediate,
                tower::kHidden),
    tower::Rows("vision_model.model.layers.{block}.mlp.fc1.bias", tower::kIntermediate),
    tower::Columns("vision_model.model.layers.{block}.mlp.fc2.weight", tower::kHidden,
                   tower::kIntermediate),
    tower::Whole("vision_model.model.layers.{block}.mlp.fc2.bias", tower::kHidden),
};

inline Status ReadLlama4Vision(const Json& json, ModelConfig& config) {
  WW_ASSIGN_OR_STATUS(const Json given, VisionJson(json));
  VisionConfig& vision = config.vision;
  WW_ASSIGN_OR_STATUS(vision.depth, ReadSizeOr(given, "num_hidden_layers", 34));
  WW_ASSIGN_OR_STATUS(vision.hidden, ReadSizeOr(given, "hidden_size", 768));
  WW_ASSIGN_OR_STATUS(vision.intermediate, ReadSizeOr(given, "intermediate_size", 5'632));
  WW_ASSIGN_OR_STATUS(vision.heads, ReadSizeOr(given, "num_attention_heads", 16));
  WW_ASSIGN_OR_STATUS(vision.channels, ReadSizeOr(given, "num_channels", 3));
  WW_ASSIGN_OR_STATUS(vision.patch, ReadSizeOr(given, "patch_size", 14));
  WW_ASSIGN_OR_STATUS(vision.out_hidden, ReadSizeOr(given, "vision_output_dim", 7'680));
  WW_ASSIGN_OR_STATUS(vision.projector, ReadSizeOr(given, "projector_input_dim", 4'096));
  WW_ASSIGN_OR_STATUS(const int64_t output, ReadSizeOr(given, "projector_output_dim", 4'096));
  WW_ASSIGN_OR_STATUS(const bool bias, ReadFlagOr(given, "multi_modal_projector_bias", false));
  if (output != vision.projector || bias) {
    return Status(
               Code::kInvalidArgument, Reason::kInvalidRequest,
               "vision_config has a multi_modal_projector_bias, or a projector_input_dim that is "
               "not projector_output_dim: transformers and engines take that for different sizes")
        .Remedy("send explicit layouts");
  }
  WW_ASSIGN_OR_STATUS(const int64_t image, ReadSizeOr(given, "image_size", 448));
  return SetPositions(image, 1, vision);
}

inline constexpr TextType kLlama4Texts[] = {{"llama4_text", "llama4_text"}};
inline constexpr Wrapper kLlama4Wrapper = {.texts = kLlama4Texts,
                                           .model = "language_model.model.",
                                           .head = "language_model.lm_head.",
                                           .tower = kLlama4Tower,
                                           .read = ReadLlama4Vision};
inline constexpr Family kLlama4 = {.model_type = "llama4", .wrapper = &kLlama4Wrapper};

}  // namespace weightwire::layout
