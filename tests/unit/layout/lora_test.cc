// Adapters by a rule of their own: which range of rows and columns of the base weight
// tensor-parallel rank t works on, from the sizes of heads alone.
#include <gtest/gtest.h>

#include "server/layout/scheme.h"
#include "server/plan/plan.h"
#include "tests/support/plan_run.h"
#include "tests/support/safetensors.h"

namespace weightwire::layout {
namespace {

constexpr int64_t kRank = 3, kHidden = 8, kHeads = 8, kKv = 2, kHead = 2, kInner = 12, kLayers = 2;
const std::string kDense = R"({"model_type":"qwen2","hidden_size":8,"num_hidden_layers":2,
    "num_attention_heads":8,"num_key_value_heads":2,"head_dim":2,"intermediate_size":12,
    "vocab_size":10})";
const std::string kLatent = R"({"model_type":"deepseek_v3","hidden_size":8,"num_hidden_layers":2,
    "num_attention_heads":2,"intermediate_size":12,"moe_intermediate_size":6,"n_routed_experts":4,
    "n_shared_experts":1,"first_k_dense_replace":1,"vocab_size":19,"q_lora_rank":6,
    "kv_lora_rank":4,"qk_nope_head_dim":4,"qk_rope_head_dim":2,"v_head_dim":4,
    "num_nextn_predict_layers":1})";

ModelLayout Derived(const std::string& config, const std::string& spec) {
  auto layout = LayoutFromScheme(config, *ParseParallelSpec(spec));
  EXPECT_TRUE(layout.has_value()) << spec << ": " << layout.error().ToString();
  return layout.has_value() ? std::move(*layout) : ModelLayout{};
}

struct Part {
  int64_t begin = 0;
  int64_t count = 0;
};

/// The rows and columns of one module's weight, [out, in], that rank t of tp works on.
struct Work {
  Part rows, columns;
  int64_t out = 0, in = 0;
};

Work WorkOf(const std::string& module, int64_t tp, int64_t t) {
  const int64_t q = kHeads * kHead, kv = kKv * kHead;
  const auto chunk = [&](int64_t size) { return Part{size / tp * t, size / tp}; };
  if (module == "q_proj") return {chunk(q), {0, kHidden}, q, kHidden};
  if (module == "o_proj") return {{0, kHidden}, chunk(q), kHidden, q};
  if (module == "down_proj") return {{0, kHidden}, chunk(kInner), kHidden, kInner};
  if (module == "gate_proj" || module == "up_proj") {
    return {chunk(kInner), {0, kHidden}, kInner, kHidden};
  }
  // k and v: with more ranks than heads, neighbours share one.
  const Part heads = tp <= kKv ? chunk(kv) : Part{t / (tp / kKv) * kHead, kHead};
  return {heads, {0, kHidden}, kv, kHidden};
}

void ExpectHolds(const ModelLayout& layout, const RankLayout& rank, const std::string& name,
                 Part rows, Part columns, Shape whole) {
  for (const LocalTensor& tensor : rank.tensors) {
    if (tensor.name != name) continue;
    ASSERT_EQ(tensor.shape, (Shape{rows.count, columns.count})) << name;
    int64_t covered = 0;
    for (const Piece& piece : tensor.pieces) {
      const TensorSpec& spec = layout.canonical.tensors[piece.tensor];
      ASSERT_EQ(spec.name, name);
      ASSERT_EQ(spec.shape, whole);
      testing::ForEachElement(piece, whole, [&](int64_t from, int64_t to) {
        const int64_t row = rows.begin + to / columns.count;
        const int64_t column = columns.begin + to % columns.count;
        ASSERT_EQ(from, row * whole[1] + column) << name << " element " << to;
        ++covered;
      });
    }
    ASSERT_EQ(covered, rows.count * columns.count) << name;
    return;
  }
  FAIL() << "no " << name;
}

