// vLLM. What a layer holds is in engine_layer.cc, ranks are in engine.h.
//
//   tp, pp, dp     without `ep` the experts are cut over all tp · dp ranks of a stage
//   ep             instead each such rank has whole experts of its own
#include "server/layout/schemes/engine.h"
#include "server/layout/schemes/option.h"

namespace weightwire::layout {
namespace {

/// vLLM 0.24 to 0.33; earlier versions have no "routed_experts.".
constexpr engine::EngineNames kEngineNames = {.experts = "routed_experts.",
                                              .latent_a = "fused_qkv_a_proj",
                                              .vision_qkv = "qkv",
                                              .index_key = "wk_weights_proj",
                                              .text = "language_model.",
                                              .tied_head = "model.embed_tokens.weight",
                                              .wrappers = true,
                                              .last_stages_spared = 1};

engine::ExpertSlice SliceOf(const engine::Grid& grid, int64_t experts, int64_t dp, int64_t t) {
  const int64_t place = dp * grid.tp + t;
  engine::ExpertSlice slice;
  slice.up_first = grid.up_first;
  slice.experts = ExpertsAt(grid, experts, grid.ep > 0 ? place : 0);
  if (grid.ep == 0) {
    slice.parts = grid.tp * grid.dp;
    slice.part = place;
  }
  return slice;
}

}  // namespace

Result<ModelLayout> DeriveVllm(const Model& model, const ParallelSpec& spec) {
  WW_ASSIGN(engine::Grid grid, engine::GridOf(spec));
  WW_ASSIGN(const bool ep, FlagOption(spec, "ep"));
  grid.ep = ep ? grid.tp * grid.dp : 0;
  grid.slice = SliceOf;
  return engine::Derive(model, spec, grid, kEngineNames);
}

}  // namespace weightwire::layout
