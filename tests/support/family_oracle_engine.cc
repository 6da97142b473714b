#include "tests/support/family_oracle_engine.h"

#include <algorithm>
#include <array>
#include <numeric>

namespace weightwire::family_oracle {
namespace {

/// What one rank has of each mixture: whole experts or parts of them, in the order of storage.
struct ExpertShare {
  std::vector<int64_t> experts;
  int64_t parts = 1;
  int64_t part = 0;
};

/// get_pp_indices: what remains goes to the last stages in SGLang, to those before the last one in
/// vLLM.
std::vector<int64_t> StageLayers(const Config& c, const EngineShape& s) {
  if (!s.stage_layers.empty()) return s.stage_layers;
  std::vector<int64_t> layers(static_cast<size_t>(s.pp), c.layers / s.pp);
  const int64_t from = s.sglang ? 1 : 2;
  for (int64_t i = from; i < c.layers % s.pp + from; ++i) ++layers[static_cast<size_t>(s.pp - i)];
  return layers;
}

int64_t VocabRows(const Config& c, const EngineShape& s) {
  return (c.vocab + s.vocab_pad_to - 1) / s.vocab_pad_to * s.vocab_pad_to;
}

/// Physical experts are the logical ones, then copies of the first; they are dealt out to `places`
/// one by one, or in runs, of which the first are longer by one where it does not come out even.
std::vector<int64_t> Dealt(const Config& c, const EngineShape& s, int64_t places, int64_t place) {
  std::vector<std::vector<int64_t>> held(static_cast<size_t>(places));
  const int64_t physical = c.experts + s.redundant;
  for (int64_t i = 0, at = 0; i < physical; ++i) {
    if (s.round_robin) {
      at = i % places;
    } else {
      const int64_t full = physical / places + (at < physical % places ? 1 : 0);
      if (std::ssize(held[static_cast<size_t>(at)]) == full) ++at;
    }
    held[static_cast<size_t>(at)].push_back(i % c.experts);
  }
  return held[static_cast<size_t>(place)];
}

ExpertShare ShareOf(const Config& c, const EngineShape& s, int64_t dp, int64_t t) {
  if (!c.Mixture()) return {};
  if (s.sglang) {
    const int64_t ep = s.ep == 0 ? 1 : s.ep, parts = s.tp / ep;
    return {Dealt(c, s, ep, t / parts), parts, t % parts};
  }
  // vLLM's experts see one group of tp · dp ranks.
  const int64_t all = s.tp * s.dp, place = dp * s.tp + t;
  if (s.ep > 0) return {Dealt(c, s, all, place), 1, 0};
  return {Dealt(c, s, 1, 0), all, place};
}

class Rank {
 public:
  Rank(const Config& c, const Weights& w, const EngineShape& s, int64_t t, int64_t stage,
       ExpertShare share)
      : c_(c), w_(w), s_(s), t_(t), stage_(stage), share_(std::move(share)) {}

  Tensors Load() {
    const bool first = stage_ == 0, last = stage_ == s_.pp - 1;
    if (first) Vocab("model.embed_tokens.weight", w_.embedding);
    if (last && !first && c_.tied) {
      Vocab(s_.sglang ? "lm_head.weight" : "model.embed_tokens.weight", w_.embedding);
    }
    if (last && !c_.tied) Vocab("lm_head.weight", w_.head);
    if (last) out_["model.norm.weight"] = w_.final_norm;
    int64_t number = 0;
    const std::vector<int64_t> stages = StageLayers(c_, s_);
    for (int64_t i = 0; i < stage_; ++i) number += stages[static_cast<size_t>(i)];
    const int64_t end = number + stages[static_cast<size_t>(stage_)];
    for (; number < end; ++number) LoadLayer(number, w_.layers[static_cast<size_t>(number)]);
    if (c_.vision.depth == 0) return std::move(out_);
    Tensors text = std::move(out_);
    out_.clear();
    for (auto& [name, array] : text) {
      out_[(s_.sglang ? "" : "language_model.") + name] = std::move(array);
    }
    c_.Wraps() ? LoadWrapperTower() : LoadTower();
    return std::move(out_);
  }

