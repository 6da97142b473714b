#include "tests/support/fp8_oracle.h"

#include <algorithm>

namespace weightwire::family_oracle {
namespace {

/// Cells of scales: this and the first weight of the block.
constexpr uint64_t kScale = uint64_t{1} << 62;

bool EndsWith(const std::string& text, std::initializer_list<const char*> ends) {
  return std::any_of(ends.begin(), ends.end(),
                     [&](const char* end) { return text.ends_with(end); });
}

/// A tensor of the checkpoint that an engine's parameter is made of.
std::string OnePart(const Config& c, const std::string& local) {
  const bool mixtral = c.Is({"mixtral"});
  const struct {
    const char* fused;
    const char* part;
  } parts[] = {{"routed_experts.", ""},
               {"qkv_proj.", "q_proj."},
               {"fused_qkv_a_proj_with_mqa.", "q_a_proj."},
               {"fused_qkv_a_proj.", "q_a_proj."},
               {"gate_up_proj.", "gate_proj."},
               {"w13_weight", mixtral ? "0.w1.weight" : "0.gate_proj.weight"},
               {"w2_weight", mixtral ? "0.w2.weight" : "0.down_proj.weight"}};
  std::string name = local;
  for (const auto& [fused, part] : parts) {
    const size_t at = name.find(fused);
    if (at != std::string::npos) name.replace(at, std::string(fused).size(), part);
  }
  return name;
}

/// Of each matrix, one cell for each block.
Array ScalesOf(const Array& weights, const Quantization& q) {
  const size_t ndim = weights.shape.size();
  const int64_t rows = weights.shape.at(ndim - 2), columns = weights.shape.at(ndim - 1);
  Array scales{weights.shape, {}, true};
  scales.shape[ndim - 2] = (rows + q.rows - 1) / q.rows;
  scales.shape[ndim - 1] = (columns + q.columns - 1) / q.columns;
  for (size_t matrix = 0; matrix < weights.cells.size(); matrix += rows * columns) {
    for (int64_t row = 0; row < rows; row += q.rows) {
      for (int64_t column = 0; column < columns; column += q.columns) {
        scales.cells.push_back(kScale | weights.cells.at(matrix + row * columns + column));
      }
    }
  }
  return scales;
}

/// The rules of vLLM's validate_fp8_block_shape and of its loaders of experts.
class Blocks {
 public:
  Blocks(const Config& c, const Quantization& q, const EngineShape& s) : c_(c), q_(q), s_(s) {}

  bool Fit() {
    for (int64_t layer = 0; layer < c_.layers; ++layer) {
      at_ = LayerPrefix(layer);
      c_.Latent() ? Latent() : Grouped();
      if (c_.MoeLayer(layer)) {
        Experts(MoePrefix(c_, layer));
        if (c_.SharedSize() > 0) Glu(SharedPrefix(c_, layer), c_.SharedSize());
      } else {
        Glu(at_ + "mlp.", c_.intermediate);
      }
    }
    return fit_;
  }

 private:
  /// Fused outputs of one rank; without tensor parallelism the last ones may end in a block.
  void Merged(const std::vector<std::string>& names, std::vector<int64_t> sizes, bool cut) {
    const bool first = IsQuantized(c_, q_, names[0]);
    for (const std::string& name : names) fit_ = fit_ && IsQuantized(c_, q_, name) == first;
    if (!cut) sizes.pop_back();
    for (int64_t size : sizes) fit_ = fit_ && (!first || size % q_.rows == 0);
  }
  /// Inputs of one rank.
  void Row(const std::string& name, int64_t size) {
    if (IsQuantized(c_, q_, name) && s_.tp > 1) fit_ = fit_ && size % q_.columns == 0;
  }
  void Glu(const std::string& at, int64_t inner) {
    const int64_t part = inner / s_.tp;
    Merged({at + "gate_proj.weight", at + "up_proj.weight"}, {part, part}, s_.tp > 1);
    Row(at + "down_proj.weight", part);
  }
  void Grouped() {
    const std::string at = at_ + "self_attn.";
    const int64_t q = c_.heads / s_.tp * c_.head_dim;
    const int64_t kv = std::max<int64_t>(1, c_.kv_heads / s_.tp) * c_.head_dim;
    Merged({at + "q_proj.weight", at + "k_proj.weight", at + "v_proj.weight"}, {q, kv, kv},
           s_.tp > 1);
    Row(at + "o_proj.weight", q);
  }
  void Latent() {
    const std::string at = at_ + "self_attn.";
    const int64_t heads = c_.heads / s_.tp;
    const int64_t q = heads * (c_.nope + c_.rope);
    if (c_.q_lora > 0) {
      Merged({at + "q_a_proj.weight", at + "kv_a_proj_with_mqa.weight"},
             {c_.q_lora, c_.kv_lora + c_.rope}, false);
      Merged({at + "q_b_proj.weight"}, {q}, s_.tp > 1);
    } else {
      Merged({at + "q_proj.weight"}, {q}, s_.tp > 1);
    }
    Merged({at + "kv_b_proj.weight"}, {heads * (c_.nope + c_.v_dim)}, s_.tp > 1);
    Row(at + "o_proj.weight", heads * c_.v_dim);
  }
  void Experts(const std::string& at) {
    const bool mixtral = c_.Is({"mixtral"});
    const int64_t ep = std::max<int64_t>(1, s_.ep);
    const int64_t parts = s_.sglang ? s_.tp / ep : s_.ep > 0 ? 1 : s_.tp * s_.dp;
    const int64_t part = c_.moe_intermediate / parts;
    for (int64_t e = 0; e < c_.experts; ++e) {
      const std::string here = at + "experts." + std::to_string(e) + (mixtral ? ".w" : ".");
      Merged({here + (mixtral ? "1.weight" : "gate_proj.weight"),
              here + (mixtral ? "3.weight" : "up_proj.weight")},
             {part, part}, parts > 1);
      const std::string down = here + (mixtral ? "2.weight" : "down_proj.weight");
      if (parts > 1 && IsQuantized(c_, q_, down)) fit_ = fit_ && part % q_.columns == 0;
    }
  }

