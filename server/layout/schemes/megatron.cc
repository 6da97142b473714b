// Megatron-core's ranks. What a layer holds is in megatron_layer.cc.
//
// The first pipeline stage has the embedding, the last one the final norm and the output layer,
// which is a copy of the embedding when the two are tied and there are several stages, and is
// absent when they are tied in one stage. MTP layers stand behind the decoder's, in the last stage
// or where layout= says so; that stage then has a copy of the embedding as well, and the final norm
// is behind the decoder's last layer, wherever that is. A vision tower is whole in the first stage,
// under the checkpoint's names, and the text model's names then begin with "language_model.", as in
// Megatron-Bridge (by its source; no dump has been compared). Layers are numbered from 0 in each
// chunk; with several chunks a stage, the names of chunk v begin with "vpp<v>.".
//
// Rank = t + T · (cp + CP · (dp + DP · pp)), Megatron's default order tp-cp-ep-dp-pp; with
// order=tp-cp-ep-pp-dp pp and dp change places. Experts have a grid of their own in each stage:
// with r the rank within the stage, x = r mod X, e = r / X mod E, and what remains are replicas.
// When pp is not last, both grids agree about the stages only with X · E = T · CP; Megatron refuses
// anything else.
// With model=hybrid a transformer is megatron-core 0.19's HybridModel: attention and MLP of a layer
// are decoder layers of their own, one behind the other, which stages, chunks and their options
// count, all of them by Transformer Engine's layer spec.
// Context- and data-parallel ranks are replicas of the rest; sequence parallelism changes no
// weight.
#include <algorithm>
#include <numeric>

#include "server/layout/schemes/linear_attention.h"
#include "server/layout/schemes/megatron_layer.h"
#include "server/layout/schemes/option.h"
#include "server/layout/schemes/pipeline.h"
#include "server/layout/schemes/scheme_registry.h"
#include "server/layout/schemes/vision.h"

