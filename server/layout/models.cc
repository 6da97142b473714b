#include "server/layout/models.h"

#include <algorithm>
#include <utility>

namespace weightwire::layout {
namespace {

Status TooMany(const std::string& what, size_t count, size_t most) {
  return Status(Code::kResourceExhausted, Reason::kLimitExceeded,
                "the models have " + std::to_string(count) + " " + what + " together, at most " +
                    std::to_string(most) + " are allowed");
}

Status TooLong(const std::string& name) {
  return Status(Code::kResourceExhausted, Reason::kLimitExceeded,
                "its name with its model's is longer than " +
                    std::to_string(LayoutLimits{}.name_bytes_max) + " bytes")
      .AtTensor(name);
}

}  // namespace

std::string NameInModel(std::string_view model, std::string_view tensor) {
  return std::string(model).append(kModelSeparator).append(tensor);
}

ModelAndTensor SplitName(std::string_view canonical) {
  const size_t at = canonical.find(kModelSeparator);
  if (at == std::string_view::npos) return {{}, canonical};
  return {canonical.substr(0, at), canonical.substr(at + kModelSeparator.size())};
}

Status CheckModelName(std::string_view model) {
  const bool plain = std::ranges::all_of(model, [](unsigned char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '.' ||
           c == '_' || c == '-';
  });
  if (plain && !model.empty() && model.size() <= kModelNameBytesMax) return OkStatus();
  const std::string shown(model.substr(0, kModelNameBytesMax));
  return Status(Code::kInvalidArgument, Reason::kInvalidRequest,
                "no model can be called \"" + shown + "\"")
      .Remedy("use letters, digits, '.', '_' and '-', at most " +
              std::to_string(kModelNameBytesMax));
}

std::vector<std::string> ModelsOf(const CanonicalSpace& canonical) {
  std::vector<std::string> models;
  for (const TensorSpec& tensor : canonical.tensors) {
    const std::string_view model = SplitName(tensor.name).model;
    if (models.empty() || models.back() != model) models.emplace_back(model);
  }
  if (models.empty()) models.emplace_back();
  std::ranges::sort(models);
  models.erase(std::unique(models.begin(), models.end()), models.end());
  return models;
}

Result<JoinedModels> JoinModels(std::span<const RankOfModel> models) {
  const LayoutLimits limits;
  struct Place {
    size_t model;
    uint32_t tensor;
    std::string name;
  };
  std::vector<Place> places;
  size_t local = 0;
  for (size_t m = 0; m < models.size(); ++m) {
    local += models[m].rank->tensors.size();
    const auto& tensors = models[m].canonical->tensors;
    for (uint32_t t = 0; t < tensors.size(); ++t) {
      places.push_back({m, t, NameInModel(models[m].model, tensors[t].name)});
    }
  }
  if (places.size() > limits.canonical_tensors_max) {
    return Fail(TooMany("tensors", places.size(), limits.canonical_tensors_max));
  }
  if (local > limits.local_tensors_per_rank_max) {
    return Fail(TooMany("tensors on this rank", local, limits.local_tensors_per_rank_max));
  }
  std::ranges::sort(places, {}, &Place::name);

  JoinedModels joined;
  std::vector<std::vector<uint32_t>> indices(models.size());  // by model and own index
  for (size_t m = 0; m < models.size(); ++m) indices[m].resize(models[m].canonical->tensors.size());
  for (Place& place : places) {
    if (place.name.size() > limits.name_bytes_max) return Fail(TooLong(place.name));
    indices[place.model][place.tensor] = static_cast<uint32_t>(joined.canonical.tensors.size());
    joined.canonical.tensors.push_back(models[place.model].canonical->tensors[place.tensor]);
    joined.canonical.tensors.back().name = std::move(place.name);
  }
  for (size_t m = 0; m < models.size(); ++m) {
    for (LocalTensor tensor : models[m].rank->tensors) {
      if (models.size() > 1) tensor.name = NameInModel(models[m].model, tensor.name);
      if (tensor.name.size() > limits.name_bytes_max) return Fail(TooLong(tensor.name));
      for (Piece& piece : tensor.pieces) piece.tensor = indices[m][piece.tensor];
      joined.rank.tensors.push_back(std::move(tensor));
    }
  }
  return joined;
}

}  // namespace weightwire::layout
