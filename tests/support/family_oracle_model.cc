#include "tests/support/family_oracle_model.h"

#include <algorithm>

namespace weightwire::family_oracle {
namespace {

/// Transform arrays whose elements count on from one tensor to the next.
class Maker {
 public:
  Maker(Tensors& tensors, std::string at) : tensors_(&tensors), at_(std::move(at)) {}

  void Add(const std::string& name, std::vector<int64_t> shape) {
    Array array{std::move(shape), {}};
    const auto size = static_cast<size_t>(array.rows() * array.Width());
    array.cells.reserve(size);
    for (size_t i = 0; i < size; ++i) array.cells.push_back(next_++);
    (*tensors_)[at_ + name] = std::move(array);
  }
  void AddIf(bool present, const std::string& name, std::vector<int64_t> shape) {
    if (present) Add(name, std::move(shape));
  }
  void MarkF32(const std::string& name) { tensors_->at(at_ + name).f32 = true; }
  void MoveTo(std::string at) { at_ = std::move(at); }
  void MoveInto(Tensors& tensors) { tensors_ = &tensors; }

 private:
  Tensors* tensors_;
  std::string at_;
  uint64_t next_ = 1;
};

bool FourNorms(const Config& c) { return c.Is({"gemma2", "gemma3_text"}); }

void AddGrouped(Maker& make, const Config& c) {
  const int64_t q = c.heads * c.head_dim, kv = c.kv_heads * c.head_dim;
  const bool fused = c.Is({"phi3"});
  make.AddIf(fused, "self_attn.qkv_proj.weight", {q + 2 * kv, c.hidden});
  make.AddIf(!fused, "self_attn.q_proj.weight", {q, c.hidden});
  make.AddIf(!fused, "self_attn.k_proj.weight", {kv, c.hidden});
  make.AddIf(!fused, "self_attn.v_proj.weight", {kv, c.hidden});
  make.Add("self_attn.o_proj.weight", {c.hidden, q});
  make.AddIf(c.QkvBias(), "self_attn.q_proj.bias", {q});
  make.AddIf(c.QkvBias(), "self_attn.k_proj.bias", {kv});
  make.AddIf(c.QkvBias(), "self_attn.v_proj.bias", {kv});
  make.AddIf(c.OBias(), "self_attn.o_proj.bias", {c.hidden});
  make.AddIf(c.HeadNorms(), "self_attn.q_norm.weight", {c.head_dim});
  make.AddIf(c.HeadNorms(), "self_attn.k_norm.weight", {c.head_dim});
  make.AddIf(c.WholeNorms(), "self_attn.q_norm.weight", {q});
  make.AddIf(c.WholeNorms(), "self_attn.k_norm.weight", {kv});
  make.AddIf(c.Is({"gpt_oss"}), "self_attn.sinks", {c.heads});
}

void AddLatent(Maker& make, const Config& c) {
  const int64_t q = c.heads * (c.nope + c.rope);
  if (c.q_lora > 0) {
    make.Add("self_attn.q_a_proj.weight", {c.q_lora, c.hidden});
    make.Add("self_attn.q_a_layernorm.weight", {c.q_lora});
    make.Add("self_attn.q_b_proj.weight", {q, c.q_lora});
  } else {
    make.Add("self_attn.q_proj.weight", {q, c.hidden});
  }
  make.Add("self_attn.kv_a_proj_with_mqa.weight", {c.kv_lora + c.rope, c.hidden});
  make.Add("self_attn.kv_a_layernorm.weight", {c.kv_lora});
  make.Add("self_attn.kv_b_proj.weight", {c.heads * (c.nope + c.v_dim), c.kv_lora});
  make.Add("self_attn.o_proj.weight", {c.hidden, c.heads * c.v_dim});
}

void AddIndexer(Maker& make, const Config& c) {
  make.Add("self_attn.indexer.wq_b.weight", {c.index_heads * c.index_dim, c.q_lora});
  make.Add("self_attn.indexer.wk.weight", {c.index_dim, c.hidden});
  make.Add("self_attn.indexer.k_norm.weight", {c.index_dim});
  make.Add("self_attn.indexer.k_norm.bias", {c.index_dim});
  make.Add("self_attn.indexer.weights_proj.weight", {c.index_heads, c.hidden});
}

void AddGlu(Maker& make, const std::string& at, int64_t inner, int64_t hidden, bool bias) {
  make.Add(at + "gate_proj.weight", {inner, hidden});
  make.Add(at + "up_proj.weight", {inner, hidden});
  make.Add(at + "down_proj.weight", {hidden, inner});
  make.AddIf(bias, at + "gate_proj.bias", {inner});
  make.AddIf(bias, at + "up_proj.bias", {inner});
  make.AddIf(bias, at + "down_proj.bias", {hidden});
}

/// A layer's dense MLP.
void AddDense(Maker& make, const Config& c) {
  if (!c.Is({"phi3", "glm4"})) {
    const std::string at = c.Is({"llama4_text"}) ? "feed_forward." : "mlp.";
    return AddGlu(make, at, c.intermediate, c.hidden,
                  c.Is({"llama", "granite", "seed_oss"}) && c.mlp_bias);
  }
  make.Add("mlp.gate_up_proj.weight", {2 * c.intermediate, c.hidden});
  make.Add("mlp.down_proj.weight", {c.hidden, c.intermediate});
}

void AddTower(Maker& make, const Vision& v) {
  const int64_t h = v.hidden, merged = v.Merged();
  make.Add("visual.patch_embed.proj.weight", {h, v.channels, v.frames, v.patch, v.patch});
  for (int64_t block = 0; block < v.depth; ++block) {
    const std::string at = std::string("visual.blocks.") + std::to_string(block) + ".";
    make.Add(at + "norm1.weight", {h});
    make.Add(at + "norm2.weight", {h});
    make.Add(at + "attn.qkv.weight", {3 * h, h});
    make.Add(at + "attn.qkv.bias", {3 * h});
    make.Add(at + "attn.proj.weight", {h, h});
    make.Add(at + "attn.proj.bias", {h});
    AddGlu(make, at + "mlp.", v.intermediate, h, true);
  }
  make.Add("visual.merger.ln_q.weight", {h});
  make.Add("visual.merger.mlp.0.weight", {merged, merged});
  make.Add("visual.merger.mlp.0.bias", {merged});
  make.Add("visual.merger.mlp.2.weight", {v.out, merged});
  make.Add("visual.merger.mlp.2.bias", {v.out});
}

void AddLinear(Maker& make, const std::string& name, int64_t rows, int64_t columns) {
  make.Add(name + ".weight", {rows, columns});
  make.Add(name + ".bias", {rows});
}
void AddNorm(Maker& make, const std::string& name, int64_t size) {
  make.Add(name + ".weight", {size});
  make.Add(name + ".bias", {size});
}

void AddSiglip(Maker& make, const Config& c) {
  const Vision& v = c.vision;
  const int64_t h = v.hidden;
  make.MoveTo("multi_modal_projector.");
  make.Add("mm_input_projection_weight", {h, c.hidden});
  make.Add("mm_soft_emb_norm.weight", {h});
  make.MoveTo("vision_tower.vision_model.");
  make.Add("embeddings.patch_embedding.weight", {h, v.channels, v.patch, v.patch});
  make.Add("embeddings.patch_embedding.bias", {h});
  make.Add("embeddings.position_embedding.weight", {v.side * v.side, h});
  AddNorm(make, "post_layernorm", h);
  for (int64_t i = 0; i < v.depth; ++i) {
    const std::string at = std::string("encoder.layers.") + std::to_string(i) + ".";
    AddNorm(make, at + "layer_norm1", h);
    AddNorm(make, at + "layer_norm2", h);
    for (const char* module : {"q_proj", "k_proj", "v_proj", "out_proj"}) {
      AddLinear(make, at + "self_attn." + module, h, h);
    }
    AddLinear(make, at + "mlp.fc1", v.intermediate, h);
    AddLinear(make, at + "mlp.fc2", h, v.intermediate);
  }
  if (!v.pooling) return;
  make.Add("head.probe", {1, 1, h});
  make.Add("head.attention.in_proj_weight", {3 * h, h});
  make.Add("head.attention.in_proj_bias", {3 * h});
  AddLinear(make, "head.attention.out_proj", h, h);
  AddNorm(make, "head.layernorm", h);
  AddLinear(make, "head.mlp.fc1", v.intermediate, h);
  AddLinear(make, "head.mlp.fc2", h, v.intermediate);
}

void AddLlama4Tower(Maker& make, const Config& c) {
  const Vision& v = c.vision;
  const int64_t h = v.hidden;
  make.MoveTo("");
  make.Add("multi_modal_projector.linear_1.weight", {c.hidden, v.out});
  make.MoveTo("vision_model.");
  make.Add("class_embedding", {h});
  make.Add("positional_embedding_vlm", {v.side * v.side + 1, h});
  make.Add("patch_embedding.linear.weight", {h, v.channels * v.patch * v.patch});
  AddNorm(make, "layernorm_pre", h);
  AddNorm(make, "layernorm_post", h);
  make.Add("vision_adapter.mlp.fc1.weight", {v.projector, v.intermediate});
  make.Add("vision_adapter.mlp.fc2.weight", {v.projector, v.projector});
  for (int64_t i = 0; i < v.depth; ++i) {
    const std::string at = std::string("model.layers.") + std::to_string(i) + ".";
    AddNorm(make, at + "input_layernorm", h);
    AddNorm(make, at + "post_attention_layernorm", h);
    for (const char* module : {"q_proj", "k_proj", "v_proj", "o_proj"}) {
      AddLinear(make, at + "self_attn." + module, h, h);
    }
    AddLinear(make, at + "mlp.fc1", v.intermediate, h);
    AddLinear(make, at + "mlp.fc2", h, v.intermediate);
  }
}

void AddPixtral(Maker& make, const Config& c) {
  const Vision& v = c.vision;
  const int64_t h = v.hidden;
  make.MoveTo("multi_modal_projector.");
  make.Add("norm.weight", {h});
  make.Add("patch_merger.merging_layer.weight", {h, v.Merged()});
  make.Add("linear_1.weight", {c.hidden, h});
  make.Add("linear_2.weight", {c.hidden, c.hidden});
  make.AddIf(v.projector_bias, "linear_1.bias", {c.hidden});
  make.AddIf(v.projector_bias, "linear_2.bias", {c.hidden});
  make.MoveTo("vision_tower.");
  make.Add("ln_pre.weight", {h});
  make.Add("patch_conv.weight", {h, v.channels, v.patch, v.patch});
  for (int64_t i = 0; i < v.depth; ++i) {
    const std::string at = std::string("transformer.layers.") + std::to_string(i) + ".";
    make.Add(at + "attention_norm.weight", {h});
    make.Add(at + "ffn_norm.weight", {h});
    for (const char* module : {"q_proj", "k_proj", "v_proj", "o_proj"}) {
      make.Add(at + "attention." + module + ".weight", {h, h});
    }
    AddGlu(make, at + "feed_forward.", v.intermediate, h, false);
  }
}

void AddMoonVit(Maker& make, const Config& c) {
  const Vision& v = c.vision;
  const int64_t h = v.hidden, merged = h * v.merge * (v.merge + 1);
  make.MoveTo("mm_projector.");
  AddNorm(make, "pre_norm", h);
  AddLinear(make, "proj.0", merged, merged);
  AddLinear(make, "proj.2", c.hidden, merged);
  make.MoveTo("vision_tower.");
  make.Add("patch_embed.proj.weight", {h, 3, v.patch, v.patch});
  make.Add("patch_embed.proj.bias", {h});
  make.Add("patch_embed.pos_emb.weight", {v.side, v.side + 1, h});
  AddNorm(make, "encoder.final_layernorm", h);
  for (int64_t i = 0; i < v.depth; ++i) {
    const std::string at = std::string("encoder.blocks.") + std::to_string(i) + ".";
    AddNorm(make, at + "norm0", h);
    AddNorm(make, at + "norm1", h);
    AddLinear(make, at + "wqkv", 3 * h, h);
    AddLinear(make, at + "wo", h, h);
    AddLinear(make, at + "mlp.fc0", v.intermediate, h);
    AddLinear(make, at + "mlp.fc1", h, v.intermediate);
  }
}

void AddQwen3Tower(Maker& make, const Config& c) {
  const Vision& v = c.vision;
  const int64_t h = v.hidden, merged = v.Merged();
  make.MoveTo("model.visual.");
  make.Add("patch_embed.proj.weight", {h, v.channels, v.frames, v.patch, v.patch});
  make.Add("patch_embed.proj.bias", {h});
  make.Add("pos_embed.weight", {v.side * v.side, h});
  for (int64_t i = 0; i < v.depth; ++i) {
    const std::string at = std::string("blocks.") + std::to_string(i) + ".";
    AddNorm(make, at + "norm1", h);
    AddNorm(make, at + "norm2", h);
    AddLinear(make, at + "attn.qkv", 3 * h, h);
    AddLinear(make, at + "attn.proj", h, h);
    AddLinear(make, at + "mlp.linear_fc1", v.intermediate, h);
    AddLinear(make, at + "mlp.linear_fc2", h, v.intermediate);
  }
  for (int64_t i = -1; i < v.mergers; ++i) {
    const std::string at =
        i < 0 ? "merger." : std::string("deepstack_merger_list.") + std::to_string(i) + ".";
    AddNorm(make, at + "norm", i < 0 ? h : merged);
    AddLinear(make, at + "linear_fc1", merged, merged);
    AddLinear(make, at + "linear_fc2", v.out, merged);
  }
}

void AddWrapperTower(Maker& make, const Config& c) {
  if (c.family == "gemma3") return AddSiglip(make, c);
  if (c.family == "llama4") return AddLlama4Tower(make, c);
  if (c.family == "mistral3") return AddPixtral(make, c);
  if (c.family == "kimi_k25") return AddMoonVit(make, c);
  AddQwen3Tower(make, c);
}

/// The text model's name of a wrapper's tensor; empty for its tower's.
std::string Plain(const Config& c, const std::string& name) {
  const std::string inner = "model.language_model.", outer = "language_model.";
  if (c.family.starts_with("qwen3_vl")) {
    if (name.starts_with("lm_head.")) return name;
    return name.starts_with(inner) ? "model." + name.substr(inner.size()) : "";
  }
  return name.starts_with(outer) ? name.substr(outer.size()) : "";
}

void AddMixture(Maker& make, const Config& c) {
  const int64_t n = c.experts, inner = c.moe_intermediate;
  if (c.Is({"qwen3_vl_moe_text"})) {
    make.Add("mlp.gate.weight", {n, c.hidden});
    make.Add("mlp.experts.gate_up_proj", {n, c.hidden, 2 * inner});
    make.Add("mlp.experts.down_proj", {n, inner, c.hidden});
    return;
  }
  if (c.Is({"llama4_text"})) {
    make.Add("feed_forward.router.weight", {n, c.hidden});
    make.Add("feed_forward.experts.gate_up_proj", {n, c.hidden, 2 * inner});
    make.Add("feed_forward.experts.down_proj", {n, inner, c.hidden});
    return AddGlu(make, "feed_forward.shared_expert.", inner, c.hidden, false);
  }
  if (c.Is({"gpt_oss"})) {
    make.Add("mlp.router.weight", {n, c.hidden});
    make.Add("mlp.router.bias", {n});
    make.Add("mlp.experts.gate_up_proj", {n, c.hidden, 2 * inner});
    make.Add("mlp.experts.gate_up_proj_bias", {n, 2 * inner});
    make.Add("mlp.experts.down_proj", {n, inner, c.hidden});
    make.Add("mlp.experts.down_proj_bias", {n, c.hidden});
    return;
  }
  if (c.Is({"mixtral", "minimax_m2"})) {
    make.Add("block_sparse_moe.gate.weight", {n, c.hidden});
    if (c.RouterCorrection()) {
      make.Add("block_sparse_moe.e_score_correction_bias", {n});
      make.MarkF32("block_sparse_moe.e_score_correction_bias");
    }
    for (int64_t e = 0; e < n; ++e) {
      const std::string at = std::string("block_sparse_moe.experts.") + std::to_string(e) + ".";
      make.Add(at + "w1.weight", {inner, c.hidden});
      make.Add(at + "w2.weight", {c.hidden, inner});
      make.Add(at + "w3.weight", {inner, c.hidden});
    }
    return;
  }
  make.Add("mlp.gate.weight", {n, c.hidden});
  if (c.RouterCorrection()) {
    make.Add("mlp.gate.e_score_correction_bias", {n});
    make.MarkF32("mlp.gate.e_score_correction_bias");
  }
  for (int64_t e = 0; e < n; ++e) {
    AddGlu(make, std::string("mlp.experts.") + std::to_string(e) + ".", inner, c.hidden, false);
  }
  if (c.SharedSize() == 0) return;
  AddGlu(make, c.Is({"qwen2_moe"}) ? "mlp.shared_expert." : "mlp.shared_experts.", c.SharedSize(),
         c.hidden, false);
  make.AddIf(c.Is({"qwen2_moe"}), "mlp.shared_expert_gate.weight", {1, c.hidden});
}

/// Reads one layer's tensors by name; what is not there stays empty.
class Reader {
 public:
  Reader(const Tensors& hf, std::string at) : hf_(hf), at_(std::move(at)) {}
  Array operator()(const std::string& name) const {
    const auto it = hf_.find(at_ + name);
    return it == hf_.end() ? Array{} : it->second;
  }

