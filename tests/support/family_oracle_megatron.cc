#include "tests/support/family_oracle_megatron.h"

#include <algorithm>
#include <array>

namespace weightwire::family_oracle {
namespace {

using Experts = MegatronShape::Experts;

/// Where one rank stands: tensor-parallel t, expert e and expert-tensor x, pipeline stage.
struct Place {
  int64_t t = 0, stage = 0, e = 0, x = 0;
};

/// For each kv head its q heads, its k, its v.
Array GroupedQkv(const Config& c, const Array& q, const Array& k, const Array& v) {
  if (!q) return {};
  std::vector<Array> parts;
  for (int64_t group = 0; group < c.kv_heads; ++group) {
    for (const Array* of : {&q, &k, &v}) parts.push_back(RowChunk(*of, c.kv_heads, group));
  }
  return Concat(parts);
}

/// A rank's linear_fc1: its chunk of gate, then its chunk of up.
Array Glu(const Array& gate, const Array& up, int64_t parts, int64_t index) {
  if (!gate) return {};
  return Concat({RowChunk(gate, parts, index), RowChunk(up, parts, index)});
}

/// One rank's tensors, filled part by part.
class Rank {
 public:
  Rank(const Config& c, const Weights& w, const MegatronShape& m, Place place)
      : c_(c), w_(w), m_(m), place_(place) {}

  Tensors Load() {
    const bool with_mtp = m_.mtp && c_.mtp > 0;
    for (int64_t v = 0; v < m_.vpp; ++v) {
      const std::string chunk = m_.vpp == 1 ? "" : std::string("vpp") + std::to_string(v) + ".";
      const std::string at = chunk + (c_.vision.depth > 0 ? "language_model." : "");
      const bool first = place_.stage == 0 && v == 0;
      const bool last = place_.stage == m_.pp - 1 && v == m_.vpp - 1;
      const auto& numbers =
          m_.pipeline->at(static_cast<size_t>(place_.stage)).at(static_cast<size_t>(v));
      for (size_t i = 0; i < numbers.size(); ++i) {
        LoadLayer(at + "decoder.layers." + std::to_string(i) + ".",
                  w_.layers[static_cast<size_t>(numbers[i])]);
      }
      if (first) {
        for (const auto& [name, array] : w_.vision) out_[chunk + name] = array;
      }
      const bool mtp_here =
          with_mtp && v == m_.vpp - 1 && place_.stage == m_.mtp_stage.value_or(m_.pp - 1);
      if (first || mtp_here) Vocab(at + "embedding.word_embeddings.weight", w_.embedding);
      if (mtp_here) LoadMtp(at);
      // TransformerBlock.has_final_layernorm_in_this_stage: with MTP it follows the last layer.
      const bool has_last_layer = std::ranges::find(numbers, c_.layers - 1) != numbers.end();
      if (with_mtp ? has_last_layer : last) {
        out_[at + "decoder.final_layernorm.weight"] = w_.final_norm;
      }
      if (!last) continue;
      if (!c_.tied) {
        Vocab(at + "output_layer.weight", w_.head);
      } else if (m_.pp > 1 && !mtp_here) {
        Vocab(at + "output_layer.weight", w_.embedding);
      }
    }
    return std::move(out_);
  }

 private:
  void Vocab(const std::string& name, const Array& whole) {
    out_[name] = RowChunk(PadRows(whole, m_.vocab_rows), m_.tp, place_.t);
  }
  Array MyRows(const Array& whole) const { return RowChunk(whole, m_.tp, place_.t); }
  Array MyColumns(const Array& whole) const { return ColumnChunk(whole, m_.tp, place_.t); }

  void LoadMtp(const std::string& at) {
    for (int64_t i = 0; i < c_.mtp; ++i) {
      const Layer& layer = w_.layers[static_cast<size_t>(c_.layers + i)];
      const std::string here = at + "mtp.layers." + std::to_string(i) + ".";
      Put(out_, here + "enorm.weight", layer.enorm);
      Put(out_, here + "hnorm.weight", layer.hnorm);
      Put(out_, here + "final_layernorm.weight", layer.head_norm);
      Put(out_, here + "eh_proj.weight", MyRows(layer.eh_proj));
      LoadLayer(here + "transformer_layer.", layer);
    }
  }

