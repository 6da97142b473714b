// The fused parameters of vLLM and SGLang at tensor-parallel size T, rank t (see docs/layouts.md):
//
//   qkv_proj       q, then k, then v rows of the rank's heads; with fewer kv heads than ranks each
//                  kv head is held by T / kv_heads neighbouring ranks. Where the model rotates
//                  pairs of rows (Llama 4), a head of the q and k weights has the first rows of all
//                  pairs, then the second ones, as both engines' loaders arrange them
//   gate_up_proj   chunk t of gate, then chunk t of up; shared experts alike
//   o_proj, down_proj   columns, chunk t; their biases whole
//   latent attention    the two first projections stacked and whole; q_b, kv_b rows, chunk t
//   indexer        whole; its key and weights projections stacked
//   norms over all heads of q and k   as the heads are
//   w13, w2        [experts, 2F/P, H] and [experts, H, F/P] of the rank's experts, cut in P parts;
//                  without gates F/P rows. Likewise gate_up_proj is up_proj
//   sinks          chunk t; norms, routers, what latent experts share   whole
//   linear attention    see linear_attention.cc
//
// Names are the checkpoint's with the fused module in place of the first one that it fuses.
#include "server/layout/schemes/engine_layer.h"

#include <algorithm>
#include <array>
#include <span>
#include <utility>

#include "server/layout/schemes/linear_attention.h"

namespace weightwire::layout::engine {
namespace {

class LayerBuilder {
 public:
  LayerBuilder(RoleCutter& cutter, std::string_view text, int64_t layer)
      : cutter_(cutter), text_(text), layer_(layer) {}

  /// The engine's name of the role's tensor, before it is fused; empty when there is none.
  std::string NameOf(Role role) const {
    const auto view = cutter_.model().Find(role, layer_);
    return view ? text_ + cutter_.model().TextName(view->tensor) : "";
  }
  /// The same with `module` in place of the last module: "a.b.q_proj.bias" → "a.b.<module>.bias".
  std::string Fused(Role role, std::string_view module) const {
    const std::string name = NameOf(role);
    const size_t leaf = name.rfind('.');
    if (leaf == std::string::npos) return name;
    const size_t begin = name.rfind('.', leaf - 1) + 1;
    return name.substr(0, begin).append(module).append(name.substr(leaf));
  }

  void Whole(Role role) { cutter_.Whole(NameOf(role), role, layer_); }
  void Rows(Role role) { cutter_.Rows(NameOf(role), role, layer_); }
  void Columns(Role role) { cutter_.Columns(NameOf(role), role, layer_); }
  /// Each kv head's part of a norm over all heads is where the head is.
  void HeadNorms() {
    if (!cutter_.model().config().whole_qk_norm) {
      Whole(Role::kQNorm);
      Whole(Role::kKNorm);
      return;
    }
    Rows(Role::kQNorm);
    const auto k = cutter_.model().Find(Role::kKNorm, layer_);
    const Range range = KvRows();
    if (!k) return;
    const RowRun runs[] = {{*k, range.begin, range.count}};
    cutter_.builder().Rows(NameOf(Role::kKNorm), runs, 0, range.count);
  }
  void GateUp(Role gate, Role up) {
    const std::string fused = Fused(gate, "gate_up_proj");
    cutter_.ChunkOfEach(fused.empty() ? NameOf(up) : fused, {gate, up}, layer_);
  }
  /// A kv head belongs to one rank, or to several neighbours when there are fewer than ranks.
  /// `pairs`: rows 2i of each head of q and k come before rows 2i + 1. A layer without keys of its
  /// own has q alone.
  void Qkv(std::array<Role, 3> roles, bool pairs) {
    const Model& model = cutter_.model();
    const auto q = model.Find(roles[0], layer_);
    const auto k = model.Find(roles[1], layer_);
    const ModelConfig& config = model.config();
    const LayerKind& kind = config.kinds[static_cast<size_t>(layer_)];
    const auto v = kind.keys_for_values ? k : model.Find(roles[2], layer_);
    if (q && kind.shares_kv) return Rows(roles[0]);
    if (!q || !k || !v) return;
    const int64_t tp = cutter_.tp();
    const int64_t q_rows = q->rows() / config.heads * (config.heads / tp);
    const auto [kv_begin, kv_rows] = KvRows();
    std::vector<RowRun> runs;
    const auto add = [&](const View& view, int64_t begin, int64_t rows) {
      if (pairs) {
        AddUnpaired(runs, view, begin, rows);
      } else {
        runs.push_back({view, begin, rows});
      }
    };
    add(*q, cutter_.t() * q_rows, q_rows);
    add(*k, kv_begin, kv_rows);
    runs.push_back({*v, kv_begin, kv_rows});
    cutter_.builder().Rows(Fused(roles[0], "qkv_proj"), runs, 0, q_rows + 2 * kv_rows);
  }

