#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <set>

#include "server/layout/families/family.h"
#include "server/layout/scheme.h"
#include "server/plan/plan.h"
#include "tests/property/family_coverage.h"
#include "tests/property/family_generator.h"
#include "tests/support/plan_run.h"

// Random models of every family, random layouts of both sides: layouts from the schemes, a plan
// between them, run element by element, against loaders written from the facts. What cannot be cut
// must be refused exactly when the oracle says so.
//
// The cases are spread over shards, which ctest runs in parallel. WEIGHTWIRE_SEED=N replays a run.
namespace weightwire {
namespace {

using family_oracle::Tensors;

// kTransfers: at least so many in each shard. Sanitizers make each an order of magnitude slower,
// and there are fewer; a few hundred are needed to draw everything once.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr int kShards = 2;
constexpr int kTransfers = 400;
constexpr bool kCovers = false;
#else
constexpr int kShards = 8;
constexpr int kTransfers = 1250;
constexpr bool kCovers = true;
#endif
/// Shards draw different cases from the same seed.
constexpr uint64_t kSeedStride = 1'000'003;

/// The oracle's tensors in the order of the scheme's; names, shapes and dtypes must agree exactly.
testing::Memory MemoryOf(const layout::ModelLayout& layout, const std::vector<Tensors>& ranks) {
  testing::Memory memory;
  EXPECT_EQ(layout.ranks.size(), ranks.size());
  if (layout.ranks.size() != ranks.size()) return memory;
  for (size_t r = 0; r < ranks.size(); ++r) {
    auto& tensors = memory.emplace_back();
    std::map<std::string, int> seen;
    for (const auto& local : layout.ranks[r].tensors) {
      const auto expected = ranks[r].find(local.name);
      if (expected == ranks[r].end()) {
        ADD_FAILURE() << "rank " << r << " has an unexpected " << local.name;
        return {};
      }
      EXPECT_EQ(++seen[local.name], 1) << "rank " << r << " has " << local.name << " twice";
      EXPECT_EQ(local.shape, expected->second.shape) << "rank " << r << " " << local.name;
      EXPECT_EQ(local.dtype == layout::DType::kF32, expected->second.f32)
          << "rank " << r << " " << local.name;
      tensors.push_back(expected->second.cells);
    }
    for (const auto& [name, array] : ranks[r]) {
      EXPECT_TRUE(seen.contains(name)) << "rank " << r << " lacks " << name;
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
        const uint64_t cell = expected[r][t][i];
        const uint64_t wanted = cell == family_oracle::kPadding ? testing::kUntouched : cell;
        if (got[r][t][i] == wanted) continue;
        FAIL() << "rank " << r << " " << name << " element " << i << " is " << got[r][t][i]
               << ", not " << wanted;
      }
    }
  }
}

class Trial {
 public:
  explicit Trial(const Case& drawn)
      : case_(drawn),
        json_(family_oracle::ConfigJson(drawn.config)),
        from_fits_(drawn.from.Fits(drawn.config)),
        to_fits_(drawn.to.Fits(drawn.config)),
        hf_(family_oracle::HuggingFace(drawn.config)) {}

  std::string Text() const { return case_.from.Spec() + " to " + case_.to.Spec() + " of " + json_; }
  bool Fits() const { return from_fits_ && to_fits_; }
  /// Whether the source holds all that the target wants.
  bool Complete() const {
    for (const auto& [name, array] : case_.to.Canonical(case_.config, hf_)) {
      if (Moves(case_.to, name) && !Moves(case_.from, name)) return false;
    }
    return true;
  }

  void ExpectRefusals() const {
    if (!from_fits_) ExpectRefused(case_.from);
    if (!to_fits_) ExpectRefused(case_.to);
  }

  void ExpectTransferred() const {
    const auto source = LayoutOf(case_.from);
    const auto target = LayoutOf(case_.to);
    ASSERT_TRUE(source.has_value()) << case_.from.Spec() << ": " << source.error().ToString();
    ASSERT_TRUE(target.has_value()) << case_.to.Spec() << ": " << target.error().ToString();
    const family_oracle::Weights weights = family_oracle::Load(case_.config, hf_);
    testing::Memory sent = MemoryOf(*source, case_.from.Ranks(case_.config, hf_, weights));
    testing::Memory wanted = MemoryOf(*target, case_.to.Ranks(case_.config, hf_, weights));
    LeaveOut(case_.from, kPoison, sent);
    LeaveOut(case_.to, family_oracle::kPadding, wanted);
    if (::testing::Test::HasFailure()) return;

    const auto plan = plan::BuildPlan(*source, *target);
    if (!Complete()) {
      ASSERT_FALSE(plan.has_value()) << "the source leaves something out";
      EXPECT_EQ(plan.error().reason(), Reason::kUnownedElement) << plan.error().ToString();
      return;
    }
    ASSERT_TRUE(plan.has_value()) << plan.error().ToString();
    testing::Memory got = testing::EmptyMemory(*target);
    EXPECT_EQ(testing::RunPlan(*plan, sent, got), 0) << "elements were written twice";
    ExpectEqual(*target, got, wanted);
    const Status proof = plan::VerifyPlan(*plan, *source, *target);
    EXPECT_TRUE(proof.ok()) << proof.ToString();
  }

