#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <numeric>
#include <random>

#include "server/layout/scheme.h"
#include "server/plan/plan.h"
#include "tests/support/dense_oracle.h"
#include "tests/support/plan_run.h"

// Random dense models and parallel shapes: layouts from the schemes, a plan between them, run
// element by element, against loaders written from the facts. Shapes that cannot be cut must be
// refused with kShapeMismatch, exactly when the oracle says so.
namespace weightwire {
namespace {

using oracle::DenseConfig;
using oracle::Tensors;

/// One side of a transfer: what to ask the schemes for, and what the oracle says about it.
struct Party {
  std::string spec;
  bool fits = true;
  std::function<std::vector<Tensors>(const DenseConfig&, const Tensors& hf)> ranks;
};

class Generator {
 public:
  explicit Generator(uint64_t seed) : random_(seed) {}

  int64_t In(int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random_);
  }
  bool OneIn(int64_t n) { return In(1, n) == 1; }

  /// Two sizes up to 8 that at most 16 heads can be cut by, except now and then.
  std::pair<int64_t, int64_t> TensorParallelSizes() {
    int64_t a = In(1, 8), b = In(1, 8);
    while (std::lcm(a, b) > 16 && !OneIn(12)) b = In(1, 8);
    return {a, b};
  }

  /// Sizes that tensor-parallel sizes `a` and `b` divide, except now and then.
  DenseConfig Config(int64_t a, int64_t b) {
    const int64_t both = std::lcm(a, b);
    const bool loose = OneIn(8);
    DenseConfig c;
    c.model_type =
        std::vector<std::string>{"qwen2", "qwen3", "llama"}[static_cast<size_t>(In(0, 2))];
    c.hidden = In(1, 13);
    c.layers = In(1, 7);
    c.heads = both > 16 || loose ? In(1, 16) : both * In(1, 16 / both);
    std::vector<int64_t> divisors;
    for (int64_t d = 1; d <= c.heads; ++d) {
      const bool fits = (d % a == 0 || a % d == 0) && (d % b == 0 || b % d == 0);
      if (c.heads % d == 0 && (fits || loose)) divisors.push_back(d);
    }
    c.kv_heads = divisors[static_cast<size_t>(In(0, std::ssize(divisors) - 1))];
    c.head_dim = In(1, 6);
    c.intermediate = loose ? In(1, 24) : both * In(1, 4);
    c.vocab = In(1, 41);
    c.tied = OneIn(2);
    c.attention_bias = OneIn(2);
    c.mlp_bias = OneIn(2);
    return c;
  }

  Party Megatron(const DenseConfig& c, int64_t tp) {
    oracle::MegatronShape m;
    m.tp = tp;
    m.dp = In(1, 3);
    m.cp = OneIn(6) ? 2 : 1;
    m.transformer_engine = OneIn(2);
    const int64_t pp = In(1, std::min<int64_t>(6, c.layers));
    std::string spec = "megatron:tp" + std::to_string(tp) + ",pp" + std::to_string(pp) + ",dp" +
                       std::to_string(m.dp);
    if (m.cp > 1) spec += ",cp2";
    if (m.transformer_engine || OneIn(2)) {
      spec += m.transformer_engine ? ",spec=te" : ",spec=local";
    }
    spec += Stages(c.layers, pp, m.stage_layers);
    spec += MegatronVocab(c.vocab, tp, m.vocab_rows);
    return {spec, oracle::MegatronFits(c, m), [m](const DenseConfig& config, const Tensors& hf) {
              return oracle::MegatronRanks(config, hf, m);
            }};
  }

  Party Vllm(const DenseConfig& c, int64_t tp) {
    oracle::VllmShape v;
    v.tp = tp;
    v.dp = In(1, 3);
    std::string spec = "vllm:tp" + std::to_string(tp) + ",dp" + std::to_string(v.dp);
    if (64 % tp != 0 || OneIn(2)) {
      v.vocab_pad_to = OneIn(8) ? In(1, 20) : tp * In(1, 9);
      spec += ",vocab_pad_to=" + std::to_string(v.vocab_pad_to);
    }
    return {spec, oracle::VllmFits(c, v), [v](const DenseConfig& config, const Tensors& hf) {
              return oracle::VllmRanks(config, hf, v);
            }};
  }

