#pragma once

#include <array>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "server/layout/types.h"

namespace weightwire::layout {

/// What a tensor does in the model. Schemes speak of roles, families give them names and sizes; a
/// scheme refuses nothing about roles that a family lacks, it leaves them out.
enum class Role : int {
  kEmbed,
  kLmHead,
  kFinalNorm,
  kInputNorm,
  kPostAttentionNorm,
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
  kGateWeight,
  kUpWeight,
  kDownWeight,
  kGateBias,
  kUpBias,
  kDownBias,
  kCount,
};

/// A size that config.json gives.
enum class Extent : int { kNone, kVocab, kHidden, kQRows, kKvRows, kHeadDim, kIntermediate };

/// When a tensor is part of the checkpoint.
enum class When : int { kAlways, kUntied, kAttentionBias, kMlpBias };

/// One tensor of the checkpoint, or one per layer when the name contains "{layer}".
struct TensorTemplate {
  Role role = Role::kCount;
  std::string_view name;
  Extent rows = Extent::kNone;
  Extent columns = Extent::kNone;  ///< kNone: the tensor has one dimension
  When when = When::kAlways;
};

/// One kind of model: a file in layout/families, listed in families.cc.
struct Family {
  std::string_view model_type;
  std::span<const TensorTemplate> tensors;
  /// Used when config.json has no `head_dim`; without it, and for a null, hidden / heads.
  std::optional<int64_t> head_dim_when_absent;
};
std::span<const Family> Families();

/// A model's config.json, as far as layouts need it. All sizes are ≥ 1 and heads is a multiple of
/// kv_heads.
struct ModelConfig {
  std::string family;
  int64_t hidden = 0;
  int64_t layers = 0;
  int64_t heads = 0;
  int64_t kv_heads = 0;
  int64_t head_dim = 0;
  int64_t intermediate = 0;
  int64_t vocab = 0;
  bool tied = false;
  bool attention_bias = false;
  bool mlp_bias = false;
  DType dtype = DType::kBF16;
};

/// A config with the tensors that its family gives it.
struct Model {
  ModelConfig config;
  CanonicalSpace canonical;
  /// By role, then by layer (one entry for tensors outside layers); empty when the model has none.
  std::array<std::vector<uint32_t>, static_cast<size_t>(Role::kCount)> by_role;

  /// Index into canonical.tensors; nullopt when the model has no such tensor.
  std::optional<uint32_t> Find(Role role, int64_t layer = 0) const;
};

/// Reads a config.json of a known family. Errors as in LayoutFromScheme.
Result<ModelConfig> ParseModelConfig(std::string_view config_json);
/// Names and sizes every tensor. The bytes of every one, of q, k and v together and of gate and up
/// together fit int64. Errors as in LayoutFromScheme.
Result<Model> BuildModel(ModelConfig config);

}  // namespace weightwire::layout
