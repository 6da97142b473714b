#include "server/layout/schemes/fsdp_tensors.h"

#include <algorithm>

namespace weightwire::layout {
namespace {

constexpr Role kColumnParallel[] = {
    Role::kEmbed,        Role::kLmHead,     Role::kQWeight,
    Role::kKWeight,      Role::kVWeight,    Role::kQBias,
    Role::kKBias,        Role::kVBias,      Role::kSinks,
    Role::kQUp,          Role::kKvUp,       Role::kGateWeight,
    Role::kUpWeight,     Role::kGateBias,   Role::kUpBias,
    Role::kExpertGate,   Role::kExpertUp,   Role::kExpertGateBias,
    Role::kExpertUpBias, Role::kSharedGate, Role::kSharedUp,
};
constexpr Role kRowParallel[] = {Role::kOWeight, Role::kDownWeight, Role::kExpertDown,
                                 Role::kSharedDown};

class Marker {
 public:
  Marker(const Model& model, std::vector<TorchTensor>& tensors)
      : model_(model), tensors_(tensors) {}

  /// Calls mark(view, torch tensor) for every place of the role.
  template <typename Mark>
  void Each(Role role, Mark mark) {
    const ModelConfig& config = model_.config();
    const int64_t layers = std::max<int64_t>(1, std::ssize(config.kinds));
    const int64_t experts = std::max<int64_t>(1, config.experts);
    for (int64_t layer = 0; layer < layers; ++layer) {
      uint32_t before = UINT32_MAX;
      for (int64_t expert = 0; expert < experts; ++expert) {
        const auto view = model_.Find(role, layer, expert);
        if (!view || view->tensor == before) break;  // not there, or not one for each expert
        before = view->tensor;
        mark(*view, tensors_[view->tensor]);
      }
    }
  }

  void Cut(Role role, bool columns) {
    Each(role, [columns](const View& view, TorchTensor& torch) {
      const int dim = columns ? view.column_dim : view.row_dim;
      torch.tp_dim = std::min(dim, static_cast<int>(torch.shape.size()) - 1);
    });
  }

 private:
  const Model& model_;
  std::vector<TorchTensor>& tensors_;
};

}  // namespace

std::vector<TorchTensor> TorchTensors(const Model& model, int64_t layers) {
  std::vector<TorchTensor> tensors;
  for (uint32_t tensor = 0; tensor < model.canonical().tensors.size(); ++tensor) {
    tensors.push_back({tensor, model.StoredShape(tensor), -1, false, model.LayerOf(tensor)});
  }
  Marker marker(model, tensors);
  for (Role role : kColumnParallel) marker.Cut(role, false);
  for (Role role : kRowParallel) marker.Cut(role, true);
  for (Role role : {Role::kRouterCorrection, Role::kLayerScalar}) {
    marker.Each(role, [](const View&, TorchTensor& torch) { torch.buffer = true; });
  }
  for (const Model::TowerPlace& place : model.tower()) {
    tensors[place.tensor].buffer = place.of->buffer;
  }
  for (const TorchTensor& torch : tensors) {
    if (const auto scales = model.ScalesOf(torch.tensor)) tensors[*scales].tp_dim = torch.tp_dim;
  }
  std::erase_if(tensors, [layers](const TorchTensor& torch) { return torch.layer >= layers; });
  return tensors;
}

}  // namespace weightwire::layout