  static Party HuggingFace() {
    return {"hf", true,
            [](const DenseConfig&, const Tensors& hf) { return std::vector<Tensors>{hf}; }};
  }

  Party Any(const DenseConfig& c, int64_t tp) {
    const int64_t kind = In(0, 9);
    if (kind < 5) return Vllm(c, tp);
    if (kind < 9) return Megatron(c, tp);
    return HuggingFace();
  }

 private:
  /// Layers per stage, and how the spec says so.
  std::string Stages(int64_t layers, int64_t pp, std::vector<int64_t>& counts) {
    counts.assign(static_cast<size_t>(pp), layers / pp);
    if (layers % pp == 0 ? OneIn(3) : OneIn(12)) return "";  // even, or refused
    const int64_t first = In(1, layers - pp + 1);
    if (pp > 1 && ((layers - first) % (pp - 1) == 0 ? OneIn(2) : OneIn(12))) {
      counts.assign(static_cast<size_t>(pp), (layers - first) / (pp - 1));
      counts[0] = first;
      return ",first=" + std::to_string(first);
    }
    counts.assign(static_cast<size_t>(pp), 1);
    for (int64_t rest = layers - pp; rest > 0; --rest) {
      ++counts[static_cast<size_t>(In(0, pp - 1))];
    }
    std::string spec = ",layers=";
    for (int64_t s = 0; s < pp; ++s) {
      if (s > 0) spec += '-';
      spec += std::to_string(counts[static_cast<size_t>(s)]);
    }
    return spec;
  }

  std::string MegatronVocab(int64_t vocab, int64_t tp, int64_t& rows) {
    const int64_t kind = In(0, 9);
    if (kind < 2) {
      rows = (vocab + 128 * tp - 1) / (128 * tp) * (128 * tp);
      return "";
    }
    if (kind < 3 || (kind < 5 && vocab % tp == 0)) {
      rows = vocab;
      return ",vocab_pad=none";
    }
    rows = OneIn(12) ? In(1, 60) : (vocab + tp - 1) / tp * tp + tp * In(0, 3);
    return ",vocab_pad=" + std::to_string(rows);
  }

