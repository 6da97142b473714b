#pragma once

#include <algorithm>

#include "server/layout/families/linear_attention.h"
#include "server/layout/families/parts.h"
#include "server/layout/families/tower.h"

namespace weightwire::layout {

/// Gemma 4. Layers of full attention have heads of another size than those of a sliding window, and
/// may have no values of their own: keys serve as them. The last layers may attend to what a layer
/// before them has stored. Each layer may be given further inputs by token (E2B, E4B), and may have
/// experts beside its MLP (26B-A4B).
namespace gemma4 {

inline constexpr SizeOf kLayerVocab = [](const ModelConfig& c) { return c.layer_vocab; };
inline constexpr SizeOf kLayerInputs = [](const ModelConfig& c) { return c.layer_inputs; };
inline constexpr SizeOf kAllInputs = [](const ModelConfig& c) { return c.layers * c.layer_inputs; };

inline constexpr IsPresent kWithInputs = [](const ModelConfig& c, const LayerKind&) {
  return c.layer_inputs > 0;
};
inline constexpr IsPresent kWithKeys = [](const ModelConfig&, const LayerKind& l) {
  return !l.shares_kv;
};
inline constexpr IsPresent kWithValues = [](const ModelConfig&, const LayerKind& l) {
  return !l.shares_kv && !l.keys_for_values;
};
inline constexpr IsPresent kWithKeyBias = [](const ModelConfig& c, const LayerKind& l) {
  return c.attention_bias && !l.shares_kv;
};
inline constexpr IsPresent kWithValueBias = [](const ModelConfig& c, const LayerKind& l) {
  return c.attention_bias && !l.shares_kv && !l.keys_for_values;
};

constexpr TensorTemplate Norm(Role role, std::string_view name, IsPresent present) {
  return parts::Vector(role, name, parts::kHidden, present);
}

}  // namespace gemma4

inline constexpr TensorTemplate kGemma4Tensors[] = {
    parts::kEmbed,
    parts::kLmHead,
    parts::kFinalNorm,
    parts::Matrix(Role::kLayerEmbed, "model.embed_tokens_per_layer.weight", gemma4::kLayerVocab,
                  gemma4::kAllInputs, gemma4::kWithInputs),
    parts::Matrix(Role::kLayerInputs, "model.per_layer_model_projection.weight", gemma4::kAllInputs,
                  parts::kHidden, gemma4::kWithInputs),
    parts::Vector(Role::kLayerInputsNorm, "model.per_layer_projection_norm.weight",
                  gemma4::kLayerInputs, gemma4::kWithInputs),
    parts::kInputNorm,
    gemma4::Norm(Role::kAttentionOutputNorm, "model.layers.{layer}.post_attention_layernorm.weight",
                 parts::kAlways),
    gemma4::Norm(Role::kPostAttentionNorm, "model.layers.{layer}.pre_feedforward_layernorm.weight",
                 parts::kAlways),
    gemma4::Norm(Role::kMlpOutputNorm, "model.layers.{layer}.post_feedforward_layernorm.weight",
                 parts::kAlways),
    gemma4::Norm(Role::kDenseOutputNorm, "model.layers.{layer}.post_feedforward_layernorm_1.weight",
                 parts::kMoe),
    gemma4::Norm(Role::kExpertInputNorm, "model.layers.{layer}.pre_feedforward_layernorm_2.weight",
                 parts::kMoe),
    gemma4::Norm(Role::kExpertOutputNorm,
                 "model.layers.{layer}.post_feedforward_layernorm_2.weight", parts::kMoe),
    parts::Vector(Role::kLayerScalar, "model.layers.{layer}.layer_scalar", parts::kOne),
    parts::Matrix(Role::kLayerInputGate, "model.layers.{layer}.per_layer_input_gate.weight",
                  gemma4::kLayerInputs, parts::kHidden, gemma4::kWithInputs),
    parts::Matrix(Role::kLayerInputOut, "model.layers.{layer}.per_layer_projection.weight",
                  parts::kHidden, gemma4::kLayerInputs, gemma4::kWithInputs),
    gemma4::Norm(Role::kLayerInputNorm, "model.layers.{layer}.post_per_layer_input_norm.weight",
                 gemma4::kWithInputs),
    parts::kQWeight,
    parts::When(gemma4::kWithKeys, parts::kKWeight),
    parts::When(gemma4::kWithValues, parts::kVWeight),
    parts::kOWeight,
    parts::QBias(parts::kWithAttentionBias),
    parts::KBias(gemma4::kWithKeyBias),
    parts::VBias(gemma4::kWithValueBias),
    parts::OBias(parts::kWithAttentionBias),
    parts::QNorm(parts::kAlways),
    parts::KNorm(gemma4::kWithKeys),
    parts::When(parts::kAlways, parts::kGateWeight),
    parts::When(parts::kAlways, parts::kUpWeight),
    parts::When(parts::kAlways, parts::kDownWeight),
    parts::Matrix(Role::kRouter, "model.layers.{layer}.router.proj.weight", parts::kExperts,
                  parts::kHidden, parts::kMoe),
    parts::Vector(Role::kRouterScale, "model.layers.{layer}.router.scale", parts::kHidden,
                  parts::kMoe),
    parts::Vector(Role::kRouterExpertScale, "model.layers.{layer}.router.per_expert_scale",
                  parts::kExperts, parts::kMoe),
    parts::GateUpExpertRows("model.layers.{layer}.experts.gate_up_proj"),
    parts::DownExpertRows("model.layers.{layer}.experts.down_proj"),
};

/// Which layers have full attention: those that `layer_types` says, else every sixth one; and
/// always the last one, whatever is said of it.
inline Result<std::vector<bool>> FullAttention(const Json& json, const ModelConfig& config) {
  WW_ASSIGN(const std::vector<std::string> words,
            ReadLayerWords(json, "layer_types", config.layers));
  std::vector<bool> full(static_cast<size_t>(config.layers));
  for (size_t layer = 0; layer < full.size(); ++layer) {
    full[layer] = words.empty() ? (layer + 1) % 6 == 0 : words[layer] == "full_attention";
    if (words.empty() || full[layer] || words[layer] == "sliding_attention") continue;
    return Fail(Code::kInvalidArgument, Reason::kInvalidRequest,
                "the field layer_types has a word that is neither \"sliding_attention\" nor "
                "\"full_attention\"");
  }
  full.back() = true;
  return full;
}

/// Releases say the sizes of layers with full attention by two fields; what transformers 5 writes
/// says them layer by layer, and counts alone then.
inline Status ReadGemma4Attention(const Json& json, ModelConfig& config) {
  WW_ASSIGN_OR_STATUS(const std::vector<bool> full, FullAttention(json, config));
  WW_ASSIGN_OR_STATUS(const bool keys, ReadFlagOr(json, "attention_k_eq_v", false));
  WW_ASSIGN_OR_STATUS(const bool said, ReadLayerSizes(json, config));
  WW_ASSIGN_OR_STATUS(const int64_t head_dim, ReadSizeOr(json, "global_head_dim", 512));
  WW_ASSIGN_OR_STATUS(const int64_t kv_heads,
                      ReadSizeOr(json, "num_global_key_value_heads", config.kv_heads));
  for (size_t layer = 0; layer < full.size(); ++layer) {
    if (!full[layer]) continue;
    LayerKind& kind = config.kinds[layer];
    kind.keys_for_values = keys;
    if (said) continue;
    kind.head_dim = head_dim;
    if (keys) kind.kv_heads = kv_heads;
  }
  WW_ASSIGN_OR_STATUS(const int64_t shared, ReadCountOr(json, "num_kv_shared_layers", 0));
  WW_ASSIGN_OR_STATUS(const bool wide, ReadFlagOr(json, "use_double_wide_mlp", false));
  if (shared >= config.layers) {
    return {Code::kInvalidArgument, Reason::kInvalidRequest,
            "the field num_kv_shared_layers leaves no layer that has keys"};
  }
  for (int64_t layer = config.layers - shared; layer < config.layers; ++layer) {
    LayerKind& kind = config.kinds[static_cast<size_t>(layer)];
    kind.shares_kv = true;
    if (wide) kind.intermediate = 2 * config.intermediate;
  }
  return OkStatus();
}

inline Status ReadGemma4Text(const Json& json, ModelConfig& config) {
  const auto inputs = json.find("hidden_size_per_layer_input");
  const bool none = inputs != json.end() && inputs->is_null();
  WW_ASSIGN_OR_STATUS(config.layer_inputs,
                      ReadCountOr(json, "hidden_size_per_layer_input", none ? 0 : 256));
  if (config.layer_inputs > 0) {
    WW_ASSIGN_OR_STATUS(config.layer_vocab,
                        ReadSizeOr(json, "vocab_size_per_layer_input", 262'144));
  }
  WW_ASSIGN_OR_STATUS(const bool experts, ReadFlagOr(json, "enable_moe_block", false));
  WW_ASSIGN_OR_STATUS(config.experts, ReadExpertsOr(json, 0));
  if (experts != config.HasExperts()) {
    return Status(Code::kInvalidArgument, Reason::kInvalidRequest,
                  "config.json says enable_moe_block " + std::string(experts ? "true" : "false") +
                      " and num_experts " + std::to_string(config.experts) +
                      ": transformers follows the first one, vLLM the second one")
        .Remedy("make the two agree: num_experts null where there are none");
  }
  if (experts) {
    WW_ASSIGN_OR_STATUS(config.moe_intermediate, ReadSize(json, "moe_intermediate_size"));
    WW_RETURN_IF_ERROR(SetMoeLayers(json, 0, 1, "", config));
  }
  return ReadGemma4Attention(json, config);
}

/// The towers of Gemma 4, which engines hold as transformers makes them, whole on each rank.
namespace gemma4 {

inline constexpr SizeOf kVisionQRows = [](const ModelConfig& c) {
  return c.vision.heads * c.vision.head_dim;
};
inline constexpr SizeOf kVisionKvRows = [](const ModelConfig& c) {
  return c.vision.kv_heads * c.vision.head_dim;
};
inline constexpr SizeOf kVisionHeadDim = [](const ModelConfig& c) { return c.vision.head_dim; };
inline constexpr SizeOf kAudio = [](const ModelConfig& c) { return c.audio.hidden; };
inline constexpr SizeOf kTwiceAudio = [](const ModelConfig& c) { return 2 * c.audio.hidden; };
inline constexpr SizeOf kFourAudio = [](const ModelConfig& c) { return 4 * c.audio.hidden; };
inline constexpr SizeOf kAudioHeadDim = [](const ModelConfig& c) {
  return c.audio.hidden / c.audio.heads;
};
inline constexpr SizeOf kAudioKernel = [](const ModelConfig& c) { return c.audio.kernel; };
inline constexpr SizeOf kAudioOut = [](const ModelConfig& c) { return c.audio.out; };
inline constexpr SizeOf kFirstChannels = [](const ModelConfig& c) {
  return c.audio.first_channels;
};
inline constexpr SizeOf kSecondChannels = [](const ModelConfig& c) {
  return c.audio.second_channels;
};
inline constexpr SizeOf kSubsampled = [](const ModelConfig& c) {
  return c.audio.first_channels / 4 * c.audio.second_channels;
};
inline constexpr SizeOf kThree = [](const ModelConfig&) { return int64_t{3}; };
inline constexpr SizeOf kAudioBlocks = [](const ModelConfig& c) { return c.audio.depth; };

inline constexpr IsPresent kWithAudio = [](const ModelConfig& c, const LayerKind&) {
  return c.audio.depth > 0;
};
inline constexpr IsPresent kClipped = [](const ModelConfig& c, const LayerKind&) {
  return c.vision.clipped;
};
inline constexpr IsPresent kAudioClipped = [](const ModelConfig& c, const LayerKind&) {
  return c.audio.depth > 0 && c.audio.clipped;
};
inline constexpr IsPresent kStandardized = [](const ModelConfig& c, const LayerKind&) {
  return c.vision.standardized;
};

/// A number of its own, without dimensions.
constexpr TowerTensor Bound(std::string_view name, IsPresent present, SizeOf count) {
  return {.name = name, .count = count, .present = present, .buffer = true};
}
constexpr TowerTensor OfAudio(std::string_view name, SizeOf first, SizeOf second = nullptr,
                              SizeOf third = nullptr, SizeOf fourth = nullptr) {
  return {.name = name,
          .shape = {first, second, third, fourth},
          .count = kAudioBlocks,
          .present = kWithAudio};
}

}  // namespace gemma4

// A linear layer of a block and the bounds that it may have.
#define WW_GEMMA4_LINEAR(name, rows, columns)                       \
  tower::Whole(name ".linear.weight", rows, columns),               \
      gemma4::Bound(name ".input_min", gemma4::kClipped, nullptr),  \
      gemma4::Bound(name ".input_max", gemma4::kClipped, nullptr),  \
      gemma4::Bound(name ".output_min", gemma4::kClipped, nullptr), \
      gemma4::Bound(name ".output_max", gemma4::kClipped, nullptr)
#define WW_GEMMA4_AUDIO_LINEAR(name, rows, columns)                                   \
  gemma4::OfAudio(name ".linear.weight", rows, columns),                              \
      gemma4::Bound(name ".input_min", gemma4::kAudioClipped, gemma4::kAudioBlocks),  \
      gemma4::Bound(name ".input_max", gemma4::kAudioClipped, gemma4::kAudioBlocks),  \
      gemma4::Bound(name ".output_min", gemma4::kAudioClipped, gemma4::kAudioBlocks), \
      gemma4::Bound(name ".output_max", gemma4::kAudioClipped, gemma4::kAudioBlocks)
#define WW_GEMMA4_VISION "model.vision_tower.encoder.layers.{block}."
#define WW_GEMMA4_AUDIO "model.audio_tower.layers.{block}."

inline constexpr TowerTensor kGemma4Towers[] = {
    tower::Whole("model.embed_vision.embedding_projection.weight", parts::kHidden, tower::kHidden),
    tower::Whole("model.vision_tower.patch_embedder.input_proj.weight", tower::kHidden,
                 tower::kPatchElements),
    tower::Whole("model.vision_tower.patch_embedder.position_embedding_table", parts::kTwo,
                 tower::kPositions, tower::kHidden),
    {.name = "model.vision_tower.std_bias",
     .shape = {tower::kHidden},
     .present = gemma4::kStandardized,
     .buffer = true},
    {.name = "model.vision_tower.std_scale",
     .shape = {tower::kHidden},
     .present = gemma4::kStandardized,
     .buffer = true},
    tower::Whole(WW_GEMMA4_VISION "input_layernorm.weight", tower::kHidden),
    tower::Whole(WW_GEMMA4_VISION "post_attention_layernorm.weight", tower::kHidden),
    tower::Whole(WW_GEMMA4_VISION "pre_feedforward_layernorm.weight", tower::kHidden),
    tower::Whole(WW_GEMMA4_VISION "post_feedforward_layernorm.weight", tower::kHidden),
    WW_GEMMA4_LINEAR(WW_GEMMA4_VISION "self_attn.q_proj", gemma4::kVisionQRows, tower::kHidden),
    WW_GEMMA4_LINEAR(WW_GEMMA4_VISION "self_attn.k_proj", gemma4::kVisionKvRows, tower::kHidden),
    WW_GEMMA4_LINEAR(WW_GEMMA4_VISION "self_attn.v_proj", gemma4::kVisionKvRows, tower::kHidden),
    WW_GEMMA4_LINEAR(WW_GEMMA4_VISION "self_attn.o_proj", tower::kHidden, gemma4::kVisionQRows),
    tower::Whole(WW_GEMMA4_VISION "self_attn.q_norm.weight", gemma4::kVisionHeadDim),
    tower::Whole(WW_GEMMA4_VISION "self_attn.k_norm.weight", gemma4::kVisionHeadDim),
    WW_GEMMA4_LINEAR(WW_GEMMA4_VISION "mlp.gate_proj", tower::kIntermediate, tower::kHidden),
    WW_GEMMA4_LINEAR(WW_GEMMA4_VISION "mlp.up_proj", tower::kIntermediate, tower::kHidden),
    WW_GEMMA4_LINEAR(WW_GEMMA4_VISION "mlp.down_proj", tower::kHidden, tower::kIntermediate),
    gemma4::OfAudio("model.embed_audio.embedding_projection.weight", parts::kHidden,
                    gemma4::kAudioOut),
    gemma4::OfAudio("model.audio_tower.output_proj.weight", gemma4::kAudioOut, gemma4::kAudio),
    gemma4::OfAudio("model.audio_tower.output_proj.bias", gemma4::kAudioOut),
    gemma4::OfAudio("model.audio_tower.subsample_conv_projection.input_proj_linear.weight",
                    gemma4::kAudio, gemma4::kSubsampled),
    gemma4::OfAudio("model.audio_tower.subsample_conv_projection.layer0.conv.weight",
                    gemma4::kFirstChannels, parts::kOne, gemma4::kThree, gemma4::kThree),
    gemma4::OfAudio("model.audio_tower.subsample_conv_projection.layer0.norm.weight",
                    gemma4::kFirstChannels),
    gemma4::OfAudio("model.audio_tower.subsample_conv_projection.layer1.conv.weight",
                    gemma4::kSecondChannels, gemma4::kFirstChannels, gemma4::kThree,
                    gemma4::kThree),
    gemma4::OfAudio("model.audio_tower.subsample_conv_projection.layer1.norm.weight",
                    gemma4::kSecondChannels),
    gemma4::OfAudio(WW_GEMMA4_AUDIO "norm_pre_attn.weight", gemma4::kAudio),
    gemma4::OfAudio(WW_GEMMA4_AUDIO "norm_post_attn.weight", gemma4::kAudio),
    gemma4::OfAudio(WW_GEMMA4_AUDIO "norm_out.weight", gemma4::kAudio),
    gemma4::OfAudio(WW_GEMMA4_AUDIO "feed_forward1.pre_layer_norm.weight", gemma4::kAudio),
    gemma4::OfAudio(WW_GEMMA4_AUDIO "feed_forward1.post_layer_norm.weight", gemma4::kAudio),
    WW_GEMMA4_AUDIO_LINEAR(WW_GEMMA4_AUDIO "feed_forward1.ffw_layer_1", gemma4::kFourAudio,
                           gemma4::kAudio),
    WW_GEMMA4_AUDIO_LINEAR(WW_GEMMA4_AUDIO "feed_forward1.ffw_layer_2", gemma4::kAudio,
                           gemma4::kFourAudio),
    gemma4::OfAudio(WW_GEMMA4_AUDIO "feed_forward2.pre_layer_norm.weight", gemma4::kAudio),
    gemma4::OfAudio(WW_GEMMA4_AUDIO "feed_forward2.post_layer_norm.weight", gemma4::kAudio),
    WW_GEMMA4_AUDIO_LINEAR(WW_GEMMA4_AUDIO "feed_forward2.ffw_layer_1", gemma4::kFourAudio,
                           gemma4::kAudio),
    WW_GEMMA4_AUDIO_LINEAR(WW_GEMMA4_AUDIO "feed_forward2.ffw_layer_2", gemma4::kAudio,
                           gemma4::kFourAudio),
    gemma4::OfAudio(WW_GEMMA4_AUDIO "lconv1d.pre_layer_norm.weight", gemma4::kAudio),
    gemma4::OfAudio(WW_GEMMA4_AUDIO "lconv1d.conv_norm.weight", gemma4::kAudio),
    gemma4::OfAudio(WW_GEMMA4_AUDIO "lconv1d.depthwise_conv1d.weight", gemma4::kAudio, parts::kOne,
                    gemma4::kAudioKernel),
    WW_GEMMA4_AUDIO_LINEAR(WW_GEMMA4_AUDIO "lconv1d.linear_start", gemma4::kTwiceAudio,
                           gemma4::kAudio),
    WW_GEMMA4_AUDIO_LINEAR(WW_GEMMA4_AUDIO "lconv1d.linear_end", gemma4::kAudio, gemma4::kAudio),
    WW_GEMMA4_AUDIO_LINEAR(WW_GEMMA4_AUDIO "self_attn.q_proj", gemma4::kAudio, gemma4::kAudio),
    WW_GEMMA4_AUDIO_LINEAR(WW_GEMMA4_AUDIO "self_attn.k_proj", gemma4::kAudio, gemma4::kAudio),
    WW_GEMMA4_AUDIO_LINEAR(WW_GEMMA4_AUDIO "self_attn.v_proj", gemma4::kAudio, gemma4::kAudio),
    WW_GEMMA4_AUDIO_LINEAR(WW_GEMMA4_AUDIO "self_attn.post", gemma4::kAudio, gemma4::kAudio),
    gemma4::OfAudio(WW_GEMMA4_AUDIO "self_attn.relative_k_proj.weight", gemma4::kAudio,
                    gemma4::kAudio),
    gemma4::OfAudio(WW_GEMMA4_AUDIO "self_attn.per_dim_scale", gemma4::kAudioHeadDim),
};
#undef WW_GEMMA4_LINEAR
#undef WW_GEMMA4_AUDIO_LINEAR
#undef WW_GEMMA4_VISION
#undef WW_GEMMA4_AUDIO

inline Status ReadGemma4Audio(const Json& json, ModelConfig& config) {
  const auto given = json.find("audio_config");
  if (given == json.end() || given->is_null()) return OkStatus();
  if (!given->is_object()) {
    return {Code::kInvalidArgument, Reason::kInvalidRequest, "the field audio_config is no object"};
  }
  AudioConfig& audio = config.audio;
  WW_ASSIGN_OR_STATUS(audio.depth, ReadSizeOr(*given, "num_hidden_layers", 12));
  WW_ASSIGN_OR_STATUS(audio.hidden, ReadSizeOr(*given, "hidden_size", 1'024));
  WW_ASSIGN_OR_STATUS(audio.heads, ReadSizeOr(*given, "num_attention_heads", 8));
  WW_ASSIGN_OR_STATUS(audio.kernel, ReadSizeOr(*given, "conv_kernel_size", 5));
  WW_ASSIGN_OR_STATUS(audio.out, ReadSizeOr(*given, "output_proj_dims", 1'536));
  WW_ASSIGN_OR_STATUS(audio.clipped, ReadFlagOr(*given, "use_clipped_linears", true));
  std::array<int64_t, 2> channels = {128, 32};
  if (const auto list = given->find("subsampling_conv_channels"); list != given->end()) {
    for (size_t i = 0; i < channels.size(); ++i) {
      const bool there = list->is_array() && list->size() == channels.size();
      channels[i] = there ? AsInteger(list->at(i)).value_or(0) : 0;
    }
  }
  audio.first_channels = channels[0];
  audio.second_channels = channels[1];
  constexpr int64_t kChannelsMax = 1 << 20;
  const auto limit = static_cast<int64_t>(LayoutLimits{}.canonical_tensors_max);
  if (channels[0] < 4 || channels[1] < 1 || std::max(channels[0], channels[1]) > kChannelsMax ||
      audio.hidden % audio.heads != 0 || audio.depth > limit) {
    return Status(Code::kInvalidArgument, Reason::kInvalidRequest,
                  "audio_config has subsampling_conv_channels that are no two numbers, or a hidden "
                  "size that is no multiple of its heads, or too many layers")
        .Remedy("correct it, or send explicit layouts");
  }
  return OkStatus();
}

inline Status ReadGemma4Towers(const Json& json, ModelConfig& config) {
  WW_ASSIGN_OR_STATUS(const Json given, VisionJson(json));
  VisionConfig& vision = config.vision;
  vision.channels = 3;
  WW_ASSIGN_OR_STATUS(vision.depth, ReadSizeOr(given, "num_hidden_layers", 16));
  WW_ASSIGN_OR_STATUS(vision.hidden, ReadSizeOr(given, "hidden_size", 768));
  WW_ASSIGN_OR_STATUS(vision.intermediate, ReadSizeOr(given, "intermediate_size", 3'072));
  WW_ASSIGN_OR_STATUS(vision.heads, ReadSizeOr(given, "num_attention_heads", 12));
  WW_ASSIGN_OR_STATUS(vision.kv_heads, ReadSizeOr(given, "num_key_value_heads", 12));
  WW_ASSIGN_OR_STATUS(vision.head_dim, ReadSizeOr(given, "head_dim", 64));
  WW_ASSIGN_OR_STATUS(vision.patch, ReadSizeOr(given, "patch_size", 16));
  WW_ASSIGN_OR_STATUS(vision.positions, ReadSizeOr(given, "position_embedding_size", 10'240));
  WW_ASSIGN_OR_STATUS(vision.clipped, ReadFlagOr(given, "use_clipped_linears", false));
  WW_ASSIGN_OR_STATUS(vision.standardized, ReadFlagOr(given, "standardize", false));
  WW_RETURN_IF_ERROR(linear::CheckUnset(given, "attention_bias"));
  if (vision.patch > 1'024) {
    return {Code::kInvalidArgument, Reason::kInvalidRequest,
            "vision_config has a patch_size over 1,024"};
  }
  WW_RETURN_IF_ERROR(CheckVision(vision));
  return ReadGemma4Audio(json, config);
}

inline constexpr TextType kGemma4Texts[] = {{"gemma4_text", "gemma4_text"}};
inline constexpr Wrapper kGemma4Wrapper = {.texts = kGemma4Texts,
                                           .model = "model.language_model.",
                                           .head = "lm_head.",
                                           .tower = kGemma4Towers,
                                           .read = ReadGemma4Towers};
inline constexpr Family kGemma4Text = {.model_type = "gemma4_text",
                                       .tensors = kGemma4Tensors,
                                       .read = ReadGemma4Text,
                                       .defaults = {.kv_heads = 4, .head_dim = 256, .tied = true},
                                       .not_in_megatron = "layers",
                                       .not_in_sglang = "layers",
                                       .layer_sizes = true,
                                       .every_stage = true};
inline constexpr Family kGemma4 = {.model_type = "gemma4", .wrapper = &kGemma4Wrapper};

}  // namespace weightwire::layout
