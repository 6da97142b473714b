#pragma once

#include <algorithm>

#include "server/layout/families/parts.h"

namespace weightwire::layout {

/// DeepSeek-V2, V3, V3.2, Kimi-K2, GLM-5 and GLM-4.7-Flash: latent attention, in V3.2 and GLM-5 to
/// what an indexer chooses, a dense beginning, shared experts that are stored
/// as one, and MTP layers behind the decoder's in V3.
namespace deepseek {

inline constexpr SizeOf kQkRows = [](const ModelConfig& c) {
  return c.heads * (c.qk_nope_dim + c.qk_rope_dim);
};
inline constexpr SizeOf kQRank = [](const ModelConfig& c) { return c.q_lora_rank; };
inline constexpr SizeOf kKvRank = [](const ModelConfig& c) { return c.kv_lora_rank; };
inline constexpr SizeOf kKvDownRows = [](const ModelConfig& c) {
  return c.kv_lora_rank + c.qk_rope_dim;
};
inline constexpr SizeOf kKvUpRows = [](const ModelConfig& c) {
  return c.heads * (c.qk_nope_dim + c.v_head_dim);
};
inline constexpr SizeOf kVRows = [](const ModelConfig& c) { return c.heads * c.v_head_dim; };
inline constexpr SizeOf kIndexRows = [](const ModelConfig& c) {
  return c.index_heads * c.index_dim;
};
inline constexpr SizeOf kIndexHeads = [](const ModelConfig& c) { return c.index_heads; };
inline constexpr SizeOf kIndexDim = [](const ModelConfig& c) { return c.index_dim; };

inline constexpr IsPresent kPlainQ = [](const ModelConfig& c, const LayerKind&) {
  return c.q_lora_rank == 0;
};
inline constexpr IsPresent kLowRankQ = [](const ModelConfig& c, const LayerKind&) {
  return c.q_lora_rank > 0;
};

inline constexpr IsPresent kIndexed = [](const ModelConfig& c, const LayerKind& l) {
  return c.index_heads > 0 && !l.shares_index;
};

/// No linear module in transformers, and never quantized in the releases and by engines.
constexpr TensorTemplate Router() {
  TensorTemplate router = parts::kRouter;
  router.full_precision = true;
  return router;
}

constexpr TensorTemplate Correction() {
  TensorTemplate bias = parts::Vector(Role::kRouterCorrection,
                                      "model.layers.{layer}.mlp.gate.e_score_correction_bias",
                                      parts::kExperts, parts::kMoeWithCorrection);
  bias.dtype = DType::kF32;
  return bias;
}

inline constexpr TensorTemplate kSharedGate =
    parts::Matrix(Role::kSharedGate, "model.layers.{layer}.mlp.shared_experts.gate_proj.weight",
                  parts::kSharedIntermediate, parts::kHidden, parts::kMoeWithShared);
inline constexpr TensorTemplate kSharedUp =
    parts::Matrix(Role::kSharedUp, "model.layers.{layer}.mlp.shared_experts.up_proj.weight",
                  parts::kSharedIntermediate, parts::kHidden, parts::kMoeWithShared);
inline constexpr TensorTemplate kSharedDown =
    parts::Matrix(Role::kSharedDown, "model.layers.{layer}.mlp.shared_experts.down_proj.weight",
                  parts::kHidden, parts::kSharedIntermediate, parts::kMoeWithShared);

inline constexpr TensorTemplate kMtpEmbedNorm = parts::Vector(
    Role::kMtpEmbedNorm, "model.layers.{layer}.enorm.weight", parts::kHidden, parts::kMtp);
inline constexpr TensorTemplate kMtpHiddenNorm = parts::Vector(
    Role::kMtpHiddenNorm, "model.layers.{layer}.hnorm.weight", parts::kHidden, parts::kMtp);
/// Not quantized in the releases and by engines.
constexpr TensorTemplate MtpProjection() {
  TensorTemplate projection =
      parts::Matrix(Role::kMtpProjection, "model.layers.{layer}.eh_proj.weight", parts::kHidden,
                    parts::kTwiceHidden, parts::kMtp);
  projection.full_precision = true;
  return projection;
}
inline constexpr TensorTemplate kMtpFinalNorm =
    parts::Vector(Role::kMtpFinalNorm, "model.layers.{layer}.shared_head.norm.weight",
                  parts::kHidden, parts::kMtp);

}  // namespace deepseek

inline constexpr TensorTemplate kDeepseekTensors[] = {
    parts::kEmbed,
    parts::kLmHead,
    parts::kFinalNorm,
    parts::kInputNorm,
    parts::kPostAttentionNorm,
    parts::Matrix(Role::kQWeight, "model.layers.{layer}.self_attn.q_proj.weight", deepseek::kQkRows,
                  parts::kHidden, deepseek::kPlainQ),
    parts::Matrix(Role::kQDown, "model.layers.{layer}.self_attn.q_a_proj.weight", deepseek::kQRank,
                  parts::kHidden, deepseek::kLowRankQ),
    parts::Vector(Role::kQDownNorm, "model.layers.{layer}.self_attn.q_a_layernorm.weight",
                  deepseek::kQRank, deepseek::kLowRankQ),
    parts::Matrix(Role::kQUp, "model.layers.{layer}.self_attn.q_b_proj.weight", deepseek::kQkRows,
                  deepseek::kQRank, deepseek::kLowRankQ),
    parts::Matrix(Role::kKvDown, "model.layers.{layer}.self_attn.kv_a_proj_with_mqa.weight",
                  deepseek::kKvDownRows, parts::kHidden),
    parts::Vector(Role::kKvDownNorm, "model.layers.{layer}.self_attn.kv_a_layernorm.weight",
                  deepseek::kKvRank),
    parts::Matrix(Role::kKvUp, "model.layers.{layer}.self_attn.kv_b_proj.weight",
                  deepseek::kKvUpRows, deepseek::kKvRank),
    parts::Matrix(Role::kOWeight, "model.layers.{layer}.self_attn.o_proj.weight", parts::kHidden,
                  deepseek::kVRows),
    parts::Matrix(Role::kIndexQuery, "model.layers.{layer}.self_attn.indexer.wq_b.weight",
                  deepseek::kIndexRows, deepseek::kQRank, deepseek::kIndexed),
    parts::Matrix(Role::kIndexKey, "model.layers.{layer}.self_attn.indexer.wk.weight",
                  deepseek::kIndexDim, parts::kHidden, deepseek::kIndexed),
    parts::Vector(Role::kIndexKeyNorm, "model.layers.{layer}.self_attn.indexer.k_norm.weight",
                  deepseek::kIndexDim, deepseek::kIndexed),
    parts::Vector(Role::kIndexKeyNormBias, "model.layers.{layer}.self_attn.indexer.k_norm.bias",
                  deepseek::kIndexDim, deepseek::kIndexed),
    parts::Matrix(Role::kIndexWeights, "model.layers.{layer}.self_attn.indexer.weights_proj.weight",
                  deepseek::kIndexHeads, parts::kHidden, deepseek::kIndexed),
    parts::kGateWeight,
    parts::kUpWeight,
    parts::kDownWeight,
    deepseek::Router(),
    deepseek::Correction(),
    parts::kExpertGate,
    parts::kExpertUp,
    parts::kExpertDown,
    deepseek::kSharedGate,
    deepseek::kSharedUp,
    deepseek::kSharedDown,
    deepseek::kMtpEmbedNorm,
    deepseek::kMtpHiddenNorm,
    deepseek::MtpProjection(),
    deepseek::kMtpFinalNorm,
};
inline constexpr MtpCopy kDeepseekMtpCopies[] = {
    {"model.layers.{layer}.embed_tokens.weight", Role::kEmbed},
    {"model.layers.{layer}.shared_head.head.weight", Role::kLmHead},
};

/// transformers' defaults that differ between V2 and V3.
struct DeepseekDefaults {
  int64_t dense_layers = 0;
  int64_t shared_experts = 0;
};

/// `q_lora_rank` null: q is one matrix; transformers takes 1,536 where config.json is silent.
inline Status ReadDeepseek(const Json& json, const DeepseekDefaults& defaults,
                           ModelConfig& config) {
  if (config.attention_bias || config.mlp_bias) {
    return Status(Code::kInvalidArgument, Reason::kInvalidRequest,
                  "config.json has attention_bias or mlp_bias, which no DeepSeek release uses and "
                  "this family does not describe")
        .Remedy("send explicit layouts");
  }
  const int64_t silent_rank = json.contains("q_lora_rank") ? 0 : 1'536;
  WW_ASSIGN_OR_STATUS(config.q_lora_rank, ReadCountOr(json, "q_lora_rank", silent_rank));
  WW_ASSIGN_OR_STATUS(config.kv_lora_rank, ReadSize(json, "kv_lora_rank"));
  WW_ASSIGN_OR_STATUS(config.qk_nope_dim, ReadSize(json, "qk_nope_head_dim"));
  WW_ASSIGN_OR_STATUS(config.qk_rope_dim, ReadSize(json, "qk_rope_head_dim"));
  WW_ASSIGN_OR_STATUS(config.v_head_dim, ReadSize(json, "v_head_dim"));
  WW_ASSIGN_OR_STATUS(config.experts, ReadExpertsOr(json, 0));
  if (!config.HasExperts()) return OkStatus();
  WW_ASSIGN_OR_STATUS(config.moe_intermediate, ReadSize(json, "moe_intermediate_size"));
  WW_ASSIGN_OR_STATUS(const int64_t shared,
                      ReadCountOr(json, "n_shared_experts", defaults.shared_experts));
  config.shared_intermediate = shared * config.moe_intermediate;
  WW_ASSIGN_OR_STATUS(const int64_t dense,
                      ReadCountOr(json, "first_k_dense_replace", defaults.dense_layers));
  WW_ASSIGN_OR_STATUS(const int64_t step, ReadSizeOr(json, "moe_layer_freq", 1));
  for (int64_t layer = dense; layer < config.layers; ++layer) {
    config.kinds[static_cast<size_t>(layer)].moe = layer % step == 0;
  }
  return OkStatus();
}

inline Status ReadDeepseekV2(const Json& json, ModelConfig& config) {
  return ReadDeepseek(json, {.dense_layers = 0, .shared_experts = 2}, config);
}

inline Status ReadDeepseekV3(const Json& json, ModelConfig& config) {
  config.router_correction = true;
  WW_ASSIGN_OR_STATUS(config.mtp_layers, ReadCountOr(json, "num_nextn_predict_layers", 0));
  return ReadDeepseek(json, {.dense_layers = 3, .shared_experts = 1}, config);
}

/// Which layers have experts: `mlp_layer_types` (transformers 5), or all but the first
/// `first_k_dense_replace`, which engines read; they must not disagree.
inline Status ReadMlpTypes(const Json& json, int64_t dense, ModelConfig& config) {
  WW_ASSIGN_OR_STATUS(dense, ReadCountOr(json, "first_k_dense_replace", dense));
  const bool both = json.contains("first_k_dense_replace");
  WW_ASSIGN_OR_STATUS(const std::vector<std::string> types,
                      ReadLayerWords(json, "mlp_layer_types", config.layers));
  for (int64_t layer = 0; layer < config.layers; ++layer) {
    const auto at = static_cast<size_t>(layer);
    const bool moe = types.empty() ? layer >= dense : types[at] == "sparse";
    if (!types.empty() &&
        ((types[at] != "sparse" && types[at] != "dense") || (both && moe != (layer >= dense)))) {
      return {Code::kInvalidArgument, Reason::kInvalidRequest,
              "config.json's mlp_layer_types has words other than dense and sparse, or "
              "first_k_dense_replace says otherwise, and engines follow that"};
    }
    config.kinds[at].moe = moe && config.HasExperts();
  }
  return OkStatus();
}

/// As transformers 5 and vLLM have it: `indexer_types`, `index_topk_pattern` (a letter for each
/// layer), or every `index_topk_freq`-th layer from `index_skip_topk_offset` on.
inline Status ReadIndexer(const Json& json, int64_t heads, ModelConfig& config) {
  WW_ASSIGN_OR_STATUS(config.index_heads, ReadSizeOr(json, "index_n_heads", heads));
  WW_ASSIGN_OR_STATUS(config.index_dim, ReadSizeOr(json, "index_head_dim", 128));
  if (config.q_lora_rank == 0) {
    return {Code::kInvalidArgument, Reason::kInvalidRequest,
            "config.json has an indexer and no q_lora_rank: the indexer reads what that gives"};
  }
  WW_ASSIGN_OR_STATUS(std::vector<std::string> types,
                      ReadLayerWords(json, "indexer_types", config.layers));
  if (types.empty()) {
    WW_ASSIGN_OR_STATUS(types, ReadLayerWords(json, "index_topk_pattern", config.layers));
  }
  WW_ASSIGN_OR_STATUS(const int64_t step, ReadSizeOr(json, "index_topk_freq", 1));
  WW_ASSIGN_OR_STATUS(const int64_t offset, ReadCountOr(json, "index_skip_topk_offset", 2));
  for (int64_t layer = 0; layer < config.layers; ++layer) {
    const auto at = static_cast<size_t>(layer);
    const std::string word = types.empty() ? "" : types[at];
    if (!types.empty() && word != "full" && word != "shared" && word != "F" && word != "S") {
      return {Code::kInvalidArgument, Reason::kInvalidRequest,
              "config.json's indexer_types or index_topk_pattern has words other than full and "
              "shared (F and S)"};
    }
    config.kinds[at].shares_index = types.empty()
                                        ? std::max<int64_t>(layer - offset + 1, 0) % step != 0
                                        : word == "shared" || word == "S";
  }
  return OkStatus();
}

/// transformers' defaults of DeepSeek-V3.2, GLM-5 and GLM-4.7-Flash.
struct SparseDefaults {
  int64_t dense_layers = 0;
  int64_t index_heads = 0;  ///< 0: no indexer
};

inline Status ReadTypedDeepseek(const Json& json, const SparseDefaults& defaults,
                                ModelConfig& config) {
  config.router_correction = true;
  WW_ASSIGN_OR_STATUS(config.mtp_layers, ReadCountOr(json, "num_nextn_predict_layers", 0));
  WW_RETURN_IF_ERROR(ReadDeepseek(json, {.dense_layers = 0, .shared_experts = 1}, config));
  WW_RETURN_IF_ERROR(ReadMlpTypes(json, defaults.dense_layers, config));
  return defaults.index_heads > 0 ? ReadIndexer(json, defaults.index_heads, config) : OkStatus();
}

inline Status ReadDeepseekV32(const Json& json, ModelConfig& config) {
  return ReadTypedDeepseek(json, {.dense_layers = 3, .index_heads = 64}, config);
}
inline Status ReadGlmMoeDsa(const Json& json, ModelConfig& config) {
  return ReadTypedDeepseek(json, {.dense_layers = 3, .index_heads = 32}, config);
}
inline Status ReadGlm4MoeLite(const Json& json, ModelConfig& config) {
  return ReadTypedDeepseek(json, {.dense_layers = 1}, config);
}

inline constexpr Family kDeepseekV2 = {"deepseek_v2", kDeepseekTensors, ReadDeepseekV2};
inline constexpr Family kDeepseekV3 = {"deepseek_v3", kDeepseekTensors, ReadDeepseekV3,
                                       kDeepseekMtpCopies};
inline constexpr Family kKimiK2 = {"kimi_k2", kDeepseekTensors, ReadDeepseekV3, kDeepseekMtpCopies};
inline constexpr Family kDeepseekV32 = {"deepseek_v32", kDeepseekTensors, ReadDeepseekV32,
                                        kDeepseekMtpCopies};
inline constexpr Family kGlmMoeDsa = {"glm_moe_dsa", kDeepseekTensors, ReadGlmMoeDsa,
                                      kDeepseekMtpCopies};
inline constexpr Family kGlm4MoeLite = {"glm4_moe_lite", kDeepseekTensors, ReadGlm4MoeLite,
                                        kDeepseekMtpCopies};

}  // namespace weightwire::layout