 private:
  void Vocab(const std::string& name, const Array& whole) {
    out_[name] = RowChunk(PadRows(whole, VocabRows(c_, s_)), s_.tp, t_);
  }
  Array MyRows(const Array& whole) const { return RowChunk(whole, s_.tp, t_); }
  Array MyColumns(const Array& whole) const { return ColumnChunk(whole, s_.tp, t_); }
  Array GateUp(const Array& gate, const Array& up) const {
    return gate ? Concat({MyRows(gate), MyRows(up)}) : Array{};
  }
  /// A kv head is on as many neighbouring ranks as there are more ranks than kv heads.
  Array MyKvRows(const Array& whole) const {
    if (c_.kv_heads >= s_.tp) return MyRows(whole);
    return RowChunk(whole, c_.kv_heads, t_ / (s_.tp / c_.kv_heads));
  }
  Array Qkv(const Array& q, const Array& k, const Array& v) const {
    return q ? Concat({MyRows(q), MyKvRows(k), MyKvRows(v)}) : Array{};
  }

  const Array& Tower(const std::string& name) const { return w_.vision.at("visual." + name); }
  /// Every stage has the tower; q, k and v are cut by heads, each third by itself.
  void LoadTower() {
    const auto whole = [this](const std::string& name) { out_["visual." + name] = Tower(name); };
    const auto rows = [this](const std::string& name) {
      out_["visual." + name] = MyRows(Tower(name));
    };
    const auto columns = [this](const std::string& name) {
      out_["visual." + name] = MyColumns(Tower(name));
    };
    whole("patch_embed.proj.weight");
    for (int64_t block = 0; block < c_.vision.depth; ++block) {
      const std::string at = std::string("blocks.") + std::to_string(block) + ".";
      whole(at + "norm1.weight");
      whole(at + "norm2.weight");
      for (const char* leaf : {"weight", "bias"}) {
        const Array& qkv = Tower(at + "attn.qkv." + leaf);
        std::vector<Array> thirds;
        for (int64_t i = 0; i < 3; ++i) thirds.push_back(MyRows(RowChunk(qkv, 3, i)));
        out_["visual." + at + (s_.sglang ? "attn.qkv_proj." : "attn.qkv.") + leaf] = Concat(thirds);
        out_["visual." + at + "mlp.gate_up_proj." + leaf] =
            GateUp(Tower(at + "mlp.gate_proj." + leaf), Tower(at + "mlp.up_proj." + leaf));
      }
      columns(at + "attn.proj.weight");
      whole(at + "attn.proj.bias");
      columns(at + "mlp.down_proj.weight");
      whole(at + "mlp.down_proj.bias");
    }
    whole("merger.ln_q.weight");
    rows("merger.mlp.0.weight");
    rows("merger.mlp.0.bias");
    columns("merger.mlp.2.weight");
    whole("merger.mlp.2.bias");
  }

  /// vLLM's towers, by what a name ends in.
  void LoadWrapperTower() {
    const bool kimi = c_.family == "kimi_k25";
    const auto has = [](const std::string& name, std::initializer_list<const char*> parts) {
      return std::any_of(parts.begin(), parts.end(),
                         [&](const char* part) { return name.find(part) != name.npos; });
    };
    const auto replaced = [](std::string name, const std::string& what, const std::string& by) {
      const size_t at = name.find(what);
      return at == name.npos ? name : name.replace(at, what.size(), by);
    };
    for (const auto& [stored, array] : w_.vision) {
      std::string name = replaced(stored, "model.visual.", "visual.");
      const bool matrix = name.ends_with(".weight");
      if (has(name, {".head."})) continue;  // pools, which language models do not
      if (kimi) {
        name = replaced(replaced(name, "_projector.proj.0.", "_projector.linear_1."),
                        "_projector.proj.2.", "_projector.linear_2.");
        if (name.starts_with("mm_projector.")) {
          out_[name] = array;
          continue;
        }
      }
      if (has(name, {".k_proj.", ".v_proj.", ".up_proj."})) continue;  // with q, with gate
      if (has(name, {".q_proj."})) {
        out_[replaced(name, "q_proj", "qkv_proj")] =
            Concat({MyRows(array), MyRows(w_.vision.at(replaced(stored, "q_proj", "k_proj"))),
                    MyRows(w_.vision.at(replaced(stored, "q_proj", "v_proj")))});
      } else if (has(name, {".gate_proj."})) {
        out_[replaced(name, "gate_proj", "gate_up_proj")] =
            GateUp(array, w_.vision.at(replaced(stored, "gate_proj", "up_proj")));
      } else if (has(name, {"attn.qkv.", ".wqkv."})) {
        std::vector<Array> thirds;
        for (int64_t i = 0; i < 3; ++i) thirds.push_back(MyRows(RowChunk(array, 3, i)));
        out_[name] = Concat(thirds);
      } else if (has(name, {"linear_fc1.", "linear_1.", "patch_embedding.linear.",
                            kimi ? "mlp.fc0." : "mlp.fc1."})) {
        out_[name] = MyRows(array);
      } else if (matrix &&
                 has(name, {"out_proj.", "attn.proj.", ".o_proj.", "linear_fc2.", "linear_2.",
                            ".wo.", ".down_proj.", kimi ? "mlp.fc1." : "mlp.fc2."})) {
        out_[name] = MyColumns(array);
      } else {
        out_[name] = array;
      }
    }
  }

