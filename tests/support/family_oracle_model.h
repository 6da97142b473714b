#pragma once

#include <set>
#include <string>
#include <vector>

#include "tests/support/family_oracle_array.h"

namespace weightwire::family_oracle {

/// A tower in front of a text model.
struct Vision {
  int64_t depth = 0, hidden = 1, heads = 1, intermediate = 1;
  int64_t channels = 1, frames = 1, patch = 1, merge = 1, out = 1;
  int64_t side = 1;  ///< of the image, in patches
  int64_t mergers = 0, projector = 1;
  bool pooling = false, projector_bias = false;
  int64_t Merged() const { return hidden * merge * merge; }
};

/// A tiny model of one of the families that the oracle knows.
struct Config {
  std::string family;
  int64_t hidden = 1;
  int64_t layers = 1;
  int64_t heads = 1;
  int64_t kv_heads = 1;
  int64_t head_dim = 1;
  int64_t intermediate = 1;
  int64_t vocab = 1;
  bool tied = false;
  bool attention_bias = false;
  bool output_bias = false;  ///< seed_oss
  bool mlp_bias = false;     ///< llama, seed_oss
  bool use_qk_norm = false;  ///< glm4_moe

  int64_t experts = 0;
  int64_t moe_intermediate = 0;
  int64_t shared_intermediate = 0;  ///< qwen2_moe
  int64_t shared_experts = 0;       ///< deepseek, glm4_moe
  int64_t first_dense = 0;          ///< deepseek, glm4_moe
  int64_t step = 1;  ///< decoder_sparse_step, moe_layer_freq, interleave_moe_layer_step
  bool lists_moe_layers = false;   ///< llama4_text
  std::set<int64_t> moe_layers;    ///< what it lists
  std::set<int64_t> dense_layers;  ///< mlp_only_layers

  int64_t q_lora = 0;
  int64_t kv_lora = 0;
  int64_t nope = 0;
  int64_t rope = 0;
  int64_t v_dim = 0;
  int64_t mtp = 0;
  int64_t index_heads = 0, index_dim = 1;  ///< deepseek_v32, glm_moe_dsa
  std::set<int64_t> shares_index;          ///< layers without an indexer
  Vision vision;                           ///< qwen2_5_vl and wrappers

  // What config.json leaves to its defaults.
  bool says_head_dim = true;
  bool says_tied = true;
  bool nests_text = false;  ///< qwen2_5_vl: the text model's sizes stand in text_config

  /// The family of the text model within a wrapper; of others their own.
  std::string Text() const;
  bool Wraps() const { return Text() != family; }
  /// Whether the text model is of one of the families.
  bool Is(std::initializer_list<const char*> families) const;
  /// Their layers with experts may be listed word by word.
  bool Typed() const { return Is({"deepseek_v32", "glm_moe_dsa", "glm4_moe_lite"}); }
  bool Indexed() const { return Is({"deepseek_v32", "glm_moe_dsa"}); }
  bool Latent() const { return Typed() || Is({"deepseek_v2", "deepseek_v3", "kimi_k2"}); }
  bool HasMtp() const { return Typed() || Is({"deepseek_v3", "kimi_k2"}); }
  bool FusedExperts() const { return Is({"llama4_text", "qwen3_vl_moe_text"}); }
  bool Mixture() const {
    return Latent() || FusedExperts() ||
           Is({"mixtral", "qwen2_moe", "qwen3_moe", "glm4_moe", "gpt_oss", "minimax_m2"});
  }
  /// Whether the scheme ("megatron", "sglang", …) is described for the model at all.
  bool Describes(const std::string& scheme) const;
  /// Whether layer (MTP layers come after the decoder's) has experts.
  bool MoeLayer(int64_t layer) const;
  bool AnyDenseLayer() const;
  bool AnyMoeLayer() const;  ///< of the decoder
  /// Inner size of all shared experts together.
  int64_t SharedSize() const;
  bool QkvBias() const;
  bool OBias() const;
  bool HeadNorms() const;
  bool RouterCorrection() const { return HasMtp() || Is({"glm4_moe", "minimax_m2"}); }
  bool WholeNorms() const { return Is({"minimax_m2"}); }  ///< of q and k, over all heads
};
const std::vector<std::string>& KnownFamilies();

/// config.json as transformers writes it for the family.
std::string ConfigJson(const Config& config);

/// The Hugging Face checkpoint: a different number in every element of all tensors.
Tensors HuggingFace(const Config& config);
/// The same as its files hold it: with what checkpoints store twice, or without MTP layers.
Tensors Checkpoint(const Config& config, const Tensors& hf, bool with_mtp);

struct Expert {
  Array gate, up, down;  ///< [inner, hidden] twice, [hidden, inner]
  Array gate_bias, up_bias, down_bias;
};

/// A layer's tensors, each as torch's Linear holds it ([out, in]); absent ones are empty.
struct Layer {
  bool moe = false;
  Array input_norm, attention_output_norm, mlp_norm, mlp_output_norm;
  Array q, k, v, o, q_bias, k_bias, v_bias, o_bias, q_norm, k_norm, sinks;
  Array q_a, q_a_norm, q_b, kv_a, kv_a_norm, kv_b;
  Array index_q, index_k, index_norm, index_norm_bias, index_weights;
  Array gate, up, down, gate_bias, up_bias, down_bias;
  Array router, router_bias, router_correction;
  std::vector<Expert> experts;
  Array shared_gate, shared_up, shared_down, shared_expert_gate;
  Array enorm, hnorm, eh_proj, head_norm;  ///< MTP
};

struct Weights {
  Array embedding, final_norm, head;  ///< head is empty when tied
  std::vector<Layer> layers;          ///< the decoder's, then MTP
  Tensors vision;                     ///< the tower's, by name
};
Weights Load(const Config& config, const Tensors& hf);

/// A name of the text model within the wrapper's checkpoint.
std::string Wrapped(const Config& config, const std::string& plain);

/// How the text model alone calls a layer's modules; each begins with "model.layers.<layer>.".
std::string LayerPrefix(int64_t layer);
std::string DensePrefix(const Config& config, int64_t layer);   ///< "….mlp."
std::string MoePrefix(const Config& config, int64_t layer);     ///< "….mlp."
std::string RouterModule(const Config& config, int64_t layer);  ///< "….mlp.gate"
std::string CorrectionName(const Config& config, int64_t layer);
std::string SharedPrefix(const Config& config, int64_t layer);  ///< "….mlp.shared_experts."
/// Names of the norms behind attention, before the MLP and behind it (Gemma 2 and 3 have three).
std::string AttentionOutputNormName(const Config& config, int64_t layer);  ///< empty: there is none
std::string MlpNormName(const Config& config, int64_t layer);

}  // namespace weightwire::family_oracle
