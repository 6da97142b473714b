#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <unordered_map>

#include "server/layout/scheme.h"
#include "server/plan/plan.h"
#include "tests/property/family_generator.h"
#include "tests/support/fp8_oracle.h"
#include "tests/support/plan_run.h"

// Random models whose trainer holds floats and whose engine holds fp8 with random blocks. The
// oracle quantizes the checkpoint's whole tensors and lets loaders written from the facts cut the
// result; where a plan gathers, it looks for a block that no source rank holds as one matrix. Plans
// that gather are then changed by chance: the proof, or the bytes, must tell.
// WEIGHTWIRE_SEED=N replays a run.
namespace weightwire {
namespace {

using family_oracle::Array;
using family_oracle::Config;
using family_oracle::Quantization;
using family_oracle::Tensors;

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr int kTransfers = 50;
#else
constexpr int kTransfers = 400;
#endif

/// Numbers of scales stand for the first weight of the block, with this bit (fp8_oracle.cc).
constexpr uint64_t kScale = uint64_t{1} << 62;

/// How weights become fp8, and of what trainer: each must have been drawn.
constexpr const char* kWays[] = {"whole, megatron", "whole, fsdp", "gathered, megatron",
                                 "gathered, fsdp"};

enum class Outcome { kSkipped, kMoved, kGathered };

class Trial {
 public:
  explicit Trial(uint64_t seed) : random_(seed) {
    for (bool again = true; again;) {
      case_ = FamilyGenerator(random_()).Draw();
      again =
          case_.config.Is({"gpt_oss", "llama4_text", "phi3", "glm4", "qwen2_5_vl", "minimax_m2"}) ||
          case_.config.Wraps() || case_.config.Indexed() || HasFilters(case_.from) ||
          HasFilters(case_.to) || case_.to.kind == Party::Kind::kMegatron;
    }
    if (case_.from.kind == Party::Kind::kEngine || !case_.from.mtp) case_.config.mtp = 0;
    DrawBlocks();
    plain_json_ = family_oracle::ConfigJson(case_.config);
    hf_ = family_oracle::HuggingFace(case_.config);
  }

  std::string Text() const {
    return case_.from.Spec() + " to " + case_.to.Spec() + " of " + blocks_.Added(plain_json_);
  }
  std::string Kinds() const { return case_.from.scheme + " to " + case_.to.scheme; }

  Outcome Run() {
    const Config& c = case_.config;
    bool fits = case_.from.Fits(c) && case_.to.Fits(c);
    if (case_.to.kind == Party::Kind::kEngine) {
      fits = fits && family_oracle::BlocksFit(c, blocks_, case_.to.engine);
    }
    if (!fits) return Outcome::kSkipped;
    const auto weights = family_oracle::Load(c, hf_);
    const auto source = LayoutOf(plain_json_, case_.from);
    const auto target = LayoutOf(blocks_.Added(plain_json_), case_.to);
    EXPECT_TRUE(source.has_value() && target.has_value());
    if (!source || !target) return Outcome::kSkipped;
    FindBlocks();
    if (blocks_of_.empty()) return Outcome::kSkipped;
    const testing::Memory sent = MemoryOf(*source, case_.from.Ranks(c, hf_, weights));
    const auto plan = plan::BuildPlan(*source, *target);
    EXPECT_TRUE(plan.has_value()) << plan.error().ToString();
    if (!plan) return Outcome::kSkipped;
    const testing::Memory wanted = MemoryOf(*target, Wanted(case_.to.Ranks(c, hf_, weights)));
    ExpectMoved(*plan, sent, *source, *target, wanted);
    if (plan->gathered.empty()) return Outcome::kMoved;
    EXPECT_FALSE(EveryBlockIsOneMatrix(sent, *source)) << "blocks that are whole are gathered";
    Damage(*plan, sent, *source, *target, wanted);
    return Outcome::kGathered;
  }

  /// Plans that were damaged and proved wrong.
  int caught() const { return caught_; }

 private:
  struct Block {
    std::vector<std::vector<uint64_t>> rows;
    uint64_t scale = 0;
  };

  int64_t In(int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random_);
  }

  static bool HasFilters(const Party& party) {
    return party.lora > 0 || !party.only.empty() || !party.skip.empty();
  }

  void DrawBlocks() {
    Config& c = case_.config;
    blocks_.rows = In(1, 4);
    blocks_.columns = In(1, 4);
    blocks_.powers_of_two = In(0, 1) == 1;
    const int64_t both = In(1, 3) == 1 ? 1 : std::lcm(blocks_.rows, blocks_.columns);
    for (int64_t* size : {&c.head_dim, &c.intermediate, &c.moe_intermediate, &c.shared_intermediate,
                          &c.q_lora, &c.nope, &c.rope, &c.v_dim}) {
      *size *= both;
    }
    if (In(1, 3) == 1) c.hidden *= both;  // so that FSDP's rows may fit
    c.says_head_dim = true;
    for (const char* module : {"lm_head", "gate", "self_attn", "experts", "model.layers.0"}) {
      if (In(1, 6) == 1) blocks_.skipped.insert(module);
    }
  }