namespace weightwire::layout {
namespace {

using megatron::ExpertGrid;
using megatron::Experts;

constexpr int64_t kVocabDivisor = 128;

struct Cut {
  int64_t tp = 1;
  int64_t pp = 1;
  int64_t vpp = 1;
  int64_t replicas = 1;    ///< cp · dp
  int64_t vocab_rows = 0;  ///< padded, of all ranks
  megatron::Names names;
  bool pp_before_dp = false;
  bool halves = false;  ///< layers are those of a HybridModel, each half of a transformer's
  int64_t layers = 0;   ///< with MTP's, of which a hybrid model has several in one
  ExpertGrid grid;      ///< sizes; places are each rank's
  Pipeline pipeline;
};

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

Status CheckSizes(const Model& model, int64_t tp) {
  const ModelConfig& config = model.config();
  WW_RETURN_IF_ERROR(CheckTensorParallel(model, tp));
  WW_RETURN_IF_ERROR(CheckLinearParallel(model, tp, false));
  if (config.IsLatent()) return OkStatus();
  const int64_t q_heads = (config.output_gate ? 2 : 1) * config.heads;
  return CheckDivides("the row count of linear_qkv",
                      (q_heads + 2 * config.kv_heads) * config.head_dim, "tp", tp,
                      FirstTensor(model, {Role::kQWeight}));
}

Result<ExpertGrid> GridOf(const Model& model, const ParallelSpec& spec, const Cut& cut) {
  const ModelConfig& config = model.config();
  const std::string expert = FirstTensor(model, {Role::kExpertGate, Role::kExpertUp});
  constexpr std::string_view kKinds[] = {"sequential", "grouped", "te"};
  ExpertGrid grid;
  WW_ASSIGN(const std::optional<size_t> kind, ChoiceOption(spec, "experts", kKinds));
  grid.kind = static_cast<Experts>(kind.value_or(cut.names.te ? 2 : 0));
  grid.ep = spec.SizeOr("ep", 1);
  grid.etp = spec.SizeOr("etp", config.HasExperts() ? cut.tp : 1);
  if (!config.HasExperts()) {
    if (grid.ep == 1 && grid.etp == 1) return grid;
    return Fail(Status(Code::kInvalidArgument, Reason::kShapeMismatch,
                       "expected experts to cut by ep and etp, found none in config.json")
                    .Remedy("leave ep and etp out"));
  }
  WW_FAIL_IF_ERROR(CheckDivides("the number of experts", config.experts, "ep", grid.ep, expert));
  WW_FAIL_IF_ERROR(
      CheckDivides("moe_intermediate_size", config.moe_intermediate, "etp", grid.etp, expert));
  WW_FAIL_IF_ERROR(CheckDivides("tp x cp x dp, the ranks of a pipeline stage",
                                cut.tp * cut.replicas, "ep x etp", grid.ep * grid.etp, expert));
  const int64_t before_stages = cut.tp * spec.SizeOr("cp", 1);
  if (cut.pp > 1 && cut.pp_before_dp && grid.ep * grid.etp != before_stages) {
    return Fail(Status(Code::kInvalidArgument, Reason::kShapeMismatch,
                       "with order=tp-cp-ep-pp-dp, ep " + std::to_string(grid.ep) + " and etp " +
                           std::to_string(grid.etp) + " must give tp x cp = " +
                           std::to_string(before_stages) + " ranks, as Megatron demands")
                    .Remedy("change ep or etp, or leave the order out"));
  }
  return grid;
}

/// Reads model=. A model of which each layer is one mixer already is the same with and without.
Status ReadHalves(const Model& model, const ParallelSpec& spec, Cut& cut) {
  constexpr std::string_view kModels[] = {"gpt", "hybrid"};
  const ModelConfig& config = model.config();
  WW_ASSIGN_OR_STATUS(const std::optional<size_t> chosen, ChoiceOption(spec, "model", kModels));
  cut.halves = chosen == 1u && !config.IsHybrid();
  if (!cut.halves) return OkStatus();
  if (const auto names = spec.options.find("spec"); names != spec.options.end() && !cut.names.te) {
    return BadOption("spec", "local", "te with model=hybrid, which knows no other");
  }
  cut.names.te = true;
  const char* part = config.IsLatent()            ? "latent attention"
                     : cut.layers > config.layers ? "MTP layers"
                                                  : nullptr;
  if (part == nullptr) return OkStatus();
  return Undescribed("megatron", std::string(part) + " in a HybridModel", config.family);
}

Result<Cut> CutOf(const Model& model, const ParallelSpec& spec) {
  const ModelConfig& config = model.config();
  constexpr std::string_view kSpecs[] = {"local", "te"};
  constexpr std::string_view kConvs[] = {"module", "flat"};
  constexpr std::string_view kOrders[] = {"tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp"};
  Cut cut;
  cut.tp = spec.SizeOr("tp", 1);
  cut.pp = spec.SizeOr("pp", 1);
  cut.vpp = spec.SizeOr("vpp", 1);
  cut.replicas = spec.SizeOr("cp", 1) * spec.SizeOr("dp", 1);
  WW_FAIL_IF_ERROR(CheckSizes(model, cut.tp));
  WW_ASSIGN(cut.vocab_rows, PaddedVocab(config, spec, cut.tp));
  WW_ASSIGN(const std::optional<size_t> names, ChoiceOption(spec, "spec", kSpecs));
  WW_ASSIGN(const std::optional<size_t> order, ChoiceOption(spec, "order", kOrders));
  WW_ASSIGN(const std::optional<size_t> conv, ChoiceOption(spec, "conv", kConvs));
  cut.names = {.te = names == 1u, .flat_conv = conv == 1u};
  cut.pp_before_dp = order == 1u;
  WW_ASSIGN(cut.layers, LayersWithMtp(config, spec));
  WW_FAIL_IF_ERROR(ReadHalves(model, spec, cut));
  if (!cut.names.te && (config.index_heads > 0 || config.whole_qk_norm)) {
    const char* part = config.whole_qk_norm ? "norms over all heads" : "indexer";
    return Fail(Undescribed("megatron", std::string(part) + " in Megatron's local layer spec",
                            config.family)
                    .Remedy("pass spec=te, or use weightwire.megatron_bridge (recorded layouts) or "
                            "explicit boxes"));
  }
  if (config.IsHybrid() && cut.layers > config.layers &&
      (spec.options.contains("layout") || spec.options.contains("pipeline"))) {
    return Fail(BadOption("layout", "…", "known for MTP layers of a hybrid model")
                    .Remedy("pass layers=, with the MTP layers on the last stage"));
  }
  WW_ASSIGN(cut.grid, GridOf(model, spec, cut));
  if (cut.vpp > 1 && cut.pp == 1) {
    return Fail(Status(Code::kInvalidArgument, Reason::kShapeMismatch, "vpp needs pp over 1")
                    .Remedy("leave vpp out, or give pp"));
  }
  if (cut.vpp > 1 && (cut.halves || config.IsHybrid()) && !spec.options.contains("layers")) {
    return Fail(Status(Code::kInvalidArgument, Reason::kShapeMismatch,
                       "Megatron's hybrid models have virtual pipeline stages only where their "
                       "pattern says each")
                    .Remedy("pass layers= with the number of layers between two \"|\" of the "
                            "pattern, or leave vpp out"));
  }
  WW_ASSIGN(cut.pipeline, PipelineOf(spec, (cut.halves ? 2 : 1) * config.layers,
                                     cut.layers - config.layers, cut.pp, cut.vpp));
  return cut;
}

void AddMtp(RoleCutter& cutter, const Cut& cut, const ExpertGrid& grid, const std::string& at) {
  const ModelConfig& config = cutter.model().config();
  const int64_t first = config.layers;
  if (config.IsHybrid()) {
    const std::string here = at + "mtp.layers.0.";
    cutter.Whole(here + "enorm.weight", Role::kMtpEmbedNorm, first);
    cutter.Whole(here + "hnorm.weight", Role::kMtpHiddenNorm, first);
    cutter.Rows(here + "eh_proj.weight", Role::kMtpProjection, first);
    for (int64_t layer = first; layer < cut.layers; ++layer) {
      const std::string inner = "mtp_model_layer.layers." + std::to_string(layer - first) + ".";
      megatron::AddLayer(cutter, grid, cut.names, here + inner, layer);
    }
    cutter.Whole(here + "final_layernorm.weight", Role::kMtpFinalNorm, cut.layers - 1);
    return;
  }
  for (int64_t layer = first; layer < cut.layers; ++layer) {
    const std::string here = at + "mtp.layers." + std::to_string(layer - first) + ".";
    cutter.Whole(here + "enorm.weight", Role::kMtpEmbedNorm, layer);
    cutter.Whole(here + "hnorm.weight", Role::kMtpHiddenNorm, layer);
    cutter.Rows(here + "eh_proj.weight", Role::kMtpProjection, layer);
    megatron::AddLayer(cutter, grid, cut.names, here + "transformer_layer.", layer);
    cutter.Whole(here + "final_layernorm.weight", Role::kMtpFinalNorm, layer);
  }
}

/// `r`: the rank within its pipeline stage.
Result<RankLayout> DeriveRank(const Model& model, const Cut& cut, int64_t r, int64_t stage) {
  RoleCutter cutter(model, cut.tp, r % cut.tp);
  ExpertGrid grid = cut.grid;
  grid.x = r % grid.etp;
  grid.e = r / grid.etp % grid.ep;
  const ModelConfig& config = model.config();
  const bool any_mtp = cut.layers > config.layers;
  for (int64_t v = 0; v < cut.vpp; ++v) {
    const std::string chunk = cut.vpp > 1 ? "vpp" + std::to_string(v) + "." : "";
    const std::string at = chunk + (config.HasVision() ? "language_model." : "");
    const bool last_chunk = v == cut.vpp - 1;
    const bool first = stage == 0 && v == 0;
    const bool last = stage == cut.pp - 1 && last_chunk;
    const bool mtp = any_mtp && stage == cut.pipeline.mtp_stage && last_chunk;
    if (first || mtp) {
      cutter.VocabRows(at + "embedding.word_embeddings.weight", Role::kEmbed, cut.vocab_rows);
    }
    if (first) AddWholeVision(cutter, chunk);
    const ChunkLayers layers =
        cut.pipeline.chunks[static_cast<size_t>(stage)][static_cast<size_t>(v)];
    for (int64_t i = 0; i < layers.count; ++i) {
      const int64_t layer = layers.first + i;
      const std::string here = at + "decoder.layers." + std::to_string(i) + ".";
      if (cut.halves) {
        megatron::AddLayer(cutter, grid, cut.names, here, layer / 2,
                           layer % 2 == 0 ? megatron::Half::kMixer : megatron::Half::kMlp);
      } else {
        megatron::AddLayer(cutter, grid, cut.names, here, layer);
      }
    }
    const bool ends_decoder = layers.count > 0 && layers.first + layers.count == config.layers;
    if (any_mtp && !config.IsHybrid() ? ends_decoder : last) {
      cutter.Whole(at + (cut.halves || config.IsHybrid() ? "decoder.final_norm.weight"
                                                         : "decoder.final_layernorm.weight"),
                   Role::kFinalNorm);
    }
    if (mtp) AddMtp(cutter, cut, grid, at);
    if (!last) continue;
    const bool shares_embedding = config.tied && (cut.pp == 1 || mtp);
    if (!shares_embedding) {
      cutter.VocabRows(at + "output_layer.weight", config.tied ? Role::kEmbed : Role::kLmHead,
                       cut.vocab_rows);
    }
  }
  return std::move(cutter.builder()).Finish();
}

/// At least as many as any rank has: a chunk of linear_qkv touches up to two groups in part.
int64_t PiecesOfLargestStage(const ModelConfig& config, const Cut& cut) {
  const int64_t group_runs = config.output_gate ? 2 * config.heads / config.kv_heads + 2 : 3;
  const int64_t qkv = group_runs * (config.kv_heads / cut.tp + 2);
  const int64_t linear = 6 * (config.linear.groups / cut.tp + 1);
  const int64_t experts = 6 * (config.experts / cut.grid.ep);
  const int64_t per_layer = 2 * qkv + linear + experts + 24;
  int64_t layers = 0;
  for (const auto& stage : cut.pipeline.chunks) {
    int64_t of_stage = 0;
    for (const ChunkLayers& chunk : stage) of_stage += chunk.count;
    layers = std::max(layers, of_stage);
  }
  const int64_t tower = (config.vision.depth + 1) * 24;
  return (layers + cut.layers - config.layers) * per_layer + tower + 4;
}

}  // namespace

Result<ModelLayout> DeriveMegatron(const Model& model, const ParallelSpec& spec) {
  if (model.wrapper() != nullptr && model.wrapper()->megatron.empty()) {
    return Fail(Undescribed("megatron", "tower", model.config().family));
  }
  const std::string_view missing = FamilyOf(model.config().text_family).not_in_megatron;
  if (!missing.empty()) return Fail(Undescribed("megatron", missing, model.config().family));
  WW_ASSIGN(const int64_t world, WorldSize({spec.SizeOr("tp", 1), spec.SizeOr("pp", 1),
                                            spec.SizeOr("cp", 1), spec.SizeOr("dp", 1)}));
  WW_ASSIGN(const Cut cut, CutOf(model, spec));
  WW_FAIL_IF_ERROR(CheckPieces(PiecesOfLargestStage(model.config(), cut), world));
  // Ranks of a stage repeat after this many.
  const int64_t period = std::lcm(cut.tp, cut.grid.ep * cut.grid.etp);
  const int64_t in_stage = cut.tp * cut.replicas;
  const int64_t dp = spec.SizeOr("dp", 1);
  const int64_t in_dp = in_stage / dp;
  ModelLayout layout{model.canonical(), {}};
  layout.ranks.resize(static_cast<size_t>(world));
  for (int64_t stage = 0; stage < cut.pp; ++stage) {
    const auto rank_of = [&](int64_t r) {
      const int64_t rank = cut.pp_before_dp ? r % in_dp + in_dp * (stage + cut.pp * (r / in_dp))
                                            : r + in_stage * stage;
      return static_cast<size_t>(rank);
    };
    for (int64_t r = 0; r < in_stage; ++r) {
      if (r >= period) {
        layout.ranks[rank_of(r)] = layout.ranks[rank_of(r % period)];
        continue;
      }
      WW_ASSIGN(layout.ranks[rank_of(r)], DeriveRank(model, cut, r, stage));
    }
  }
  return layout;
}

}  // namespace weightwire::layout
