#pragma once

#include "server/layout/families/qwen3.h"
#include "server/layout/families/tower.h"

namespace weightwire::layout {

/// Qwen3-VL: Qwen3 behind a tower with further mergers for inner blocks. Qwen3-VL-MoE stores the
/// experts of a layer as one tensor with inputs first, gate before up in the last dimension, as the
/// releases and transformers 4 do.
inline constexpr TensorTemplate kQwen3VlMoeTensors[] = {
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
    parts::QNorm(parts::kAlways),
    parts::KNorm(parts::kAlways),
    parts::kGateWeight,
    parts::kUpWeight,
    parts::kDownWeight,
    parts::kRouter,
    parts::GateUpExperts("model.layers.{layer}.mlp.experts.gate_up_proj"),
    parts::DownExperts("model.layers.{layer}.mlp.experts.down_proj"),
};

inline constexpr TowerTensor kQwen3VlTower[] = {
    tower::Whole("model.visual.patch_embed.proj.weight", tower::kHidden, tower::kChannels,
                 tower::kFrames, tower::kPatch, tower::kPatch),
    tower::Whole("model.visual.patch_embed.proj.bias", tower::kHidden),
    tower::Whole("model.visual.pos_embed.weight", tower::kPositions, tower::kHidden),
    tower::Whole("model.visual.blocks.{block}.norm1.weight", tower::kHidden),
    tower::Whole("model.visual.blocks.{block}.norm1.bias", tower::kHidden),
    tower::Whole("model.visual.blocks.{block}.norm2.weight", tower::kHidden),
    tower::Whole("model.visual.blocks.{block}.norm2.bias", tower::kHidden),
    tower::Qkv("model.visual.blocks.{block}.attn.qkv.weight"),
    tower::QkvBias("model.visual.blocks.{block}.attn.qkv.bias"),
    tower::Columns("model.visual.blocks.{block}.attn.proj.weight", tower::kHidden, tower::kHidden),
    tower::Whole("model.visual.blocks.{block}.attn.proj.bias", tower::kHidden),
    tower::Rows("model.visual.blocks.{block}.mlp.linear_fc1.weight", tower::kIntermediate,
                tower::kHidden),
    tower::Rows("model.visual.blocks.{block}.mlp.linear_fc1.bias", tower::kIntermediate),
    tower::Columns("model.visual.blocks.{block}.mlp.linear_fc2.weight", tower::kHidden,
                   tower::kIntermediate),
    tower::Whole("model.visual.blocks.{block}.mlp.linear_fc2.bias", tower::kHidden),
    tower::Whole("model.visual.merger.norm.weight", tower::kHidden),
    tower::Whole("model.visual.merger.norm.bias", tower::kHidden),
    tower::Rows("model.visual.merger.linear_fc1.weight", tower::kMerged, tower::kMerged),
    tower::Rows("model.visual.merger.linear_fc1.bias", tower::kMerged),
    tower::Columns("model.visual.merger.linear_fc2.weight", tower::kOut, tower::kMerged),
    tower::Whole("model.visual.merger.linear_fc2.bias", tower::kOut),
    tower::EachMerger(
        tower::Whole("model.visual.deepstack_merger_list.{block}.norm.weight", tower::kMerged)),
    tower::EachMerger(
        tower::Whole("model.visual.deepstack_merger_list.{block}.norm.bias", tower::kMerged)),
    tower::EachMerger(tower::Rows("model.visual.deepstack_merger_list.{block}.linear_fc1.weight",
                                  tower::kMerged, tower::kMerged)),
    tower::EachMerger(
        tower::Rows("model.visual.deepstack_merger_list.{block}.linear_fc1.bias", tower::kMerged)),
    tower::EachMerger(tower::Columns("model.visual.deepstack_merger_list.{block}.linear_fc2.weight",
                                     tower::kOut, tower::kMerged)),
    tower::EachMerger(
        tower::Whole("model.visual.deepstack_merger_list.{block}.linear_fc2.bias", tower::kOut)),
};

inline Status ReadQwen3VlVision(const Json& json, ModelConfig& config) {
  WW_ASSIGN_OR_STATUS(const Json given, VisionJson(json));
  VisionConfig& vision = config.vision;
  WW_ASSIGN_OR_STATUS(vision.depth, ReadSizeOr(given, "depth", 27));
  WW_ASSIGN_OR_STATUS(vision.hidden, ReadSizeOr(given, "hidden_size", 1'152));
  WW_ASSIGN_OR_STATUS(vision.intermediate, ReadSizeOr(given, "intermediate_size", 4'304));
  WW_ASSIGN_OR_STATUS(vision.heads, ReadSizeOr(given, "num_heads", 16));
  WW_ASSIGN_OR_STATUS(vision.channels, ReadSizeOr(given, "in_channels", 3));
  WW_ASSIGN_OR_STATUS(vision.patch, ReadSizeOr(given, "patch_size", 16));
  WW_ASSIGN_OR_STATUS(vision.temporal_patch, ReadSizeOr(given, "temporal_patch_size", 2));
  WW_ASSIGN_OR_STATUS(vision.out_hidden, ReadSizeOr(given, "out_hidden_size", 3'584));
  WW_ASSIGN_OR_STATUS(vision.positions, ReadSizeOr(given, "num_position_embeddings", 2'304));
  WW_RETURN_IF_ERROR(SetMerged(given, "spatial_merge_size", 2, vision));
  vision.mergers = 3;
  if (const auto inner = given.find("deepstack_visual_indexes");
      inner != given.end() && inner->is_array()) {
    vision.mergers = std::ssize(*inner);
  }
  return CheckVision(vision);
}

inline Status ReadQwen3VlMoe(const Json& json, ModelConfig& config) {
  WW_ASSIGN_OR_STATUS(config.experts, ReadExpertsOr(json, 60));
  WW_ASSIGN_OR_STATUS(config.moe_intermediate, ReadSizeOr(json, "moe_intermediate_size", 1'408));
  WW_ASSIGN_OR_STATUS(const int64_t step, ReadSizeOr(json, "decoder_sparse_step", 1));
  return SetMoeLayers(json, 0, step, "mlp_only_layers", config);
}

/// Never a model of its own.
inline constexpr Family kQwen3VlMoeText = {.model_type = "qwen3_vl_moe_text",
                                           .tensors = kQwen3VlMoeTensors,
                                           .read = ReadQwen3VlMoe,
                                           .defaults = {.kv_heads = 16}};

inline constexpr TextType kQwen3VlTexts[] = {{"qwen3_vl_text", "qwen3"}};
inline constexpr TextType kQwen3VlMoeTexts[] = {{"qwen3_vl_moe_text", "qwen3_vl_moe_text"}};
inline constexpr Wrapper kQwen3VlWrapper = {.texts = kQwen3VlTexts,
                                            .model = "model.language_model.",
                                            .head = "lm_head.",
                                            .tower = kQwen3VlTower,
                                            .read = ReadQwen3VlVision,
                                            .outer_tie = true};
inline constexpr Wrapper kQwen3VlMoeWrapper = {.texts = kQwen3VlMoeTexts,
                                               .model = "model.language_model.",
                                               .head = "lm_head.",
                                               .tower = kQwen3VlTower,
                                               .read = ReadQwen3VlVision,
                                               .outer_tie = true};
inline constexpr Family kQwen3Vl = {.model_type = "qwen3_vl", .wrapper = &kQwen3VlWrapper};
inline constexpr Family kQwen3VlMoe = {.model_type = "qwen3_vl_moe",
                                       .wrapper = &kQwen3VlMoeWrapper};

}  // namespace weightwire::layout
