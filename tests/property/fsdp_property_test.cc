#include <gtest/gtest.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <random>

#include "server/layout/scheme.h"
#include "server/plan/plan.h"
#include "tests/support/plan_run.h"

// Random small models, random FSDP and ZeRO shardings on one side, hf, megatron or vllm on the
// other: a plan between them, run element by element. What the sharded side holds is worked out as
// torch does it, by chunking, flattening and padding whole arrays; nothing of the scheme is used.
namespace weightwire {
namespace {

using layout::ModelLayout;
using layout::Shape;

constexpr uint64_t kPadding = ~uint64_t{0} - 1;

struct Array {
  Shape shape;
  std::vector<uint64_t> cells;
};
using Tensors = std::map<std::string, Array>;

int64_t Count(const Shape& shape) {
  int64_t count = 1;
  for (int64_t size : shape) count *= size;
  return count;
}

/// tensor.narrow(dim, begin, count)
Array Narrow(const Array& whole, size_t dim, int64_t begin, int64_t count) {
  int64_t inner = 1;
  for (size_t d = dim + 1; d < whole.shape.size(); ++d) inner *= whole.shape[d];
  Array out{whole.shape, {}};
  out.shape[dim] = count;
  for (int64_t at = 0; at < Count(whole.shape); ++at) {
    const int64_t index = at / inner % whole.shape[dim];
    if (index >= begin && index < begin + count) {
      out.cells.push_back(whole.cells.at(static_cast<size_t>(at)));
    }
  }
  return out;
}

/// torch.chunk(tensor, parts, dim)[index]; no extent in `dim` when there are fewer chunks.
Array Chunk(const Array& whole, int64_t parts, size_t dim, int64_t index) {
  const int64_t size = whole.shape[dim];
  const int64_t chunk = (size + parts - 1) / parts;
  std::vector<Array> chunks;
  for (int64_t begin = 0; begin < size; begin += chunk) {
    chunks.push_back(Narrow(whole, dim, begin, std::min(chunk, size - begin)));
  }
  if (index < std::ssize(chunks)) return chunks[static_cast<size_t>(index)];
  return Narrow(whole, dim, 0, 0);
}

struct Sharding {
  std::string kind;
  int64_t dp = 1, hsdp = 1, tp = 1, dim = 0, align = 8;  ///< 8 elements of bf16 are 16 bytes
};

bool Contains(const std::string& text, const char* part) {
  return text.find(part) != std::string::npos;
}
bool IsBuffer(const std::string& name) { return name.ends_with("e_score_correction_bias"); }

/// The dimension that tensor parallelism cuts; −1: none.
int TensorParallelDim(const std::string& name) {
  for (const char* part : {".q_proj.", ".k_proj.", ".v_proj.", ".q_b_proj.", ".kv_b_proj.",
                           ".gate_proj.", ".up_proj.", "embed_tokens.", "lm_head."}) {
    if (Contains(name, part)) return 0;
  }
  return Contains(name, ".o_proj.") || Contains(name, ".down_proj.") ? 1 : -1;
}

/// A module's parameters in the order in which transformers builds them.
std::vector<std::string> ModuleOrder(const Tensors& hf, const std::string& family, int64_t layer) {
  std::vector<std::string> names;
  const auto add = [&](const std::string& name) {
    if (hf.contains(name)) names.push_back(name);
  };
  if (layer < 0) {
    for (const char* name : {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}) {
      add(name);
    }
    return names;
  }
  const std::string at = std::string("model.layers.") + std::to_string(layer) + ".";
  const auto mlp = [&](const std::string& module) {
    for (const char* name : {"gate_proj", "up_proj", "down_proj"}) {
      add(at + module + name + ".weight");
    }
  };
  const auto experts = [&] {
    for (int64_t e = 0; e < 9; ++e) mlp("mlp.experts." + std::to_string(e) + ".");
  };
  for (const char* name :
       {"q_proj", "q_a_proj", "q_a_layernorm", "q_b_proj", "k_proj", "v_proj", "kv_a_proj_with_mqa",
        "kv_a_layernorm", "kv_b_proj", "o_proj", "q_norm", "k_norm"}) {
    add(at + "self_attn." + name + ".weight");
    add(at + "self_attn." + name + ".bias");
  }
  mlp("mlp.");
  if (family == "deepseek_v3") experts();
  add(at + "mlp.gate.weight");
  if (family != "deepseek_v3") experts();
  mlp("mlp.shared_experts.");
  add(at + "input_layernorm.weight");
  add(at + "post_attention_layernorm.weight");
  return names;
}

/// Part `index` of `flat`, padded to a multiple of `parts`.
Array FlatPart(std::vector<uint64_t> flat, int64_t parts, int64_t index) {
  while (std::ssize(flat) % parts != 0) flat.push_back(kPadding);
  const int64_t size = std::ssize(flat) / parts;
  return {{size}, {flat.begin() + index * size, flat.begin() + (index + 1) * size}};
}

/// FSDP1's flat parameters, or the parts of the original parameters in them.
void AddFlat(const Tensors& hf, const std::string& family, const Sharding& s, int64_t shard,
             int64_t layer, Tensors& out) {
  const bool orig = s.kind == "fsdp1-orig";
  std::vector<uint64_t> flat;
  std::map<std::string, std::pair<int64_t, int64_t>> span;
  for (const std::string& name : ModuleOrder(hf, family, layer)) {
    const Array& whole = hf.at(name);
    while (orig && std::ssize(flat) % s.align != 0) flat.push_back(kPadding);
    span[name] = {std::ssize(flat), std::ssize(flat) + std::ssize(whole.cells)};
    flat.insert(flat.end(), whole.cells.begin(), whole.cells.end());
  }
  if (flat.empty()) return;
  const Array part = FlatPart(flat, s.dp, shard);
  if (!orig) {
    const std::string at =
        layer < 0 ? "" : std::string("model.layers.") + std::to_string(layer) + ".";
    out[at + "_flat_param"] = part;
    return;
  }
  const int64_t from = shard * part.shape[0];
  for (const auto& [name, range] : span) {
    Array held{{0}, {}};
    for (int64_t at = std::max(from, range.first);
         at < std::min(from + part.shape[0], range.second); ++at) {
      held.cells.push_back(flat[static_cast<size_t>(at)]);
    }
    held.shape = s.dp == 1 ? hf.at(name).shape : Shape{std::ssize(held.cells)};
    out[name] = std::move(held);
  }
}

/// What rank `rank` of the sharded trainer holds.
Tensors Held(const Tensors& hf, const std::string& family, const Sharding& s, int64_t rank) {
  const int64_t t = rank % s.tp, shard = rank / s.tp % s.dp;
  Tensors out;
  for (int64_t layer = -1; s.kind.starts_with("fsdp1") && layer < 9; ++layer) {
    AddFlat(hf, family, s, shard, layer, out);
  }
  for (const auto& [name, whole] : hf) {
    if (IsBuffer(name)) {
      out[name] = whole;
    } else if (s.kind == "zero3") {
      out[name] = FlatPart(whole.cells, s.dp, shard);
    } else if (s.kind == "fsdp2") {
      const int tp_dim = TensorParallelDim(name);
      const size_t dim = std::ssize(whole.shape) > s.dim ? static_cast<size_t>(s.dim) : 0;
      Array mine = tp_dim < 0 ? whole : Chunk(whole, s.tp, static_cast<size_t>(tp_dim), t);
      mine = Chunk(mine, s.dp, dim, shard);
      if (mine.cells.empty()) mine.shape[dim] = 0;
      out[name] = std::move(mine);
    }
  }
  return out;
}

/// One round: a model and the specs of both sides.
struct Round {
  std::string family, config;
  Sharding sharding;
  std::string fsdp_spec, other_spec;
  bool fsdp_is_source = true;
  bool mtp = false;
};

class Generator {
 public:
  explicit Generator(uint64_t seed) : random_(seed) {}

