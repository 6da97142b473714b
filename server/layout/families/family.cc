#include "server/layout/families/family.h"
#include "server/layout/config_in_format.h"

#include <algorithm>
#include <numeric>
#include <set>

#include "server/layout/blocks.h"
#include "server/layout/families/deepseek.h"
#include "server/layout/families/exaone4.h"
#include "server/layout/families/gemma.h"
#include "server/layout/families/gemma3.h"
#include "server/layout/families/gemma4.h"
#include "server/layout/families/glm4.h"
#include "server/layout/families/glm4_moe.h"
#include "server/layout/families/gpt_oss.h"
#include "server/layout/families/kimi_k25.h"
#include "server/layout/families/llama.h"
#include "server/layout/families/llama4.h"
#include "server/layout/families/llama4_vision.h"
#include "server/layout/families/minimax_m2.h"
#include "server/layout/families/mistral3.h"
#include "server/layout/families/mixtral.h"
#include "server/layout/families/nemotron_h.h"
#include "server/layout/families/phi3.h"
#include "server/layout/families/qwen2.h"
#include "server/layout/families/qwen2_5_vl.h"
#include "server/layout/families/qwen3.h"
#include "server/layout/families/qwen3_5.h"
#include "server/layout/families/qwen3_next.h"
#include "server/layout/families/qwen3_vl.h"
#include "server/layout/families/seed_oss.h"
#include "server/layout/scheme.h"
#include "server/layout/trace.h"

