#pragma once

#include <array>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "server/layout/families/config.h"
#include "server/layout/types.h"

namespace weightwire::layout {

/// What a matrix or vector does in the model. Schemes speak of roles, families say where each lies
/// in the checkpoint; a scheme refuses nothing about roles that a family lacks, it leaves them out.
enum class Role : int {
  kEmbed,
  kLmHead,
  kFinalNorm,
  // What each layer is given of each token, all layers' behind one another (Gemma 4).
  kLayerEmbed,       ///< [tokens, layers · inputs]
  kLayerInputs,      ///< [layers · inputs, hidden]
  kLayerInputsNorm,  ///< of one layer's
  // In a layer: how much of them it takes, what it makes of them, and the norm of that.
  kLayerInputGate,
  kLayerInputOut,
  kLayerInputNorm,
  kLayerScalar,  ///< what the layer gives is multiplied by; a buffer
  // Norms of a layer.
  kInputNorm,
  kPostAttentionNorm,    ///< before the MLP
  kAttentionOutputNorm,  ///< of what attention adds (Gemma 2 and 3)
  kMlpOutputNorm,        ///< of what the MLP adds (Gemma 2 and 3)
  kDenseOutputNorm,      ///< of a dense MLP beside experts (Gemma 4), and of the experts
  kExpertInputNorm,
  kExpertOutputNorm,
  // Attention.
  kQWeight,
  kKWeight,
  kVWeight,
  kOWeight,
  kQBias,
  kKBias,
  kVBias,
  kOBias,
  kQNorm,
  kKNorm,
  kSinks,  ///< one number a head (gpt-oss)
  // Multi-head latent attention.
  kQDown,
  kQDownNorm,
  kQUp,
  kKvDown,
  kKvDownNorm,
  kKvUp,
  // The indexer of sparse latent attention; the same on every tensor-parallel rank.
  kIndexQuery,
  kIndexKey,
  kIndexKeyNorm,
  kIndexKeyNormBias,
  kIndexWeights,  ///< how much each of its heads counts
  // Linear attention: of layers that mix tokens by the gated delta rule, or by Mamba 2.
  kLinearQkvz,  ///< of each group: q, k, then v and z of its heads
  kLinearBa,    ///< of each group: b, then a of its heads
  kLinearQkv,   ///< all of q, then k, then v
  kLinearZ,
  kLinearB,
  kLinearA,
  kMambaIn,     ///< all of z, then x, B, C, dt
  kLinearConv,  ///< [channels, 1, kernel]: channels are q, k, v; or x, B, C
  kLinearConvBias,
  kLinearALog,  ///< these three: one number a head
  kLinearDtBias,
  kLinearD,
  kLinearNorm,  ///< of one head
  kMambaNorm,   ///< of all heads
  kLinearOut,
  // Dense MLP.
  kGateWeight,
  kUpWeight,
  kDownWeight,
  kGateBias,
  kUpBias,
  kDownBias,
  // Mixture of experts; roles that begin with kExpert are there once for each expert.
  kRouter,
  kRouterBias,
  kRouterScale,        ///< of what the router reads
  kRouterExpertScale,  ///< of what each expert gives
  kRouterCorrection,   ///< added to the scores that choose experts; a buffer, often fp32
  kExpertGate,
  kExpertUp,
  kExpertDown,
  kExpertGateBias,
  kExpertUpBias,
  kExpertDownBias,
  kSharedGate,
  kSharedUp,
  kSharedDown,
  kExpertLatentIn,    ///< [latent, hidden]: before all routed experts
  kExpertLatentOut,   ///< [hidden, latent]: behind them
  kSharedExpertGate,  ///< [1, hidden]: how much the shared expert counts
  // Multi-token prediction: of layers that come after the decoder's.
  kMtpEmbedNorm,
  kMtpHiddenNorm,
  kMtpProjection,
  kMtpFinalNorm,
  // The vision tower: of a block, unless they say otherwise.
  kVisionPatch,  ///< outside blocks
  kVisionAttentionNorm,
  kVisionMlpNorm,
  kVisionQWeight,
  kVisionKWeight,
  kVisionVWeight,
  kVisionQBias,
  kVisionKBias,
  kVisionVBias,
  kVisionOWeight,
  kVisionOBias,
  kVisionGateWeight,
  kVisionUpWeight,
  kVisionDownWeight,
  kVisionGateBias,
  kVisionUpBias,
  kVisionDownBias,
  // Between tower and text model, outside blocks.
  kMergerNorm,
  kMergerInWeight,
  kMergerInBias,
  kMergerOutWeight,
  kMergerOutBias,
  // A tensor of a wrapper's tower, which TowerTensor says more of: a linear layer's matrix, others.
  kTowerLinear,
  kTower,
  kCount,
};

using SizeOf = int64_t (*)(const ModelConfig&);
using IsPresent = bool (*)(const ModelConfig&, const LayerKind&);

/// Which part of a stored tensor has a role: rows along one dimension (all of them, one of equal
/// slices, or a run of its own), columns along another, the expert's or a fixed index along the
/// rest.
struct Part {
  Role role = Role::kCount;
  int row_dim = 0;
  int column_dim = 1;   ///< -1: a vector
  int expert_dim = -1;  ///< for experts that are stored as one tensor
  int fixed_dim = -1;
  int64_t fixed_index = 0;
  /// The rows are stored in `slices` equal runs, one behind another, of which this is run `slice`.
  int64_t slice = 0;
  int64_t slices = 1;
  /// Where runs are not equal: the run's length and the rows before it (nullptr: none).
  SizeOf row_count = nullptr;
  SizeOf first_row = nullptr;
};

/// One tensor of the checkpoint; one per layer when the name contains "{layer}", per block of the
/// vision tower when it contains "{block}", and per expert when it contains "{expert}".
struct TensorTemplate {
  std::string_view name;
  std::array<SizeOf, 5> shape{};  ///< up to the first nullptr; canonical
  std::array<Part, 3> parts;      ///< from the second one on maybe unused (kCount)
  IsPresent present = [](const ModelConfig&, const LayerKind&) { return true; };
  /// Hugging Face stores the last two canonical dimensions as one.
  bool joined = false;
  std::optional<DType> dtype = std::nullopt;  ///< unlike the model's
  /// Is not quantized although its role is a linear layer's.
  bool full_precision = false;
  /// One per MTP layer, although its name has no number.
  bool mtp = false;
};

/// A name under which a Hugging Face checkpoint stores another tensor once more, for each MTP
/// layer.
struct MtpCopy {
  std::string_view name;
  Role of = Role::kCount;
};

/// What transformers takes where config.json is silent; null is not silence.
struct Defaults {
  int64_t kv_heads = 0;  ///< 0, or no divisor of heads: as many as heads
  int64_t head_dim = 0;  ///< 0: hidden_size / heads
  bool tied = false;
};

/// What a tensor-parallel rank of an engine has of a tower's tensor.
enum class TowerCut : int {
  kAbsent,  ///< engines leave it out
  kWhole,
  kRows,     ///< its chunk of the rows
  kHeads,    ///< the same, cut between heads of the tower
  kColumns,  ///< its chunk of the columns
};

/// One tensor of the tower or projector of a wrapper; one per block when the name contains
/// "{block}". Checkpoints, and Megatron ranks that have it, hold it whole.
struct TowerTensor {
  std::string_view name;  ///< the checkpoint's
  std::array<SizeOf, 5> shape{};
  TowerCut cut = TowerCut::kWhole;
  /// vLLM's name where it is not the checkpoint's without a "model." in front. Tensors that share
  /// one lie there one behind another, in the order in which the family lists them.
  std::string_view engine = {};
  int64_t slices = 1;      ///< equal runs of rows, each cut by itself: q, k and v as one tensor
  SizeOf count = nullptr;  ///< of "{block}"; nullptr: the tower's depth
  IsPresent present = [](const ModelConfig&, const LayerKind&) { return true; };
  bool buffer = false;  ///< no parameter: FSDP holds it whole
};

/// Which family describes the text model that text_config calls `model_type`.
struct TextType {
  std::string_view model_type;
  std::string_view family;
};

struct NamePrefix {
  std::string_view checkpoint;
  std::string_view megatron;
};

/// A model of other modules around a text model: the text family's tensors under longer names,
/// sizes from `text_config`, and a tower that is listed tensor by tensor.
struct Wrapper {
  std::span<const TextType> texts;  ///< the first one where text_config says none
  std::string_view model;           ///< instead of the text family's "model."
  std::string_view head;            ///< instead of its "lm_head."
  std::span<const TowerTensor> tower;
  /// Reads the sizes of the tower from the whole config.json.
  Status (*read)(const Json& json, ModelConfig& config) = nullptr;
  /// The class ties by what stands beside text_config, if text_config is silent.
  bool outer_tie = false;
  /// How Megatron-Bridge calls the tower's modules, which it holds whole on the first stage; the
  /// text model is "language_model." there. Empty: not described for Megatron.
  std::span<const NamePrefix> megatron = {};
};

/// One kind of model: a file in layout/families, listed in family.cc. A wrapper has no tensors,
/// reader and defaults of its own but those of its text model's family.
struct Family {
  std::string_view model_type;
  std::span<const TensorTemplate> tensors = {};
  /// Reads what config.json says beyond the sizes that all models have.
  Status (*read)(const Json& json, ModelConfig& config) = nullptr;
  std::span<const MtpCopy> mtp_copies = {};
  Defaults defaults = {};
  const Wrapper* wrapper = nullptr;
  /// Appends MTP layers to `kinds`, with `fused` experts or a tensor for each. Only of families
  /// that have them where the parallel spec says so, and not by config.json alone: it counts them
  /// also where neither files nor trainers have any. Errors as ParseModelConfig's.
  Status (*mtp)(const Json& json, bool fused, ModelConfig& config) = nullptr;
  /// What the names of MTP layers have instead of all that stands before "{layer}", which then
  /// counts them from 0; empty: they are numbered behind the decoder's.
  std::string_view mtp_layers = {};
  /// Fills in common sizes that config.json says by other names or not at all, before any is read.
  Status (*prepare)(Json& json) = nullptr;
  /// What of it the megatron scheme does not describe; empty: nothing.
  std::string_view not_in_megatron = {};
  std::string_view not_in_sglang = {};
  /// Reads `per_layer_config`.
  bool layer_sizes = false;
  /// Engines have what stands outside layers on every pipeline stage.
  bool every_stage = false;
};
std::span<const Family> Families();
/// One of Families(), or a text model that is only described within a wrapper. It must exist.
const Family& FamilyOf(std::string_view model_type);

/// A matrix (or a vector: column_dim −1) inside a canonical tensor. `box` has extent 1 in every
/// dimension but these two.
struct View {
  uint32_t tensor = 0;
  Box box;
  int row_dim = 0;
  int column_dim = -1;
  int64_t rows() const { return box.extent[static_cast<size_t>(row_dim)]; }
  int64_t columns() const {
    return column_dim < 0 ? 1 : box.extent[static_cast<size_t>(column_dim)];
  }
};

/// A config with the tensors that its family gives it.
class Model {
 public:
  /// Names and sizes every tensor. Errors as in LayoutFromScheme.
  static Result<Model> Build(ModelConfig config);

