#pragma once

#include <string_view>
#include <vector>

#include "server/layout/schemes/role_cutter.h"

namespace weightwire::layout::engine {

/// Where vLLM's and SGLang's names differ.
struct EngineNames {
  std::string_view experts;     ///< between the experts' module and "w13_weight", with its dot
  std::string_view latent_a;    ///< the fused first projections of latent attention
  std::string_view vision_qkv;  ///< q, k and v of the vision tower
  std::string_view index_key;   ///< the indexer's fused projections
  std::string_view text;       ///< in front of the text model's names where there is a vision tower
  std::string_view tied_head;  ///< what the last of several stages has of a tied embedding
  bool wrappers = false;       ///< towers of wrappers are described
  /// Attention whose heads have output gates has its modules in the layer itself, not in self_attn.
  bool flat_gated_attention = false;
  /// Stages that get none of the layers that remain when they are spread evenly: the last ones. The
  /// stages before them get one more each, from behind.
  int64_t last_stages_spared = 0;
};

/// What one rank holds of every mixture of experts.
struct ExpertSlice {
  std::vector<int64_t> experts;  ///< in the order of the rank's storage; redundant ones repeat
  int64_t parts = 1;             ///< into which each expert is cut
  int64_t part = 0;
  bool up_first = false;  ///< w13 holds up, then gate
};

/// One decoder layer.
void AddLayer(RoleCutter& cutter, const EngineNames& engine_names, const ExpertSlice& slice,
              int64_t layer);

}  // namespace weightwire::layout::engine
