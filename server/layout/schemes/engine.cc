#include "server/layout/schemes/engine.h"

#include <algorithm>

#include "server/layout/schemes/linear_attention.h"
#include "server/layout/schemes/option.h"
#include "server/layout/schemes/pipeline.h"
#include "server/layout/schemes/scale_tensors.h"
#include "server/layout/schemes/vision.h"

namespace weightwire::layout::engine {
namespace {

constexpr int64_t kVocabPadToDefault = 64;
/// At least as many as a layer has with every bias and norm, without experts.
constexpr int64_t kPiecesPerLayer = 32;
constexpr std::string_view kBackbone = "backbone.";

Result<int64_t> PaddedVocab(int64_t vocab, const ParallelSpec& spec, int64_t tp) {
  WW_ASSIGN(const std::optional<int64_t> given, IntegerOption(spec, "vocab_pad_to", 1));
  const std::optional<int64_t> rows = RoundUpChecked(vocab, given.value_or(kVocabPadToDefault));
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

Result<std::vector<ChunkLayers>> StagesOf(const ParallelSpec& spec, int64_t layers, int64_t stages,
                                          int64_t last_spared) {
  std::vector<int64_t> counts(static_cast<size_t>(stages), layers / stages);
  if (const auto listed = spec.options.find("layers"); listed != spec.options.end()) {
    WW_ASSIGN(counts, ParseDashedList("layers", listed->second));
  } else {
    for (int64_t i = 0; i < layers % stages; ++i) {
      ++counts[static_cast<size_t>(stages - 1 - last_spared - i)];
    }
  }
  std::vector<ChunkLayers> result;
  int64_t next = 0;
  bool fits = static_cast<int64_t>(counts.size()) == stages;
  for (int64_t count : counts) {
    fits = fits && count >= 1 && count <= layers - next;
    if (!fits) break;
    result.push_back({next, count});
    next += count;
  }
  if (fits && next == layers) return result;
  return Fail(Status(Code::kInvalidArgument, Reason::kShapeMismatch,
                     std::to_string(layers) + " layers cannot be distributed over " +
                         std::to_string(stages) + " pipeline stages so")
                  .Remedy("pass every stage as in layers=7-7-6"));
}

Status CheckExperts(const Model& model, const Grid& grid) {
  const ModelConfig& config = model.config();
  if (!config.HasExperts()) {
    if (grid.ep == 0 && grid.redundant == 0) return OkStatus();
    return Status(Code::kInvalidArgument, Reason::kShapeMismatch,
                  "expected experts to spread, found none in config.json")
        .Remedy("leave ep, round_robin and redundant out");
  }
  if (grid.ep == 0 && grid.redundant > 0) {
    return BadOption("redundant", std::to_string(grid.redundant), "allowed without ep");
  }
  if (config.experts + grid.redundant >= grid.ep) return OkStatus();
  return Status(Code::kInvalidArgument, Reason::kShapeMismatch,
                "expected at least one expert for each of " + std::to_string(grid.ep) +
                    " expert-parallel ranks, found " +
                    std::to_string(config.experts + grid.redundant))
      .AtTensor(FirstTensor(model, {Role::kExpertGate, Role::kExpertUp}))
      .Remedy("choose a smaller group, or redundant experts");
}

/// "backbone." of Nemotron-H's checkpoints is "model." in engines.
void RenameBackbone(RankLayout& rank) {
  for (LocalTensor& tensor : rank.tensors) {
    if (tensor.name.starts_with(kBackbone)) tensor.name.replace(0, kBackbone.size(), "model.");
  }
}

void FlattenAttention(RankLayout& rank) {
  constexpr std::string_view kModule = "self_attn.";
  for (LocalTensor& tensor : rank.tensors) {
    const size_t at = tensor.name.find(kModule);
    if (at != std::string::npos) tensor.name.erase(at, kModule.size());
  }
}

}  // namespace

std::vector<int64_t> ExpertsAt(const Grid& grid, int64_t experts, int64_t e) {
  const int64_t physical = experts + grid.redundant;
  const int64_t ep = std::max<int64_t>(1, grid.ep);
  const int64_t more = physical % ep;
  std::vector<int64_t> held;
  if (grid.round_robin) {
    for (int64_t expert = e; expert < physical; expert += ep) held.push_back(expert % experts);
    return held;
  }
  const int64_t first = e * (physical / ep) + std::min(e, more);
  const int64_t count = physical / ep + (e < more ? 1 : 0);
  for (int64_t expert = first; expert < first + count; ++expert) held.push_back(expert % experts);
  return held;
}

Result<Grid> GridOf(const ParallelSpec& spec) {
  Grid grid;
  grid.tp = spec.SizeOr("tp", 1);
  grid.pp = spec.SizeOr("pp", 1);
  grid.dp = spec.SizeOr("dp", 1);
  WW_ASSIGN(const std::optional<int64_t> redundant, IntegerOption(spec, "redundant", 0));
  grid.redundant = std::min<int64_t>(redundant.value_or(0), 1 << 20);
  WW_ASSIGN(grid.round_robin, FlagOption(spec, "round_robin"));
  WW_ASSIGN(grid.up_first, FlagOption(spec, "up_first"));
  return grid;
}

Result<ModelLayout> Derive(const Model& model, const ParallelSpec& spec, const Grid& grid,
                           const EngineNames& engine) {
  const ModelConfig& config = model.config();
  const Family& family = FamilyOf(config.text_family);
  if (model.wrapper() != nullptr && !engine.wrappers) {
    return Fail(Undescribed("sglang", "tower", config.family));
  }
  if (config.whole_qk_norm && engine.index_key.empty()) {
    return Fail(Undescribed("sglang", "norms over all heads", config.family)
                    .AtTensor(FirstTensor(model, {Role::kQNorm})));
  }
  if (config.index_heads > 0 && engine.index_key.empty()) {
    return Fail(Undescribed("sglang", "indexer", config.family)
                    .AtTensor(FirstTensor(model, {Role::kIndexKey})));
  }
  EngineNames engine_names = engine;
  if (!config.HasVision()) engine_names.text = "";
  WW_ASSIGN(const int64_t world, WorldSize({grid.tp, grid.pp, grid.dp}));
  WW_FAIL_IF_ERROR(CheckTensorParallel(model, grid.tp));
  WW_FAIL_IF_ERROR(CheckLinearParallel(model, grid.tp, true));
  WW_FAIL_IF_ERROR(CheckExperts(model, grid));
  const int64_t experts = (config.experts + grid.redundant) / std::max<int64_t>(1, grid.ep) + 1;
  const int64_t heads_here =
      config.heads / grid.tp + std::max<int64_t>(1, config.kv_heads / grid.tp);
  const int64_t single_rows = config.rotary_pairs ? heads_here * config.head_dim : 0;
  const int64_t per_layer = (kPiecesPerLayer + 6 * experts + single_rows) * (config.scales ? 2 : 1);
  WW_FAIL_IF_ERROR(CheckPieces(per_layer, world));
  const int64_t tower = ((config.vision.depth + config.vision.mergers + 1) * kPiecesPerLayer +
                         std::ssize(model.tower())) *
                        (config.scales ? 2 : 1);
  WW_FAIL_IF_ERROR(CheckPieces(config.layers * per_layer + tower, world));
  WW_ASSIGN(const int64_t vocab_rows, PaddedVocab(config.vocab, spec, grid.tp));
  WW_ASSIGN(const int64_t layer_rows, PaddedVocab(config.layer_vocab, spec, grid.tp));
  WW_ASSIGN(const std::vector<ChunkLayers> stages,
            StagesOf(spec, config.layers, grid.pp, engine_names.last_stages_spared));
  ModelLayout layout{model.canonical(), {}};
  for (int64_t rank = 0; rank < world; ++rank) {
    const int64_t t = rank % grid.tp;
    const int64_t stage = rank / grid.tp % grid.pp;
    const int64_t dp = rank / (grid.tp * grid.pp);
    if (dp > 0 && !config.HasExperts()) {
      layout.ranks.push_back(layout.ranks[static_cast<size_t>(rank % (grid.tp * grid.pp))]);
      continue;
    }
    const ExpertSlice slice =
        config.HasExperts() ? grid.slice(grid, config.experts, dp, t) : ExpertSlice{};
    RoleCutter cutter(model, grid.tp, t);
    const bool last = stage == grid.pp - 1;
    const std::string text(engine_names.text);
    const bool outside = family.every_stage;
    if (outside || stage == 0) {
      cutter.VocabRows(text + "model.embed_tokens.weight", Role::kEmbed, vocab_rows);
      cutter.VocabRows(text + "model.embed_tokens_per_layer.weight", Role::kLayerEmbed, layer_rows);
      cutter.Rows(text + "model.per_layer_model_projection.weight", Role::kLayerInputs, 0);
      cutter.Whole(text + "model.per_layer_projection_norm.weight", Role::kLayerInputsNorm);
    }
    if (last && !outside && stage > 0 && config.tied) {
      cutter.VocabRows(text + std::string(engine_names.tied_head), Role::kEmbed, vocab_rows);
    }
    const ChunkLayers layers = stages[static_cast<size_t>(stage)];
    for (int64_t i = 0; i < layers.count; ++i)
      AddLayer(cutter, engine_names, slice, layers.first + i);
    if (outside || last) {
      const std::string norm = FirstTensor(model, {Role::kFinalNorm});
      cutter.Whole(norm.starts_with(kBackbone) ? norm : text + "model.norm.weight",
                   Role::kFinalNorm);
      cutter.VocabRows(text + "lm_head.weight", Role::kLmHead, vocab_rows);
    }
    AddVisionShards(cutter, engine_names.vision_qkv);
    AddTowerShards(cutter);
    WW_ASSIGN(RankLayout derived, std::move(cutter.builder()).Finish());
    RenameBackbone(derived);
    if (engine_names.flat_gated_attention && config.output_gate) FlattenAttention(derived);
    if (Status added = AddScaleTensors(model, derived); !added.ok()) {
      return Fail(std::move(added).AtRank(std::to_string(rank)));
    }
    layout.ranks.push_back(std::move(derived));
  }
  return layout;
}

}  // namespace weightwire::layout::engine
