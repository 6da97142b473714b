// vLLM's fused parameters at tensor-parallel size T, rank t (see docs/layouts.md):
//
//   qkv_proj       q, then k, then v rows of the rank's heads; with fewer kv heads than ranks each
//   kv
//                  head is held by T / kv_heads neighbouring ranks
//   gate_up_proj   chunk t of gate, then chunk t of up
//   o_proj, down_proj   columns, chunk t; their biases whole
//   embed_tokens, lm_head   rows of the vocabulary padded to a multiple of vocab_pad_to, chunk t
//   norms          whole
//
// Rank = t + T · dp: data-parallel replicas are equal.
#include <algorithm>

#include "server/layout/schemes/option.h"
#include "server/layout/schemes/role_cutter.h"
#include "server/layout/schemes/scheme_registry.h"

namespace weightwire::layout {
namespace {

constexpr int64_t kVocabPadToDefault = 64;
/// At least as many as a layer has with every bias and norm.
constexpr int64_t kPiecesPerLayer = 18;

Result<int64_t> PaddedVocab(const Model& model, const ParallelSpec& spec, int64_t tp) {
  WW_ASSIGN(const std::optional<int64_t> given, IntegerOption(spec, "vocab_pad_to", 1));
  const std::optional<int64_t> rows =
      RoundUpChecked(model.config.vocab, given.value_or(kVocabPadToDefault));
  if (!rows) {
    return Fail(Code::kInvalidArgument, Reason::kShapeOverflow,
                "the padded vocabulary does not fit 64 bits");
  }
  if (*rows % tp != 0) {
    return Fail(Status(Code::kInvalidArgument, Reason::kShapeMismatch,
                       "the padded vocabulary has " + std::to_string(*rows) +
                           " rows, no multiple of tp " + std::to_string(tp))
                    .Remedy("pass a vocab_pad_to that is a multiple of tp"));
  }
  return *rows;
}

/// A kv head belongs to one rank, or to several neighbours when there are fewer than ranks.
void Qkv(RoleCutter& cutter, std::string name, std::array<Role, 3> roles, int64_t layer) {
  const Model& model = cutter.model();
  const auto q = model.Find(roles[0], layer);
  const auto k = model.Find(roles[1], layer);
  const auto v = model.Find(roles[2], layer);
  if (!q || !k || !v) return;
  const ModelConfig& config = model.config;
  const int64_t q_rows = config.heads / cutter.tp() * config.head_dim;
  const int64_t kv_rows = std::max<int64_t>(1, config.kv_heads / cutter.tp()) * config.head_dim;
  const int64_t ranks_per_kv_head = std::max<int64_t>(1, cutter.tp() / config.kv_heads);
  const int64_t kv_begin = cutter.t() / ranks_per_kv_head * kv_rows;
  const RowRun runs[] = {
      {*q, cutter.t() * q_rows, q_rows}, {*k, kv_begin, kv_rows}, {*v, kv_begin, kv_rows}};
  cutter.builder().Rows(std::move(name), runs, 0, q_rows + 2 * kv_rows);
}

void Layer(RoleCutter& cutter, int64_t layer) {
  const std::string at = "model.layers." + std::to_string(layer) + ".";
  cutter.Whole(at + "input_layernorm.weight", Role::kInputNorm, layer);
  Qkv(cutter, at + "self_attn.qkv_proj.weight", {Role::kQWeight, Role::kKWeight, Role::kVWeight},
      layer);
  Qkv(cutter, at + "self_attn.qkv_proj.bias", {Role::kQBias, Role::kKBias, Role::kVBias}, layer);
  cutter.Whole(at + "self_attn.q_norm.weight", Role::kQNorm, layer);
  cutter.Whole(at + "self_attn.k_norm.weight", Role::kKNorm, layer);
  cutter.Columns(at + "self_attn.o_proj.weight", Role::kOWeight, layer);
  cutter.Whole(at + "self_attn.o_proj.bias", Role::kOBias, layer);
  cutter.Whole(at + "post_attention_layernorm.weight", Role::kPostAttentionNorm, layer);
  cutter.ChunkOfEach(at + "mlp.gate_up_proj.weight", {Role::kGateWeight, Role::kUpWeight}, layer);
  cutter.ChunkOfEach(at + "mlp.gate_up_proj.bias", {Role::kGateBias, Role::kUpBias}, layer);
  cutter.Columns(at + "mlp.down_proj.weight", Role::kDownWeight, layer);
  cutter.Whole(at + "mlp.down_proj.bias", Role::kDownBias, layer);
}

Result<RankLayout> DeriveRank(const Model& model, int64_t tp, int64_t t, int64_t vocab_rows) {
  RoleCutter cutter(model, tp, t);
  cutter.VocabRows("model.embed_tokens.weight", Role::kEmbed, vocab_rows);
  for (int64_t layer = 0; layer < model.config.layers; ++layer) Layer(cutter, layer);
  cutter.Whole("model.norm.weight", Role::kFinalNorm);
  cutter.VocabRows("lm_head.weight", Role::kLmHead, vocab_rows);
  return std::move(cutter.builder()).Finish();
}

}  // namespace

Result<ModelLayout> DeriveVllm(const Model& model, const ParallelSpec& spec) {
  const int64_t tp = spec.SizeOr("tp", 1);
  WW_ASSIGN(const int64_t world, WorldSize({tp, spec.SizeOr("dp", 1)}));
  WW_FAIL_IF_ERROR(CheckTensorParallel(model.config, tp));
  WW_FAIL_IF_ERROR(CheckPieces(model.config.layers * kPiecesPerLayer, world));
  WW_ASSIGN(const int64_t vocab_rows, PaddedVocab(model, spec, tp));
  ModelLayout layout{model.canonical, {}};
  for (int64_t rank = 0; rank < world; ++rank) {
    if (rank >= tp) {
      layout.ranks.push_back(layout.ranks[static_cast<size_t>(rank % tp)]);
      continue;
    }
    WW_ASSIGN(RankLayout derived, DeriveRank(model, tp, rank, vocab_rows));
    layout.ranks.push_back(std::move(derived));
  }
  return layout;
}

}  // namespace weightwire::layout