  Round Draw() {
    Round r;
    r.family = std::array{"qwen2", "qwen3_moe", "deepseek_v3"}[static_cast<size_t>(In(0, 2))];
    r.fsdp_is_source = OneIn(2);
    const int64_t tp = OneIn(3) ? 1 : In(2, 3);
    const std::string other = std::array{"hf", "megatron", "vllm"}[static_cast<size_t>(In(0, 2))];
    DrawSharding(r);
    const bool flat = r.sharding.kind.starts_with("fsdp1");
    const int64_t mtp_layers = r.family == "deepseek_v3" && OneIn(2) ? 1 : 0;
    r.mtp = mtp_layers > 0 && !flat && other != "vllm" && OneIn(2);
    DrawConfig(r, tp, mtp_layers);
    r.other_spec = other;
    if (other != "hf") {
      r.other_spec += ":tp" + std::to_string(tp);
      r.other_spec += other == "vllm" ? ",vocab_pad_to=" + std::to_string(tp * In(1, 3))
                                      : ",vocab_pad=" + std::to_string((20 + In(0, 3)) * tp);
      if (OneIn(3)) r.other_spec += ",pp2";
      if (other == "megatron" && OneIn(2)) r.other_spec += ",spec=te";
      if (other == "vllm" && r.family != "qwen2" && OneIn(2)) r.other_spec += ",ep";
    }
    if (other != "vllm" && !r.mtp) r.other_spec += (other == "hf" ? ":" : ",") + Mtp();
    return r;
  }

