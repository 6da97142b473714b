#include "tests/property/family_generator.h"

#include <algorithm>
#include <numeric>

namespace weightwire {
namespace {

using family_oracle::Config;
using family_oracle::Tensors;

/// What cuts the experts' inner sizes, what deals experts out, and how many there must be.
struct ExpertNeeds {
  int64_t parts = 1, multiple = 1, least = 1;
};

ExpertNeeds NeedsOf(const Party& party) {
  if (party.kind == Party::Kind::kMegatron) return {party.megatron.etp, party.megatron.ep, 1};
  const family_oracle::EngineShape& e = party.engine;
  const int64_t ep = std::max<int64_t>(1, e.ep);
  if (party.kind != Party::Kind::kEngine) return {};
  if (e.sglang) return {std::max<int64_t>(1, e.tp / ep), 1, ep - e.redundant};
  return e.ep > 0 ? ExpertNeeds{1, 1, e.tp * e.dp - e.redundant} : ExpertNeeds{e.tp * e.dp, 1, 1};
}

int64_t TensorParallel(const Party& party) {
  return party.kind == Party::Kind::kMegatron ? party.megatron.tp
         : party.kind == Party::Kind::kEngine ? party.engine.tp
                                              : 1;
}

}  // namespace

std::string Party::Spec() const {
  std::string spec = scheme;
  for (size_t i = 0; i < items.size(); ++i) spec.append(i == 0 ? ":" : ",").append(items[i]);
  return spec;
}

bool Party::Keeps(const std::string& name) const {
  const auto matches = [&name](const Pattern& pattern) { return pattern.matches(name); };
  return (only.empty() || std::any_of(only.begin(), only.end(), matches)) &&
         std::none_of(skip.begin(), skip.end(), matches);
}

bool Party::NamesFit(const Config& config) const {
  if (!family_oracle::AdaptersFit(config, targets)) return false;
  if (only.empty() && skip.empty()) return true;
  const Tensors hf = family_oracle::HuggingFace(config);
  const auto any = [&hf](const auto& of) {
    return std::any_of(hf.begin(), hf.end(), [&of](const auto& item) { return of(item.first); });
  };
  const auto useful = [&any](const Pattern& pattern) { return any(pattern.matches); };
  return std::all_of(only.begin(), only.end(), useful) &&
         std::all_of(skip.begin(), skip.end(), useful) &&
         any([this](const std::string& name) { return Keeps(name); });
}

bool Party::Fits(const Config& config) const {
  if (!NamesFit(config)) return false;
  if (lora > 0 && kind == Kind::kFsdp && fsdp.tp > 1) return false;
  if (kind == Kind::kMegatron) return family_oracle::MegatronFits(config, megatron);
  return kind != Kind::kEngine || family_oracle::EngineFits(config, engine);
}

std::vector<Tensors> Party::Weights(const Config& config, const Tensors& hf,
                                    const family_oracle::Weights& weights) const {
  if (kind == Kind::kHuggingFace) return {family_oracle::Checkpoint(config, hf, mtp)};
  if (kind == Kind::kFsdp) {
    return family_oracle::FsdpRanks(mtp ? hf : family_oracle::Checkpoint(config, hf, false), fsdp);
  }
  if (kind == Kind::kMegatron) return family_oracle::MegatronRanks(config, weights, megatron);
  return family_oracle::EngineRanks(config, weights, engine);
}

Tensors Party::Canonical(const Config& config, const Tensors& hf) const {
  return lora == 0 ? hf : family_oracle::Adapters(config, hf, lora, targets);
}

std::vector<Tensors> Party::Ranks(const Config& config, const Tensors& hf,
                                  const family_oracle::Weights& weights) const {
  if (lora == 0) return Weights(config, hf, weights);
  const Tensors adapters = Canonical(config, hf);
  if (kind == Kind::kFsdp) return family_oracle::FsdpRanks(adapters, fsdp);
  return family_oracle::AdapterRanks(hf, adapters, Weights(config, hf, weights));
}

int64_t FamilyGenerator::DivisorOf(int64_t n) {
  std::vector<int64_t> divisors;
  for (int64_t d = 1; d <= n; ++d) {
    if (n % d == 0) divisors.push_back(d);
  }
  return Pick(divisors);
}

void FamilyGenerator::Size(Party& party, const char* word, int64_t size) {
  if (size > 1 || OneIn(4)) party.items.push_back(std::string(word) + std::to_string(size));
}

Case FamilyGenerator::Draw() {
  Case c;
  DrawOutline(c.config);
  const std::vector<int64_t> sizes = {1, 1, 2, 2, 2, 3, 4, 4, 5, 6, 8};
  const int64_t a = Pick(sizes);
  int64_t b = Pick(sizes);
  while (std::lcm(a, b) > 16 && !OneIn(12)) b = Pick(sizes);
  const auto draw = [&](int64_t kind, int64_t tp) {
    return kind == 4   ? DrawFsdp(c.config)
           : kind == 0 ? DrawHuggingFace(c.config)
           : kind == 1 ? DrawMegatron(c.config, tp)
                       : DrawEngine(c.config, tp, kind == 3);
  };
  c.from = draw(Pick<int64_t>({0, 1, 1, 1, 1, 2, 3, 4}), a);
  c.to = draw(Pick<int64_t>({0, 1, 1, 2, 2, 2, 3, 3}), b);
  DrawSizes(c.config, c.from, c.to);
  OneIn(8) ? DrawLora(c) : DrawFilters(c);
  for (Party* party : {&c.from, &c.to}) {
    DrawVocab(c.config, *party);
    std::shuffle(party->items.begin(), party->items.end(), random_);
  }
  return c;
}

/// What decides which tensors there are.
void FamilyGenerator::DrawOutline(Config& c) {
  c.family = Pick(family_oracle::KnownFamilies());
  if (OneIn(12)) c.family = OneIn(2) ? "deepseek_v3" : "kimi_k2";  // for its MTP layers
  c.layers = In(1, c.Mixture() ? 5 : 8);
  c.attention_bias = OneIn(2);
  c.mlp_bias = OneIn(2);
  c.use_qk_norm = OneIn(2);
  if (c.HasMtp()) c.mtp = In(0, 2);
  const bool gemma = c.Is({"gemma", "gemma2", "gemma3_text"});
  c.says_tied = !OneIn(4);
  c.tied = c.says_tied ? OneIn(2) : gemma;
  c.output_bias = OneIn(2);
  if (c.Typed() && OneIn(2)) {
    c.lists_moe_layers = true;
    for (int64_t layer = 0; layer < c.layers; ++layer) {
      if (OneIn(2)) c.moe_layers.insert(layer);
    }
  }
  if (c.Indexed()) {
    c.index_heads = In(1, 3);
    c.index_dim = In(1, 3);
    for (int64_t layer = 0; layer < c.layers; ++layer) {
      if (OneIn(3)) c.shares_index.insert(layer);
    }
  }
  if (c.Latent() || c.Is({"glm4_moe"})) c.first_dense = In(0, c.layers - (OneIn(8) ? 0 : 1));
  if ((c.Latent() && !c.Typed()) ||
      c.Is({"qwen2_moe", "qwen3_moe", "llama4_text", "qwen3_vl_moe_text"})) {
    c.step = OneIn(3) ? 2 : 1;
  }
  if (c.Is({"llama4_text"}) && OneIn(2)) {
    c.lists_moe_layers = true;
    for (int64_t layer = 0; layer < c.layers; ++layer) {
      if (OneIn(2)) c.moe_layers.insert(layer);
    }
  }
  if (c.Is({"qwen2_5_vl"})) {
    c.vision.depth = In(1, 2);
    c.nests_text = OneIn(2);
  }
  if (c.Wraps()) {
    c.vision.depth = In(1, 2);
    c.vision.mergers = In(0, 2);
    c.vision.pooling = OneIn(2);
    c.vision.projector_bias = OneIn(2);
    c.nests_text = true;
  }
  if (!c.Is({"qwen2_moe", "qwen3_moe", "qwen3_vl_moe_text"})) return;
  for (int64_t layer = 0; layer < c.layers; ++layer) {
    if (OneIn(6)) c.dense_layers.insert(layer);
  }
}

/// Sizes that both sides' parallel sizes divide, except now and then.
void FamilyGenerator::DrawSizes(Config& c, const Party& from, const Party& to) {
  const bool loose = OneIn(10);
  const int64_t tp = std::lcm(TensorParallel(from), TensorParallel(to));
  c.hidden = In(1, 9);
  c.vocab = In(1, 41);
  c.intermediate = loose ? In(1, 24) : tp * In(1, tp > 8 ? 1 : 3);
  if (c.mtp > 0 && !loose) {
    int64_t rows = 1;  // of eh_proj
    for (const Party* party : {&from, &to}) {
      if (party->kind == Party::Kind::kMegatron && party->mtp) {
        rows = std::lcm(rows, party->megatron.tp);
      }
    }
    c.hidden = rows * In(1, std::max<int64_t>(1, 9 / rows));
  }
  if (c.Wraps() && !loose) c.hidden = tp * In(1, std::max<int64_t>(1, 9 / tp));
  DrawAttention(c, tp, loose);
  if (c.vision.depth > 0) DrawVision(c.vision, tp, loose);
  if (c.Mixture()) DrawMixture(c, from, to, loose);
}

void FamilyGenerator::DrawAttention(Config& c, int64_t tp, bool loose) {
  c.heads = tp > 16 || loose ? In(1, 16) : tp * In(1, 16 / tp);
  std::vector<int64_t> kv_heads;
  for (int64_t d = 1; d <= c.heads; ++d) {
    const bool fits = d % tp == 0 || tp % d == 0;
    if (c.heads % d == 0 && (fits || loose)) kv_heads.push_back(d);
  }
  c.kv_heads = Pick(kv_heads);
  for (int i = 0; i < 8; ++i) {
    c.head_dim = In(1, 6);
    if (c.Is({"llama4_text"}) && !OneIn(30)) c.head_dim = 2 * In(1, 3);
    if ((c.heads + 2 * c.kv_heads) * c.head_dim % tp == 0) break;
  }
  if (!c.Wraps() &&
      c.Is({"llama", "granite", "exaone4", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3_moe",
            "phi3", "qwen2_5_vl"}) &&
      OneIn(5)) {
    c.says_head_dim = false;
    c.head_dim = In(1, 2);
    c.hidden = c.heads * c.head_dim;
  }
  if (!c.Latent()) return;
  c.kv_heads = c.heads;
  c.says_head_dim = c.hidden % c.heads != 0 || OneIn(2);
  c.q_lora = OneIn(3) && !c.Indexed() ? 0 : loose ? In(1, 12) : tp * In(1, tp > 4 ? 1 : 3);
  c.rope = In(1, 4);
  c.kv_lora = loose ? In(1, 12) : tp * In(1, tp > 4 ? 1 : 2) + (tp - c.rope % tp) % tp;
  c.nope = In(1, 4);
  c.v_dim = In(1, 4);
}

void FamilyGenerator::DrawVision(family_oracle::Vision& v, int64_t tp, bool loose) {
  v.heads = loose ? In(1, 4) : tp;
  v.hidden = v.heads * In(1, tp > 4 ? 1 : 2);
  v.intermediate = loose ? In(1, 9) : tp * In(1, tp > 4 ? 1 : 2);
  v.channels = In(1, 2);
  v.frames = In(1, 2);
  v.patch = In(1, 2);
  v.merge = In(1, v.hidden > 6 ? 1 : 2);
  v.out = In(1, 4);
  v.side = In(1, 2);
  v.projector = loose ? In(1, 4) : tp;
}

void FamilyGenerator::DrawMixture(Config& c, const Party& from, const Party& to, bool loose) {
  const ExpertNeeds a = NeedsOf(from), b = NeedsOf(to);
  const int64_t multiple = std::lcm(a.multiple, b.multiple);
  const int64_t least = std::max(a.least, b.least);
  const int64_t tp = std::lcm(TensorParallel(from), TensorParallel(to));
  c.experts = loose ? In(1, 9) : multiple * std::max(In(1, 3), (least + multiple - 1) / multiple);
  c.experts = std::min<int64_t>(c.experts, 24);
  if (c.Is({"qwen2_moe"})) c.shared_intermediate = loose ? In(1, 12) : tp * In(1, 2);
  if (c.Latent() || c.Is({"glm4_moe"})) c.shared_experts = In(0, 2);
  int64_t parts = std::lcm(a.parts, b.parts);
  if (c.shared_experts > 0 || c.Is({"llama4_text"})) parts = std::lcm(parts, tp);
  c.moe_intermediate = loose || parts > 36 ? In(1, 12) : parts * In(1, parts > 4 ? 1 : 3);
}

}  // namespace weightwire