 private:
  /// The rank's rows of k and v.
  Range KvRows() const {
    const ModelConfig& config = cutter_.model().config();
    const int64_t kv_heads = config.KvHeads(layer_);
    const int64_t rows = std::max<int64_t>(1, kv_heads / cutter_.tp()) * config.HeadDim(layer_);
    const int64_t ranks_per_kv_head = std::max<int64_t>(1, cutter_.tp() / kv_heads);
    return {cutter_.t() / ranks_per_kv_head * rows, rows};
  }
  void AddUnpaired(std::vector<RowRun>& runs, const View& view, int64_t begin, int64_t rows) {
    const int64_t head = cutter_.model().config().HeadDim(layer_);
    if (cutter_.Divide(view, head, 2) == 0) return;  // the rank is refused
    for (int64_t at = begin; at < begin + rows; at += head) {
      for (int64_t row = 0; row < head; row += 2) runs.push_back({view, at + row, 1});
      for (int64_t row = 1; row < head; row += 2) runs.push_back({view, at + row, 1});
    }
  }

  RoleCutter& cutter_;
  const std::string text_;
  const int64_t layer_;
};

void Attention(LayerBuilder& layer, RoleCutter& cutter, const EngineNames& engine_names,
               int64_t number) {
  if (!cutter.model().config().IsLatent()) {
    layer.Qkv({Role::kQWeight, Role::kKWeight, Role::kVWeight},
              cutter.model().config().rotary_pairs);
    layer.Qkv({Role::kQBias, Role::kKBias, Role::kVBias}, false);
    layer.HeadNorms();
    layer.Rows(Role::kSinks);
  } else if (cutter.model().config().q_lora_rank > 0) {
    cutter.Stack(layer.Fused(Role::kQDown, engine_names.latent_a), {Role::kQDown, Role::kKvDown},
                 number);
  } else {
    layer.Rows(Role::kQWeight);
    layer.Whole(Role::kKvDown);
  }
  layer.Whole(Role::kQDownNorm);
  layer.Rows(Role::kQUp);
  layer.Whole(Role::kKvDownNorm);
  layer.Rows(Role::kKvUp);
  layer.Whole(Role::kIndexQuery);
  cutter.Stack(layer.Fused(Role::kIndexKey, engine_names.index_key),
               {Role::kIndexKey, Role::kIndexWeights}, number);
  layer.Whole(Role::kIndexKeyNorm);
  layer.Whole(Role::kIndexKeyNormBias);
  layer.Columns(Role::kOWeight);
  layer.Whole(Role::kOBias);
}

/// The experts of one rank as two stacks and, for families that have them, two of biases.
class ExpertStacks {
 public:
  ExpertStacks(RoleCutter& cutter, const ExpertSlice& slice, std::string at, int64_t layer)
      : cutter_(cutter), slice_(slice), at_(std::move(at)), layer_(layer) {}

