#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "server/layout/json_reader.h"

namespace weightwire::layout {

/// fp8 weights with one fp32 scale for each block: what quantization_config of config.json says of
/// checkpoints like DeepSeek-V3's. The scale of element (r, c) of a weight is element
/// (r / rows, c / columns) of the tensor that stands beside it; the last blocks may be partial.
struct BlockScales {
  int64_t rows = 0;     ///< of a block, along the outputs
  int64_t columns = 0;  ///< along the inputs
  /// Runs of whole dotted parts of names, as "lm_head", "mlp.gate" or "model.layers.0.self_attn".
  std::set<std::string, std::less<>> skipped;
  /// Beginnings of names, with '*' for whole parts: "model.layers.*.self_attn".
  std::vector<std::string> patterns;

  /// Whether the tensor keeps the model's dtype: an entry of `skipped` or `patterns` speaks of it.
  bool Skips(std::string_view tensor) const;
  /// Calls visit(entry) for each that does; for some maybe twice.
  void ForEachMatch(std::string_view tensor,
                    const std::function<void(const std::string&)>& visit) const;
};

/// `quantization_config` of config.json; nullopt when it is absent or null. Entries that leave
/// modules out are `modules_to_not_convert` and `ignored_layers`.
///   kInvalidArgument / kInvalidRequest  any other quantization than the one above, a field that is
///                                       not understood, a pattern that loaders read differently
Result<std::optional<BlockScales>> ReadBlockScales(const Json& json);

}  // namespace weightwire::layout
