#pragma once

#include "server/layout/families/qwen2.h"

namespace weightwire::layout {

/// Qwen2.5-VL: Qwen2 behind a vision tower whose q, k and v are one tensor. Names are those of the
/// releases and of transformers 4; `vision_config` has the tower's sizes.
namespace qwen_vl {

inline constexpr SizeOf kHidden = [](const ModelConfig& c) { return c.vision.hidden; };
inline constexpr SizeOf kThreeHidden = [](const ModelConfig& c) { return 3 * c.vision.hidden; };
inline constexpr SizeOf kIntermediate = [](const ModelConfig& c) { return c.vision.intermediate; };
inline constexpr SizeOf kChannels = [](const ModelConfig& c) { return c.vision.channels; };
inline constexpr SizeOf kFrames = [](const ModelConfig& c) { return c.vision.temporal_patch; };
inline constexpr SizeOf kPatch = [](const ModelConfig& c) { return c.vision.patch; };
inline constexpr SizeOf kMerged = [](const ModelConfig& c) {
  return c.vision.hidden * c.vision.merged;
};
inline constexpr SizeOf kOut = [](const ModelConfig& c) { return c.vision.out_hidden; };

/// q, k and v in three runs of rows.
constexpr std::array<Part, 3> Thirds(Role q, Role k, Role v) {
  return {Part{.role = q, .slice = 0, .slices = 3}, Part{.role = k, .slice = 1, .slices = 3},
          Part{.role = v, .slice = 2, .slices = 3}};
}

}  // namespace qwen_vl

inline constexpr TensorTemplate kQwen25VlTensors[] = {
    parts::kEmbed,
    parts::kLmHead,
    parts::kFinalNorm,
    parts::kInputNorm,
    parts::kPostAttentionNorm,
    parts::kQWeight,
    parts::kKWeight,
    parts::kVWeight,
    parts::kOWeight,
    parts::QBias(parts::kAlways),
    parts::KBias(parts::kAlways),
    parts::VBias(parts::kAlways),
    parts::kGateWeight,
    parts::kUpWeight,
    parts::kDownWeight,
    {.name = "visual.patch_embed.proj.weight",
     .shape = {qwen_vl::kHidden, qwen_vl::kChannels, qwen_vl::kFrames, qwen_vl::kPatch,
               qwen_vl::kPatch},
     .parts = {Part{.role = Role::kVisionPatch}}},
    parts::Vector(Role::kVisionAttentionNorm, "visual.blocks.{block}.norm1.weight",
                  qwen_vl::kHidden),
    parts::Vector(Role::kVisionMlpNorm, "visual.blocks.{block}.norm2.weight", qwen_vl::kHidden),
    {.name = "visual.blocks.{block}.attn.qkv.weight",
     .shape = {qwen_vl::kThreeHidden, qwen_vl::kHidden},
     .parts = qwen_vl::Thirds(Role::kVisionQWeight, Role::kVisionKWeight, Role::kVisionVWeight)},
    {.name = "visual.blocks.{block}.attn.qkv.bias",
     .shape = {qwen_vl::kThreeHidden},
     .parts = qwen_vl::Thirds(Role::kVisionQBias, Role::kVisionKBias, Role::kVisionVBias)},
    parts::Matrix(Role::kVisionOWeight, "visual.blocks.{block}.attn.proj.weight", qwen_vl::kHidden,
                  qwen_vl::kHidden),
    parts::Vector(Role::kVisionOBias, "visual.blocks.{block}.attn.proj.bias", qwen_vl::kHidden),
    parts::Matrix(Role::kVisionGateWeight, "visual.blocks.{block}.mlp.gate_proj.weight",
                  qwen_vl::kIntermediate, qwen_vl::kHidden),
    parts::Vector(Role::kVisionGateBias, "visual.blocks.{block}.mlp.gate_proj.bias",
                  qwen_vl::kIntermediate),
    parts::Matrix(Role::kVisionUpWeight, "visual.blocks.{block}.mlp.up_proj.weight",
                  qwen_vl::kIntermediate, qwen_vl::kHidden),
    parts::Vector(Role::kVisionUpBias, "visual.blocks.{block}.mlp.up_proj.bias",
                  qwen_vl::kIntermediate),
    parts::Matrix(Role::kVisionDownWeight, "visual.blocks.{block}.mlp.down_proj.weight",
                  qwen_vl::kHidden, qwen_vl::kIntermediate),
    parts::Vector(Role::kVisionDownBias, "visual.blocks.{block}.mlp.down_proj.bias",
                  qwen_vl::kHidden),
    parts::Vector(Role::kMergerNorm, "visual.merger.ln_q.weight", qwen_vl::kHidden),
    parts::Matrix(Role::kMergerInWeight, "visual.merger.mlp.0.weight", qwen_vl::kMerged,
                  qwen_vl::kMerged),
    parts::Vector(Role::kMergerInBias, "visual.merger.mlp.0.bias", qwen_vl::kMerged),
    parts::Matrix(Role::kMergerOutWeight, "visual.merger.mlp.2.weight", qwen_vl::kOut,
                  qwen_vl::kMerged),
    parts::Vector(Role::kMergerOutBias, "visual.merger.mlp.2.bias", qwen_vl::kOut),
};

inline Status ReadQwen25Vl(const Json& json, ModelConfig& config) {
  const auto given = json.find("vision_config");
  if (given == json.end() || !given->is_object()) {
    return {Code::kInvalidArgument, Reason::kInvalidRequest,
            "the field vision_config is missing or no object"};
  }
  VisionConfig& vision = config.vision;
  WW_ASSIGN_OR_STATUS(vision.depth, ReadSizeOr(*given, "depth", 32));
  WW_ASSIGN_OR_STATUS(vision.hidden, ReadSizeOr(*given, "hidden_size", 3'584));
  WW_ASSIGN_OR_STATUS(vision.intermediate, ReadSizeOr(*given, "intermediate_size", 3'420));
  WW_ASSIGN_OR_STATUS(vision.heads, ReadSizeOr(*given, "num_heads", 16));
  WW_ASSIGN_OR_STATUS(vision.channels, ReadSizeOr(*given, "in_channels", 3));
  WW_ASSIGN_OR_STATUS(vision.patch, ReadSizeOr(*given, "patch_size", 14));
  WW_ASSIGN_OR_STATUS(vision.temporal_patch, ReadSizeOr(*given, "temporal_patch_size", 2));
  WW_ASSIGN_OR_STATUS(vision.out_hidden, ReadSizeOr(*given, "out_hidden_size", 3'584));
  WW_ASSIGN_OR_STATUS(const int64_t side, ReadSizeOr(*given, "spatial_merge_size", 2));
  if (vision.hidden % vision.heads != 0 || side > 1'024) {
    return {Code::kInvalidArgument, Reason::kInvalidRequest,
            "vision_config has a hidden_size that is no multiple of num_heads, or a "
            "spatial_merge_size over 1,024"};
  }
  vision.merged = side * side;
  return OkStatus();
}

inline constexpr Family kQwen25Vl = {.model_type = "qwen2_5_vl",
                                     .tensors = kQwen25VlTensors,
                                     .read = ReadQwen25Vl,
                                     .defaults = {.kv_heads = 8}};

}  // namespace weightwire::layout
