#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

/// What each rank of a dense model holds, computed the way the loaders do it: make the whole
/// Hugging Face tensor, then slice, concatenate and pad arrays. Written from the facts in
/// docs/layouts.md; shares nothing with server/layout or server/plan.
namespace weightwire::oracle {

/// A cell that no loader fills: vocabulary padding.
inline constexpr uint64_t kPadding = uint64_t{1} << 63;

/// A matrix of `columns` columns, or a vector (`columns` = 0) of `rows` elements.
struct Array {
  int64_t rows = 0;
  int64_t columns = 0;
  std::vector<uint64_t> cells;

  int64_t Width() const { return columns == 0 ? 1 : columns; }
  std::vector<int64_t> Shape() const {
    return columns == 0 ? std::vector<int64_t>{rows} : std::vector<int64_t>{rows, columns};
  }
};
using Tensors = std::map<std::string, Array>;

inline Array Rows(const Array& whole, int64_t begin, int64_t count) {
  Array out{count, whole.columns, {}};
  for (int64_t cell = begin * whole.Width(); cell < (begin + count) * whole.Width(); ++cell) {
    out.cells.push_back(whole.cells.at(static_cast<size_t>(cell)));
  }
  return out;
}

inline Array Columns(const Array& whole, int64_t begin, int64_t count) {
  Array out{whole.rows, count, {}};
  for (int64_t row = 0; row < whole.rows; ++row) {
    for (int64_t column = begin; column < begin + count; ++column) {
      out.cells.push_back(whole.cells.at(static_cast<size_t>(row * whole.columns + column)));
    }
  }
  return out;
}

inline Array Concat(const std::vector<Array>& parts) {
  Array out{0, parts.at(0).columns, {}};
  for (const Array& part : parts) {
    if (part.columns != out.columns) throw std::logic_error("columns differ");
    out.rows += part.rows;
    out.cells.insert(out.cells.end(), part.cells.begin(), part.cells.end());
  }
  return out;
}

/// torch.chunk of equal parts along dimension 0, and along dimension 1.
inline Array RowChunk(const Array& whole, int64_t parts, int64_t index) {
  if (whole.rows % parts != 0) throw std::logic_error("rows do not divide");
  return Rows(whole, whole.rows / parts * index, whole.rows / parts);
}
inline Array ColumnChunk(const Array& whole, int64_t parts, int64_t index) {
  if (whole.columns % parts != 0) throw std::logic_error("columns do not divide");
  return Columns(whole, whole.columns / parts * index, whole.columns / parts);
}

inline Array PadRows(Array array, int64_t rows) {
  array.cells.resize(static_cast<size_t>(rows * array.Width()), kPadding);
  array.rows = rows;
  return array;
}

struct DenseConfig {
  std::string model_type;  ///< qwen2, qwen3 or llama
  int64_t hidden = 1;
  int64_t layers = 1;
  int64_t heads = 1;
  int64_t kv_heads = 1;
  int64_t head_dim = 1;
  int64_t intermediate = 1;
  int64_t vocab = 1;
  bool tied = false;
  bool attention_bias = false;  ///< qwen3 and llama; qwen2 has q, k and v biases always
  bool mlp_bias = false;        ///< llama

