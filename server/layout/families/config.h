#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

#include "server/layout/families/weight_format.h"
#include "server/layout/json_reader.h"
#include "server/layout/types.h"

namespace weightwire::layout {

/// What mixes tokens in a layer.
enum class Mixer { kAttention, kGatedDelta, kMamba, kNone };

/// How one layer differs from its neighbours.
struct LayerKind {
  bool moe = false;        ///< experts instead of a dense MLP
  bool mtp = false;        ///< predicts a further token; comes after the decoder's layers
  bool mtp_first = false;  ///< these two, where several layers predict one token together
  bool mtp_last = false;
  bool fused_experts = false;  ///< all its experts are one tensor, where the family has both forms
  bool shares_index = false;   ///< attends to what the indexer of a layer before it chose
  Mixer mixer = Mixer::kAttention;
  bool mlp = true;  ///< a dense MLP or experts
  // Sizes of its own; 0: the model's.
  int64_t head_dim = 0;
  int64_t kv_heads = 0;
  int64_t intermediate = 0;
  bool shares_kv = false;        ///< attends to the keys and values of a layer before it, has none
  bool keys_for_values = false;  ///< its keys are its values, before norm and rotation
  bool HasSizes() const { return head_dim > 0 || kv_heads > 0 || intermediate > 0; }
};

/// Gated delta rule (Qwen3-Next) and Mamba 2: heads of values in groups that share the rest.
struct LinearConfig {
  int64_t groups = 0;    ///< of q and k, or of B and C; 0: no layer has linear attention
  int64_t heads = 0;     ///< of values: a multiple of groups
  int64_t state = 0;     ///< rows of one group in each of q and k, or B and C
  int64_t head_dim = 0;  ///< rows of one head
  int64_t kernel = 0;    ///< of the convolution over time
  bool conv_bias = false;
  int64_t GroupRows() const { return groups * state; }
  int64_t HeadRows() const { return heads * head_dim; }
};

/// The vision tower in front of a text model.
struct VisionConfig {
  int64_t depth = 0;  ///< blocks; 0: there is no tower
  int64_t hidden = 0;
  int64_t intermediate = 0;
  int64_t heads = 0;  ///< divides hidden
  int64_t channels = 0;
  int64_t patch = 0;           ///< pixels along a side
  int64_t temporal_patch = 0;  ///< frames
  int64_t merged = 0;          ///< patches that the merger joins: at most 2²⁰
  int64_t out_hidden = 0;
  int64_t positions = 0;         ///< that have an embedding
  int64_t positions_across = 0;  ///< where they are a table: `positions` is its height
  int64_t mergers = 0;           ///< further ones, of inner blocks (deepstack)
  bool pooling = false;          ///< has a head that pools all patches
  bool projector_bias = false;
  int64_t projector = 0;  ///< inner size of what stands between blocks and text model
  int64_t kv_heads = 0;   ///< these two, where hidden and heads do not say them
  int64_t head_dim = 0;
  bool clipped = false;       ///< linear layers have bounds of what they read and write
  bool standardized = false;  ///< shifts and scales what it gives
};

/// The audio tower beside it (Gemma 4).
struct AudioConfig {
  int64_t depth = 0;  ///< blocks; 0: there is no tower
  int64_t hidden = 0;
  int64_t heads = 0;           ///< divides hidden
  int64_t first_channels = 0;  ///< of the first convolution: at least 4
  int64_t second_channels = 0;
  int64_t kernel = 0;  ///< of the convolution over time
  int64_t out = 0;
  bool clipped = false;
};
/// Names of a tower's tensors begin so, in every family that has one; other names do not.
inline constexpr std::string_view kVisionPrefix = "visual.";

/// A model's config.json, as far as layouts need it. Sizes that every model has are ≥ 1 (head_dim
/// may be 0 with latent attention, intermediate where every layer has experts) and heads is a
/// multiple of kv_heads; all are below 2³¹, so that a product of two fits int64.
struct ModelConfig {
  std::string family;       ///< config.json's model_type
  std::string text_family;  ///< of the text model: `family`, unless that is a wrapper
  int64_t hidden = 0;
  int64_t layers = 0;  ///< of the decoder
  int64_t heads = 0;
  int64_t kv_heads = 0;
  int64_t head_dim = 0;
  int64_t intermediate = 0;
  int64_t vocab = 0;
  bool tied = false;
  bool attention_bias = false;
  bool output_bias = false;  ///< of attention, where it is chosen apart from q's, k's and v's
  bool mlp_bias = false;
  bool qk_norm = false;
  /// The norms of q and k are over all heads, and cut with them.
  bool whole_qk_norm = false;
  /// The rotary embedding turns rows 2i and 2i + 1 of a head of q or k together, and engines load
  /// all first rows of the pairs, then all second ones.
  bool rotary_pairs = false;
  /// Each head of q has a gate of its output behind it: q has twice as many rows.
  bool output_gate = false;
  DType dtype = DType::kBF16;
  std::optional<WeightFormat> scales;  ///< nullopt: no weight is quantized