  void LoadLayer(int64_t number, const Layer& l) {
    const std::string at = LayerPrefix(number), attention = at + "self_attn.";
    Put(out_, at + "input_layernorm.weight", l.input_norm);
    Put(out_, AttentionOutputNormName(c_, number), l.attention_output_norm);
    Put(out_, MlpNormName(c_, number), l.mlp_norm);
    Put(out_,
        at + (c_.Is({"glm4"}) ? "post_mlp_layernorm.weight" : "post_feedforward_layernorm.weight"),
        l.mlp_output_norm);
    c_.Latent() ? LoadLatent(attention, l) : LoadGrouped(attention, l);
    Put(out_, attention + "o_proj.weight", MyColumns(l.o));
    Put(out_, attention + "o_proj.bias", l.o_bias);
    const std::string dense = DensePrefix(c_, number);
    Put(out_, dense + "gate_up_proj.weight", GateUp(l.gate, l.up));
    Put(out_, dense + "gate_up_proj.bias", GateUp(l.gate_bias, l.up_bias));
    Put(out_, dense + "down_proj.weight", MyColumns(l.down));
    Put(out_, dense + "down_proj.bias", l.down_bias);
    if (!l.moe) return;
    Put(out_, RouterModule(c_, number) + ".weight", l.router);
    Put(out_, RouterModule(c_, number) + ".bias", l.router_bias);
    Put(out_, CorrectionName(c_, number), l.router_correction);
    const std::string shared = SharedPrefix(c_, number);
    Put(out_, shared + "gate_up_proj.weight", GateUp(l.shared_gate, l.shared_up));
    Put(out_, shared + "down_proj.weight", MyColumns(l.shared_down));
    Put(out_, at + "mlp.shared_expert_gate.weight", l.shared_expert_gate);
    LoadExperts(MoePrefix(c_, number) + "experts." + (s_.sglang ? "" : "routed_experts."), l);
  }

  void LoadGrouped(const std::string& at, const Layer& l) {
    // Llama 4 rotates neighbouring rows of a head together, engines a row and one half a head on.
    const bool pairs = c_.Is({"llama4_text"});
    Put(out_, at + "qkv_proj.weight",
        pairs ? Qkv(Unpaired(l.q, c_.head_dim), Unpaired(l.k, c_.head_dim), l.v)
              : Qkv(l.q, l.k, l.v));
    Put(out_, at + "qkv_proj.bias", Qkv(l.q_bias, l.k_bias, l.v_bias));
    Put(out_, at + "q_norm.weight", c_.WholeNorms() ? MyRows(l.q_norm) : l.q_norm);
    Put(out_, at + "k_norm.weight", c_.WholeNorms() ? MyKvRows(l.k_norm) : l.k_norm);
    Put(out_, at + "sinks", MyRows(l.sinks));
  }

  void LoadLatent(const std::string& at, const Layer& l) {
    if (l.q_a) {
      out_[at + (s_.sglang ? "fused_qkv_a_proj_with_mqa.weight" : "fused_qkv_a_proj.weight")] =
          Concat({l.q_a, l.kv_a});
      out_[at + "q_a_layernorm.weight"] = l.q_a_norm;
      out_[at + "q_b_proj.weight"] = MyRows(l.q_b);
    } else {
      out_[at + "q_proj.weight"] = MyRows(l.q);
      out_[at + "kv_a_proj_with_mqa.weight"] = l.kv_a;
    }
    out_[at + "kv_a_layernorm.weight"] = l.kv_a_norm;
    out_[at + "kv_b_proj.weight"] = MyRows(l.kv_b);
    if (!l.index_k) return;
    out_[at + "indexer.wq_b.weight"] = l.index_q;
    out_[at + "indexer.wk_weights_proj.weight"] = Concat({l.index_k, l.index_weights});
    out_[at + "indexer.k_norm.weight"] = l.index_norm;
    out_[at + "indexer.k_norm.bias"] = l.index_norm_bias;
  }

