// An adapter follows the weight that it adds B · A to, whatever the scheme: a rank that has rows of
// the weight has these rows of B and, of A, the columns that it has of the weight. So
//
//   hf             both whole
//   column-parallel modules (q, k, v, gate, up; q_b, kv_b)   A whole, B rows of the rank
//   row-parallel modules (o, down)                           A columns of the rank, B whole
//   replicated modules (q_a, kv_a in engines)                both whole
//
// with the same replication of kv heads and the same pipeline stages; names are PEFT's on every
// side. `fsdp` cuts adapters as parameters of their own (kind=fsdp2 or zero3, without tp).
//
// By reading, with no engine run: vLLM's layers with LoRA hold such parts (vllm/lora/layers,
// slice_lora_a and slice_lora_b, without fully_sharded_loras), stacked for its adapter slots and
// padded to its max_lora_rank, which a receiver copies them into. SGLang was not looked up.
// Megatron-Bridge's ParallelLinearAdapter is known to differ: one adapter for each fused linear
// layer, A of column-parallel layers and B of row-parallel ones cut by rows; a Megatron trainer
// that holds these sends explicit layouts.
#include "server/layout/schemes/lora.h"

#include <algorithm>

#include "server/layout/schemes/fsdp.h"
#include "server/layout/schemes/option.h"
#include "server/layout/schemes/rank_builder.h"