  void LoadLayer(const std::string& at, const Layer& l) {
    const bool te = m_.transformer_engine;
    const std::string attention = at + "self_attention.";
    out_[te && !c_.Latent() ? attention + "linear_qkv.layer_norm_weight"
                            : at + "input_layernorm.weight"] = l.input_norm;
    out_[at + (te && !l.moe ? "mlp.linear_fc1.layer_norm_weight" : "pre_mlp_layernorm.weight")] =
        l.mlp_norm;
    Put(out_, attention + "linear_proj.post_layernorm.weight", l.attention_output_norm);
    Put(out_, at + "mlp.linear_fc2.post_layernorm.weight", l.mlp_output_norm);
    c_.Latent() ? LoadLatent(attention, l) : LoadGrouped(attention, l);
    Put(out_, attention + "linear_proj.weight", MyColumns(l.o));
    Put(out_, attention + "linear_proj.bias", l.o_bias);
    if (l.moe) {
      LoadMixture(at + "mlp.", l);
      return;
    }
    Put(out_, at + "mlp.linear_fc1.weight", Glu(l.gate, l.up, m_.tp, place_.t));
    Put(out_, at + "mlp.linear_fc1.bias", Glu(l.gate_bias, l.up_bias, m_.tp, place_.t));
    Put(out_, at + "mlp.linear_fc2.weight", MyColumns(l.down));
    Put(out_, at + "mlp.linear_fc2.bias", l.down_bias);
  }

  void LoadGrouped(const std::string& at, const Layer& l) {
    Put(out_, at + "linear_qkv.weight", MyRows(GroupedQkv(c_, l.q, l.k, l.v)));
    Put(out_, at + "linear_qkv.bias", MyRows(GroupedQkv(c_, l.q_bias, l.k_bias, l.v_bias)));
    const int64_t k_parts = std::min(m_.tp, c_.kv_heads);
    Put(out_, at + "q_layernorm.weight", c_.WholeNorms() ? MyRows(l.q_norm) : l.q_norm);
    Put(out_, at + "k_layernorm.weight",
        c_.WholeNorms() ? RowChunk(l.k_norm, k_parts, place_.t / (m_.tp / k_parts)) : l.k_norm);
    Put(out_, at + "core_attention.softmax_offset", MyRows(l.sinks));
  }

  void LoadLatent(const std::string& at, const Layer& l) {
    const bool te = m_.transformer_engine;
    Put(out_, at + "linear_q_proj.weight", MyRows(l.q));
    Put(out_, at + "linear_q_down_proj.weight", te ? l.q_a : MyRows(l.q_a));
    Put(out_, at + "linear_kv_down_proj.weight", te ? l.kv_a : MyRows(l.kv_a));
    Put(out_, at + "linear_q_up_proj.weight", MyRows(l.q_b));
    Put(out_, at + "linear_kv_up_proj.weight", MyRows(l.kv_b));
    const bool fused = te && !c_.Indexed();
    Put(out_, at + (fused ? "linear_q_up_proj.layer_norm_weight" : "q_layernorm.weight"),
        l.q_a_norm);
    Put(out_, at + (fused ? "linear_kv_up_proj.layer_norm_weight" : "kv_layernorm.weight"),
        l.kv_a_norm);
    const std::string indexer = at + "core_attention.indexer.";
    Put(out_, indexer + "linear_wq_b.weight", l.index_q);
    Put(out_, indexer + "linear_wk.weight", l.index_k);
    Put(out_, indexer + "k_norm.weight", l.index_norm);
    Put(out_, indexer + "k_norm.bias", l.index_norm_bias);
    Put(out_, indexer + "linear_weights_proj.weight", l.index_weights);
  }

  void LoadMixture(const std::string& at, const Layer& l) {
    Put(out_, at + "router.weight", l.router);
    Put(out_, at + "router.bias", l.router_bias);
    Put(out_, at + "router.expert_bias", l.router_correction);
    Put(out_, at + "shared_experts.linear_fc1.weight",
        Glu(l.shared_gate, l.shared_up, m_.tp, place_.t));
    Put(out_, at + "shared_experts.linear_fc2.weight", MyColumns(l.shared_down));
    Put(out_, at + "shared_experts.gate_weight", l.shared_expert_gate);
    const int64_t held = Exact(c_.experts, m_.ep);
    std::vector<Array> fc1, fc2;
    for (int64_t i = 0; i < held; ++i) {
      const Expert& expert = l.experts[static_cast<size_t>(place_.e * held + i)];
      fc1.push_back(Glu(expert.gate, expert.up, m_.etp, place_.x));
      fc2.push_back(ColumnChunk(expert.down, m_.etp, place_.x));
      if (m_.experts == Experts::kGrouped) continue;
      const bool te = m_.experts == Experts::kTransformerEngine;
      const std::string before =
          te ? "experts." : "experts.local_experts." + std::to_string(i) + ".";
      const std::string behind = te ? std::to_string(i) : "";
      const auto put = [&](const char* name, const Array& array) {
        Put(out_, at + before + name + behind, array);
      };
      put("linear_fc1.weight", fc1.back());
      put("linear_fc2.weight", fc2.back());
      put("linear_fc1.bias", Glu(expert.gate_bias, expert.up_bias, m_.etp, place_.x));
      put("linear_fc2.bias", expert.down_bias);
    }
    if (m_.experts == Experts::kGrouped) LoadGroupedMlp(at + "experts.", fc1, fc2);
  }