const std::vector<std::pair<std::string, std::string>> kModules = {
    {"self_attn", "q_proj"}, {"self_attn", "k_proj"}, {"self_attn", "v_proj"},
    {"self_attn", "o_proj"}, {"mlp", "gate_proj"},    {"mlp", "up_proj"},
    {"mlp", "down_proj"}};

TEST(Lora, CutsAdaptersAsTheirModulesUnderTensorParallelism) {
  for (const auto& [scheme, tp] :
       std::vector<std::pair<std::string, int64_t>>{{"hf:", 1},
                                                    {"vllm:tp1,", 1},
                                                    {"vllm:tp2,", 2},
                                                    {"vllm:tp4,dp2,", 4},
                                                    {"sglang:tp4,", 4},
                                                    {"megatron:tp2,dp2,", 2},
                                                    {"megatron:tp1,spec=te,", 1}}) {
    const std::string spec = scheme + "lora=" + std::to_string(kRank);
    SCOPED_TRACE(spec);
    const ModelLayout layout = Derived(kDense, spec);
    ASSERT_EQ(Validate(layout), OkStatus());
    ASSERT_EQ(layout.canonical.tensors.size(), 2 * kModules.size() * kLayers);
    for (size_t rank = 0; rank < layout.ranks.size(); ++rank) {
      ASSERT_EQ(layout.ranks[rank].tensors.size(), layout.canonical.tensors.size());
      for (int64_t layer = 0; layer < kLayers; ++layer) {
        for (const auto& [part, module] : kModules) {
          const Work work = WorkOf(module, tp, static_cast<int64_t>(rank) % tp);
          const std::string at = "base_model.model.model.layers." + std::to_string(layer) + "." +
                                 part + "." + module + ".";
          const Part r{0, kRank};
          ExpectHolds(layout, layout.ranks[rank], at + "lora_A.weight", r, work.columns,
                      {kRank, work.in});
          ExpectHolds(layout, layout.ranks[rank], at + "lora_B.weight", work.rows, r,
                      {work.out, kRank});
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

// kv heads < tp: Megatron's rank 1 of 4 has rows 4-7 of q and k head 0's rows, half a group.
TEST(Lora, FollowsMegatronsChunksAcrossHeads) {
  const ModelLayout layout = Derived(kDense, "megatron:tp4,lora=3,targets=q|k");
  int64_t q = 0, k = 0;
  for (const RankLayout& rank : layout.ranks) {
    for (const LocalTensor& tensor : rank.tensors) {
      if (tensor.name.ends_with("layers.0.self_attn.q_proj.lora_B.weight")) q += tensor.shape[0];
      if (tensor.name.ends_with("layers.0.self_attn.k_proj.lora_B.weight")) k += tensor.shape[0];
    }
  }
  EXPECT_EQ(q, kHeads * kHead);
  EXPECT_EQ(k, kKv * kHead);
}

TEST(Lora, LeavesPipelineStagesTheirLayers) {
  const ModelLayout layout = Derived(kDense, "megatron:tp1,pp2,lora=2,targets=q");
  ASSERT_EQ(layout.ranks.size(), 2u);
  for (size_t stage = 0; stage < 2; ++stage) {
    ASSERT_EQ(layout.ranks[stage].tensors.size(), 2u);
    EXPECT_NE(layout.ranks[stage].tensors[0].name.find("layers." + std::to_string(stage) + "."),
              std::string::npos);
  }
}

// Experts, routers and MTP layers have none; the dense layer has an MLP, the other has not.
TEST(Lora, KnowsLatentAttention) {
  const ModelLayout layout = Derived(kLatent, "hf:lora=2");
  EXPECT_EQ(layout.canonical.tensors.size(), 2u * (5 * 2 + 3));
  for (const TensorSpec& tensor : layout.canonical.tensors) {
    EXPECT_EQ(tensor.name.find("expert"), std::string::npos) << tensor.name;
    EXPECT_EQ(tensor.name.find("layers.2."), std::string::npos) << tensor.name;
  }
}

TEST(Lora, CutsAdaptersOfFsdpTrainersAsParameters) {
  const ModelLayout layout = Derived(kDense, "fsdp:dp2,lora=3,targets=o");
  ASSERT_EQ(layout.ranks.size(), 2u);
  for (int64_t shard = 0; shard < 2; ++shard) {
    const std::string at = "base_model.model.model.layers.1.self_attn.o_proj.";
    // [3, 16] by rows in chunks of 2, [8, 3] in chunks of 4.
    ExpectHolds(layout, layout.ranks[shard], at + "lora_A.weight", {2 * shard, 2 - shard}, {0, 16},
                {3, 16});
    ExpectHolds(layout, layout.ranks[shard], at + "lora_B.weight", {4 * shard, 4}, {0, 3}, {8, 3});
  }
}

TEST(Lora, PlansOnlyAdaptersAndFillsEngines) {
  const ModelLayout hf = Derived(kDense, "hf:lora=5");
  for (const char* from : {"hf:lora=5", "fsdp:dp3,lora=5", "fsdp:dp3,kind=zero3,lora=5",
                           "megatron:tp4,lora=5", "vllm:tp2,lora=5"}) {
    for (const char* to : {"hf:lora=5", "vllm:tp4,lora=5", "sglang:tp2,lora=5"}) {
      SCOPED_TRACE(std::string(from) + " to " + to);
      const ModelLayout source = Derived(kDense, from), target = Derived(kDense, to);
      ASSERT_EQ(source.canonical, hf.canonical);
      const auto plan = plan::BuildPlan(source, target);
      ASSERT_TRUE(plan.has_value()) << plan.error().ToString();
      EXPECT_EQ(plan::VerifyPlan(*plan, source, target), OkStatus());
      testing::Memory got = testing::EmptyMemory(target);
      EXPECT_EQ(testing::RunPlan(*plan, testing::FilledMemory(source), got), 0);
      EXPECT_EQ(got, testing::FilledMemory(target));
      for (const std::string& name : plan->tensor_names) {
        EXPECT_TRUE(name.starts_with("base_model.model.")) << name;
      }
    }
  }
}

TEST(Lora, ComposesWithFilters) {
  const ModelLayout layout = Derived(kDense, "vllm:tp2,lora=2,only=*lora_B*");
  for (const RankLayout& rank : layout.ranks) {
    for (const LocalTensor& tensor : rank.tensors) {
      EXPECT_EQ(tensor.pieces.empty(), tensor.name.ends_with("lora_A.weight")) << tensor.name;
    }
  }
}

TEST(Lora, RefusesWhatItDoesNotKnow) {
  const auto refused = [](const std::string& config, const std::string& spec) {
    const auto layout = LayoutFromScheme(config, *ParseParallelSpec(spec));
    EXPECT_FALSE(layout.has_value()) << spec;
    return layout.has_value() ? OkStatus() : layout.error();
  };
  for (const char* spec : {"hf:lora=0", "hf:lora", "hf:lora16", "hf:targets=q",
                           "hf:lora=2,targets=x", "hf:lora=2,targets=q|q", "hf:lora=2,targets=q|",
                           "fsdp:tp2,lora=2", "fsdp:dp2,kind=fsdp1,lora=2"}) {
    const Status status = refused(kDense, spec);
    EXPECT_EQ(status.reason(), Reason::kUnknownScheme) << spec << ": " << status.ToString();
  }
  const Status absent = refused(kDense, "hf:lora=2,targets=q|kv_a");
  EXPECT_EQ(absent.reason(), Reason::kTensorMissing);
  EXPECT_NE(absent.message().find("kv_a"), std::string::npos);
  EXPECT_EQ(refused(kDense, "hf:lora=9223372036854775807").reason(), Reason::kShapeOverflow);
}

}  // namespace
}  // namespace weightwire::layout
