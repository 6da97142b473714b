// Megatron-core's parameters (see docs/layouts.md), rank t of T tensor-parallel ranks:
//
//   linear_qkv     the grouped matrix (for each kv head: its q heads, k, v) cut into T plain
//   chunks;
//                  with fewer kv heads than T the chunks cut across heads, nothing is replicated
//   linear_fc1     chunk t of gate, then chunk t of up
//   linear_proj, linear_fc2   columns, chunk t; their biases whole
//   word_embeddings, output_layer   rows of the padded vocabulary, chunk t
//   norms          whole
//
// The first pipeline stage has the embedding, the last one the final norm and the output layer,
// which is a copy of the embedding when the two are tied and there are several stages, and is
// absent when they are tied in one stage. Layers are numbered from 0 in each stage.
//
// Rank = t + T · (cp + CP · (dp + DP · pp)), Megatron's default order tp-cp-ep-dp-pp. Context- and
// data-parallel ranks are replicas.
#include <algorithm>

#include "server/layout/schemes/option.h"
#include "server/layout/schemes/pipeline.h"
#include "server/layout/schemes/role_cutter.h"
#include "server/layout/schemes/scheme_registry.h"

namespace weightwire::layout {
namespace {

constexpr int64_t kVocabDivisor = 128;

/// Names that differ between the specs that Megatron builds its layers from.
struct LayerNames {
  std::string_view input_norm;
  std::string_view post_attention_norm;
};
constexpr LayerNames kLocalNames = {"input_layernorm.weight", "pre_mlp_layernorm.weight"};
constexpr LayerNames kTeNames = {"self_attention.linear_qkv.layer_norm_weight",
                                 "mlp.linear_fc1.layer_norm_weight"};

struct Cut {
  int64_t tp = 1;
  int64_t pp = 1;
  int64_t vocab_rows = 0;  ///< padded, of all ranks
  LayerNames names = kLocalNames;
  std::vector<StageLayers> stages;
};

Result<LayerNames> NamesOf(const ParallelSpec& spec) {
  const auto it = spec.options.find("spec");
  if (it == spec.options.end() || it->second == "local") return kLocalNames;
  if (it->second == "te") return kTeNames;
  return Fail(BadOption("spec", it->second, "local or te"));
}

Result<int64_t> PaddedVocab(const ModelConfig& config, const ParallelSpec& spec, int64_t tp) {
  const auto option = spec.options.find("vocab_pad");
  std::optional<int64_t> rows;
  if (option == spec.options.end()) {
    rows = RoundUpChecked(config.vocab, kVocabDivisor * tp);
  } else if (option->second == "none") {
    rows = config.vocab;
  } else {
    WW_ASSIGN(rows, IntegerOption(spec, "vocab_pad", 1));
  }
  if (!rows) {
    return Fail(Code::kInvalidArgument, Reason::kShapeOverflow,
                "the padded vocabulary does not fit 64 bits");
  }
  if (*rows < config.vocab || *rows % tp != 0) {
    return Fail(Status(Code::kInvalidArgument, Reason::kShapeMismatch,
                       "a padded vocabulary of " + std::to_string(*rows) +
                           " rows does not hold vocab_size " + std::to_string(config.vocab) +
                           " in equal parts for tp " + std::to_string(tp))
                    .Remedy("pass vocab_pad= with a multiple of tp from vocab_size on"));
  }
  return *rows;
}

Status CheckSizes(const ModelConfig& config, int64_t tp) {
  WW_RETURN_IF_ERROR(CheckTensorParallel(config, tp));
  return CheckDivides("the row count of linear_qkv",
                      (config.heads + 2 * config.kv_heads) * config.head_dim, tp);
}

/// Chunk t of the grouped matrix: only the groups that the chunk touches are listed.
void Qkv(RoleCutter& cutter, std::string name, std::array<Role, 3> roles, int64_t layer) {
  const Model& model = cutter.model();
  const auto q = model.Find(roles[0], layer);
  const auto k = model.Find(roles[1], layer);
  const auto v = model.Find(roles[2], layer);
  if (!q || !k || !v) return;
  const ModelConfig& config = model.config;
  const int64_t head = config.head_dim;
  const int64_t group_q = config.heads / config.kv_heads * head;
  const int64_t group_rows = group_q + 2 * head;
  const int64_t rows = config.kv_heads * group_rows / cutter.tp();
  const int64_t begin = cutter.t() * rows;
  const int64_t first_group = begin / group_rows;
  std::vector<RowRun> runs;
  for (int64_t group = first_group; group * group_rows < begin + rows; ++group) {
    runs.push_back({*q, group * group_q, group_q});
    runs.push_back({*k, group * head, head});
    runs.push_back({*v, group * head, head});
  }
  cutter.builder().Rows(std::move(name), runs, begin - first_group * group_rows, rows);
}

void Layer(RoleCutter& cutter, const LayerNames& names, int64_t local_index, int64_t layer) {
  const std::string at = "decoder.layers." + std::to_string(local_index) + ".";
  cutter.Whole(at + std::string(names.input_norm), Role::kInputNorm, layer);
  Qkv(cutter, at + "self_attention.linear_qkv.weight",
      {Role::kQWeight, Role::kKWeight, Role::kVWeight}, layer);
  Qkv(cutter, at + "self_attention.linear_qkv.bias", {Role::kQBias, Role::kKBias, Role::kVBias},
      layer);
  cutter.Whole(at + "self_attention.q_layernorm.weight", Role::kQNorm, layer);
  cutter.Whole(at + "self_attention.k_layernorm.weight", Role::kKNorm, layer);
  cutter.Columns(at + "self_attention.linear_proj.weight", Role::kOWeight, layer);
  cutter.Whole(at + "self_attention.linear_proj.bias", Role::kOBias, layer);
  cutter.Whole(at + std::string(names.post_attention_norm), Role::kPostAttentionNorm, layer);
  cutter.ChunkOfEach(at + "mlp.linear_fc1.weight", {Role::kGateWeight, Role::kUpWeight}, layer);
  cutter.ChunkOfEach(at + "mlp.linear_fc1.bias", {Role::kGateBias, Role::kUpBias}, layer);
  cutter.Columns(at + "mlp.linear_fc2.weight", Role::kDownWeight, layer);
  cutter.Whole(at + "mlp.linear_fc2.bias", Role::kDownBias, layer);
}

Result<RankLayout> DeriveRank(const Model& model, const Cut& cut, int64_t t, int64_t stage) {
  RoleCutter cutter(model, cut.tp, t);
  if (stage == 0)
    cutter.VocabRows("embedding.word_embeddings.weight", Role::kEmbed, cut.vocab_rows);
  const StageLayers layers = cut.stages[static_cast<size_t>(stage)];
  for (int64_t i = 0; i < layers.count; ++i) {
    Layer(cutter, cut.names, i, layers.first + i);
  }
  if (stage == cut.pp - 1) {
    cutter.Whole("decoder.final_layernorm.weight", Role::kFinalNorm);
    const Role head = model.config.tied ? Role::kEmbed : Role::kLmHead;
    const bool shares_embedding = model.config.tied && cut.pp == 1;
    if (!shares_embedding) cutter.VocabRows("output_layer.weight", head, cut.vocab_rows);
  }
  return std::move(cutter.builder()).Finish();
}

/// At least as many as any rank has: a chunk of linear_qkv touches up to two groups in part.
int64_t PiecesOfLargestStage(const ModelConfig& config, const Cut& cut) {
  const int64_t qkv = 3 * (config.kv_heads / cut.tp + 2);
  const int64_t per_layer = 2 * qkv + 12;
  int64_t layers = 0;
  for (const StageLayers& stage : cut.stages) layers = std::max(layers, stage.count);
  return layers * per_layer;
}

Result<Cut> CutOf(const Model& model, const ParallelSpec& spec) {
  Cut cut;
  cut.tp = spec.SizeOr("tp", 1);
  cut.pp = spec.SizeOr("pp", 1);
  WW_FAIL_IF_ERROR(CheckSizes(model.config, cut.tp));
  WW_ASSIGN(cut.vocab_rows, PaddedVocab(model.config, spec, cut.tp));
  WW_ASSIGN(cut.names, NamesOf(spec));
  WW_ASSIGN(cut.stages, PipelineStages(spec, model.config.layers, cut.pp));
  return cut;
}

}  // namespace

Result<ModelLayout> DeriveMegatron(const Model& model, const ParallelSpec& spec) {
  const int64_t replicas = spec.SizeOr("cp", 1) * spec.SizeOr("dp", 1);
  WW_ASSIGN(const int64_t world, WorldSize({spec.SizeOr("tp", 1), spec.SizeOr("pp", 1),
                                            spec.SizeOr("cp", 1), spec.SizeOr("dp", 1)}));
  WW_ASSIGN(const Cut cut, CutOf(model, spec));
  WW_FAIL_IF_ERROR(CheckPieces(PiecesOfLargestStage(model.config, cut), world));
  ModelLayout layout{model.canonical, {}};
  for (int64_t stage = 0; stage < cut.pp; ++stage) {
    const size_t stage_begin = layout.ranks.size();
    for (int64_t t = 0; t < cut.tp; ++t) {
      WW_ASSIGN(RankLayout rank, DeriveRank(model, cut, t, stage));
      layout.ranks.push_back(std::move(rank));
    }
    for (int64_t i = cut.tp; i < cut.tp * replicas; ++i) {
      layout.ranks.push_back(layout.ranks[stage_begin + static_cast<size_t>(i % cut.tp)]);
    }
  }
  return layout;
}

}  // namespace weightwire::layout
