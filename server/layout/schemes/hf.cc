// One rank that holds every canonical tensor whole, under its own name: a Hugging Face checkpoint,
// or any unsharded model.
#include "server/layout/schemes/rank_builder.h"
#include "server/layout/schemes/scheme_registry.h"

namespace weightwire::layout {

Result<ModelLayout> DeriveHf(const Model& model, const ParallelSpec&) {
  RankBuilder builder(model.canonical);
  for (uint32_t tensor = 0; tensor < model.canonical.tensors.size(); ++tensor) {
    builder.Whole(model.canonical.tensors[tensor].name, tensor);
  }
  WW_ASSIGN(RankLayout rank, std::move(builder).Finish());
  return ModelLayout{model.canonical, {std::move(rank)}};
}

}  // namespace weightwire::layout