  void LoadExperts(const std::string& at, const Layer& l) {
    std::vector<Array> w13, w13_bias, w2, w2_bias;
    const auto two = [this](const Array& gate, const Array& up) {
      const Array g = RowChunk(gate, share_.parts, share_.part);
      const Array u = RowChunk(up, share_.parts, share_.part);
      return s_.up_first ? Concat({u, g}) : Concat({g, u});
    };
    for (int64_t number : share_.experts) {
      const Expert& expert = l.experts[static_cast<size_t>(number)];
      w13.push_back(two(expert.gate, expert.up));
      w2.push_back(ColumnChunk(expert.down, share_.parts, share_.part));
      if (!expert.gate_bias) continue;
      w13_bias.push_back(two(expert.gate_bias, expert.up_bias));
      w2_bias.push_back(expert.down_bias);
    }
    out_[at + "w13_weight"] = Stack(w13);
    out_[at + "w2_weight"] = Stack(w2);
    if (w13_bias.empty()) return;
    out_[at + "w13_bias"] = Stack(w13_bias);
    out_[at + "w2_bias"] = Stack(w2_bias);
  }

  const Config& c_;
  const Weights& w_;
  const EngineShape& s_;
  const int64_t t_;
  const int64_t stage_;
  const ExpertShare share_;
  Tensors out_;
};

bool ExpertsFit(const Config& c, const EngineShape& s) {
  if (!c.Mixture()) return s.ep == 0 && s.redundant == 0;
  if (s.sglang && s.ep > 0 && s.tp % s.ep != 0) return false;
  const int64_t sglang_ep = s.ep == 0 ? 1 : s.ep;
  const int64_t places = s.sglang ? sglang_ep : s.ep > 0 ? s.tp * s.dp : 1;
  const int64_t parts = s.sglang ? s.tp / sglang_ep : s.ep > 0 ? 1 : s.tp * s.dp;
  if (!s.sglang && s.ep == 0 && s.redundant > 0) return false;
  if (c.AnyMoeLayer() && c.moe_intermediate % parts != 0) return false;
  return c.experts + s.redundant >= places;
}

}  // namespace

bool EngineFits(const Config& c, const EngineShape& s) {
  if (!c.Describes(s.sglang ? "sglang" : "vllm")) return false;
  const std::vector<int64_t> stages = StageLayers(c, s);
  if (std::ssize(stages) != s.pp) return false;
  for (int64_t layers : stages) {
    if (layers < 1) return false;
  }
  if (std::accumulate(stages.begin(), stages.end(), int64_t{0}) != c.layers) return false;
  if (c.heads % s.tp != 0 || VocabRows(c, s) % s.tp != 0) return false;
  if (!c.Latent() && c.kv_heads % s.tp != 0 && s.tp % c.kv_heads != 0) return false;
  if (c.AnyDenseLayer() && c.intermediate % s.tp != 0) return false;
  if (c.Is({"llama4_text"}) && c.head_dim % 2 != 0) return false;
  const Vision& v = c.vision;
  if (v.depth > 0 && (v.heads % s.tp != 0 || v.intermediate % s.tp != 0)) return false;
  const bool qwen = !c.Wraps() || c.family.starts_with("qwen3_vl");
  if (v.depth > 0 && qwen && v.Merged() % s.tp != 0) return false;
  const bool cuts_text = c.family == "mistral3" || c.family == "llama4";  // the projector's rows
  if (cuts_text && c.hidden % s.tp != 0) return false;
  if (c.family == "llama4" && v.projector % s.tp != 0) return false;
  return c.SharedSize() % s.tp == 0 && ExpertsFit(c, s);
}

std::vector<Tensors> EngineRanks(const Config& c, const Weights& w, const EngineShape& s) {
  std::map<std::array<int64_t, 3>, Tensors> known;  // replicas are loaded once
  std::vector<Tensors> ranks;
  for (int64_t dp = 0; dp < s.dp; ++dp) {
    for (int64_t stage = 0; stage < s.pp; ++stage) {
      for (int64_t t = 0; t < s.tp; ++t) {
        const bool same_everywhere = s.sglang || !c.Mixture();
        Tensors& tensors = known[{same_everywhere ? 0 : dp, stage, t}];
        if (tensors.empty()) tensors = Rank(c, w, s, t, stage, ShareOf(c, s, dp, t)).Load();
        ranks.push_back(tensors);
      }
    }
  }
  return ranks;
}

}  // namespace weightwire::family_oracle