 private:
  const Tensors& hf_;
  const std::string at_;
};

std::vector<Expert> LoadExperts(const Config& c, const Reader& of) {
  std::vector<Expert> experts(static_cast<size_t>(c.experts));
  for (int64_t e = 0; e < c.experts; ++e) {
    Expert& expert = experts[static_cast<size_t>(e)];
    if (c.FusedExperts()) {
      const std::string at = c.Is({"llama4_text"}) ? "feed_forward.experts." : "mlp.experts.";
      const Array gate_up = At(of(at + "gate_up_proj"), e);  // gate's columns first
      expert.gate = Transpose(ColumnChunk(gate_up, 2, 0));
      expert.up = Transpose(ColumnChunk(gate_up, 2, 1));
      expert.down = Transpose(At(of(at + "down_proj"), e));
      continue;
    }
    if (c.Is({"gpt_oss"})) {
      const Array gate_up = At(of("mlp.experts.gate_up_proj"), e);  // [hidden, 2 · inner]
      const Array bias = At(of("mlp.experts.gate_up_proj_bias"), e);
      expert = {Transpose(EveryOther(gate_up, 0)),
                Transpose(EveryOther(gate_up, 1)),
                Transpose(At(of("mlp.experts.down_proj"), e)),
                EveryOther(bias, 0),
                EveryOther(bias, 1),
                At(of("mlp.experts.down_proj_bias"), e)};
      continue;
    }
    const bool mixtral = c.Is({"mixtral", "minimax_m2"});
    const std::string at = std::string(mixtral ? "block_sparse_moe" : "mlp") + ".experts." +
                           std::to_string(e) + (mixtral ? ".w" : ".");
    expert.gate = of(at + (mixtral ? "1.weight" : "gate_proj.weight"));
    expert.up = of(at + (mixtral ? "3.weight" : "up_proj.weight"));
    expert.down = of(at + (mixtral ? "2.weight" : "down_proj.weight"));
  }
  return experts;
}

Layer LoadLayer(const Config& c, const Tensors& hf, int64_t number) {
  const Reader of(hf, LayerPrefix(number));
  Layer l;
  l.moe = c.MoeLayer(number);
  l.input_norm = of("input_layernorm.weight");
  l.mlp_norm =
      of(FourNorms(c) ? "pre_feedforward_layernorm.weight" : "post_attention_layernorm.weight");
  if (c.Is({"exaone4"})) l.mlp_norm = {};
  const std::string output = AttentionOutputNormName(c, number);
  if (!output.empty()) l.attention_output_norm = of(output.substr(LayerPrefix(number).size()));
  l.mlp_output_norm =
      of(c.Is({"glm4"}) ? "post_mlp_layernorm.weight" : "post_feedforward_layernorm.weight");
  l.q = of("self_attn.q_proj.weight");
  l.k = of("self_attn.k_proj.weight");
  l.v = of("self_attn.v_proj.weight");
  if (const Array qkv = of("self_attn.qkv_proj.weight")) {
    const int64_t q = c.heads * c.head_dim, kv = c.kv_heads * c.head_dim;
    l.q = Rows(qkv, 0, q);
    l.k = Rows(qkv, q, kv);
    l.v = Rows(qkv, q + kv, kv);
  }
  l.o = of("self_attn.o_proj.weight");
  l.q_bias = of("self_attn.q_proj.bias");
  l.k_bias = of("self_attn.k_proj.bias");
  l.v_bias = of("self_attn.v_proj.bias");
  l.o_bias = of("self_attn.o_proj.bias");
  l.q_norm = of("self_attn.q_norm.weight");
  l.k_norm = of("self_attn.k_norm.weight");
  l.sinks = of("self_attn.sinks");
  l.q_a = of("self_attn.q_a_proj.weight");
  l.q_a_norm = of("self_attn.q_a_layernorm.weight");
  l.q_b = of("self_attn.q_b_proj.weight");
  l.kv_a = of("self_attn.kv_a_proj_with_mqa.weight");
  l.kv_a_norm = of("self_attn.kv_a_layernorm.weight");
  l.kv_b = of("self_attn.kv_b_proj.weight");
  l.index_q = of("self_attn.indexer.wq_b.weight");
  l.index_k = of("self_attn.indexer.wk.weight");
  l.index_norm = of("self_attn.indexer.k_norm.weight");
  l.index_norm_bias = of("self_attn.indexer.k_norm.bias");
  l.index_weights = of("self_attn.indexer.weights_proj.weight");
  const std::string dense = DensePrefix(c, number).substr(LayerPrefix(number).size());
  l.gate = of(dense + "gate_proj.weight");
  l.up = of(dense + "up_proj.weight");
  l.down = of(dense + "down_proj.weight");
  if (const Array gate_up = of("mlp.gate_up_proj.weight")) {
    l.gate = RowChunk(gate_up, 2, 0);
    l.up = RowChunk(gate_up, 2, 1);
  }
  l.gate_bias = of("mlp.gate_proj.bias");
  l.up_bias = of("mlp.up_proj.bias");
  l.down_bias = of("mlp.down_proj.bias");
  l.enorm = of("enorm.weight");
  l.hnorm = of("hnorm.weight");
  l.eh_proj = of("eh_proj.weight");
  l.head_norm = of("shared_head.norm.weight");
  if (!l.moe) return l;
  const std::string module = RouterModule(c, number).substr(LayerPrefix(number).size());
  l.router = of(module + ".weight");
  l.router_bias = of(module + ".bias");
  l.router_correction = of(CorrectionName(c, number).substr(LayerPrefix(number).size()));
  l.experts = LoadExperts(c, of);
  const std::string shared = SharedPrefix(c, number).substr(LayerPrefix(number).size());
  l.shared_gate = of(shared + "gate_proj.weight");
  l.shared_up = of(shared + "up_proj.weight");
  l.shared_down = of(shared + "down_proj.weight");
  l.shared_expert_gate = of("mlp.shared_expert_gate.weight");
  return l;
}

}  // namespace

Tensors HuggingFace(const Config& c) {
  Tensors hf;
  Maker make(hf, "");
  make.Add("model.embed_tokens.weight", {c.vocab, c.hidden});
  make.AddIf(!c.tied, "lm_head.weight", {c.vocab, c.hidden});
  make.Add("model.norm.weight", {c.hidden});
  if (c.vision.depth > 0 && !c.Wraps()) AddTower(make, c.vision);
  for (int64_t layer = 0; layer < c.layers + c.mtp; ++layer) {
    make.MoveTo(LayerPrefix(layer));
    make.AddIf(!c.Is({"exaone4"}), "input_layernorm.weight", {c.hidden});
    make.Add("post_attention_layernorm.weight", {c.hidden});
    make.AddIf(FourNorms(c), "pre_feedforward_layernorm.weight", {c.hidden});
    make.AddIf(FourNorms(c) || c.Is({"exaone4"}), "post_feedforward_layernorm.weight", {c.hidden});
    make.AddIf(c.Is({"glm4"}), "post_self_attn_layernorm.weight", {c.hidden});
    make.AddIf(c.Is({"glm4"}), "post_mlp_layernorm.weight", {c.hidden});
    c.Latent() ? AddLatent(make, c) : AddGrouped(make, c);
    if (c.Indexed() && !c.shares_index.contains(layer)) AddIndexer(make, c);
    if (c.MoeLayer(layer)) {
      AddMixture(make, c);
    } else {
      AddDense(make, c);
    }
    if (layer < c.layers) continue;
    make.Add("enorm.weight", {c.hidden});
    make.Add("hnorm.weight", {c.hidden});
    make.Add("eh_proj.weight", {c.hidden, 2 * c.hidden});
    make.Add("shared_head.norm.weight", {c.hidden});
  }
  if (!c.Wraps()) return hf;
  Tensors whole;
  for (auto& [name, array] : hf) whole[Wrapped(c, name)] = std::move(array);
  make.MoveInto(whole);
  AddWrapperTower(make, c);
  return whole;
}

Tensors Checkpoint(const Config& c, const Tensors& hf, bool with_mtp) {
  Tensors out = hf;
  for (int64_t layer = c.layers; layer < c.layers + c.mtp; ++layer) {
    const std::string at = Wrapped(c, LayerPrefix(layer));
    if (with_mtp) {
      const std::string embedding = Wrapped(c, "model.embed_tokens.weight");
      out[at + "embed_tokens.weight"] = hf.at(embedding);
      out[at + "shared_head.head.weight"] =
          hf.at(c.tied ? embedding : Wrapped(c, "lm_head.weight"));
      continue;
    }
    std::erase_if(out, [&at](const auto& item) { return item.first.starts_with(at); });
  }
  return out;
}

Weights Load(const Config& c, const Tensors& checkpoint) {
  Weights weights;
  Tensors text;
  for (const auto& [name, array] : checkpoint) {
    if (!c.Wraps()) break;
    const std::string plain = Plain(c, name);
    (plain.empty() ? weights.vision[name] : text[plain]) = array;
  }
  const Tensors& hf = c.Wraps() ? text : checkpoint;
  weights.embedding = hf.at("model.embed_tokens.weight");
  weights.final_norm = hf.at("model.norm.weight");
  if (!c.tied) weights.head = hf.at("lm_head.weight");
  for (const auto& [name, array] : hf) {
    if (name.starts_with("visual.")) weights.vision[name] = array;
  }
  for (int64_t layer = 0; layer < c.layers + c.mtp; ++layer) {
    weights.layers.push_back(LoadLayer(c, hf, layer));
  }
  return weights;
}

std::string Wrapped(const Config& c, const std::string& plain) {
  if (!c.Wraps()) return plain;
  const bool head = plain.starts_with("lm_head.");
  if (!c.family.starts_with("qwen3_vl")) return "language_model." + plain;
  return head ? plain : "model.language_model." + plain.substr(std::string("model.").size());
}

std::string LayerPrefix(int64_t layer) {
  return std::string("model.layers.") + std::to_string(layer) + ".";
}
std::string DensePrefix(const Config& c, int64_t layer) {
  return LayerPrefix(layer) + (c.Is({"llama4_text"}) ? "feed_forward." : "mlp.");
}
std::string MoePrefix(const Config& c, int64_t layer) {
  return c.Is({"mixtral", "minimax_m2"}) ? LayerPrefix(layer) + "block_sparse_moe."
                                         : DensePrefix(c, layer);
}
std::string RouterModule(const Config& c, int64_t layer) {
  return MoePrefix(c, layer) + (c.Is({"gpt_oss", "llama4_text"}) ? "router" : "gate");
}
std::string CorrectionName(const Config& c, int64_t layer) {
  return (c.Is({"minimax_m2"}) ? MoePrefix(c, layer) : RouterModule(c, layer) + ".") +
         "e_score_correction_bias";
}
std::string SharedPrefix(const Config& c, int64_t layer) {
  const bool one = c.Is({"qwen2_moe", "llama4_text"});
  return MoePrefix(c, layer) + (one ? "shared_expert." : "shared_experts.");
}
std::string AttentionOutputNormName(const Config& c, int64_t layer) {
  if (c.Is({"glm4"})) return LayerPrefix(layer) + "post_self_attn_layernorm.weight";
  const bool has = FourNorms(c) || c.Is({"exaone4"});
  return has ? LayerPrefix(layer) + "post_attention_layernorm.weight" : "";
}
std::string MlpNormName(const Config& c, int64_t layer) {
  return LayerPrefix(layer) +
         (FourNorms(c) ? "pre_feedforward_layernorm.weight" : "post_attention_layernorm.weight");
}

}  // namespace weightwire::family_oracle
