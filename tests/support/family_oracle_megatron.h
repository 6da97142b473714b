#pragma once

#include <optional>

#include "tests/support/family_oracle_model.h"

namespace weightwire::family_oracle {

/// Layer numbers by pipeline stage, then model chunk.
using Pipeline = std::vector<std::vector<std::vector<int64_t>>>;

// Megatron's ways to distribute `layers` over `pp` stages of `vpp` chunks; nullopt: refused.

std::optional<Pipeline> EvenPipeline(int64_t layers, int64_t pp, int64_t vpp);
/// Embedding and loss count as layers of the first and the last chunk.
std::optional<Pipeline> AccountedPipeline(int64_t layers, int64_t pp, int64_t vpp, bool embedding,
                                          bool loss);
/// Layers of the first and the last stage; 0: not said.
std::optional<Pipeline> FirstLastPipeline(int64_t layers, int64_t pp, int64_t vpp, int64_t first,
                                          int64_t last);
/// Layers of each chunk, in the order in which the model passes them.
std::optional<Pipeline> ListedPipeline(int64_t layers, int64_t pp, int64_t vpp,
                                       const std::vector<int64_t>& counts);

struct MegatronShape {
  enum class Experts { kSequential, kGrouped, kTransformerEngine };
  int64_t tp = 1, pp = 1, vpp = 1, cp = 1, dp = 1;
  int64_t ep = 1, etp = 1;
  bool transformer_engine = false;
  Experts experts = Experts::kSequential;
  bool pp_before_dp = false;  ///< order tp-cp-ep-pp-dp
  bool mtp = true;            ///< false: the model was built without its MTP layers
  int64_t vocab_rows = 1;     ///< padded, of all ranks together
  std::optional<Pipeline> pipeline;
  std::optional<int64_t> mtp_stage;  ///< whose last chunk has them; not said: the last stage
};

/// Whether Megatron builds such a model; asked before MegatronRanks.
bool MegatronFits(const Config& config, const MegatronShape& shape);
/// What every rank holds, by rank.
std::vector<Tensors> MegatronRanks(const Config& config, const Weights& weights,
                                   const MegatronShape& shape);

}  // namespace weightwire::family_oracle
