#pragma once

#include <set>
#include <string>

#include "tests/support/family_oracle_engine.h"

/// fp8 weights with block scales, by definition: the scale of a block is the scale of the weights
/// in it, wherever they lie. Shares nothing with server/layout.
namespace weightwire::family_oracle {

struct Quantization {
  int64_t rows = 1;  ///< of a block
  int64_t columns = 1;
  std::set<std::string> skipped;  ///< modules_to_not_convert
  bool powers_of_two = false;     ///< scales, which scale_fmt says

  /// config.json with a quantization_config.
  std::string Added(const std::string& config_json) const;
};

/// Whether the checkpoint stores the tensor as fp8.
bool IsQuantized(const Config& config, const Quantization& q, const std::string& canonical);
/// Puts the scales of each fp8 weight beside it. `local` names are an engine's or the checkpoint's.
Tensors WithScales(const Config& config, const Quantization& q, const Tensors& local);
/// FSDP2 over dp shards, tensor parallelism within: what every rank holds of a checkpoint `all`
/// with scales, each cut as a parameter of its own; and whether no block of a weight is cut by tp.
std::vector<Tensors> FsdpRanks(const Tensors& all, int64_t dp, int64_t tp);
bool FsdpFits(const Tensors& all, const Quantization& q, int64_t tp);
/// Whether the engine loads such a model: what it cuts and fuses is whole blocks, and quantized as
/// a whole.
bool BlocksFit(const Config& config, const Quantization& q, const EngineShape& shape);

}  // namespace weightwire::family_oracle