  const Config& c_;
  const Quantization& q_;
  const EngineShape& s_;
  std::string at_;
  bool fit_ = true;
};

/// torch.chunk along dimension 0 or 1; nothing where the chunks before have everything.
Array TorchChunk(const Array& whole, int64_t dim, int64_t parts, int64_t index) {
  const Array turned = dim == 0 ? whole : Transpose(whole);
  const int64_t chunk = (turned.rows() + parts - 1) / parts;
  const int64_t begin = std::min(index * chunk, turned.rows());
  const Array part = Rows(turned, begin, std::min(chunk, turned.rows() - begin));
  return dim == 0 ? part : Transpose(part);
}

/// Which dimension tensor parallelism cuts; −1: none.
int64_t TensorParallelDim(const std::string& name) {
  const auto has = [&name](std::initializer_list<const char*> parts) {
    return std::any_of(parts.begin(), parts.end(),
                       [&name](const char* part) { return name.find(part) != std::string::npos; });
  };
  if (has({"o_proj.weight", "down_proj.weight", ".w2.weight"})) return 1;
  const bool rows = has({"embed_tokens", "lm_head", "q_proj", "k_proj", "v_proj", "q_b_proj",
                         "kv_b_proj", "gate_proj", "up_proj", ".w1.weight", ".w3.weight"});
  return rows ? 0 : -1;
}

}  // namespace

std::string Quantization::Added(const std::string& config_json) const {
  std::string list;
  for (const std::string& module : skipped) {
    list.append(list.empty() ? "\"" : ", \"").append(module).append("\"");
  }
  std::string json = config_json;
  json.pop_back();
  return json + R"(, "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", )" +
         (powers_of_two ? R"("scale_fmt": "ue8m0", )" : "") +
         R"("activation_scheme": "dynamic", "weight_block_size": [)" + std::to_string(rows) + ", " +
         std::to_string(columns) + R"(], "modules_to_not_convert": [)" + list + "]}}";
}

bool IsQuantized(const Config& c, const Quantization& q, const std::string& canonical) {
  if (!canonical.ends_with(".weight")) return false;
  for (const std::string& module : q.skipped) {
    if ((std::string(".") + canonical).find("." + module + ".") != std::string::npos) return false;
  }
  if (EndsWith(canonical, {"mlp.gate.weight", "block_sparse_moe.gate.weight",
                           "mlp.shared_expert_gate.weight"})) {
    return c.Is({"mixtral", "qwen2_moe", "qwen3_moe"});
  }
  if (EndsWith(canonical, {"w1.weight", "w2.weight", "w3.weight"})) return true;
  return EndsWith(canonical, {"_proj.weight", "kv_a_proj_with_mqa.weight"}) &&
         !EndsWith(canonical, {"eh_proj.weight"});
}

Tensors WithScales(const Config& c, const Quantization& q, const Tensors& local) {
  Tensors out;
  for (const auto& [name, array] : local) {
    out[name] = array;
    if (IsQuantized(c, q, OnePart(c, name))) out[name + "_scale_inv"] = ScalesOf(array, q);
  }
  return out;
}

std::vector<Tensors> FsdpRanks(const Tensors& all, int64_t dp, int64_t tp) {
  std::vector<Tensors> ranks(static_cast<size_t>(dp * tp));
  for (const auto& [name, array] : all) {
    const int64_t dim = TensorParallelDim(name);
    for (int64_t rank = 0; rank < dp * tp; ++rank) {
      Array& part = ranks[static_cast<size_t>(rank)][name] = array;
      if (name.ends_with("e_score_correction_bias")) continue;  // a buffer
      if (dim >= 0) part = TorchChunk(part, dim, tp, rank % tp);
      part = TorchChunk(part, 0, dp, rank / tp);
      if (part.cells.empty()) part.shape[0] = 0;  // as FSDP2 reports it
    }
  }
  return ranks;
}

bool FsdpFits(const Tensors& all, const Quantization& q, int64_t tp) {
  bool fits = true;
  for (const auto& [name, array] : all) {
    const int64_t dim = TensorParallelDim(name);
    if (dim < 0 || !all.contains(name + "_scale_inv")) continue;
    const int64_t size = array.shape[static_cast<size_t>(dim)];
    const int64_t chunk = (size + tp - 1) / tp;
    fits = fits && (chunk % (dim == 0 ? q.rows : q.columns) == 0 || chunk == size);
  }
  return fits;
}

bool BlocksFit(const Config& c, const Quantization& q, const EngineShape& s) {
  return Blocks(c, q, s).Fit();
}

}  // namespace weightwire::family_oracle
