// Megatron-core's parameters of one layer (see docs/layouts.md), rank t of T tensor-parallel ranks,
// x of X expert-tensor-parallel ones, e of E expert-parallel ones:
//
//   linear_qkv     the grouped matrix (for each kv head: its q heads, k, v) cut into T plain
//   chunks;
//                  with fewer kv heads than T the chunks cut across heads, nothing is replicated
//                  a head's gate of its output (Qwen3-Next): q heads, then their gates, k, v
//   linear_fc1     chunk t of gate, then chunk t of up; up alone where the model has no gate
//   linear attention          see linear_attention.cc
//   linear_proj, linear_fc2   columns, chunk t; their biases whole
//   latent attention          up projections: rows, chunk t; down projections: rows, chunk t in the
//                  local spec, whole under Transformer Engine
//   indexer        whole
//   norms over all heads of q and k (MiniMax-M2)   rows, chunk t; k's as the kv heads
//   experts        expert i of the rank is e · N/E + i; fc1 and fc2 as above, by (x, X)
//     sequential   one pair of tensors each; Transformer Engine: weight0, weight1, …
//     grouped      all in one buffer, each transposed: weight1 is [N/E, hidden, 2F/X] although its
//                  shape says [hidden, N/E · 2F/X]; weight2 is [N/E, F/X, hidden]
//   router, shared-expert gate, norms   whole; shared experts by (t, T) like a dense MLP
//
// Not checked against a real dump: softmax_offset and expert biases (gpt-oss) and the
// post_layernorms (Gemma 2 and 3), the indexer and norms over all heads, which follow
// Megatron-Bridge's mappings.
#include "server/layout/schemes/megatron_layer.h"

#include <algorithm>

#include "server/layout/schemes/linear_attention.h"

