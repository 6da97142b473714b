#include "tests/unit/layout/element_oracle.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <utility>

namespace weightwire::layout::oracle {
namespace {

bool Has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

std::string KindOf(const std::string& name) { return name.substr(name.rfind('.')); }

/// The layer's index in "….layers.3.rest" and the rest.
std::pair<int64_t, std::string> SplitLayer(const std::string& name) {
  const size_t begin = name.find("layers.") + 7;
  const size_t end = name.find('.', begin);
  return {std::stoll(name.substr(begin, end - begin)), name.substr(end + 1)};
}

std::optional<Element> VocabElement(const Sizes& s, int64_t t, const std::string& tensor,
                                    int64_t row, int64_t column) {
  const int64_t global = t * (s.vocab_rows / s.tp) + row;
  if (global >= s.vocab) return std::nullopt;
  return Element{tensor, global, column};
}

bool IsReplicated(const std::string& tensor) {
  return Has(tensor, "norm") || Has(tensor, "o_proj.bias") || Has(tensor, "down_proj.bias");
}

}  // namespace

std::string Sizes::ConfigJson() const {
  nlohmann::json json = {{"model_type", model_type},    {"hidden_size", hidden},
                         {"num_hidden_layers", layers}, {"num_attention_heads", heads},
                         {"num_key_value_heads", kv},   {"head_dim", head_dim},
                         {"intermediate_size", inter},  {"vocab_size", vocab},
                         {"tie_word_embeddings", tied}, {"attention_bias", attention_bias},
                         {"mlp_bias", mlp_bias}};
  return json.dump();
}

std::optional<Element> MegatronElement(const Sizes& s, int64_t t, int64_t stage,
                                       const std::string& name, int64_t row, int64_t column,
                                       bool te_names) {
  if (name == "embedding.word_embeddings.weight") {
    return VocabElement(s, t, "model.embed_tokens.weight", row, column);
  }
  if (name == "output_layer.weight") {
    return VocabElement(s, t, s.tied ? "model.embed_tokens.weight" : "lm_head.weight", row, column);
  }
  if (name == "decoder.final_layernorm.weight") return Element{"model.norm.weight", row, 0};
  const auto [local_layer, rest] = SplitLayer(name);
  int64_t layer = local_layer;
  for (int64_t before = 0; before < stage; ++before) layer += s.stages[before];
  const std::string at = "model.layers." + std::to_string(layer) + ".";
  const std::string input_norm =
      te_names ? "self_attention.linear_qkv.layer_norm_weight" : "input_layernorm.weight";
  const std::string mlp_norm =
      te_names ? "mlp.linear_fc1.layer_norm_weight" : "pre_mlp_layernorm.weight";
  if (rest == input_norm) return Element{at + "input_layernorm.weight", row, 0};
  if (rest == mlp_norm) return Element{at + "post_attention_layernorm.weight", row, 0};
  if (rest == "self_attention.q_layernorm.weight") {
    return Element{at + "self_attn.q_norm.weight", row, 0};
  }
  if (rest == "self_attention.k_layernorm.weight") {
    return Element{at + "self_attn.k_norm.weight", row, 0};
  }
  const std::string kind = KindOf(name);
  if (Has(rest, "linear_qkv.")) {
    const int64_t grouped_rows = (s.heads + 2 * s.kv) * s.head_dim;
    const int64_t global = t * (grouped_rows / s.tp) + row;
    const int64_t q_in_group = s.heads / s.kv * s.head_dim;
    const int64_t group = global / (grouped_rows / s.kv);
    const int64_t within = global % (grouped_rows / s.kv);
    if (within < q_in_group) {
      return Element{at + "self_attn.q_proj" + kind, group * q_in_group + within, column};
    }
    const bool is_k = within - q_in_group < s.head_dim;
    return Element{at + "self_attn." + (is_k ? "k" : "v") + "_proj" + kind,
                   group * s.head_dim + (within - q_in_group) % s.head_dim, column};
  }
  if (rest == "self_attention.linear_proj.weight") {
    return Element{at + "self_attn.o_proj.weight", row, t * (s.heads * s.head_dim / s.tp) + column};
  }
  if (rest == "self_attention.linear_proj.bias") {
    return Element{at + "self_attn.o_proj.bias", row, 0};
  }
  if (Has(rest, "linear_fc1.")) {
    const int64_t part = s.inter / s.tp;
    return Element{at + "mlp." + (row < part ? "gate" : "up") + "_proj" + kind,
                   t * part + row % part, column};
  }
  if (rest == "mlp.linear_fc2.weight") {
    return Element{at + "mlp.down_proj.weight", row, t * (s.inter / s.tp) + column};
  }
  if (rest == "mlp.linear_fc2.bias") return Element{at + "mlp.down_proj.bias", row, 0};
  throw std::runtime_error("the oracle does not know " + name);
}

std::optional<Element> VllmElement(const Sizes& s, int64_t t, const std::string& name, int64_t row,
                                   int64_t column) {
  if (name == "model.embed_tokens.weight" || name == "lm_head.weight") {
    return VocabElement(s, t, name, row, column);
  }
  if (IsReplicated(name)) return Element{name, row, column};
  const std::string at = name.substr(0, name.rfind('.', name.rfind('.') - 1) + 1);
  const std::string kind = KindOf(name);
  if (Has(name, "qkv_proj")) {
    const int64_t q_heads = s.heads / s.tp;
    const int64_t kv_heads = s.kv >= s.tp ? s.kv / s.tp : 1;
    const int64_t head = row / s.head_dim;
    const int64_t in_head = row % s.head_dim;
    if (head < q_heads) {
      return Element{at + "q_proj" + kind, (t * q_heads + head) * s.head_dim + in_head, column};
    }
    const int64_t local = (head - q_heads) % kv_heads;
    const int64_t global = s.kv >= s.tp ? t * kv_heads + local : t * s.kv / s.tp;
    return Element{at + (head - q_heads < kv_heads ? "k_proj" : "v_proj") + kind,
                   global * s.head_dim + in_head, column};
  }
  if (Has(name, "gate_up_proj")) {
    const int64_t part = s.inter / s.tp;
    return Element{at + (row / part == 0 ? "gate_proj" : "up_proj") + kind, t * part + row % part,
                   column};
  }
  if (Has(name, "o_proj.weight")) {
    return Element{name, row, t * (s.heads / s.tp) * s.head_dim + column};
  }
  if (Has(name, "down_proj.weight")) return Element{name, row, t * (s.inter / s.tp) + column};
  throw std::runtime_error("the oracle does not know " + name);
}

int64_t MegatronCopies(const Sizes& s, const std::string& tensor) {
  const int64_t replicas = s.cp * s.dp;
  if (IsReplicated(tensor)) return replicas * s.tp;
  const bool twice = tensor == "model.embed_tokens.weight" && s.tied && s.pp > 1;
  return twice ? 2 * replicas : replicas;
}

int64_t VllmCopies(const Sizes& s, const std::string& tensor) {
  if (IsReplicated(tensor)) return s.dp * s.tp;
  const bool is_kv = Has(tensor, "k_proj") || Has(tensor, "v_proj");
  return is_kv ? s.dp * std::max<int64_t>(1, s.tp / s.kv) : s.dp;
}

}  // namespace weightwire::layout::oracle