  const ModelConfig& config() const { return config_; }
  const CanonicalSpace& canonical() const { return canonical_; }
  /// Where the role lies; nullopt when the model has no such part. `layer` counts decoder layers,
  /// then MTP layers, or the vision tower's blocks; both arguments are ignored where they have no
  /// meaning.
  std::optional<View> Find(Role role, int64_t layer = 0, int64_t expert = 0) const;
  /// The layer that the tensor belongs to; −1 for those outside layers.
  int64_t LayerOf(uint32_t tensor) const { return layer_of_[tensor]; }
  /// The shape under which a Hugging Face checkpoint stores canonical tensor `tensor`.
  Shape StoredShape(uint32_t tensor) const;
  /// Of each weight in NVFP4, what it has in common with those that engines hold with it as one,
  /// with one scale of whole tensors, and no others. modelopt's: all that read the same.
  const std::map<std::string, std::string>& fused() const { return fused_; }
  /// The tensor with the scales of fp8 weight `tensor`; nullopt for all others.
  std::optional<uint32_t> ScalesOf(uint32_t tensor) const;
  std::span<const MtpCopy> mtp_copies() const { return mtp_copies_; }

  /// nullptr: the model is a text model alone, or one whose family lists the tower itself.
  const Wrapper* wrapper() const { return wrapper_; }
  /// The checkpoint's name for a name of the text family: NameOf, and the wrapper's prefix.
  std::string Named(std::string_view pattern, int64_t number, int64_t expert) const;
  /// The text family's name of a tensor that is none of the wrapper's tower.
  std::string TextName(uint32_t tensor) const;
  struct TowerPlace {
    const TowerTensor* of = nullptr;
    int64_t block = 0;
    uint32_t tensor = 0;
  };
  /// The wrapper's tower, each of its TowerTensors for all blocks, in their order.
  std::span<const TowerPlace> tower() const { return tower_; }