  int64_t experts = 0;
  int64_t moe_intermediate = 0;
  int64_t shared_intermediate = 0;  ///< of all shared experts together; 0: none
  bool router_correction = false;
  int64_t latent = 0;        ///< what experts read and write instead of hidden; 0: hidden
  int64_t layer_inputs = 0;  ///< what each layer is given of each token, beside hidden; 0: nothing
  int64_t layer_vocab = 0;   ///< tokens that have it

  int64_t q_lora_rank = 0;   ///< 0: q is one matrix
  int64_t kv_lora_rank = 0;  ///< 0: no latent attention
  int64_t qk_nope_dim = 0;
  int64_t qk_rope_dim = 0;
  int64_t v_head_dim = 0;
  int64_t index_heads = 0;  ///< of the indexer of sparse latent attention; 0: there is none
  int64_t index_dim = 0;

  LinearConfig linear;
  VisionConfig vision;
  AudioConfig audio;

  int64_t mtp_layers = 0;
  std::vector<LayerKind> kinds;  ///< layers + mtp_layers

  bool HasExperts() const { return experts > 0; }
  bool IsLatent() const { return kv_lora_rank > 0; }
  /// Layers that have only one of attention, Mamba, an MLP and experts (Nemotron-H).
  bool IsHybrid() const;
  bool HasVision() const { return vision.depth > 0; }
  bool IsWrapper() const { return text_family != family; }
  /// Of a decoder or MTP layer.
  int64_t HeadDim(int64_t layer) const;
  int64_t KvHeads(int64_t layer) const;
  /// The model with the layer's sizes, without `kinds`.
  ModelConfig Of(const LayerKind& kind) const;
};

/// What a parallel spec says of MTP layers, and of how a checkpoint has the experts in them.
enum class MtpWord { kUnsaid, kNone, kSingle, kFused };

/// Reads a config.json of a known family. Errors as in LayoutFromScheme, and
///   kInvalidArgument / kUnknownScheme  MTP layers that the model does not have, or not so
Result<ModelConfig> ParseModelConfig(std::string_view config_json, MtpWord mtp = MtpWord::kUnsaid);

// ---- for the families' own readers ----

///   kInvalidArgument / kInvalidRequest  absent or below 1; kShapeOverflow  2³¹ or more
Result<int64_t> ReadSize(const Json& json, const char* key);
/// The same, and `fallback` when the key is absent or null.
Result<int64_t> ReadSizeOr(const Json& json, const char* key, int64_t fallback);
/// The number of experts, by whichever of the names that transformers has used for it.
Result<int64_t> ReadExpertsOr(const Json& json, int64_t fallback);
/// A count, from 0 on, that may stand under any of `keys`; null is absent, 0 when all that is there
/// is null, and `fallback` when none is there.
///   kInvalidArgument / kInvalidRequest  two of them say different numbers
Result<int64_t> ReadSynonymsOr(const Json& json, std::initializer_list<const char*> keys,
                               int64_t fallback);
/// kInvalidArgument / kInvalidRequest: two fields that mean the same say different things.
Status TwoValues(std::string_view key, const std::string& value, std::string_view other,
                 const std::string& other_value);
/// From 0 on.
Result<int64_t> ReadCountOr(const Json& json, const char* key, int64_t fallback);
Result<bool> ReadFlagOr(const Json& json, const char* key, bool fallback);
/// heads, groups, … of `keys`, by the fields' names in the order of LinearConfig, which `defaults`
/// are for. kInvalidArgument / kInvalidRequest when heads is no multiple of groups.
Status ReadLinear(const Json& json, std::array<const char*, 5> keys, LinearConfig defaults,
                  ModelConfig& config);
/// Sets `moe` of every decoder layer from `first` on whose number + 1 is a multiple of `step`, but
/// of none that the list `dense_key` (layer numbers; may be absent) names, and of none at all when
/// there are no experts.
Status SetMoeLayers(const Json& json, int64_t first, int64_t step, const char* dense_key,
                    ModelConfig& config);
/// One word for each decoder layer: a list of them, or a text of one letter each; empty when the
/// key is absent or null. kInvalidArgument / kInvalidRequest for anything else.
Result<std::vector<std::string>> ReadLayerWords(const Json& json, const char* key, int64_t layers);
/// Sets head_dim and kv_heads of the decoder layers that `per_layer_config` speaks of, as
/// transformers 5 writes it; false when it is absent or null.
///   kInvalidArgument / kInvalidRequest  a layer that is not there, another field than these two
Result<bool> ReadLayerSizes(const Json& json, ModelConfig& config);
/// "the parallel spec's mtp= does not fit …: why" as kInvalidArgument / kUnknownScheme.
Status BadMtp(const ModelConfig& config, std::string_view why);
/// Sets `moe` of the decoder layers that the list `key` names, and of no other.
Status SetListedMoeLayers(const Json& json, const char* key, ModelConfig& config);

}  // namespace weightwire::layout