namespace weightwire::layout {
namespace {

struct Target {
  std::string_view word;
  Role role;
};
constexpr Target kTargets[] = {
    {"q", Role::kQWeight},       {"k", Role::kKWeight},       {"v", Role::kVWeight},
    {"o", Role::kOWeight},       {"gate", Role::kGateWeight}, {"up", Role::kUpWeight},
    {"down", Role::kDownWeight}, {"q_a", Role::kQDown},       {"q_b", Role::kQUp},
    {"kv_a", Role::kKvDown},     {"kv_b", Role::kKvUp},
};

/// The adapter of one linear layer: A and B as indices into the adapters' canonical space.
struct Adapter {
  uint32_t weight = 0;  ///< in the model's canonical space
  uint32_t a = 0;
  uint32_t b = 0;
};

struct AdapterSet {
  CanonicalSpace canonical;
  std::vector<Adapter> adapters;
};

Result<std::vector<Target>> TargetsOf(const ParallelSpec& spec) {
  const auto option = spec.options.find("targets");
  if (option == spec.options.end())
    return std::vector<Target>(std::begin(kTargets), std::end(kTargets));
  std::vector<Target> targets;
  for (std::string_view word : SplitList(option->second, '|')) {
    const auto known = std::find_if(std::begin(kTargets), std::end(kTargets),
                                    [word](const Target& target) { return target.word == word; });
    const bool twice = std::any_of(targets.begin(), targets.end(),
                                   [word](const Target& target) { return target.word == word; });
    if (known == std::end(kTargets) || twice) {
      return Fail(BadOption("targets", option->second,
                            "a list of some of q|k|v|o|gate|up|down|q_a|q_b|kv_a|kv_b"));
    }
    targets.push_back(*known);
  }
  return targets;
}

/// A linear layer of torch: a canonical matrix of its own.
bool IsLinear(const Model& model, const View& view) {
  const TensorSpec& tensor = model.canonical().tensors[view.tensor];
  return tensor.shape.size() == 2 && view.box.extent == tensor.shape && view.row_dim == 0 &&
         tensor.name.ends_with(".weight");
}

/// The canonical weights of the target's linear layers.
std::vector<uint32_t> WeightsOf(const Model& model, Role role) {
  std::vector<uint32_t> weights;
  for (int64_t layer = 0; layer < model.config().layers; ++layer) {
    const auto view = model.Find(role, layer);
    if (view && IsLinear(model, *view)) weights.push_back(view->tensor);
  }
  return weights;
}

Status NoSuchLayers(std::string_view word) {
  return Status(Code::kInvalidArgument, Reason::kTensorMissing,
                "the model has no linear layers for targets=" + std::string(word))
      .Remedy("leave it out of targets=");
}

/// PEFT's name of matrix `lora_A` or `lora_B`.
std::string AdapterName(const TensorSpec& weight, std::string_view matrix) {
  return std::string("base_model.model.")
      .append(weight.name, 0, weight.name.rfind('.') + 1)
      .append(matrix)
      .append(".weight");
}

Result<std::vector<uint32_t>> AllWeights(const Model& model, const ParallelSpec& spec) {
  WW_ASSIGN(const std::vector<Target> targets, TargetsOf(spec));
  std::vector<uint32_t> weights;
  for (const Target& target : targets) {
    const std::vector<uint32_t> found = WeightsOf(model, target.role);
    if (found.empty() && spec.options.contains("targets")) return Fail(NoSuchLayers(target.word));
    weights.insert(weights.end(), found.begin(), found.end());
  }
  return weights;
}

Result<AdapterSet> AdaptersOf(const Model& model, const ParallelSpec& spec) {
  WW_ASSIGN(const std::optional<int64_t> rank, IntegerOption(spec, "lora", 1));
  WW_ASSIGN(const std::vector<uint32_t> weights, AllWeights(model, spec));
  AdapterSet set;
  std::vector<TensorSpec>& tensors = set.canonical.tensors;
  for (uint32_t weight : weights) {
    const TensorSpec& base = model.canonical().tensors[weight];
    tensors.push_back({AdapterName(base, "lora_A"), base.dtype, {*rank, base.shape[1]}});
    tensors.push_back({AdapterName(base, "lora_B"), base.dtype, {base.shape[0], *rank}});
  }
  for (const TensorSpec& tensor : tensors) {
    if (StorageBytes(tensor.dtype, tensor.shape)) continue;
    return Fail(Status(Code::kInvalidArgument, Reason::kShapeOverflow,
                       "the adapter's byte count does not fit 64 bits")
                    .AtTensor(tensor.name));
  }
  std::sort(tensors.begin(), tensors.end(),
            [](const TensorSpec& a, const TensorSpec& b) { return a.name < b.name; });
  for (uint32_t weight : weights) {
    const TensorSpec& base = model.canonical().tensors[weight];
    set.adapters.push_back({weight, *set.canonical.Find(AdapterName(base, "lora_A")),
                            *set.canonical.Find(AdapterName(base, "lora_B"))});
  }
  return set;
}

/// What a rank holds of a weight: distinct ranges of rows and of columns, in the order of its
/// pieces.
struct HeldRanges {
  std::vector<Range> rows;
  std::vector<Range> columns;
};

void AddDistinct(std::vector<Range>& ranges, const Box& box, size_t dim) {
  const bool known = std::any_of(ranges.begin(), ranges.end(), [&](const Range& range) {
    return range.begin == box.begin[dim] && range.count == box.extent[dim];
  });
  if (!known) ranges.push_back({box.begin[dim], box.extent[dim]});
}

/// The ranges of dimension `dim` of `tensor`, one behind the other in local storage.
LocalTensor Gathered(const CanonicalSpace& canonical, uint32_t tensor, size_t dim,
                     std::span<const Range> ranges) {
  const TensorSpec& spec = canonical.tensors[tensor];
  LocalTensor local{spec.name, spec.dtype, spec.shape, {}};
  local.shape[dim] = 0;
  for (const Range& range : ranges) local.shape[dim] += range.count;
  int64_t at = 0;
  for (const Range& range : ranges) {
    Piece piece{tensor, {{0, 0}, spec.shape}, 0, {local.shape[1], 1}};
    piece.box.begin[dim] = range.begin;
    piece.box.extent[dim] = range.count;
    piece.local_offset = at * piece.local_stride[dim];
    at += range.count;
    local.pieces.push_back(std::move(piece));
  }
  return local;
}

RankLayout Follow(const AdapterSet& set, const RankLayout& base,
                  std::span<const int64_t> adapter_of) {
  std::vector<HeldRanges> held(set.adapters.size());
  for (const LocalTensor& tensor : base.tensors) {
    for (const Piece& piece : tensor.pieces) {
      const int64_t adapter = adapter_of[piece.tensor];
      if (adapter < 0) continue;
      HeldRanges& ranges = held[static_cast<size_t>(adapter)];
      AddDistinct(ranges.rows, piece.box, 0);
      AddDistinct(ranges.columns, piece.box, 1);
    }
  }
  RankLayout rank;
  for (size_t i = 0; i < set.adapters.size(); ++i) {
    if (held[i].rows.empty()) continue;
    rank.tensors.push_back(Gathered(set.canonical, set.adapters[i].a, 1, held[i].columns));
    rank.tensors.push_back(Gathered(set.canonical, set.adapters[i].b, 0, held[i].rows));
  }
  return rank;
}

Result<ModelLayout> ShardAdapters(const AdapterSet& set, const ParallelSpec& spec) {
  WW_ASSIGN(const fsdp::Sharding sharding, fsdp::ShardingOf(spec));
  const bool flat = sharding.kind != fsdp::Kind::kFsdp2 && sharding.kind != fsdp::Kind::kZero3;
  if (flat || sharding.tp > 1) {
    return Fail(BadOption("lora", spec.options.at("lora"),
                          "known with tp or with flat parameters in fsdp"));
  }
  std::vector<TorchTensor> tensors;
  for (uint32_t tensor = 0; tensor < set.canonical.tensors.size(); ++tensor) {
    tensors.push_back({tensor, set.canonical.tensors[tensor].shape});
  }
  return fsdp::Shard(set.canonical, tensors, "", sharding);
}

}  // namespace

Result<ModelLayout> DeriveLora(const Model& model, const Scheme& scheme, const ParallelSpec& spec) {
  WW_ASSIGN(const AdapterSet set, AdaptersOf(model, spec));
  if (scheme.name == "fsdp") return ShardAdapters(set, spec);
  WW_ASSIGN(const ModelLayout base, scheme.derive(model, spec));
  std::vector<int64_t> adapter_of(model.canonical().tensors.size(), -1);
  for (size_t i = 0; i < set.adapters.size(); ++i) {
    adapter_of[set.adapters[i].weight] = static_cast<int64_t>(i);
  }
  ModelLayout layout{set.canonical, {}};
  for (const RankLayout& rank : base.ranks) layout.ranks.push_back(Follow(set, rank, adapter_of));
  return layout;
}

}  // namespace weightwire::layout