 private:
  struct Place {
    const Part* part = nullptr;  ///< nullptr: not in this layer
    uint32_t first = 0;          ///< into position_, of expert 0
    bool per_expert = false;
  };
  Model() = default;
  /// `number`: of the layer or block, 0 outside them. `layer`: −1 outside decoder and MTP layers.
  Status Add(const TensorTemplate& tensor, int64_t number, int64_t layer);
  Status AddTower(const TowerTensor& tensor);
  /// Makes those of the tensors from `first` on codes that are quantized, and adds their scales.
  Status Quantize(const TensorTemplate& tensor, size_t first, int64_t layer);
  Status Pack(TensorSpec& weight, int64_t layer);
  /// The same of the experts of gpt-oss, which lie in one tensor.
  Status PackExperts(const TensorTemplate& tensor, TensorSpec& weight, int64_t layer);
  /// A tensor beside that of a weight, stored in the shape `stored` where that is another one.
  void AddBeside(TensorSpec beside, int64_t layer, std::optional<Shape> stored = std::nullopt);
  /// Scales of activations, and of the KV cache, beside the weight of this name.
  void AddInputScale(const std::string& weight, int64_t layer);
  Status AddKvScales(Role role, const std::string& weight, int64_t layer);
  void SortByName();

  ModelConfig config_;
  CanonicalSpace canonical_;
  std::vector<bool> joined_;                  ///< by canonical tensor
  std::map<std::string, Shape> stored_;       ///< other shapes of scales, by name
  std::map<std::string, std::string> fused_;  ///< see fused()
  std::vector<int64_t> layer_of_;             ///< by canonical tensor
  std::vector<int64_t> scales_of_;  ///< by canonical tensor: its scales; −1: it has none
  std::vector<uint32_t> position_;  ///< canonical tensor, by the order of creation
  /// By role, then by layer (one entry outside layers).
  std::array<std::vector<Place>, static_cast<size_t>(Role::kCount)> places_;
  std::span<const MtpCopy> mtp_copies_;
  std::string_view mtp_layers_;
  const Wrapper* wrapper_ = nullptr;
  std::vector<TowerPlace> tower_;  ///< until SortByName with tensors by the order of creation
};

/// "{layer}" or "{block}", and "{expert}", replaced.
std::string NameOf(std::string_view pattern, int64_t number, int64_t expert);

}  // namespace weightwire::layout