 private:
  static std::string Mtp() { return "mtp=none"; }
  int64_t In(int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random_);
  }
  bool OneIn(int64_t n) { return In(1, n) == 1; }

  void DrawSharding(Round& r) {
    Sharding& s = r.sharding;
    s.kind = std::array{"fsdp2", "fsdp2", "fsdp1", "fsdp1-orig", "zero3"}[size_t(In(0, 4))];
    s.dp = OneIn(8) ? In(10, 45) : In(1, 7);
    s.hsdp = OneIn(3) && s.dp < 10 ? In(2, 3) : 1;
    r.fsdp_spec = "fsdp:dp" + std::to_string(s.dp) + ",hsdp" + std::to_string(s.hsdp);
    if (s.kind == "fsdp2") {
      s.tp = OneIn(2) && s.dp < 10 ? In(2, 5) : 1;
      s.dim = OneIn(3) ? In(1, 2) : 0;
      r.fsdp_spec += ",tp" + std::to_string(s.tp) + ",dim=" + std::to_string(s.dim);
    }
    if (s.kind != "fsdp2" || OneIn(2)) r.fsdp_spec += ",kind=" + s.kind;
    if (s.kind == "fsdp1-orig" && OneIn(2)) {
      s.align = In(1, 9);
      r.fsdp_spec += ",align=" + std::to_string(s.align);
    }
  }

  void DrawConfig(Round& r, int64_t tp, int64_t mtp_layers) {
    const auto number = [&](const char* key, int64_t value) {
      r.config += std::string("\"") + key + "\":" + std::to_string(value) + ",";
    };
    r.config = "{";
    const int64_t kv = tp * In(1, 2);
    number("hidden_size", In(1, 9));
    number("num_hidden_layers", 2);
    number("num_attention_heads", kv * In(1, 2));
    number("num_key_value_heads", kv);
    number("head_dim", In(1, 4));
    number("intermediate_size", tp * In(1, 5));
    number("vocab_size", In(1, 20));
    if (r.family != "qwen2") {
      const int64_t experts = In(tp, 4);
      number("moe_intermediate_size", tp * In(1, 3));
      number(r.family == "qwen3_moe" ? "num_experts" : "n_routed_experts", experts);
      if (OneIn(2)) r.config += R"("mlp_only_layers":[0],)";
    }
    if (r.family == "deepseek_v3") {
      number("n_shared_experts", In(0, 1));
      number("first_k_dense_replace", In(0, 1));
      number("q_lora_rank", OneIn(3) ? 0 : tp * In(1, 3));
      number("kv_lora_rank", tp * In(1, 3));
      number("qk_nope_head_dim", In(1, 3));
      number("qk_rope_head_dim", tp * In(1, 2));
      number("v_head_dim", In(1, 3));
      number("num_nextn_predict_layers", mtp_layers);
    }
    if (!r.mtp) r.fsdp_spec += "," + Mtp();
    r.config += std::string("\"tie_word_embeddings\":") + (OneIn(2) ? "true" : "false") +
                ",\"model_type\":\"" + r.family + "\"}";
  }

