#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <string_view>

#include "server/layout/json_reader.h"

namespace weightwire::layout {

/// fp8 weights with one fp32 scale for each block: what quantization_config of config.json says of
/// checkpoints like DeepSeek-V3's. The scale of element (r, c) of a weight is element
/// (r / rows, c / columns) of the tensor that stands beside it; the last blocks may be partial.
struct BlockScales {
  int64_t rows = 0;     ///< of a block, along the outputs
  int64_t columns = 0;  ///< along the inputs
  std::set<std::string, std::less<>> skipped;

  /// Whether the tensor keeps the model's dtype: an entry of `skipped` is a run of whole dotted
  /// parts of its name, as "lm_head", "mlp.gate" or "model.layers.0.self_attn" are.
  bool Skips(std::string_view tensor) const;
};

/// `quantization_config` of config.json; nullopt when it is absent or null. Entries that leave
/// modules out are `modules_to_not_convert` and `ignored_layers`.
///   kInvalidArgument / kInvalidRequest  any other quantization than the one above
Result<std::optional<BlockScales>> ReadBlockScales(const Json& json);

}  // namespace weightwire::layout
