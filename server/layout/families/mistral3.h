#pragma once

#include "server/layout/families/llama.h"
#include "server/layout/families/tower.h"

namespace weightwire::layout {

/// Mistral Small 3.1 and later, Ministral 3: Mistral or Ministral 3 behind a Pixtral tower. Names
/// are those of the releases, which both versions of transformers save.
inline constexpr TowerTensor kMistral3Tower[] = {
    tower::Whole("multi_modal_projector.norm.weight", tower::kHidden),
    tower::Whole("multi_modal_projector.patch_merger.merging_layer.weight", tower::kHidden,
                 tower::kMerged),
    tower::Rows("multi_modal_projector.linear_1.weight", parts::kHidden, tower::kHidden),
    tower::If(tower::kWithProjectorBias,
              tower::Rows("multi_modal_projector.linear_1.bias", parts::kHidden)),
    tower::Columns("multi_modal_projector.linear_2.weight", parts::kHidden, parts::kHidden),
    tower::If(tower::kWithProjectorBias,
              tower::Whole("multi_modal_projector.linear_2.bias", parts::kHidden)),
    tower::Whole("vision_tower.ln_pre.weight", tower::kHidden),
    tower::Whole("vision_tower.patch_conv.weight", tower::kHidden, tower::kChannels, tower::kPatch,
                 tower::kPatch),
    tower::Whole("vision_tower.transformer.layers.{block}.attention_norm.weight", tower::kHidden),
    tower::Whole("vision_tower.transformer.layers.{block}.ffn_norm.weight", tower::kHidden),
    tower::HeadRows("vision_tower.transformer.layers.{block}.attention.q_proj.weight",
                    "vision_tower.transformer.layers.{block}.attention.qkv_proj.weight"),
    tower::HeadRows("vision_tower.transformer.layers.{block}.attention.k_proj.weight",
                    "vision_tower.transformer.layers.{block}.attention.qkv_proj.weight"),
    tower::HeadRows("vision_tower.transformer.layers.{block}.attention.v_proj.weight",
                    "vision_tower.transformer.layers.{block}.attention.qkv_proj.weight"),
    tower::Columns("vision_tower.transformer.layers.{block}.attention.o_proj.weight",
                   tower::kHidden, tower::kHidden),
    tower::FusedRows("vision_tower.transformer.layers.{block}.feed_forward.gate_proj.weight",
                     "vision_tower.transformer.layers.{block}.feed_forward.gate_up_proj.weight"),
    tower::FusedRows("vision_tower.transformer.layers.{block}.feed_forward.up_proj.weight",
                     "vision_tower.transformer.layers.{block}.feed_forward.gate_up_proj.weight"),
    tower::Columns("vision_tower.transformer.layers.{block}.feed_forward.down_proj.weight",
                   tower::kHidden, tower::kIntermediate),
};

inline Status ReadMistral3Vision(const Json& json, ModelConfig& config) {
  WW_ASSIGN_OR_STATUS(const Json given, VisionJson(json));
  VisionConfig& vision = config.vision;
  WW_ASSIGN_OR_STATUS(vision.depth, ReadSizeOr(given, "num_hidden_layers", 24));
  WW_ASSIGN_OR_STATUS(vision.hidden, ReadSizeOr(given, "hidden_size", 1'024));
  WW_ASSIGN_OR_STATUS(vision.intermediate, ReadSizeOr(given, "intermediate_size", 4'096));
  WW_ASSIGN_OR_STATUS(vision.heads, ReadSizeOr(given, "num_attention_heads", 16));
  WW_ASSIGN_OR_STATUS(vision.channels, ReadSizeOr(given, "num_channels", 3));
  WW_ASSIGN_OR_STATUS(vision.patch, ReadSizeOr(given, "patch_size", 16));
  WW_ASSIGN_OR_STATUS(vision.projector_bias, ReadFlagOr(json, "multimodal_projector_bias", false));
  WW_RETURN_IF_ERROR(SetMerged(json, "spatial_merge_size", 2, vision));
  const auto layer = json.find("vision_feature_layer");
  if (layer != json.end() && AsInteger(*layer) != -1) {
    return Status(Code::kInvalidArgument, Reason::kInvalidRequest,
                  "config.json's vision_feature_layer is not -1: engines then leave blocks of the "
                  "tower out, which is not described")
        .Remedy("send explicit layouts");
  }
  return CheckVision(vision);
}

inline constexpr TextType kMistral3Texts[] = {{"mistral", "mistral"}, {"ministral3", "ministral3"}};
inline constexpr NamePrefix kMistral3Megatron[] = {
    {"vision_tower.", "vision_tower."}, {"multi_modal_projector.", "multi_modal_projector."}};
inline constexpr Wrapper kMistral3Wrapper = {.texts = kMistral3Texts,
                                             .model = "language_model.model.",
                                             .head = "language_model.lm_head.",
                                             .tower = kMistral3Tower,
                                             .read = ReadMistral3Vision,
                                             .megatron = kMistral3Megatron};
inline constexpr Family kMistral3 = {.model_type = "mistral3", .wrapper = &kMistral3Wrapper};

}  // namespace weightwire::layout
