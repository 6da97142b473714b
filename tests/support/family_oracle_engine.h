#pragma once

#include "tests/support/family_oracle_model.h"

namespace weightwire::family_oracle {

struct EngineShape {
  bool sglang = false;  ///< otherwise vLLM
  int64_t tp = 1, pp = 1, dp = 1;
  /// vLLM: 1 with expert parallelism over all tp · dp ranks of a stage. SGLang: the size of
  /// expert parallelism, within tp. 0: not said.
  int64_t ep = 0;
  int64_t redundant = 0;
  bool round_robin = false;
  bool up_first = false;
  int64_t vocab_pad_to = 64;
  std::vector<int64_t> stage_layers;  ///< empty: as the engine does it by itself
};

/// Whether the engine runs such a model; asked before EngineRanks.
bool EngineFits(const Config& config, const EngineShape& shape);
/// What every rank holds, by rank.
std::vector<Tensors> EngineRanks(const Config& config, const Weights& weights,
                                 const EngineShape& shape);

}  // namespace weightwire::family_oracle