  void Add() {
    std::array weights = {Role::kExpertGate, Role::kExpertUp};
    std::array biases = {Role::kExpertGateBias, Role::kExpertUpBias};
    const bool gated = Find(weights[0]).has_value();
    if (gated && slice_.up_first) {
      std::swap(weights[0], weights[1]);
      std::swap(biases[0], biases[1]);
    }
    Stack("w13_weight", std::span(weights).subspan(gated ? 0 : 1), Cut::kRows);
    Stack("w13_bias", biases, Cut::kRows);
    Stack("w2_weight", std::array{Role::kExpertDown}, Cut::kColumns);
    Stack("w2_bias", std::array{Role::kExpertDownBias}, Cut::kNone);
  }

 private:
  std::optional<View> Find(Role role, int64_t expert = 0) const {
    return cutter_.model().Find(role, layer_, expert);
  }
  enum class Cut { kRows, kColumns, kNone };

  /// [experts, rows of every role, columns]; of each expert the rank's part along `cut`.
  void Stack(const char* name, std::span<const Role> roles, Cut cut) {
    const auto sample = Find(roles.front());
    if (!sample) return;
    const auto part_of = [&](int64_t size, Cut along) {
      if (cut != along) return Range{0, size};
      const int64_t part = cutter_.Divide(*sample, size, slice_.parts);
      return Range{slice_.part * part, part};
    };
    const Range rows = part_of(sample->rows(), Cut::kRows);
    const Range columns = part_of(sample->columns(), Cut::kColumns);
    Shape shape = {static_cast<int64_t>(slice_.experts.size()),
                   static_cast<int64_t>(roles.size()) * rows.count};
    if (sample->column_dim >= 0) shape.push_back(columns.count);
    cutter_.builder().Start(at_ + name, cutter_.model().canonical().tensors[sample->tensor].dtype,
                            std::move(shape));
    int64_t offset = 0;
    for (int64_t expert : slice_.experts) {
      for (Role role : roles) {
        cutter_.builder().Put(*Find(role, expert), rows, columns, offset, columns.count, 1);
        offset += rows.count * columns.count;
      }
    }
  }

  RoleCutter& cutter_;
  const ExpertSlice& slice_;
  const std::string at_;
  const int64_t layer_;
};

/// "model.layers.3.mlp.experts." from the name of an expert's tensor.
std::string ExpertModule(const std::string& name) {
  constexpr std::string_view kModule = ".experts.";
  return name.substr(0, name.find(kModule) + kModule.size());
}

}  // namespace

void AddLayer(RoleCutter& cutter, const EngineNames& engine_names, const ExpertSlice& slice,
              int64_t number) {
  LayerBuilder layer(cutter, engine_names.text, number);
  layer.Whole(Role::kInputNorm);
  Attention(layer, cutter, engine_names, number);
  AddEngineLinear(cutter, engine_names.text, number);
  layer.Whole(Role::kAttentionOutputNorm);
  layer.Whole(Role::kPostAttentionNorm);
  layer.GateUp(Role::kGateWeight, Role::kUpWeight);
  layer.GateUp(Role::kGateBias, Role::kUpBias);
  layer.Columns(Role::kDownWeight);
  layer.Whole(Role::kDownBias);
  for (Role norm : {Role::kMlpOutputNorm, Role::kDenseOutputNorm, Role::kExpertInputNorm,
                    Role::kExpertOutputNorm}) {
    layer.Whole(norm);
  }
  for (Role given :
       {Role::kLayerInputGate, Role::kLayerInputOut, Role::kLayerInputNorm, Role::kLayerScalar}) {
    layer.Whole(given);
  }
  layer.Whole(Role::kRouter);
  layer.Whole(Role::kRouterScale);
  layer.Whole(Role::kRouterExpertScale);
  layer.Whole(Role::kRouterBias);
  layer.Whole(Role::kRouterCorrection);
  layer.Whole(Role::kExpertLatentIn);
  layer.Whole(Role::kExpertLatentOut);
  if (const std::string name = layer.NameOf(Role::kExpertDown); !name.empty()) {
    ExpertStacks(cutter, slice, ExpertModule(name).append(engine_names.experts), number).Add();
  }
  layer.GateUp(Role::kSharedGate, Role::kSharedUp);
  layer.Columns(Role::kSharedDown);
  layer.Whole(Role::kSharedExpertGate);
}

}  // namespace weightwire::layout::engine
