#include "server/layout/families/family.h"

#include <algorithm>
#include <numeric>

#include "server/base/checked.h"
#include "server/layout/families/llama.h"
#include "server/layout/families/qwen2.h"
#include "server/layout/families/qwen3.h"
#include "server/layout/scheme.h"

namespace weightwire::layout {
namespace {

constexpr Family kFamilies[] = {kLlama, kQwen2, kQwen3};
constexpr std::string_view kLayerMark = "{layer}";

const Family& FamilyOf(std::string_view model_type) {
  const auto it =
      std::find_if(std::begin(kFamilies), std::end(kFamilies),
                   [model_type](const Family& family) { return family.model_type == model_type; });
  WW_CHECK(it != std::end(kFamilies));
  return *it;
}

bool IsPresent(When when, const ModelConfig& config) {
  switch (when) {
    case When::kAlways:
      return true;
    case When::kUntied:
      return !config.tied;
    case When::kAttentionBias:
      return config.attention_bias;
    case When::kMlpBias:
      return config.mlp_bias;
  }
  return false;
}

/// nullopt when the size does not fit int64.
std::optional<int64_t> SizeOf(Extent extent, const ModelConfig& config) {
  switch (extent) {
    case Extent::kNone:
      return 1;
    case Extent::kVocab:
      return config.vocab;
    case Extent::kHidden:
      return config.hidden;
    case Extent::kQRows:
      return CheckedProduct(std::array{config.heads, config.head_dim});
    case Extent::kKvRows:
      return CheckedProduct(std::array{config.kv_heads, config.head_dim});
    case Extent::kHeadDim:
      return config.head_dim;
    case Extent::kIntermediate:
      return config.intermediate;
  }
  return std::nullopt;
}

bool IsPerLayer(const TensorTemplate& tensor) {
  return tensor.name.find(kLayerMark) != std::string_view::npos;
}

std::string NameOf(const TensorTemplate& tensor, int64_t layer) {
  std::string name(tensor.name);
  const size_t mark = name.find(kLayerMark);
  if (mark != std::string::npos) name.replace(mark, kLayerMark.size(), std::to_string(layer));
  return name;
}

Result<Shape> ShapeOf(const TensorTemplate& tensor, const ModelConfig& config) {
  Shape shape;
  for (Extent extent : {tensor.rows, tensor.columns}) {
    if (extent == Extent::kNone) continue;
    const std::optional<int64_t> size = SizeOf(extent, config);
    shape.push_back(size.value_or(-1));
  }
  if (!StorageBytes(config.dtype, shape)) {
    return Fail(Status(Code::kInvalidArgument, Reason::kShapeOverflow,
                       "the sizes in config.json give more bytes than fit 64 bits")
                    .AtTensor(NameOf(tensor, 0)));
  }
  return shape;
}

Status CheckTensorCount(const Family& family, const ModelConfig& config) {
  int64_t per_layer = 0;
  for (const TensorTemplate& tensor : family.tensors) per_layer += IsPerLayer(tensor) ? 1 : 0;
  const auto limit = static_cast<int64_t>(LayoutLimits{}.canonical_tensors_max);
  if (config.layers > (limit - static_cast<int64_t>(family.tensors.size())) / per_layer) {
    return {Code::kResourceExhausted, Reason::kLimitExceeded,
            "num_hidden_layers is " + std::to_string(config.layers) + ", more than fit " +
                std::to_string(limit) + " tensors"};
  }
  return OkStatus();
}

/// What schemes fuse must fit as well: their arithmetic relies on it.
Status CheckFusedSizes(const ModelConfig& config) {
  const std::array qkv = {config.heads + 2 * config.kv_heads, config.head_dim, config.hidden};
  const std::array gate_up = {int64_t{2}, config.intermediate, config.hidden};
  if (StorageBytes(config.dtype, qkv) && StorageBytes(config.dtype, gate_up)) return OkStatus();
  return {Code::kInvalidArgument, Reason::kShapeOverflow,
          "the sizes in config.json give fused tensors of more bytes than fit 64 bits"};
}

/// Sorts the tensors by name and lets by_role follow.
void SortByName(Model& model) {
  std::vector<TensorSpec>& tensors = model.canonical.tensors;
  std::vector<uint32_t> order(tensors.size());
  std::iota(order.begin(), order.end(), 0u);
  std::sort(order.begin(), order.end(),
            [&tensors](uint32_t a, uint32_t b) { return tensors[a].name < tensors[b].name; });
  std::vector<TensorSpec> sorted;
  sorted.reserve(tensors.size());
  std::vector<uint32_t> position(tensors.size());
  for (uint32_t old_index : order) {
    position[old_index] = static_cast<uint32_t>(sorted.size());
    sorted.push_back(std::move(tensors[old_index]));
  }
  tensors = std::move(sorted);
  for (auto& layers : model.by_role) {
    for (uint32_t& index : layers) index = position[index];
  }
}

}  // namespace

std::span<const Family> Families() { return kFamilies; }

std::optional<uint32_t> Model::Find(Role role, int64_t layer) const {
  const auto& layers = by_role[static_cast<size_t>(role)];
  if (layers.empty()) return std::nullopt;
  return layers[static_cast<size_t>(layer)];
}

Result<Model> BuildModel(ModelConfig config) {
  const Family& family = FamilyOf(config.family);
  WW_FAIL_IF_ERROR(CheckTensorCount(family, config));
  WW_FAIL_IF_ERROR(CheckFusedSizes(config));
  Model model;
  for (const TensorTemplate& tensor : family.tensors) {
    if (!IsPresent(tensor.when, config)) continue;
    WW_ASSIGN(const Shape shape, ShapeOf(tensor, config));
    const int64_t count = IsPerLayer(tensor) ? config.layers : 1;
    for (int64_t layer = 0; layer < count; ++layer) {
      model.by_role[static_cast<size_t>(tensor.role)].push_back(
          static_cast<uint32_t>(model.canonical.tensors.size()));
      model.canonical.tensors.push_back({NameOf(tensor, layer), config.dtype, shape});
    }
  }
  SortByName(model);
  model.config = std::move(config);
  return model;
}

Result<CanonicalSpace> CanonicalFromConfig(std::string_view config_json) {
  WW_ASSIGN(ModelConfig config, ParseModelConfig(config_json));
  WW_ASSIGN(Model model, BuildModel(std::move(config)));
  return std::move(model.canonical);
}

}  // namespace weightwire::layout
