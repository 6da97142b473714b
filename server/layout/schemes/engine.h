#pragma once

#include <map>

#include "server/layout/schemes/engine_layer.h"
#include "server/layout/schemes/scheme_registry.h"

namespace weightwire::layout::engine {

/// The sizes of one engine group and the experts of each of its ranks.
struct Grid {
  int64_t tp = 1;
  int64_t pp = 1;
  int64_t dp = 1;
  /// Of the rank (dp, t); the same in every pipeline stage.
  ExpertSlice (*slice)(const Grid& grid, int64_t experts, int64_t dp, int64_t t) = nullptr;
  int64_t ep = 0;         ///< expert-parallel ranks; 0: experts are cut like other weights
  int64_t redundant = 0;  ///< copies of the first experts behind the last one
  bool round_robin = false;
  bool up_first = false;
};

/// Rank = t + T · (pp + PP · dp). The first stage has the embedding, the last one the final norm
/// and lm_head, or, tied, a second embedding (`tied_head`). MTP layers are left out: draft models
/// are groups of their own, or traced; `mtp=` adds to the canonical space alone. A vision tower is
/// in every stage. Layers are spread as the engine does, or as `layers=7-7-6` says. Errors as
/// in LayoutFromScheme.
Result<ModelLayout> Derive(const Model& model, const ParallelSpec& spec, const Grid& grid,
                           const EngineNames& engine_names);

/// Options that both engines have: `redundant=N` experts, `round_robin` placement instead of runs,
/// `up_first` in w13. Errors as in LayoutFromScheme.
Result<Grid> GridOf(const ParallelSpec& spec);

/// Those of `experts` + redundant physical experts that place `e` of `grid.ep` holds; a redundant
/// one is named by the expert that it repeats.
std::vector<int64_t> ExpertsAt(const Grid& grid, int64_t experts, int64_t e);

}  // namespace weightwire::layout::engine
