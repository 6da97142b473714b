#pragma once

#include <string>

#include "server/layout/schemes/role_cutter.h"

namespace weightwire::layout::megatron {

/// How a Megatron build holds its experts.
enum class Experts { kSequential, kGrouped, kTransformerEngine };

/// Where one rank stands in the grid of experts.
struct ExpertGrid {
  Experts kind = Experts::kSequential;
  int64_t ep = 1;
  int64_t etp = 1;
  int64_t e = 0;  ///< of ep
  int64_t x = 0;  ///< of etp
};

/// How a Megatron build names a layer's parameters.
struct Names {
  bool te = false;         ///< Transformer Engine's layer spec
  bool flat_conv = false;  ///< Mamba's convolution is conv1d_weight and conv1d_bias
};

/// Which half of a transformer layer: what mixes tokens, or the MLP or experts behind it.
enum class Half { kBoth, kMixer, kMlp };

/// One transformer layer, or the half of one that megatron-core's HybridModel has as a layer of its
/// own; `at` is the prefix of its names, with the dot at its end.
void AddLayer(RoleCutter& cutter, const ExpertGrid& grid, const Names& names, const std::string& at,
              int64_t layer, Half half = Half::kBoth);

}  // namespace weightwire::layout::megatron