  /// The buffers are [experts, hidden, 2 · inner] and [experts, inner, hidden] under shapes that
  /// hide it.
  void LoadGroupedMlp(const std::string& at, std::vector<Array> fc1, std::vector<Array> fc2) {
    for (Array& array : fc1) array = Transpose(array);
    for (Array& array : fc2) array = Transpose(array);
    const int64_t held = std::ssize(fc1);
    const int64_t hidden = fc1[0].shape[0], twice_inner = fc1[0].shape[1];
    out_[at + "weight1"] = Reshape(Stack(fc1), {hidden, held * twice_inner});
    out_[at + "weight2"] = Concat(fc2);
  }

  const Config& c_;
  const Weights& w_;
  const MegatronShape& m_;
  const Place place_;
  Tensors out_;
};

bool ExpertsFit(const Config& c, const MegatronShape& m) {
  if (!c.Mixture()) return m.ep == 1 && m.etp == 1;
  if (c.experts % m.ep != 0 || c.moe_intermediate % m.etp != 0) return false;
  if (m.tp * m.cp * m.dp % (m.ep * m.etp) != 0) return false;
  // GroupedMLP asserts that linear layers have no bias.
  if (m.experts == Experts::kGrouped && c.Is({"gpt_oss"})) return false;
  // parallel_state asserts this: otherwise the two grids would disagree about pipeline stages.
  const bool pp_last = m.pp == 1 || !m.pp_before_dp;
  return pp_last || m.ep * m.etp == m.tp * m.cp;
}

bool AttentionFits(const Config& c, const MegatronShape& m) {
  if (c.heads % m.tp != 0) return false;
  if (!c.Latent()) {
    const bool kv_fits = c.kv_heads % m.tp == 0 || m.tp % c.kv_heads == 0;
    return kv_fits && (c.heads + 2 * c.kv_heads) * c.head_dim % m.tp == 0;
  }
  const bool downs_whole = m.transformer_engine;
  return downs_whole || (c.q_lora % m.tp == 0 && (c.kv_lora + c.rope) % m.tp == 0);
}

}  // namespace

bool MegatronFits(const Config& c, const MegatronShape& m) {
  if (!c.Describes("megatron")) return false;
  if (!m.transformer_engine && (c.Indexed() || c.WholeNorms())) return false;
  if (!m.pipeline || (m.vpp > 1 && m.pp == 1)) return false;
  if (m.vocab_rows < c.vocab || m.vocab_rows % m.tp != 0) return false;
  if (!AttentionFits(c, m) || !ExpertsFit(c, m)) return false;
  if (c.AnyDenseLayer() && c.intermediate % m.tp != 0) return false;
  if (c.SharedSize() % m.tp != 0) return false;
  return !m.mtp || c.mtp == 0 || c.hidden % m.tp == 0;  // eh_proj's rows
}

std::vector<Tensors> MegatronRanks(const Config& c, const Weights& w, const MegatronShape& m) {
  const int64_t world = m.tp * m.cp * m.dp * m.pp;
  std::map<std::array<int64_t, 4>, Tensors> known;  // replicas are loaded once
  std::vector<Tensors> ranks;
  for (int64_t rank = 0; rank < world; ++rank) {
    Place place;
    place.t = rank % m.tp;
    // Dense ranks count t, cp, dp, stage; or t, cp, stage, dp. The grid of experts has x, e, their
    // replicas, stage; or x, e, stage, replicas.
    const int64_t before_stage = m.pp_before_dp ? m.tp * m.cp : m.tp * m.cp * m.dp;
    place.stage = rank / before_stage % m.pp;
    const int64_t expert_rank =
        m.pp_before_dp && m.pp > 1 ? rank % (m.ep * m.etp) : rank % (world / m.pp);
    place.x = expert_rank % m.etp;
    place.e = expert_rank / m.etp % m.ep;
    Tensors& tensors = known[{place.t, place.stage, place.e, place.x}];
    if (tensors.empty()) tensors = Rank(c, w, m, place).Load();
    ranks.push_back(tensors);
  }
  return ranks;
}

}  // namespace weightwire::family_oracle
