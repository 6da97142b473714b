// One rank that holds every canonical tensor whole, as a Hugging Face checkpoint stores it: under
// its own name, dimensions that the canonical shape splits joined again, and for each MTP layer the
// copies of embedding and head that such checkpoints carry.
//
// `mtp=none` leaves the MTP layers out, as transformers itself does; `mtp=single|fused` says that
// those of Qwen3-Next, Qwen3.5 and Nemotron-H are there, and how their experts are stored.
#include "server/layout/schemes/option.h"
#include "server/layout/schemes/rank_builder.h"
#include "server/layout/schemes/scheme_registry.h"

namespace weightwire::layout {

Result<ModelLayout> DeriveHf(const Model& model, const ParallelSpec& spec) {
  const ModelConfig& config = model.config();
  WW_ASSIGN(const int64_t layers, LayersWithMtp(config, spec));
  RankBuilder builder(model.canonical());
  for (uint32_t tensor = 0; tensor < model.canonical().tensors.size(); ++tensor) {
    if (model.LayerOf(tensor) >= layers) continue;
    builder.Stored(model.canonical().tensors[tensor].name, tensor, model.StoredShape(tensor));
  }
  for (int64_t layer = config.layers; layer < layers; ++layer) {
    for (const MtpCopy& copy : model.mtp_copies()) {
      const auto of = model.Find(copy.of);
      const auto view = of ? of : model.Find(Role::kEmbed);  // a tied head is the embedding
      builder.Stored(model.Named(copy.name, layer, 0), view->tensor,
                     model.StoredShape(view->tensor));
    }
  }
  WW_ASSIGN(RankLayout rank, std::move(builder).Finish());
  return ModelLayout{model.canonical(), {std::move(rank)}};
}

}  // namespace weightwire::layout
