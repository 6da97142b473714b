#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "server/layout/json_reader.h"
#include "server/layout/types.h"

namespace weightwire::layout {

/// How a name is compared with the entries of a list of modules that keep the model's dtype.
enum class IgnoreRule {
  /// Runs of whole dotted parts ("lm_head", "mlp.gate", "model.layers.0.self_attn"), or beginnings
  /// with '*' for whole parts ("model.layers.*.self_attn"). fp8 and mxfp8.
  kParts,
  /// Whole names of modules, or "re:" and a regular expression that a name begins with, as Python's
  /// re.match reads it. compressed-tensors.
  kNamesAndExpressions,
  /// Whole names of modules or of what they lie in, with '*', '?' for any characters. modelopt.
  kGlobs,
};

/// Whose scales a quantized KV cache has.
enum class KvScales {
  kNone,
  kProjections,  ///< "k_proj.k_scale", "v_proj.v_scale". modelopt.
  kAttention,    ///< "self_attn.k_scale", "self_attn.v_scale". compressed-tensors.
};

/// How quantized weights are stored: what quantization_config of config.json says.
///
/// Codes are F8_E4M3, under the weight's own name, or four bits each, packed. The scale of element
/// (r, c) is element (r / rows, c / columns) of the tensor that stands beside it; the last groups
/// of fp8 may be partial.
struct WeightFormat {
  std::string_view name;  ///< as `wwctl convert --quantize` calls it
  int64_t rows = 0;       ///< of a group, along the outputs; 0: all
  int64_t columns = 0;    ///< along the inputs; 0: all
  ScaleRule rule = ScaleRule::kQuotient;
  std::optional<DType> scale = DType::kF32;  ///< nullopt: the model's dtype
  std::string_view suffix = kScaleSuffix;    ///< what the scales' name adds to the weight's

  IgnoreRule ignore = IgnoreRule::kParts;
  DType codes = DType::kF8E4M3;
  int64_t packed = 1;  ///< codes in one of `codes`
  /// Beside each quantized weight: the last part of the name of a scale of what it reads, which is
  /// calibrated (types.h); empty: none.
  std::string_view input = {};
  /// Beside weights of k and v, whether these are quantized or not: scales of the KV cache.
  KvScales kv = KvScales::kNone;
  /// Entries without, and with, characters of a pattern.
  std::set<std::string, std::less<>> skipped = {};
  std::vector<std::string> patterns = {};
  /// Of each of `patterns` that is a regular expression.
  struct Expression;
  std::vector<std::shared_ptr<const Expression>> expressions = {};

  /// Whether engines' own layouts are described for it: others are repacked or fused differently
  /// when they are loaded.
  bool InEngines() const { return rows > 0 && columns > 0 && suffix == kScaleSuffix && !OneByte(); }
  bool OneByte() const { return scale && ElementBytes(*scale) == 1; }
  /// gpt-oss': of its experts alone, which lie in one tensor with inputs first before, and with
  /// outputs first then: `…_blocks` [experts, outputs, groups, bytes] and `…_scales`.
  bool OfFusedExperts() const { return suffix == kFusedScales; }
  bool OfModelopt() const { return ignore == IgnoreRule::kGlobs; }
  /// Of a scale of a whole tensor, calibrated ones too.
  Shape OfOne() const { return OfModelopt() ? Shape{} : Shape{1}; }
  /// What a checkpoint has of the scales [rows, columns] of a matrix of fp8.
  Shape StoredScales(const Shape& scales) const;
  /// Of the calibrated scale of this name.
  DType CalibratedType(std::string_view scale_name, DType model) const;
  /// Whether the tensor keeps the model's dtype: an entry speaks of it.
  bool Skips(std::string_view tensor) const;
  /// Calls visit(entry) for each that does; for some maybe twice.
  void ForEachMatch(std::string_view tensor,
                    const std::function<void(const std::string&)>& visit) const;
};

/// `quantization_config` of config.json; nullopt when it is absent or null.
///   kInvalidArgument / kInvalidRequest  a quantization that is not described (it is named), a
///   field
///                                       that is not understood, a pattern that loaders read
///                                       differently
Result<std::optional<WeightFormat>> ReadWeightFormat(const Json& json);

/// What a config.json must say for the format of this name: the object `quantization_config`.
/// `skipped`: modules that keep the model's dtype; of gpt-oss the release's own list.
///   kInvalidArgument / kInvalidRequest  there is none of this name; the known ones are named
Result<Json> QuantizationConfigOf(std::string_view name, const std::vector<std::string>& skipped);

}  // namespace weightwire::layout