namespace weightwire::layout::megatron {
namespace {

/// Chunk t of the grouped matrix: only the groups that the chunk touches are listed.
void Qkv(RoleCutter& cutter, std::string name, std::array<Role, 3> roles, int64_t layer) {
  const Model& model = cutter.model();
  const auto q = model.Find(roles[0], layer);
  const auto k = model.Find(roles[1], layer);
  const auto v = model.Find(roles[2], layer);
  if (!q || !k || !v) return;
  const ModelConfig& config = model.config();
  const int64_t head = config.head_dim;
  const int64_t q_heads = config.heads / config.kv_heads;
  const int64_t group_q = q->rows() / config.kv_heads;
  const int64_t group_rows = group_q + 2 * head;
  const int64_t rows = cutter.Divide(*q, config.kv_heads * group_rows, cutter.tp());
  const int64_t begin = cutter.t() * rows;
  const int64_t first_group = begin / group_rows;
  std::vector<RowRun> runs;
  for (int64_t group = first_group; group * group_rows < begin + rows; ++group) {
    if (config.output_gate) {
      for (int64_t part : {0, 1}) {  // the heads' q, then their gates
        for (int64_t i = 0; i < q_heads; ++i) {
          runs.push_back({*q, group * group_q + (2 * i + part) * head, head});
        }
      }
    } else {
      runs.push_back({*q, group * group_q, group_q});
    }
    runs.push_back({*k, group * head, head});
    runs.push_back({*v, group * head, head});
  }
  if (runs.empty()) return;  // the rank is refused
  cutter.builder().Rows(std::move(name), runs, begin - first_group * group_rows, rows);
}

/// A norm over all kv heads: with fewer of them than T, neighbouring ranks have the same head's.
void KeyNorm(RoleCutter& cutter, std::string name, int64_t layer) {
  const auto view = cutter.model().Find(Role::kKNorm, layer);
  if (!view) return;
  const int64_t parts = std::min(cutter.tp(), cutter.model().config().kv_heads);
  const int64_t rows = cutter.Divide(*view, view->rows(), parts);
  const RowRun runs[] = {{*view, cutter.t() / (cutter.tp() / parts) * rows, rows}};
  cutter.builder().Rows(std::move(name), runs, 0, rows);
}

void GroupedAttention(RoleCutter& cutter, const std::string& at, int64_t layer) {
  Qkv(cutter, at + "linear_qkv.weight", {Role::kQWeight, Role::kKWeight, Role::kVWeight}, layer);
  Qkv(cutter, at + "linear_qkv.bias", {Role::kQBias, Role::kKBias, Role::kVBias}, layer);
  if (cutter.model().config().whole_qk_norm) {
    cutter.Rows(at + "q_layernorm.weight", Role::kQNorm, layer);
    KeyNorm(cutter, at + "k_layernorm.weight", layer);
  } else {
    cutter.Whole(at + "q_layernorm.weight", Role::kQNorm, layer);
    cutter.Whole(at + "k_layernorm.weight", Role::kKNorm, layer);
  }
  cutter.Rows(at + "core_attention.softmax_offset", Role::kSinks, layer);
}

void LatentAttention(RoleCutter& cutter, bool te, const std::string& at, int64_t layer) {
  const auto down = [&](const char* name, Role role) {
    te ? cutter.Whole(at + name, role, layer) : cutter.Rows(at + name, role, layer);
  };
  cutter.Rows(at + "linear_q_proj.weight", Role::kQWeight, layer);
  down("linear_q_down_proj.weight", Role::kQDown);
  // The indexer reads q behind its norm, which is then a module of its own.
  const bool fused = te && cutter.model().config().index_heads == 0;
  cutter.Whole(at + (fused ? "linear_q_up_proj.layer_norm_weight" : "q_layernorm.weight"),
               Role::kQDownNorm, layer);
  cutter.Rows(at + "linear_q_up_proj.weight", Role::kQUp, layer);
  down("linear_kv_down_proj.weight", Role::kKvDown);
  cutter.Whole(at + (fused ? "linear_kv_up_proj.layer_norm_weight" : "kv_layernorm.weight"),
               Role::kKvDownNorm, layer);
  cutter.Rows(at + "linear_kv_up_proj.weight", Role::kKvUp, layer);
  const std::string indexer = at + "core_attention.indexer.";
  cutter.Whole(indexer + "linear_wq_b.weight", Role::kIndexQuery, layer);
  cutter.Whole(indexer + "linear_wk.weight", Role::kIndexKey, layer);
  cutter.Whole(indexer + "k_norm.weight", Role::kIndexKeyNorm, layer);
  cutter.Whole(indexer + "k_norm.bias", Role::kIndexKeyNormBias, layer);
  cutter.Whole(indexer + "linear_weights_proj.weight", Role::kIndexWeights, layer);
}

void DenseMlp(RoleCutter& cutter, const std::string& at, int64_t layer) {
  cutter.ChunkOfEach(at + "linear_fc1.weight", {Role::kGateWeight, Role::kUpWeight}, layer);
  cutter.ChunkOfEach(at + "linear_fc1.bias", {Role::kGateBias, Role::kUpBias}, layer);
  cutter.Columns(at + "linear_fc2.weight", Role::kDownWeight, layer);
  cutter.Whole(at + "linear_fc2.bias", Role::kDownBias, layer);
}

/// "linear_fc1.weight" of local expert i, in the notation of `kind`.
std::string ExpertName(Experts kind, const std::string& at, int64_t i, const std::string& name) {
  return kind == Experts::kTransformerEngine
             ? at + name + std::to_string(i)
             : at + "local_experts." + std::to_string(i) + "." + name;
}

void SeparateExperts(RoleCutter& cutter, const ExpertGrid& grid, const std::string& at,
                     int64_t layer) {
  const Model& model = cutter.model();
  RankBuilder& builder = cutter.builder();
  const int64_t count = model.config().experts / grid.ep;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t expert = grid.e * count + i;
    const auto chunks = [&](const char* name, Role gate_role, Role up_role) {
      const auto gate = model.Find(gate_role, layer, expert);
      const auto up = model.Find(up_role, layer, expert);
      if (!up) return;
      const int64_t rows = cutter.Divide(*up, up->rows(), grid.etp);
      std::vector<RowRun> runs;
      if (gate) runs.push_back({*gate, grid.x * rows, rows});
      runs.push_back({*up, grid.x * rows, rows});
      builder.Rows(ExpertName(grid.kind, at, i, name), runs, 0, std::ssize(runs) * rows);
    };
    chunks("linear_fc1.weight", Role::kExpertGate, Role::kExpertUp);
    chunks("linear_fc1.bias", Role::kExpertGateBias, Role::kExpertUpBias);
    if (const auto down = model.Find(Role::kExpertDown, layer, expert)) {
      const int64_t width = cutter.Divide(*down, down->columns(), grid.etp);
      builder.Columns(ExpertName(grid.kind, at, i, "linear_fc2.weight"), *down, grid.x * width,
                      width);
    }
    if (const auto bias = model.Find(Role::kExpertDownBias, layer, expert)) {
      const RowRun runs[] = {{*bias, 0, bias->rows()}};
      builder.Rows(ExpertName(grid.kind, at, i, "linear_fc2.bias"), runs, 0, bias->rows());
    }
  }
}

void GroupedExperts(RoleCutter& cutter, const ExpertGrid& grid, const std::string& at,
                    int64_t layer) {
  const Model& model = cutter.model();
  const auto sample = model.Find(Role::kExpertUp, layer);
  if (!sample) return;
  RankBuilder& builder = cutter.builder();
  const bool gated = model.Find(Role::kExpertGate, layer).has_value();
  if (const auto bias = model.Find(Role::kExpertGateBias, layer)) {
    builder.Refuse(Status(Code::kInvalidArgument, Reason::kShapeMismatch,
                          "Megatron's GroupedMLP has no biases, and the model's experts do")
                       .AtTensor(model.canonical().tensors[bias->tensor].name)
                       .Remedy("pass experts=sequential or experts=te"));
  }
  const int64_t count = model.config().experts / grid.ep;
  const int64_t hidden = sample->columns();
  const int64_t inner = cutter.Divide(*sample, sample->rows(), grid.etp);
  const Range chunk{grid.x * inner, inner};
  const DType dtype = model.canonical().tensors[sample->tensor].dtype;
  const int64_t width = (gated ? 2 : 1) * inner;
  builder.Start(at + "weight1", dtype, {hidden, count * width});
  for (int64_t i = 0; i < count; ++i) {
    int64_t offset = i * hidden * width;
    const int64_t expert = grid.e * count + i;
    if (gated) {
      builder.Put(*model.Find(Role::kExpertGate, layer, expert), chunk, {0, hidden}, offset, 1,
                  width);
      offset += inner;
    }
    builder.Put(*model.Find(Role::kExpertUp, layer, expert), chunk, {0, hidden}, offset, 1, width);
  }
  builder.Start(at + "weight2", dtype, {count * inner, hidden});
  for (int64_t i = 0; i < count; ++i) {
    builder.Put(*model.Find(Role::kExpertDown, layer, grid.e * count + i), {0, hidden}, chunk,
                i * inner * hidden, 1, hidden);
  }
}

void MixtureOfExperts(RoleCutter& cutter, const ExpertGrid& grid, const std::string& at,
                      int64_t layer) {
  cutter.Whole(at + "router.weight", Role::kRouter, layer);
  cutter.Whole(at + "router.bias", Role::kRouterBias, layer);
  cutter.Whole(at + "router.expert_bias", Role::kRouterCorrection, layer);
  cutter.Whole(at + "fc1_latent_proj.weight", Role::kExpertLatentIn, layer);
  cutter.Whole(at + "fc2_latent_proj.weight", Role::kExpertLatentOut, layer);
  if (grid.kind == Experts::kGrouped) {
    GroupedExperts(cutter, grid, at + "experts.", layer);
  } else {
    SeparateExperts(cutter, grid, at + "experts.", layer);
  }
  cutter.ChunkOfEach(at + "shared_experts.linear_fc1.weight", {Role::kSharedGate, Role::kSharedUp},
                     layer);
  cutter.Columns(at + "shared_experts.linear_fc2.weight", Role::kSharedDown, layer);
  cutter.Whole(at + "shared_experts.gate_weight", Role::kSharedExpertGate, layer);
}

std::string_view MlpNorm(bool te, bool moe) {
  return te && !moe ? "mlp.linear_fc1.layer_norm_weight" : "pre_mlp_layernorm.weight";
}

/// Transformer Engine fuses a norm into the linear layer behind it, where there is just one.
std::string_view InputNorm(const ModelConfig& config, const LayerKind& kind, bool te) {
  switch (kind.mixer) {
    case Mixer::kNone:
      return MlpNorm(te, kind.moe);
    case Mixer::kMamba:
      return te ? "mixer.in_proj.layer_norm_weight" : "norm.weight";
    case Mixer::kGatedDelta:
      return te ? "self_attention.in_proj.layer_norm_weight" : "input_layernorm.weight";
    case Mixer::kAttention:
      break;
  }
  return te && !config.IsLatent() ? "self_attention.linear_qkv.layer_norm_weight"
                                  : "input_layernorm.weight";
}

void AddMixer(RoleCutter& cutter, const Names& names, const std::string& at, int64_t layer) {
  const bool te = names.te;
  const ModelConfig& config = cutter.model().config();
  const LayerKind& kind = config.kinds[static_cast<size_t>(layer)];
  cutter.Whole(at + std::string(InputNorm(config, kind, te)), Role::kInputNorm, layer);
  if (config.IsLatent()) {
    LatentAttention(cutter, te, at + "self_attention.", layer);
  } else {
    GroupedAttention(cutter, at + "self_attention.", layer);
  }
  AddMegatronLinear(cutter, at, names.flat_conv, layer);
  cutter.Columns(at + "self_attention.linear_proj.weight", Role::kOWeight, layer);
  cutter.Whole(at + "self_attention.linear_proj.bias", Role::kOBias, layer);
  cutter.Whole(at + "self_attention.linear_proj.post_layernorm.weight", Role::kAttentionOutputNorm,
               layer);
}

void AddMlp(RoleCutter& cutter, const ExpertGrid& grid, bool te, const std::string& at,
            int64_t layer) {
  const LayerKind& kind = cutter.model().config().kinds[static_cast<size_t>(layer)];
  cutter.Whole(at + std::string(MlpNorm(te, kind.moe)), Role::kPostAttentionNorm, layer);
  if (!kind.mlp) return;
  if (kind.moe) {
    MixtureOfExperts(cutter, grid, at + "mlp.", layer);
  } else {
    DenseMlp(cutter, at + "mlp.", layer);
  }
  cutter.Whole(at + "mlp.linear_fc2.post_layernorm.weight", Role::kMlpOutputNorm, layer);
}

}  // namespace

void AddLayer(RoleCutter& cutter, const ExpertGrid& grid, const Names& names, const std::string& at,
              int64_t layer, Half half) {
  if (half != Half::kMlp) AddMixer(cutter, names, at, layer);
  if (half != Half::kMixer) AddMlp(cutter, grid, names.te, at, layer);
}

}  // namespace weightwire::layout::megatron