  std::mt19937_64 random_;
};

Result<ModelLayout> LayoutOf(const Round& round, const std::string& text) {
  WW_ASSIGN(const layout::ParallelSpec spec, layout::ParseParallelSpec(text));
  return layout::LayoutFromScheme(round.config, spec);
}

/// The checkpoint, without the layers that the trainer leaves out.
Tensors HuggingFace(const Round& round, const layout::CanonicalSpace& canonical) {
  Tensors hf;
  for (uint32_t i = 0; i < canonical.tensors.size(); ++i) {
    const std::string& name = canonical.tensors[i].name;
    const layout::Shape& shape = canonical.tensors[i].shape;
    if (!round.mtp && name.starts_with("model.layers.2.")) continue;
    Array& array = hf[name];
    array.shape = shape;
    testing::ForEachIndex(shape, [&](const std::vector<int64_t>& index) {
      array.cells.push_back(testing::ElementId(i, shape, index));
    });
  }
  return hf;
}

/// The oracle's tensors in the order of the scheme's; names and shapes must agree exactly.
testing::Memory MemoryOf(const ModelLayout& layout, const Round& round) {
  const Tensors hf = HuggingFace(round, layout.canonical);
  const Sharding& s = round.sharding;
  testing::Memory memory;
  EXPECT_EQ(std::ssize(layout.ranks), s.dp * s.hsdp * s.tp);
  for (size_t r = 0; r < layout.ranks.size(); ++r) {
    const Tensors held = Held(hf, round.family, s, static_cast<int64_t>(r));
    auto& tensors = memory.emplace_back();
    EXPECT_EQ(layout.ranks[r].tensors.size(), held.size()) << "rank " << r;
    for (const auto& local : layout.ranks[r].tensors) {
      const auto expected = held.find(local.name);
      EXPECT_NE(expected, held.end()) << "rank " << r << " has an unexpected " << local.name;
      if (expected == held.end()) return {};
      EXPECT_EQ(local.shape, expected->second.shape) << "rank " << r << " " << local.name;
      tensors.push_back(expected->second.cells);
    }
  }
  return memory;
}

void ExpectTransferred(const Round& round, const ModelLayout& fsdp, const ModelLayout& other) {
  testing::Memory sharded = MemoryOf(fsdp, round);
  if (::testing::Test::HasFailure()) return;
  const ModelLayout& source = round.fsdp_is_source ? fsdp : other;
  const ModelLayout& target = round.fsdp_is_source ? other : fsdp;
  const auto plan = plan::BuildPlan(source, target);
  ASSERT_TRUE(plan.has_value()) << plan.error().ToString();
  testing::Memory got = testing::EmptyMemory(target);
  const testing::Memory sent = round.fsdp_is_source ? sharded : testing::FilledMemory(other);
  EXPECT_EQ(testing::RunPlan(*plan, sent, got), 0) << "elements were written twice";
  const Status proof = plan::VerifyPlan(*plan, source, target);
  EXPECT_TRUE(proof.ok()) << proof.ToString();
  if (!round.fsdp_is_source) {
    for (auto& rank : sharded) {
      for (auto& tensor : rank) {
        std::replace(tensor.begin(), tensor.end(), kPadding, testing::kUntouched);
      }
    }
  }
  const testing::Memory want = round.fsdp_is_source ? testing::FilledMemory(other) : sharded;
  for (size_t r = 0; r < want.size(); ++r) {
    for (size_t t = 0; t < want[r].size(); ++t) {
      ASSERT_EQ(got[r][t], want[r][t]) << "rank " << r << " " << target.ranks[r].tensors[t].name;
    }
  }
}

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr int kTransfers = 150;  // sanitizers make each an order of magnitude slower
#else
constexpr int kTransfers = 1'500;
#endif

TEST(FsdpTransfer, EqualsTorchsShardsForRandomModelsAndShardings) {
  const char* seed_text = std::getenv("WEIGHTWIRE_SEED");
  const uint64_t seed = seed_text ? std::strtoull(seed_text, nullptr, 10) : std::random_device()();
  std::printf("WEIGHTWIRE_SEED=%llu\n", static_cast<unsigned long long>(seed));
  std::map<std::string, int> kinds;
  int transfers = 0;
  for (uint64_t number = 0; transfers < kTransfers; ++number) {
    ASSERT_LT(number, 3u * kTransfers) << "the other side refuses too often";
    const Round round = Generator(seed + number).Draw();
    SCOPED_TRACE(std::string("WEIGHTWIRE_SEED=") + std::to_string(seed) + " round " +
                 std::to_string(number) + ": " + round.fsdp_spec +
                 (round.fsdp_is_source ? " to " : " from ") + round.other_spec + " of " +
                 round.config);
    const auto other = LayoutOf(round, round.other_spec);
    if (!other.has_value()) {  // sizes that its parallelism cannot cut; none is refused by fsdp
      ASSERT_EQ(other.error().reason(), Reason::kShapeMismatch) << other.error().ToString();
      continue;
    }
    const auto fsdp = LayoutOf(round, round.fsdp_spec);
    ASSERT_TRUE(fsdp.has_value()) << fsdp.error().ToString();
    ExpectTransferred(round, *fsdp, *other);
    if (HasFailure()) return;
    ++kinds[round.sharding.kind + (round.fsdp_is_source ? " as source" : " as target")];
    ++transfers;
  }
  for (const auto& [kind, count] : kinds) std::printf("%s: %d\n", kind.c_str(), count);
  EXPECT_EQ(kinds.size(), 8u);
}

}  // namespace
}  // namespace weightwire
