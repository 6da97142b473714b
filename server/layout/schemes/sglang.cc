// SGLang 0.5, by its source; no real engine has been compared. What a layer holds is in
// engine_layer.cc, ranks are in engine.h.
//
//   tp, pp, dp     dp are replicas (data-parallel attention is not described)
//   epN            N divides tp: rank t has the experts of place t / (tp / N), each cut in tp / N
//   parts
#include "server/layout/schemes/engine.h"
#include "server/layout/schemes/option.h"
#include "server/layout/schemes/vision.h"

namespace weightwire::layout {
namespace {

constexpr engine::EngineNames kEngineNames = {.experts = "",
                                              .latent_a = "fused_qkv_a_proj_with_mqa",
                                              .vision_qkv = "qkv_proj",
                                              .index_key = "",
                                              .text = "",
                                              .tied_head = "lm_head.weight",
                                              .flat_gated_attention = true,
                                              .last_stages_spared = 0};

engine::ExpertSlice SliceOf(const engine::Grid& grid, int64_t experts, int64_t, int64_t t) {
  engine::ExpertSlice slice;
  slice.up_first = grid.up_first;
  slice.parts = grid.tp / grid.ep;
  slice.part = t % slice.parts;
  slice.experts = ExpertsAt(grid, experts, t / slice.parts);
  return slice;
}

}  // namespace

Result<ModelLayout> DeriveSglang(const Model& model, const ParallelSpec& spec) {
  const std::string_view missing = FamilyOf(model.config().text_family).not_in_sglang;
  if (!missing.empty()) return Fail(Undescribed("sglang", missing, model.config().family));
  if (const std::string qkv = FirstTensor(model, {Role::kLinearQkv}); !qkv.empty()) {
    return Fail(Status(Code::kInvalidArgument, Reason::kUnknownModel,
                       "scheme sglang does not describe " + model.config().family +
                           ": SGLang has Qwen3.5's text models as parts of the whole model only")
                    .AtTensor(qkv)
                    .Remedy("send explicit layouts"));
  }
  WW_ASSIGN(engine::Grid grid, engine::GridOf(spec));
  grid.ep = model.config().HasExperts() ? spec.SizeOr("ep", 1) : spec.SizeOr("ep", 0);
  grid.slice = SliceOf;
  if (grid.ep > 0) {
    WW_FAIL_IF_ERROR(CheckDivides("tp", grid.tp, "ep", grid.ep,
                                  FirstTensor(model, {Role::kExpertGate, Role::kExpertUp})));
  }
  return engine::Derive(model, spec, grid, kEngineNames);
}

}  // namespace weightwire::layout
