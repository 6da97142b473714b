// Random small dense models: every element of every local tensor is compared with the oracle, and
// every canonical element is counted.
#include <gtest/gtest.h>

#include <cstdlib>
#include <map>
#include <random>

#include "server/layout/scheme.h"
#include "tests/support/safetensors.h"
#include "tests/unit/layout/element_oracle.h"

namespace weightwire::layout {
namespace {

using oracle::Element;
using oracle::Sizes;

uint64_t Seed() {
  const char* text = std::getenv("WEIGHTWIRE_SEED");
  const uint64_t seed = text != nullptr ? std::strtoull(text, nullptr, 10) : std::random_device{}();
  std::printf("WEIGHTWIRE_SEED=%llu\n", static_cast<unsigned long long>(seed));
  return seed;
}

class Random {
 public:
  explicit Random(uint64_t seed) : engine_(seed) {}
  int64_t Between(int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(engine_);
  }
  bool Coin() { return Between(0, 1) == 1; }
  template <typename T>
  T Pick(std::initializer_list<T> values) {
    return *(values.begin() + Between(0, static_cast<int64_t>(values.size()) - 1));
  }

 private:
  std::mt19937_64 engine_;
};

Sizes RandomSizes(Random& random) {
  Sizes s;
  s.model_type = random.Pick<const char*>({"qwen2", "qwen3", "llama"});
  s.tp = random.Pick<int64_t>({1, 2, 3, 4, 6});
  // kv heads are a multiple of tp, or a divisor of it.
  s.kv = s.tp * random.Between(1, 2);
  if (random.Coin()) {
    do s.kv = random.Between(1, s.tp);
    while (s.tp % s.kv != 0);
  }
  s.heads = s.kv;
  while (s.heads % s.tp != 0 || random.Between(0, 2) == 0) s.heads += s.kv;
  s.head_dim = random.Between(1, 5);
  s.hidden = random.Between(1, 7);
  s.inter = s.tp * random.Between(1, 5);
  s.vocab = random.Between(1, 40);
  s.tied = random.Coin();
  s.attention_bias = random.Coin();
  s.mlp_bias = random.Coin();
  s.dp = random.Between(1, 2);
  s.cp = random.Between(1, 2);
  s.pp = random.Between(1, 6);
  for (int64_t stage = 0; stage < s.pp; ++stage) s.stages.push_back(random.Between(0, 3));
  s.stages.back() += 1;
  for (int64_t count : s.stages) s.layers += count;
  return s;
}

ParallelSpec MegatronSpec(Sizes& s, bool te_names, Random& random) {
  ParallelSpec spec{"megatron", {{"tp", s.tp}, {"pp", s.pp}, {"cp", s.cp}, {"dp", s.dp}}, {}};
  if (te_names) spec.options["spec"] = "te";
  std::string layers;
  for (int64_t count : s.stages) {
    layers += (layers.empty() ? "" : "-") + std::to_string(count);
  }
  spec.options["layers"] = layers;
  s.vocab_rows = (s.vocab + s.tp - 1) / s.tp * s.tp;
  if (random.Coin()) s.vocab_rows += s.tp * random.Between(0, 60);  // ranks with padding only
  spec.options["vocab_pad"] = std::to_string(s.vocab_rows);
  return spec;
}

using Counts = std::map<std::string, std::vector<int64_t>>;

/// Compares one local tensor with `expected(row, column)` and counts what it covers.
template <typename Expected>
void CheckTensor(const CanonicalSpace& canonical, const LocalTensor& tensor, Expected expected,
                 Counts& counts) {
  std::vector<std::pair<int64_t, int64_t>> held(testing::CountElements(tensor.shape), {-1, -1});
  for (const Piece& piece : tensor.pieces) {
    testing::ForEachElement(piece, canonical.tensors[piece.tensor].shape,
                            [&](int64_t from, int64_t to) {
                              ASSERT_EQ(held.at(to).first, -1) << tensor.name << " overlaps";
                              held[to] = {piece.tensor, from};
                            });
  }
  const int64_t columns = tensor.shape.size() == 2 ? tensor.shape[1] : 1;
  for (size_t i = 0; i < held.size(); ++i) {
    const int64_t row = static_cast<int64_t>(i) / columns;
    const std::optional<Element> want = expected(row, static_cast<int64_t>(i) % columns);
    ASSERT_EQ(want.has_value(), held[i].first >= 0) << tensor.name << " element " << i;
    if (!want) continue;
    const TensorSpec& source = canonical.tensors[held[i].first];
    ASSERT_EQ(source.name, want->tensor) << tensor.name << " element " << i;
    const int64_t source_columns = source.shape.size() == 2 ? source.shape[1] : 1;
    ASSERT_EQ(held[i].second, want->row * source_columns + want->column)
        << tensor.name << " element " << i;
    auto& count = counts[source.name];
    count.resize(testing::CountElements(source.shape));
    ++count[held[i].second];
  }
}

template <typename Copies>
void CheckCounts(const CanonicalSpace& canonical, const Counts& counts, Copies copies) {
  for (const TensorSpec& tensor : canonical.tensors) {
    const auto it = counts.find(tensor.name);
    ASSERT_NE(it, counts.end()) << tensor.name << " is held by no rank";
    const std::vector<int64_t> want(testing::CountElements(tensor.shape), copies(tensor.name));
    ASSERT_EQ(it->second, want) << tensor.name;
  }
}

TEST(MegatronScheme, HoldsEachElementWhereTheOracleSaysAndAsOften) {
  Random random(Seed());
  int cut_across_heads = 0;
  for (int round = 0; round < 150; ++round) {
    Sizes s = RandomSizes(random);
    const bool te_names = random.Coin();
    const ParallelSpec spec = MegatronSpec(s, te_names, random);
    SCOPED_TRACE(s.ConfigJson() + " " + spec.ToString());
    const auto layout = LayoutFromScheme(s.ConfigJson(), spec);
    if ((s.heads + 2 * s.kv) * s.head_dim % s.tp != 0) {
      ASSERT_FALSE(layout.has_value());
      EXPECT_EQ(layout.error().reason(), Reason::kShapeMismatch);
      continue;
    }
    ASSERT_TRUE(layout.has_value()) << layout.error().ToString();
    ASSERT_EQ(Validate(*layout), OkStatus());
    ASSERT_EQ(static_cast<int64_t>(layout->ranks.size()), s.tp * s.pp * s.cp * s.dp);
    cut_across_heads += s.kv < s.tp ? 1 : 0;
    Counts counts;
    for (int64_t rank = 0; rank < static_cast<int64_t>(layout->ranks.size()); ++rank) {
      const int64_t t = rank % s.tp;
      const int64_t stage = rank / (s.tp * s.cp * s.dp);
      for (const LocalTensor& tensor : layout->ranks[rank].tensors) {
        CheckTensor(
            layout->canonical, tensor,
            [&](int64_t row, int64_t column) {
              return oracle::MegatronElement(s, t, stage, tensor.name, row, column, te_names);
            },
            counts);
        if (::testing::Test::HasFatalFailure()) return;
      }
    }
    CheckCounts(layout->canonical, counts,
                [&](const std::string& name) { return oracle::MegatronCopies(s, name); });
    if (::testing::Test::HasFatalFailure()) return;
  }
  EXPECT_GT(cut_across_heads, 0);
}

TEST(VllmScheme, HoldsEachElementWhereTheOracleSaysAndAsOften) {
  Random random(Seed());
  int replicated_kv = 0;
  for (int round = 0; round < 150; ++round) {
    Sizes s = RandomSizes(random);
    const int64_t pad_to = s.tp * random.Between(1, 30);
    s.vocab_rows = (s.vocab + pad_to - 1) / pad_to * pad_to;
    const ParallelSpec spec{
        "vllm", {{"tp", s.tp}, {"dp", s.dp}}, {{"vocab_pad_to", std::to_string(pad_to)}}};
    SCOPED_TRACE(s.ConfigJson() + " " + spec.ToString());
    const auto layout = LayoutFromScheme(s.ConfigJson(), spec);
    ASSERT_TRUE(layout.has_value()) << layout.error().ToString();
    ASSERT_EQ(Validate(*layout), OkStatus());
    ASSERT_EQ(static_cast<int64_t>(layout->ranks.size()), s.tp * s.dp);
    replicated_kv += s.kv < s.tp ? 1 : 0;
    Counts counts;
    for (int64_t rank = 0; rank < static_cast<int64_t>(layout->ranks.size()); ++rank) {
      for (const LocalTensor& tensor : layout->ranks[rank].tensors) {
        CheckTensor(
            layout->canonical, tensor,
            [&](int64_t row, int64_t column) {
              return oracle::VllmElement(s, rank % s.tp, tensor.name, row, column);
            },
            counts);
        if (::testing::Test::HasFatalFailure()) return;
      }
    }
    CheckCounts(layout->canonical, counts,
                [&](const std::string& name) { return oracle::VllmCopies(s, name); });
    if (::testing::Test::HasFatalFailure()) return;
  }
  EXPECT_GT(replicated_kv, 0);
}

}  // namespace
}  // namespace weightwire::layout