  Result<layout::ModelLayout> LayoutOf(const std::string& json, const Party& party) const {
    WW_ASSIGN(const layout::ParallelSpec spec, layout::ParseParallelSpec(party.Spec()));
    return layout::LayoutFromScheme(json, spec);
  }

  /// Quantizes the checkpoint.
  void FindBlocks() {
    for (const auto& [name, array] : hf_) {
      if (!family_oracle::IsQuantized(case_.config, blocks_, name)) continue;
      const int64_t rows = array.shape.at(0), columns = array.shape.at(1);
      for (int64_t r = 0; r < rows; r += blocks_.rows) {
        for (int64_t k = 0; k < columns; k += blocks_.columns) {
          Block block;
          std::vector<uint64_t> all;
          for (int64_t row = r; row < std::min(rows, r + blocks_.rows); ++row) {
            const auto first = array.cells.begin() + row * columns + k;
            block.rows.emplace_back(first, first + std::min(blocks_.columns, columns - k));
            all.insert(all.end(), block.rows.back().begin(), block.rows.back().end());
          }
          block.scale = testing::ScaleOf(all);
          for (uint64_t cell : all) block_of_[cell] = blocks_of_.size();
          blocks_of_.push_back(std::move(block));
        }
      }
    }
  }

  /// What the loader makes of the quantized checkpoint.
  std::vector<Tensors> Wanted(const std::vector<Tensors>& ranks) const {
    std::vector<Tensors> wanted;
    for (const Tensors& rank : ranks) {
      wanted.push_back(family_oracle::WithScales(case_.config, blocks_, rank));
      Tensors& tensors = wanted.back();
      for (auto& [name, array] : tensors) {
        const bool codes = tensors.contains(name + "_scale_inv");
        for (uint64_t& cell : array.cells) {
          if (cell != family_oracle::kPadding && (cell & kScale) != 0) {
            cell = blocks_of_.at(block_of_.at(cell ^ kScale)).scale;
          } else if (codes && cell != family_oracle::kPadding) {
            cell = testing::CodeOf(cell, blocks_of_.at(block_of_.at(cell)).scale);
          }
        }
      }
    }
    return wanted;
  }

  static testing::Memory MemoryOf(const layout::ModelLayout& layout,
                                  const std::vector<Tensors>& ranks) {
    testing::Memory memory;
    for (size_t r = 0; r < ranks.size(); ++r) {
      auto& tensors = memory.emplace_back();
      for (const layout::LocalTensor& local : layout.ranks.at(r).tensors) {
        tensors.push_back(ranks[r].at(local.name).cells);
      }
    }
    return memory;
  }

  /// Whether each block lies somewhere as a part of a row-major matrix or of one that is turned.
  bool EveryBlockIsOneMatrix(const testing::Memory& memory,
                             const layout::ModelLayout& source) const {
    std::vector<bool> held(blocks_of_.size(), false);
    for (size_t r = 0; r < memory.size(); ++r) {
      for (size_t t = 0; t < memory[r].size(); ++t) {
        if (source.ranks[r].tensors[t].pieces.empty()) continue;
        const std::vector<uint64_t>& cells = memory[r][t];
        const int64_t width = source.ranks[r].tensors[t].shape.back();
        std::unordered_map<uint64_t, int64_t> at;
        for (size_t i = 0; i < cells.size(); ++i) at.emplace(cells[i], static_cast<int64_t>(i));
        for (size_t b = 0; b < held.size(); ++b)
          held[b] = held[b] || IsMatrix(blocks_of_[b], at, width);
      }
    }
    return std::ranges::all_of(held, [](bool is) { return is; });
  }
  static bool IsMatrix(const Block& block, const std::unordered_map<uint64_t, int64_t>& at,
                       int64_t width) {
    const auto first = at.find(block.rows[0][0]);
    if (first == at.end()) return false;
    const auto lies = [&](int64_t down, int64_t right) {
      for (size_t r = 0; r < block.rows.size(); ++r) {
        for (size_t k = 0; k < block.rows[r].size(); ++k) {
          const auto found = at.find(block.rows[r][k]);
          if (found == at.end() || found->second != first->second + down * static_cast<int64_t>(r) +
                                                        right * static_cast<int64_t>(k)) {
            return false;
          }
        }
      }
      return true;
    };
    return lies(width, 1) || lies(1, width);
  }