namespace weightwire::layout {
namespace {

constexpr Family kFamilies[] = {
    kDeepseekV2, kDeepseekV3, kDeepseekV32, kExaone4,  kGemma,      kGemma2,      kGemma3,
    kGemma3Text, kGemma4,     kGemma4Text,  kGlm4,     kGlm4Moe,    kGlm4MoeLite, kGlmMoeDsa,
    kGptOss,     kGranite,    kKimiK2,      kKimiK25,  kLlama,      kLlama4,      kLlama4Text,
    kMinimaxM2,  kMinistral3, kMistral,     kMistral3, kMixtral,    kNemotronH,   kPhi3,
    kQwen2,      kQwen25Vl,   kQwen2Moe,    kQwen3,    kQwen35,     kQwen35Moe,   kQwen35MoeText,
    kQwen35Text, kQwen3Moe,   kQwen3Next,   kQwen3Vl,  kQwen3VlMoe, kSeedOss,
};
/// Text models that are described only within a wrapper.
constexpr Family kInnerFamilies[] = {kQwen3VlMoeText, kQwen35MoeFused};
constexpr std::string_view kLayerMark = "{layer}";
constexpr std::string_view kBlockMark = "{block}";
constexpr std::string_view kExpertMark = "{expert}";
/// All names of text families begin with one of these.
constexpr std::string_view kModelPrefix = "model.";
constexpr std::string_view kHeadPrefix = "lm_head.";
/// Or with this one, which no wrapper changes.
constexpr std::string_view kMtpPrefix = "mtp.";

/// Roles of linear layers, which quantization takes: not embeddings, norms and biases.
constexpr Role kLinearRoles[] = {Role::kQWeight,
                                 Role::kKWeight,
                                 Role::kVWeight,
                                 Role::kOWeight,
                                 Role::kQDown,
                                 Role::kQUp,
                                 Role::kKvDown,
                                 Role::kKvUp,
                                 Role::kGateWeight,
                                 Role::kUpWeight,
                                 Role::kDownWeight,
                                 Role::kRouter,
                                 Role::kExpertGate,
                                 Role::kExpertUp,
                                 Role::kExpertDown,
                                 Role::kSharedGate,
                                 Role::kSharedUp,
                                 Role::kSharedDown,
                                 Role::kSharedExpertGate,
                                 Role::kVisionQWeight,
                                 Role::kVisionOWeight,
                                 Role::kVisionGateWeight,
                                 Role::kVisionUpWeight,
                                 Role::kVisionDownWeight,
                                 Role::kMergerInWeight,
                                 Role::kMergerOutWeight,
                                 Role::kLinearQkvz,
                                 Role::kLinearBa,
                                 Role::kLinearQkv,
                                 Role::kLinearZ,
                                 Role::kLinearB,
                                 Role::kLinearA,
                                 Role::kMambaIn,
                                 Role::kLinearOut,
                                 Role::kExpertLatentIn,
                                 Role::kExpertLatentOut,
                                 Role::kTowerLinear,
                                 Role::kLayerInputs,
                                 Role::kLayerInputGate,
                                 Role::kLayerInputOut,
                                 Role::kIndexQuery,
                                 Role::kIndexKey,
                                 Role::kMtpProjection};

bool IsLinear(const TensorTemplate& tensor) {
  return !tensor.full_precision && std::find(std::begin(kLinearRoles), std::end(kLinearRoles),
                                             tensor.parts[0].role) != std::end(kLinearRoles);
}

/// What linear layers of one module read: those with the same one are fused by engines. The
/// weight's own name where no other reads the same.
std::string_view InputOf(Role role, std::string_view weight) {
  switch (role) {
    case Role::kQWeight:
    case Role::kKWeight:
    case Role::kVWeight:
    case Role::kQDown:
    case Role::kKvDown:
    case Role::kIndexKey:
    case Role::kLinearQkvz:
    case Role::kLinearBa:
    case Role::kLinearQkv:
    case Role::kLinearZ:
    case Role::kLinearB:
    case Role::kLinearA:
      return "attention";
    case Role::kQUp:
    case Role::kIndexQuery:
      return "latent queries";
    case Role::kGateWeight:
    case Role::kUpWeight:
      return "mlp";
    case Role::kExpertGate:
    case Role::kExpertUp:
      return "expert";
    case Role::kSharedGate:
    case Role::kSharedUp:
    case Role::kSharedExpertGate:
      return "shared experts";
    default:
      return weight;
  }
}

/// The same for compressed-tensors' NVFP4: what llm-compressor gives one global scale, and what
/// vLLM fuses besides, whose loader takes the largest of several for all of them.
std::string_view FusedWith(Role role, std::string_view weight) {
  switch (role) {
    case Role::kQWeight:
    case Role::kKWeight:
    case Role::kVWeight:
      return "attention";
    case Role::kQDown:
    case Role::kKvDown:
      return "latent attention";
    case Role::kLinearQkv:
    case Role::kLinearZ:
      return "linear attention";
    case Role::kLinearB:
    case Role::kLinearA:
      return "gates of linear attention";
    case Role::kGateWeight:
    case Role::kUpWeight:
    case Role::kExpertGate:
    case Role::kExpertUp:
    case Role::kSharedGate:
    case Role::kSharedUp:
      return InputOf(role, weight);
    default:
      return weight;
  }
}

/// modelopt gives gate and up of an expert one scale of both, also of whole tensors in fp8: what
/// they hold passes as it is, and nothing makes it of one of them.
bool SharesScale(const WeightFormat& format, Role role) {
  return format.rule == ScaleRule::kOwnQuotient &&
         (role == Role::kExpertGate || role == Role::kExpertUp);
}

/// Of a wrapper's tower: found by TowerPlace, not by role.
bool IsTower(const TensorTemplate& tensor) {
  return tensor.parts[0].role == Role::kTower || tensor.parts[0].role == Role::kTowerLinear;
}

/// A matrix of its own, outputs first: the blocks of its scales are blocks of its role.
bool IsPlainMatrix(const TensorTemplate& tensor) {
  const Part& part = tensor.parts[0];
  return tensor.parts[1].role == Role::kCount && tensor.shape[1] != nullptr &&
         tensor.shape[2] == nullptr && part.row_dim == 0 && part.column_dim == 1;
}

bool Has(std::string_view name, std::string_view mark) {
  return name.find(mark) != std::string_view::npos;
}

Result<Shape> ShapeOf(const TensorTemplate& tensor, const ModelConfig& config, DType dtype) {
  Shape shape;
  for (SizeOf size : tensor.shape) {
    if (size != nullptr) shape.push_back(size(config));
  }
  if (!StorageBytes(dtype, shape)) {
    return Fail(Status(Code::kInvalidArgument, Reason::kShapeOverflow,
                       "the sizes in config.json give more bytes than fit 64 bits")
                    .AtTensor(NameOf(tensor.name, 0, 0)));
  }
  return shape;
}

void Replace(std::string& name, std::string_view mark, int64_t number) {
  const size_t at = name.find(mark);
  if (at != std::string::npos) name.replace(at, mark.size(), std::to_string(number));
}

/// "model.layers.{layer}.mlp" → "<layers>{layer}.mlp"
std::string InMtpLayers(std::string_view pattern, std::string_view layers) {
  const size_t at = pattern.find(kLayerMark);
  return at == std::string_view::npos ? std::string(pattern)
                                      : std::string(layers).append(pattern.substr(at));
}

/// Groups of elements of four bits are whole: neither libraries nor engines have others.
Status CheckGroups(const std::string& weight, int64_t columns, int64_t group) {
  if (columns % group == 0) return OkStatus();
  const int64_t below = columns / group * group;
  return Status(Code::kInvalidArgument, Reason::kShapeMismatch,
                std::to_string(columns) + " columns are no whole groups of " +
                    std::to_string(group) + ", each of which has one scale")
      .AtTensor(weight)
      .Remedy("columns must be a multiple of " + std::to_string(group) + ", as " +
              (below > 0 ? std::to_string(below) + " or " : "") + std::to_string(below + group) +
              " is; or take a format with smaller groups, or leave the module out");
}

}  // namespace

std::string NameOf(std::string_view pattern, int64_t number, int64_t expert) {
  std::string name(pattern);
  Replace(name, kLayerMark, number);
  Replace(name, kBlockMark, number);
  Replace(name, kExpertMark, expert);
  return name;
}

std::span<const Family> Families() { return kFamilies; }

const Family& FamilyOf(std::string_view model_type) {
  const auto is_it = [model_type](const Family& family) { return family.model_type == model_type; };
  const auto it = std::ranges::find_if(kFamilies, is_it);
  if (it != std::end(kFamilies)) return *it;
  const auto inner = std::ranges::find_if(kInnerFamilies, is_it);
  WW_CHECK(inner != std::end(kInnerFamilies));
  return *inner;
}

Result<Model> Model::Build(ModelConfig config) {
  const Family& text = FamilyOf(config.text_family);
  Model model;
  model.wrapper_ = FamilyOf(config.family).wrapper;
  model.config_ = std::move(config);
  model.mtp_copies_ = text.mtp_copies;
  model.mtp_layers_ = text.mtp_layers;
  if (model.wrapper_ != nullptr) {
    for (const TowerTensor& tensor : model.wrapper_->tower) {
      WW_FAIL_IF_ERROR(model.AddTower(tensor));
    }
  }
  for (const TensorTemplate& tensor : text.tensors) {
    if (!Has(tensor.name, kLayerMark) && !tensor.mtp) {
      if (!tensor.present(model.config_, {})) continue;
      const int64_t blocks = Has(tensor.name, kBlockMark) ? model.config_.vision.depth : 1;
      for (int64_t block = 0; block < blocks; ++block) {
        WW_FAIL_IF_ERROR(model.Add(tensor, block, -1));
      }
      continue;
    }
    for (size_t layer = 0; layer < model.config_.kinds.size(); ++layer) {
      if (!tensor.present(model.config_, model.config_.kinds[layer])) continue;
      const auto number = static_cast<int64_t>(layer);
      WW_FAIL_IF_ERROR(model.Add(tensor, number, number));
    }
  }
  model.SortByName();
  return model;
}

std::string Model::Named(std::string_view pattern, int64_t number, int64_t expert) const {
  std::string name = NameOf(pattern, number, expert);
  if (wrapper_ == nullptr || name.starts_with(kMtpPrefix)) return name;
  const auto [plain, wrapped] = name.starts_with(kModelPrefix)
                                    ? std::pair(kModelPrefix, wrapper_->model)
                                    : std::pair(kHeadPrefix, wrapper_->head);
  WW_CHECK(name.starts_with(plain));
  return name.replace(0, plain.size(), wrapped);
}

std::string Model::TextName(uint32_t tensor) const {
  std::string name = canonical_.tensors[tensor].name;
  if (wrapper_ == nullptr || name.starts_with(kMtpPrefix)) return name;
  const auto [plain, wrapped] = name.starts_with(wrapper_->model)
                                    ? std::pair(kModelPrefix, wrapper_->model)
                                    : std::pair(kHeadPrefix, wrapper_->head);
  WW_CHECK(name.starts_with(wrapped));
  return name.replace(0, wrapped.size(), plain);
}

Status Model::AddTower(const TowerTensor& tensor) {
  if (!tensor.present(config_, {})) return OkStatus();
  const bool linear = tensor.cut > TowerCut::kWhole && tensor.shape[1] != nullptr;
  const TensorTemplate whole{.name = tensor.name,
                             .shape = tensor.shape,
                             .parts = {Part{.role = linear ? Role::kTowerLinear : Role::kTower}}};
  const SizeOf count =
      tensor.count != nullptr ? tensor.count : [](const ModelConfig& c) { return c.vision.depth; };
  const int64_t blocks = Has(tensor.name, kBlockMark) ? count(config_) : 1;
  for (int64_t block = 0; block < blocks; ++block) {
    tower_.push_back({&tensor, block, static_cast<uint32_t>(canonical_.tensors.size())});
    WW_RETURN_IF_ERROR(Add(whole, block, -1));
  }
  return OkStatus();
}

/// The tensor in one layer or block, of every expert.
Status Model::Add(const TensorTemplate& tensor, int64_t number, int64_t layer) {
  const DType dtype = tensor.dtype.value_or(config_.dtype);
  const LayerKind* kind = layer < 0 ? nullptr : &config_.kinds[static_cast<size_t>(layer)];
  const std::optional<ModelConfig> own =
      kind != nullptr && kind->HasSizes() ? std::optional(config_.Of(*kind)) : std::nullopt;
  WW_ASSIGN_OR_STATUS(const Shape shape, ShapeOf(tensor, own ? *own : config_, dtype));
  const bool own_numbers = kind != nullptr && kind->mtp && !mtp_layers_.empty();
  const std::string pattern =
      own_numbers ? InMtpLayers(tensor.name, mtp_layers_) : std::string(tensor.name);
  const int64_t shown = own_numbers ? number - config_.layers : number;
  const bool per_expert = Has(tensor.name, kExpertMark);
  const int64_t count = per_expert ? config_.experts : 1;
  if (count == 0 || std::ranges::find(shape, 0) != shape.end()) {
    return Status(Code::kInvalidArgument, Reason::kInvalidRequest,
                  "config.json gives the tensor no elements")
        .AtTensor(NameOf(pattern, shown, 0))
        .Remedy("a layer that has experts needs at least one");
  }
  const bool quantized =
      config_.scales.has_value() && IsLinear(tensor) &&
      (!config_.scales->OfFusedExperts() || tensor.parts[0].role == Role::kExpertGate ||
       tensor.parts[0].role == Role::kExpertDown);
  const auto limit = static_cast<int64_t>(LayoutLimits{}.canonical_tensors_max);
  constexpr int64_t kTensorsOfWeight = 5;  // of a packed one, of which k and v have another one
  if (std::ssize(canonical_.tensors) > limit - count * (quantized ? kTensorsOfWeight : 1)) {
    return {Code::kResourceExhausted, Reason::kLimitExceeded,
            "config.json gives more than " + std::to_string(limit) + " tensors"};
  }
  const bool tower = IsTower(tensor);
  for (const Part& part : tensor.parts) {
    if (part.role == Role::kCount || tower) continue;
    auto& places = places_[static_cast<size_t>(part.role)];
    const auto at = static_cast<size_t>(number);
    places.resize(std::max(places.size(), at + 1));
    places[at] = {&part, static_cast<uint32_t>(canonical_.tensors.size()), per_expert};
  }
  const size_t first = canonical_.tensors.size();
  for (int64_t expert = 0; expert < count; ++expert) {
    canonical_.tensors.push_back(
        {tower ? NameOf(pattern, shown, expert) : Named(pattern, shown, expert), dtype, shape});
    joined_.push_back(tensor.joined);
    layer_of_.push_back(layer);
    scales_of_.push_back(-1);
  }
  const std::string name = canonical_.tensors[first].name;
  if (quantized) WW_RETURN_IF_ERROR(Quantize(tensor, first, layer));
  return AddKvScales(tensor.parts[0].role, name, layer);
}

Status Model::Quantize(const TensorTemplate& tensor, size_t first, int64_t layer) {
  const WeightFormat& format = *config_.scales;
  const size_t end = canonical_.tensors.size();
  for (size_t at = first; at < end; ++at) {
    TensorSpec& weight = canonical_.tensors[at];
    if (format.Skips(weight.name)) continue;
    if (format.OfFusedExperts()) {
      WW_RETURN_IF_ERROR(PackExperts(tensor, weight, layer));
      continue;
    }
    if (!IsPlainMatrix(tensor)) {
      return Status(Code::kInvalidArgument, Reason::kInvalidRequest,
                    "family " + config_.family +
                        " stores the weight in an arrangement whose scales are not described")
          .AtTensor(weight.name)
          .Remedy(
              "name its module in modules_to_not_convert if it is not quantized, or send "
              "explicit layouts");
    }
    const std::string name = weight.name;
    if (IsNvFp4(format.rule)) {
      const std::string expert = Has(tensor.name, kExpertMark) ? std::to_string(at - first) : "";
      const Role role = tensor.parts[0].role;
      fused_[name] = std::string(format.OfModelopt() ? InputOf(role, name) : FusedWith(role, name))
                         .append(" ")
                         .append(std::to_string(layer))
                         .append(" ")
                         .append(expert);
    }
    if (format.packed > 1) {
      scales_of_[at] = std::ssize(canonical_.tensors);
      WW_RETURN_IF_ERROR(Pack(weight, layer));
      AddInputScale(name, layer);
      continue;
    }
    weight.dtype = format.codes;
    weight.block = {format.rows > 0 ? format.rows : weight.shape[0],
                    format.columns > 0 ? format.columns : weight.shape[1]};
    weight.scale_rule = format.rule;
    const Shape block = weight.block;
    if (SharesScale(format, tensor.parts[0].role)) {
      weight.block = {};
      weight.scale_rule = ScaleRule::kQuotient;
    }
    TensorSpec scales{weight.name, format.scale.value_or(config_.dtype), weight.shape};
    scales.name.append(format.suffix);
    scales.shape[0] = BlockCount(weight.shape[0], block[0]);
    scales.shape[1] = BlockCount(weight.shape[1], block[1]);
    scales_of_[at] = std::ssize(canonical_.tensors);
    const Shape stored = format.StoredScales(scales.shape);
    AddBeside(std::move(scales), layer, stored);
    AddInputScale(name, layer);
  }
  return OkStatus();
}

void Model::AddInputScale(const std::string& weight, int64_t layer) {
  const WeightFormat& format = *config_.scales;
  if (format.input.empty()) return;
  const std::string module = weight.substr(0, weight.rfind('.') + 1);
  AddBeside({module + std::string(format.input), format.CalibratedType(format.input, config_.dtype),
             format.OfOne()},
            layer);
}

/// An MTP layer's attention has none: exporters leave these layers as they were.
Status Model::AddKvScales(Role role, const std::string& name, int64_t layer) {
  if (!config_.scales || config_.scales->kv == KvScales::kNone) return OkStatus();
  const WeightFormat& format = *config_.scales;
  const bool attends = role == Role::kQWeight || role == Role::kKWeight || role == Role::kVWeight ||
                       role == Role::kKvDown;
  if (!attends || layer < 0 || config_.kinds[static_cast<size_t>(layer)].mtp) return OkStatus();
  const bool apart = name.ends_with(".q_proj.weight") || name.ends_with(".k_proj.weight") ||
                     name.ends_with(".v_proj.weight");
  const LayerKind& kind = config_.kinds[static_cast<size_t>(layer)];
  if (!apart || config_.IsLatent() || kind.HasSizes()) {
    return Status(Code::kInvalidArgument, Reason::kInvalidRequest,
                  "quantization_config has a kv_cache_scheme, and the scales that it has of this "
                  "attention are not described")
        .AtTensor(name)
        .Remedy("leave kv_cache_scheme out where the engine quantizes no KV cache");
  }
  if (role != Role::kKWeight && role != Role::kVWeight) return OkStatus();
  const std::string_view scale = role == Role::kKWeight ? kCalibrated[2] : kCalibrated[3];
  std::string at = name.substr(0, name.rfind('.'));
  if (format.kv == KvScales::kAttention) at.resize(at.rfind('.'));
  AddBeside(
      {at + "." + std::string(scale), format.CalibratedType(scale, config_.dtype), format.OfOne()},
      layer);
  return OkStatus();
}

void Model::AddBeside(TensorSpec beside, int64_t layer, std::optional<Shape> stored) {
  if (stored && *stored != beside.shape) stored_[beside.name] = std::move(*stored);
  canonical_.tensors.push_back(std::move(beside));
  joined_.push_back(false);
  layer_of_.push_back(layer);
  scales_of_.push_back(-1);
}

/// `weight` may move while tensors are added.
Status Model::Pack(TensorSpec& weight, int64_t layer) {
  const WeightFormat& format = *config_.scales;
  WW_RETURN_IF_ERROR(CheckGroups(weight.name, weight.shape[1], format.columns));
  const std::string name = weight.name;
  const Shape shape = weight.shape;
  if (!format.OfModelopt()) weight.name.append(kPackedSuffix);
  weight.dtype = format.codes;
  weight.shape[1] /= format.packed;
  weight.block = {1, format.columns / format.packed};
  weight.scale_rule = format.rule;
  weight.packed = format.packed;
  AddBeside({name + std::string(format.suffix),
             format.scale.value_or(config_.dtype),
             {shape[0], shape[1] / format.columns}},
            layer);
  if (IsNvFp4(format.rule)) {
    const std::string_view global = format.OfModelopt() ? kSecondScale : "_global_scale";
    AddBeside({name + std::string(global), DType::kF32, format.OfOne()}, layer);
  } else if (format.rule == ScaleRule::kInt4) {
    AddBeside({name + "_shape", DType::kI64, {2}}, layer);
  }
  return OkStatus();
}

Status Model::PackExperts(const TensorTemplate& tensor, TensorSpec& weight, int64_t layer) {
  const WeightFormat& format = *config_.scales;
  WW_CHECK(tensor.parts[0].expert_dim == 0 && tensor.parts[0].column_dim == 1);
  WW_RETURN_IF_ERROR(CheckGroups(weight.name, weight.shape[1], format.columns));
  const int64_t rows = std::accumulate(weight.shape.begin() + 2, weight.shape.end(), int64_t{1},
                                       std::multiplies<>());
  TensorSpec scales{
      weight.name, *format.scale, {weight.shape[0], rows, weight.shape[1] / format.columns}};
  scales.name.append(kFusedScales);
  weight.name.append(kFusedBlocks);
  weight.dtype = format.codes;
  weight.shape = scales.shape;
  weight.shape.push_back(format.columns / format.packed);
  joined_[static_cast<size_t>(&weight - canonical_.tensors.data())] = false;
  AddBeside(std::move(scales), layer);
  return OkStatus();
}

void Model::SortByName() {
  std::vector<TensorSpec>& tensors = canonical_.tensors;
  std::vector<uint32_t> order(tensors.size());
  std::iota(order.begin(), order.end(), 0u);
  std::sort(order.begin(), order.end(),
            [&tensors](uint32_t a, uint32_t b) { return tensors[a].name < tensors[b].name; });
  std::vector<TensorSpec> sorted;
  std::vector<bool> joined;
  std::vector<int64_t> layer_of;
  sorted.reserve(tensors.size());
  position_.resize(tensors.size());
  for (uint32_t created : order) {
    position_[created] = static_cast<uint32_t>(sorted.size());
    sorted.push_back(std::move(tensors[created]));
    joined.push_back(joined_[created]);
    layer_of.push_back(layer_of_[created]);
  }
  std::vector<int64_t> scales_of(tensors.size(), -1);
  for (size_t created = 0; created < scales_of_.size(); ++created) {
    if (scales_of_[created] < 0) continue;
    scales_of[position_[created]] = position_[static_cast<size_t>(scales_of_[created])];
  }
  for (TowerPlace& place : tower_) place.tensor = position_[place.tensor];
  tensors = std::move(sorted);
  scales_of_ = std::move(scales_of);
  joined_ = std::move(joined);
  layer_of_ = std::move(layer_of);
}

std::optional<View> Model::Find(Role role, int64_t layer, int64_t expert) const {
  const auto& places = places_[static_cast<size_t>(role)];
  const auto at = static_cast<size_t>(layer);
  if (at >= places.size() || places[at].part == nullptr) return std::nullopt;
  const Place& place = places[at];
  const Part& part = *place.part;
  View view;
  view.tensor = position_[place.first + (place.per_expert ? static_cast<uint32_t>(expert) : 0u)];
  const Shape& shape = canonical_.tensors[view.tensor].shape;
  view.box = {Shape(shape.size(), 0), shape};
  view.row_dim = part.row_dim;
  view.column_dim = static_cast<size_t>(part.column_dim) < shape.size() ? part.column_dim : -1;
  const auto fix = [&view](int dim, int64_t index) {
    if (dim < 0) return;
    view.box.begin[static_cast<size_t>(dim)] = index;
    view.box.extent[static_cast<size_t>(dim)] = 1;
  };
  const auto row = static_cast<size_t>(part.row_dim);
  view.box.extent[row] /= part.slices;
  view.box.begin[row] = part.slice * view.box.extent[row];
  if (part.row_count != nullptr) {
    view.box.begin[row] = part.first_row == nullptr ? 0 : part.first_row(config_);
    view.box.extent[row] = part.row_count(config_);
  }
  fix(part.expert_dim, expert);
  fix(part.fixed_dim, part.fixed_index);
  return view;
}

std::optional<uint32_t> Model::ScalesOf(uint32_t tensor) const {
  if (scales_of_[tensor] < 0) return std::nullopt;
  return static_cast<uint32_t>(scales_of_[tensor]);
}

Shape Model::StoredShape(uint32_t tensor) const {
  Shape shape = canonical_.tensors[tensor].shape;
  const auto stored = stored_.find(canonical_.tensors[tensor].name);
  if (stored != stored_.end()) return stored->second;
  if (!joined_[tensor]) return shape;
  const int64_t last = shape.back();
  shape.pop_back();
  shape.back() *= last;
  return shape;
}

Result<std::vector<std::string>> NotesOfConfig(std::string_view config_json) {
  WW_ASSIGN(ModelConfig config, ParseModelConfig(config_json));
  std::vector<std::string> notes;
  if (!config.scales) return notes;
  const WeightFormat scales = *config.scales;
  WW_ASSIGN(const Model model, Model::Build(std::move(config)));
  std::set<std::string> idle(scales.skipped.begin(), scales.skipped.end());
  idle.insert(scales.patterns.begin(), scales.patterns.end());
  if (model.config().tied) idle.erase("lm_head");  // it is the embedding, which nothing quantizes
  for (const TensorSpec& tensor : model.canonical().tensors) {
    if (idle.empty()) break;
    if (model.canonical().WeightOf(model.canonical().Find(tensor.name).value())) continue;
    scales.ForEachMatch(tensor.name, [&idle](const std::string& entry) { idle.erase(entry); });
  }
  for (const std::string& entry : idle) {
    notes.push_back("quantization_config leaves out \"" + entry +
                    "\", which names no module of the model: nothing is left out for it");
  }
  return notes;
}

Result<std::string> ConfigInFormat(std::string_view config_json, std::string_view format) {
  WW_ASSIGN(ModelConfig config, ParseModelConfig(config_json));
  if (config.scales) {
    return Fail(Status(Code::kFailedPrecondition, Reason::kDtypeMismatch,
                       "config.json has a quantization_config: the model is quantized already")
                    .Remedy("quantize the checkpoint that it was made of"));
  }
  WW_ASSIGN(const Model model, Model::Build(std::move(config)));
  std::vector<std::string> kept;
  for (const TensorSpec& tensor : model.canonical().tensors) {
    const std::string_view name = tensor.name;
    for (std::string_view module : {"lm_head", "gate", "router", "shared_expert_gate"}) {
      const std::string weight = std::string(module) + ".weight";
      if (name == weight || name.ends_with("." + weight)) {
        kept.emplace_back(name.substr(0, name.size() - std::string_view(".weight").size()));
      }
    }
  }
  WW_ASSIGN(Json quantization, format.starts_with('{') ? ParseObject(format, "quantization_config")
                                                       : QuantizationConfigOf(format, kept));
  WW_ASSIGN(Json json, ParseObject(config_json, "config.json"));
  json["quantization_config"] = std::move(quantization);
  std::string text = json.dump(2);
  WW_ASSIGN(ModelConfig quantized, ParseModelConfig(text));
  WW_FAIL_IF_ERROR([&] {  // a shape that the format does not fit is refused now
    const auto built = Model::Build(std::move(quantized));
    return built ? OkStatus() : built.error();
  }());
  return text;
}

Result<std::map<std::string, std::string>> FusedWeights(std::string_view config_json) {
  WW_ASSIGN(ModelConfig config, ParseModelConfig(config_json));
  WW_ASSIGN(const Model model, Model::Build(std::move(config)));
  return model.fused();
}

Result<CanonicalSpace> CanonicalFromConfig(std::string_view config_json) {
  WW_ASSIGN(ModelConfig config, ParseModelConfig(config_json));
  WW_ASSIGN(const Model model, Model::Build(std::move(config)));
  return model.canonical();
}

Result<CanonicalSpace> StoredFromConfig(std::string_view config_json) {
  WW_ASSIGN(ModelConfig config, ParseModelConfig(config_json));
  WW_ASSIGN(const Model model, Model::Build(std::move(config)));
  CanonicalSpace stored = model.canonical();
  for (uint32_t t = 0; t < stored.tensors.size(); ++t) {
    stored.tensors[t].shape = model.StoredShape(t);
  }
  return stored;
}

}  // namespace weightwire::layout
