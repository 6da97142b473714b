#pragma once

#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "server/layout/types.h"

/// A trainer may publish several models together (actor, reward, draft), each cut over its ranks in
/// its own way. Their canonical space is one: tensor T of model M is called "M::T". An engine holds
/// one of them, and no other tensor.
namespace weightwire::layout {

inline constexpr std::string_view kModelSeparator = "::";
inline constexpr size_t kModelNameBytesMax = 64;
inline constexpr size_t kModelsMax = 64;

/// "M::T".
std::string NameInModel(std::string_view model, std::string_view tensor);

struct ModelAndTensor {
  std::string_view model;  ///< empty: of a trainer that publishes one model, which has no name
  std::string_view tensor;
  friend bool operator==(const ModelAndTensor&, const ModelAndTensor&) = default;
};
ModelAndTensor SplitName(std::string_view canonical);

/// Letters, digits, '.', '_' and '-'; at most kModelNameBytesMax.
///   kInvalidArgument / kInvalidRequest
Status CheckModelName(std::string_view model);

/// Of all tensors, sorted, at least one; {""} for one model without a name.
std::vector<std::string> ModelsOf(const CanonicalSpace& canonical);

/// What one rank has of one model.
struct RankOfModel {
  std::string model;
  std::shared_ptr<const CanonicalSpace> canonical;
  std::shared_ptr<const RankLayout> rank;
};
struct JoinedModels {
  CanonicalSpace canonical;
  RankLayout rank;
};
/// One canonical space, and the rank's tensors of all models in the order of `models`. Of several
/// models local tensors are called "M::T", too; of one they keep their names, for an engine knows
/// no other. Needs valid layouts and different names of models.
///   kResourceExhausted / kLimitExceeded  LayoutLimits
Result<JoinedModels> JoinModels(std::span<const RankOfModel> models);

}  // namespace weightwire::layout