 private:
  /// What a source must not be asked for.
  static constexpr uint64_t kPoison = family_oracle::kPadding + 1;

  bool Moves(const Party& party, const std::string& name) const {
    bool mtp = false;
    for (int64_t i = 0; i < case_.config.mtp; ++i) {
      mtp = mtp || name.starts_with(family_oracle::Wrapped(
                       case_.config, family_oracle::LayerPrefix(case_.config.layers + i)));
    }
    // vLLM's SigLIP tower has no pooling head: nobody asks it for one.
    const bool pooling = name.starts_with("vision_tower.vision_model.head.");
    return party.Keeps(name) && (party.mtp || !mtp) &&
           !(pooling && party.kind == Party::Kind::kEngine);
  }
  /// Cells of the tensors that the party's filters leave out become `cell`.
  void LeaveOut(const Party& party, uint64_t cell, testing::Memory& memory) const {
    if (party.only.empty() && party.skip.empty()) return;
    std::set<uint64_t> left_out;
    for (const auto& [name, array] : hf_) {
      if (!party.Keeps(name)) left_out.insert(array.cells.begin(), array.cells.end());
    }
    for (auto& rank : memory) {
      for (auto& tensor : rank) {
        for (uint64_t& at : tensor) at = left_out.contains(at) ? cell : at;
      }
    }
  }
  Result<layout::ModelLayout> LayoutOf(const Party& party) const {
    WW_ASSIGN(const layout::ParallelSpec spec, layout::ParseParallelSpec(party.Spec()));
    return layout::LayoutFromScheme(json_, spec);
  }
  void ExpectRefused(const Party& party) const {
    const auto layout = LayoutOf(party);
    ASSERT_FALSE(layout.has_value()) << party.Spec() << " must be refused";
    EXPECT_EQ(layout.error().code(), Code::kInvalidArgument) << layout.error().ToString();
    const bool known =
        layout.error().reason() == Reason::kShapeMismatch ||
        layout.error().reason() == Reason::kUnknownScheme ||
        (layout.error().reason() == Reason::kTensorMissing && !party.NamesFit(case_.config));
    EXPECT_TRUE(known) << layout.error().ToString();
  }

  const Case& case_;
  const std::string json_;
  const bool from_fits_;
  const bool to_fits_;
  const Tensors hf_;
};

/// Families that no case of this test can draw, because the oracle does not know them.
std::string FamiliesWithoutOracle() {
  const std::vector<std::string>& known = family_oracle::KnownFamilies();
  std::string names;
  for (const layout::Family& family : layout::Families()) {
    if (std::find(known.begin(), known.end(), family.model_type) != known.end()) continue;
    names.append(names.empty() ? "" : ", ").append(family.model_type);
  }
  return names.empty() ? "none" : names;
}

class FamilyTransfer : public ::testing::TestWithParam<int> {};

TEST_P(FamilyTransfer, EqualsTheLoadersForRandomModelsAndLayouts) {
  const char* seed_text = std::getenv("WEIGHTWIRE_SEED");
  const uint64_t seed = seed_text ? std::strtoull(seed_text, nullptr, 10) : std::random_device()();
  std::printf("WEIGHTWIRE_SEED=%llu shard %d of %d, %d transfers\n",
              static_cast<unsigned long long>(seed), GetParam(), kShards, kTransfers);
  FamilyCoverage coverage;
  int transfers = 0, refusals = 0, incomplete = 0, rounds = 0;
  // Longer when something rare has not been drawn yet; with sanitizers that is left to other
  // builds.
  const auto done = [&] {
    return transfers >= kTransfers && (!kCovers || coverage.Missing().empty());
  };
  const auto begin = std::chrono::steady_clock::now();
  for (; rounds < 100 * kTransfers && !done(); ++rounds) {
    const uint64_t shard = static_cast<uint64_t>(GetParam()) * kSeedStride;
    const Case drawn = FamilyGenerator(seed + shard + static_cast<uint64_t>(rounds)).Draw();
    const Trial trial(drawn);
    SCOPED_TRACE(std::string("WEIGHTWIRE_SEED=") + std::to_string(seed) + " round " +
                 std::to_string(rounds) + ": " + trial.Text());
    if (!trial.Fits()) {
      trial.ExpectRefusals();
      ++refusals;
    } else {
      trial.ExpectTransferred();
      ++(trial.Complete() ? transfers : incomplete);
      if (trial.Complete()) coverage.Add(drawn);
    }
    if (HasFailure()) return;
  }
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
  std::printf("%s%d transfers, %d refusals, %d without an owner, in %.1f s\n",
              coverage.Table().c_str(), transfers, refusals, incomplete, seconds.count());
  std::printf("families without an oracle: %s\n", FamiliesWithoutOracle().c_str());
  for (const std::string& missing : coverage.Missing()) {
    EXPECT_FALSE(kCovers) << "never drawn: " << missing;
  }
  EXPECT_GE(transfers, kTransfers);
  EXPECT_GT(refusals, kTransfers / 20);
  EXPECT_GT(incomplete, 0);
}

INSTANTIATE_TEST_SUITE_P(Shard, FamilyTransfer, ::testing::Range(0, kShards));

}  // namespace
}  // namespace weightwire