  bool QkvBias() const { return model_type == "qwen2" || attention_bias; }
  bool OBias() const { return model_type != "qwen2" && attention_bias; }
  bool MlpBias() const { return model_type == "llama" && mlp_bias; }
  bool HeadNorms() const { return model_type == "qwen3"; }
};

inline std::string ConfigJson(const DenseConfig& c) {
  const auto number = [](const char* key, int64_t value) {
    return std::string("\"") + key + "\": " + std::to_string(value) + ", ";
  };
  const auto flag = [](const char* key, bool value) {
    return std::string("\"") + key + "\": " + (value ? "true" : "false") + ", ";
  };
  return std::string("{") + number("hidden_size", c.hidden) +
         number("num_hidden_layers", c.layers) + number("num_attention_heads", c.heads) +
         number("num_key_value_heads", c.kv_heads) + number("head_dim", c.head_dim) +
         number("intermediate_size", c.intermediate) + number("vocab_size", c.vocab) +
         flag("tie_word_embeddings", c.tied) + flag("attention_bias", c.attention_bias) +
         flag("mlp_bias", c.mlp_bias) + "\"model_type\": \"" + c.model_type + "\"}";
}

/// A different number for every element of every tensor (splitmix64, below kPadding).
inline uint64_t CellValue(uint64_t tensor, uint64_t index, uint64_t salt) {
  uint64_t x = salt + (tensor << 32 | index) * 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return (x ^ (x >> 31)) >> 1;
}

/// The Hugging Face checkpoint.
inline Tensors HuggingFace(const DenseConfig& c, uint64_t salt) {
  Tensors hf;
  const auto add = [&](const std::string& name, int64_t rows, int64_t columns) {
    Array array{rows, columns, {}};
    for (int64_t i = 0; i < rows * array.Width(); ++i) {
      array.cells.push_back(CellValue(hf.size(), static_cast<uint64_t>(i), salt));
    }
    hf[name] = std::move(array);
  };
  add("model.embed_tokens.weight", c.vocab, c.hidden);
  if (!c.tied) add("lm_head.weight", c.vocab, c.hidden);
  add("model.norm.weight", c.hidden, 0);
  for (int64_t layer = 0; layer < c.layers; ++layer) {
    const std::string at = std::string("model.layers.") + std::to_string(layer) + ".";
    const int64_t q = c.heads * c.head_dim, kv = c.kv_heads * c.head_dim;
    add(at + "input_layernorm.weight", c.hidden, 0);
    add(at + "post_attention_layernorm.weight", c.hidden, 0);
    add(at + "self_attn.q_proj.weight", q, c.hidden);
    add(at + "self_attn.k_proj.weight", kv, c.hidden);
    add(at + "self_attn.v_proj.weight", kv, c.hidden);
    add(at + "self_attn.o_proj.weight", c.hidden, q);
    if (c.QkvBias()) {
      add(at + "self_attn.q_proj.bias", q, 0);
      add(at + "self_attn.k_proj.bias", kv, 0);
      add(at + "self_attn.v_proj.bias", kv, 0);
    }
    if (c.OBias()) add(at + "self_attn.o_proj.bias", c.hidden, 0);
    if (c.HeadNorms()) {
      add(at + "self_attn.q_norm.weight", c.head_dim, 0);
      add(at + "self_attn.k_norm.weight", c.head_dim, 0);
    }
    add(at + "mlp.gate_proj.weight", c.intermediate, c.hidden);
    add(at + "mlp.up_proj.weight", c.intermediate, c.hidden);
    add(at + "mlp.down_proj.weight", c.hidden, c.intermediate);
    if (c.MlpBias()) {
      add(at + "mlp.gate_proj.bias", c.intermediate, 0);
      add(at + "mlp.up_proj.bias", c.intermediate, 0);
      add(at + "mlp.down_proj.bias", c.hidden, 0);
    }
  }
  return hf;
}

struct MegatronShape {
  int64_t tp = 1;
  int64_t cp = 1;
  int64_t dp = 1;
  std::vector<int64_t> stage_layers = {1};
  int64_t vocab_rows = 1;  ///< padded, in all
  bool transformer_engine = false;
};

inline bool HeadsFit(const DenseConfig& c, int64_t tp) {
  const bool kv_fit = c.kv_heads % tp == 0 || (tp > c.kv_heads && tp % c.kv_heads == 0);
  return c.heads % tp == 0 && kv_fit && c.intermediate % tp == 0;
}

inline bool MegatronFits(const DenseConfig& c, const MegatronShape& m) {
  return HeadsFit(c, m.tp) && (c.heads + 2 * c.kv_heads) * c.head_dim % m.tp == 0 &&
         m.vocab_rows >= c.vocab && m.vocab_rows % m.tp == 0 &&
         std::accumulate(m.stage_layers.begin(), m.stage_layers.end(), int64_t{0}) == c.layers;
}

/// linear_qkv before it is cut: for each kv group its q heads, its k head and its v head.
inline Array GroupedQkv(const DenseConfig& c, const Array& q, const Array& k, const Array& v) {
  std::vector<Array> parts;
  for (int64_t group = 0; group < c.kv_heads; ++group) {
    parts.push_back(RowChunk(q, c.kv_heads, group));
    parts.push_back(RowChunk(k, c.kv_heads, group));
    parts.push_back(RowChunk(v, c.kv_heads, group));
  }
  return Concat(parts);
}

/// What tensor-parallel rank `t` of pipeline stage `stage` holds.
inline Tensors MegatronCut(const DenseConfig& c, const Tensors& hf, const MegatronShape& m,
                           int64_t t, size_t stage) {
  Tensors out;
  const bool first = stage == 0, last = stage + 1 == m.stage_layers.size();
  const auto vocab = [&](const char* name) {
    return RowChunk(PadRows(hf.at(name), m.vocab_rows), m.tp, t);
  };
  if (first) out["embedding.word_embeddings.weight"] = vocab("model.embed_tokens.weight");
  if (last) out["decoder.final_layernorm.weight"] = hf.at("model.norm.weight");
  if (last && !c.tied) out["output_layer.weight"] = vocab("lm_head.weight");
  if (last && !first && c.tied) out["output_layer.weight"] = vocab("model.embed_tokens.weight");
  int64_t layer = 0;
  for (size_t s = 0; s < stage; ++s) layer += m.stage_layers[s];
  for (int64_t local = 0; local < m.stage_layers[stage]; ++local, ++layer) {
    const std::string from = std::string("model.layers.") + std::to_string(layer) + ".";
    const std::string to = std::string("decoder.layers.") + std::to_string(local) + ".";
    const auto of = [&](const char* name) -> const Array& { return hf.at(from + name); };
    const auto glu = [&](const char* gate, const char* up) {
      return Concat({RowChunk(of(gate), m.tp, t), RowChunk(of(up), m.tp, t)});
    };
    out[to + (m.transformer_engine ? "self_attention.linear_qkv.layer_norm_weight"
                                   : "input_layernorm.weight")] = of("input_layernorm.weight");
    out[to +
        (m.transformer_engine ? "mlp.linear_fc1.layer_norm_weight" : "pre_mlp_layernorm.weight")] =
        of("post_attention_layernorm.weight");
    out[to + "self_attention.linear_qkv.weight"] =
        RowChunk(GroupedQkv(c, of("self_attn.q_proj.weight"), of("self_attn.k_proj.weight"),
                            of("self_attn.v_proj.weight")),
                 m.tp, t);
    if (c.QkvBias()) {
      out[to + "self_attention.linear_qkv.bias"] =
          RowChunk(GroupedQkv(c, of("self_attn.q_proj.bias"), of("self_attn.k_proj.bias"),
                              of("self_attn.v_proj.bias")),
                   m.tp, t);
    }
    out[to + "self_attention.linear_proj.weight"] =
        ColumnChunk(of("self_attn.o_proj.weight"), m.tp, t);
    if (c.OBias()) out[to + "self_attention.linear_proj.bias"] = of("self_attn.o_proj.bias");
    if (c.HeadNorms()) {
      out[to + "self_attention.q_layernorm.weight"] = of("self_attn.q_norm.weight");
      out[to + "self_attention.k_layernorm.weight"] = of("self_attn.k_norm.weight");
    }
    out[to + "mlp.linear_fc1.weight"] = glu("mlp.gate_proj.weight", "mlp.up_proj.weight");
    out[to + "mlp.linear_fc2.weight"] = ColumnChunk(of("mlp.down_proj.weight"), m.tp, t);
    if (c.MlpBias()) {
      out[to + "mlp.linear_fc1.bias"] = glu("mlp.gate_proj.bias", "mlp.up_proj.bias");
      out[to + "mlp.linear_fc2.bias"] = of("mlp.down_proj.bias");
    }
  }
  return out;
}

/// All ranks, in Megatron's default order tp-cp-dp-pp.
inline std::vector<Tensors> MegatronRanks(const DenseConfig& c, const Tensors& hf,
                                          const MegatronShape& m) {
  std::vector<Tensors> ranks;
  for (size_t stage = 0; stage < m.stage_layers.size(); ++stage) {
    for (int64_t replica = 0; replica < m.dp * m.cp; ++replica) {
      for (int64_t t = 0; t < m.tp; ++t) ranks.push_back(MegatronCut(c, hf, m, t, stage));
    }
  }
  return ranks;
}

struct VllmShape {
  int64_t tp = 1;
  int64_t dp = 1;
  int64_t vocab_pad_to = 64;
  int64_t VocabRows(const DenseConfig& c) const {
    return (c.vocab + vocab_pad_to - 1) / vocab_pad_to * vocab_pad_to;
  }
};

inline bool VllmFits(const DenseConfig& c, const VllmShape& v) {
  return HeadsFit(c, v.tp) && v.VocabRows(c) % v.tp == 0;
}

/// What tensor-parallel rank `t` holds: q, k and v one after another, gate then up.
inline Tensors VllmFuse(const DenseConfig& c, const Tensors& hf, const VllmShape& v, int64_t t) {
  Tensors out;
  const auto vocab = [&](const char* name) {
    out[name] = RowChunk(PadRows(hf.at(name), v.VocabRows(c)), v.tp, t);
  };
  vocab("model.embed_tokens.weight");
  if (!c.tied) vocab("lm_head.weight");
  out["model.norm.weight"] = hf.at("model.norm.weight");
  for (int64_t layer = 0; layer < c.layers; ++layer) {
    const std::string at = std::string("model.layers.") + std::to_string(layer) + ".";
    const auto of = [&](const std::string& name) -> const Array& { return hf.at(at + name); };
    const auto kv = [&](const Array& whole) {
      if (v.tp <= c.kv_heads) return RowChunk(whole, v.tp, t);
      return RowChunk(whole, c.kv_heads, t / (v.tp / c.kv_heads));
    };
    const auto qkv = [&](const std::string& kind) {
      out[at + "self_attn.qkv_proj." + kind] =
          Concat({RowChunk(of("self_attn.q_proj." + kind), v.tp, t),
                  kv(of("self_attn.k_proj." + kind)), kv(of("self_attn.v_proj." + kind))});
    };
    const auto gate_up = [&](const std::string& kind) {
      out[at + "mlp.gate_up_proj." + kind] = Concat({RowChunk(of("mlp.gate_proj." + kind), v.tp, t),
                                                     RowChunk(of("mlp.up_proj." + kind), v.tp, t)});
    };
    const auto whole = [&](const std::string& name) { out[at + name] = of(name); };
    whole("input_layernorm.weight");
    whole("post_attention_layernorm.weight");
    qkv("weight");
    if (c.QkvBias()) qkv("bias");
    out[at + "self_attn.o_proj.weight"] = ColumnChunk(of("self_attn.o_proj.weight"), v.tp, t);
    if (c.OBias()) whole("self_attn.o_proj.bias");
    if (c.HeadNorms()) {
      whole("self_attn.q_norm.weight");
      whole("self_attn.k_norm.weight");
    }
    gate_up("weight");
    out[at + "mlp.down_proj.weight"] = ColumnChunk(of("mlp.down_proj.weight"), v.tp, t);
    if (c.MlpBias()) {
      gate_up("bias");
      whole("mlp.down_proj.bias");
    }
  }
  return out;
}

inline std::vector<Tensors> VllmRanks(const DenseConfig& c, const Tensors& hf, const VllmShape& v) {
  std::vector<Tensors> ranks;
  for (int64_t replica = 0; replica < v.dp; ++replica) {
    for (int64_t t = 0; t < v.tp; ++t) ranks.push_back(VllmFuse(c, hf, v, t));
  }
  return ranks;
}

}  // namespace weightwire::oracle