  std::mt19937_64 random_;
};

/// Lays the oracle's tensors out in the order of the scheme's; names and shapes must agree exactly.
testing::Memory MemoryOf(const layout::ModelLayout& layout, const std::vector<Tensors>& ranks) {
  testing::Memory memory;
  EXPECT_EQ(layout.ranks.size(), ranks.size());
  if (layout.ranks.size() != ranks.size()) return memory;
  for (size_t r = 0; r < ranks.size(); ++r) {
    auto& tensors = memory.emplace_back();
    EXPECT_EQ(layout.ranks[r].tensors.size(), ranks[r].size()) << "rank " << r;
    for (const auto& local : layout.ranks[r].tensors) {
      const auto expected = ranks[r].find(local.name);
      EXPECT_NE(expected, ranks[r].end()) << "rank " << r << " has an unexpected " << local.name;
      if (expected == ranks[r].end()) return {};
      EXPECT_EQ(local.shape, expected->second.Shape()) << "rank " << r << " " << local.name;
      tensors.push_back(expected->second.cells);
    }
  }
  return memory;
}

/// Every filled cell of the target, and none of its padding, was written.
void ExpectEqual(const layout::ModelLayout& target, const testing::Memory& got,
                 const testing::Memory& expected) {
  ASSERT_EQ(got.size(), expected.size());
  for (size_t r = 0; r < got.size(); ++r) {
    for (size_t t = 0; t < got[r].size(); ++t) {
      const std::string& name = target.ranks[r].tensors[t].name;
      ASSERT_EQ(got[r][t].size(), expected[r][t].size()) << "rank " << r << " " << name;
      for (size_t i = 0; i < got[r][t].size(); ++i) {
        const bool padding = expected[r][t][i] == oracle::kPadding;
        ASSERT_EQ(got[r][t][i], padding ? testing::kUntouched : expected[r][t][i])
            << "rank " << r << " " << name << " element " << i;
      }
    }
  }
}

Result<layout::ModelLayout> LayoutOf(const DenseConfig& config, const Party& party) {
  WW_ASSIGN(const layout::ParallelSpec spec, layout::ParseParallelSpec(party.spec));
  return layout::LayoutFromScheme(oracle::ConfigJson(config), spec);
}

void ExpectRefused(const DenseConfig& config, const Party& party) {
  const auto layout = LayoutOf(config, party);
  ASSERT_FALSE(layout.has_value()) << party.spec << " must be refused";
  EXPECT_EQ(layout.error().code(), Code::kInvalidArgument) << layout.error().ToString();
  EXPECT_EQ(layout.error().reason(), Reason::kShapeMismatch) << layout.error().ToString();
}

void ExpectTransferred(const DenseConfig& config, const Party& from, const Party& to,
                       uint64_t salt) {
  const Tensors hf = oracle::HuggingFace(config, salt);
  const auto source = LayoutOf(config, from);
  const auto target = LayoutOf(config, to);
  ASSERT_TRUE(source.has_value()) << source.error().ToString();
  ASSERT_TRUE(target.has_value()) << target.error().ToString();
  const testing::Memory sent = MemoryOf(*source, from.ranks(config, hf));
  const testing::Memory wanted = MemoryOf(*target, to.ranks(config, hf));
  if (::testing::Test::HasFailure()) return;

  const auto plan = plan::BuildPlan(*source, *target);
  ASSERT_TRUE(plan.has_value()) << plan.error().ToString();
  testing::Memory got = testing::EmptyMemory(*target);
  EXPECT_EQ(testing::RunPlan(*plan, sent, got), 0) << "elements were written twice";
  ExpectEqual(*target, got, wanted);
  const Status proof = plan::VerifyPlan(*plan, *source, *target);
  EXPECT_TRUE(proof.ok()) << proof.ToString();
  EXPECT_DOUBLE_EQ(plan::Report(*plan, *source, *target).ingress_over_bound, 1.0);
}

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr int kTransfers = 400;  // sanitizers make each an order of magnitude slower
#else
constexpr int kTransfers = 2500;
#endif

TEST(DenseTransfer, EqualsTheLoadersForRandomModelsAndShapes) {
  const char* seed_text = std::getenv("WEIGHTWIRE_SEED");
  const uint64_t seed = seed_text ? std::strtoull(seed_text, nullptr, 10) : std::random_device()();
  std::printf("WEIGHTWIRE_SEED=%llu\n", static_cast<unsigned long long>(seed));
  int transfers = 0, refusals = 0, rounds = 0;
  for (; transfers < kTransfers && rounds < 4 * kTransfers; ++rounds) {
    Generator generator(seed + static_cast<uint64_t>(rounds));
    const auto [from_tp, to_tp] = generator.TensorParallelSizes();
    const DenseConfig config = generator.Config(from_tp, to_tp);
    const Party from = generator.Megatron(config, from_tp);
    const Party to = generator.Any(config, to_tp);
    SCOPED_TRACE(std::string("WEIGHTWIRE_SEED=") + std::to_string(seed) + std::string(" round ") +
                 std::to_string(rounds) + ": " + from.spec + " to " + to.spec + " of " +
                 oracle::ConfigJson(config));
    if (!from.fits) ExpectRefused(config, from);
    if (!to.fits) ExpectRefused(config, to);
    if (from.fits && to.fits) {
      ExpectTransferred(config, from, to, seed);
      ++transfers;
    } else {
      ++refusals;
    }
    if (HasFailure()) return;
  }
  std::printf("%d transfers, %d refusals\n", transfers, refusals);
  EXPECT_EQ(transfers, kTransfers);
  EXPECT_GT(refusals, kTransfers / 20);
}

}  // namespace
}  // namespace weightwire