  static void ExpectMoved(const plan::TransferPlan& plan, const testing::Memory& sent,
                          const layout::ModelLayout& source, const layout::ModelLayout& target,
                          testing::Memory wanted) {
    testing::Memory got = testing::EmptyMemory(target);
    EXPECT_EQ(testing::RunPlan(plan, sent, got), 0) << "elements were written twice";
    ASSERT_EQ(got.size(), wanted.size());
    for (size_t r = 0; r < wanted.size(); ++r) {
      for (size_t t = 0; t < wanted[r].size(); ++t) {
        std::ranges::replace(wanted[r][t], family_oracle::kPadding, testing::kUntouched);
        ASSERT_EQ(got[r][t], wanted[r][t])
            << "rank " << r << " " << target.ranks[r].tensors[t].name;
      }
    }
    const Status proof = plan::VerifyPlan(plan, source, target);
    EXPECT_TRUE(proof.ok()) << proof.ToString();
    EXPECT_GE(plan::Report(plan, source, target).egress_over_bound, 1 - 1e-9);
  }

  template <typename List>
  auto& Any(List& list) {
    return list[static_cast<size_t>(In(0, static_cast<int64_t>(list.size()) - 1))];
  }

  /// Something that a copy of what is gathered says, by chance.
  void Change(plan::CopyOp& op) {
    const auto d = static_cast<size_t>(In(0, 1));
    const int64_t by = In(0, 1) == 0 ? 1 : -1;
    testing::Mistake(
        op, In(0, testing::kMistakes - 1), d, by,
        blocks_.powers_of_two ? layout::ScaleRule::kQuotient : layout::ScaleRule::kPowerOfTwo);
  }

  /// A mistake in the plan is proved, unless it makes no difference.
  void Damage(plan::TransferPlan plan, const testing::Memory& sent,
              const layout::ModelLayout& source, const layout::ModelLayout& target,
              const testing::Memory& wanted) {
    auto rank = plan.gathered.begin();
    std::advance(rank, In(0, static_cast<int64_t>(plan.gathered.size()) - 1));
    std::vector<plan::CopyOp*> ops;
    for (plan::CopyOp& op : rank->second.made) ops.push_back(&op);
    for (plan::Stream& stream : plan.streams) {
      if (stream.target_rank != rank->first) continue;
      for (plan::CopyOp& op : stream.ops) {
        if (op.target_tensor == rank->second.made[0].source_tensor) ops.push_back(&op);
      }
    }
    Change(*Any(ops));
    testing::CountBytes(plan);
    if (plan::VerifyPlan(plan, source, target).ok()) {
      return ExpectMoved(plan, sent, source, target, wanted);
    }
    ++caught_;
  }

  std::mt19937_64 random_;
  int caught_ = 0;
  Case case_;
  Quantization blocks_;
  std::string plain_json_;
  Tensors hf_;
  std::vector<Block> blocks_of_;
  std::unordered_map<uint64_t, size_t> block_of_;  ///< by cell of the checkpoint
};

TEST(QuantizedTransfer, EqualsTheWholeTensorsQuantizedAndCut) {
  const char* seed_text = std::getenv("WEIGHTWIRE_SEED");
  const uint64_t seed = seed_text ? std::strtoull(seed_text, nullptr, 10) : std::random_device()();
  std::printf("WEIGHTWIRE_SEED=%llu\n", static_cast<unsigned long long>(seed));
  std::map<std::string, int> drawn;
  const auto count_of = [&drawn](const std::string& what) {
    int count = 0;
    for (const auto& [text, times] : drawn) count += text.starts_with(what) ? times : 0;
    return count;
  };
  // Whatever few draws have missed by chance is drawn on for; only if it never comes something is
  // wrong.
  const auto seldom = [&count_of](const char* what) { return count_of(what) <= kTransfers / 50; };
  int moved = 0, gathered = 0, caught = 0;
  const auto enough = [&] {
    return moved >= kTransfers && gathered > kTransfers / 10 && caught > kTransfers / 20 &&
           moved - gathered > kTransfers / 10 && std::ranges::none_of(kWays, seldom);
  };
  for (uint64_t round = 0; round < 40 * kTransfers && !enough(); ++round) {
    Trial trial(seed + round);
    SCOPED_TRACE(std::string("WEIGHTWIRE_SEED=") + std::to_string(seed) + " round " +
                 std::to_string(round) + ": " + trial.Text());
    const Outcome outcome = trial.Run();
    if (HasFailure()) return;
    if (outcome == Outcome::kSkipped) continue;
    const bool gathers = outcome == Outcome::kGathered;
    ++drawn[(gathers ? "gathered, " : "whole, ") + trial.Kinds()];
    ++moved;
    gathered += gathers;
    caught += trial.caught();
  }
  for (const auto& [what, count] : drawn) std::printf("%6d %s\n", count, what.c_str());
  EXPECT_TRUE(enough()) << moved << " moved, " << gathered << " gathered, " << caught << " caught";
}

}  // namespace
}  // namespace weightwire
