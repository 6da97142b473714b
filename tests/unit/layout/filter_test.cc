#include "server/layout/schemes/filter.h"

#include <gtest/gtest.h>

#include <set>

#include "server/layout/scheme.h"
#include "server/plan/plan.h"
#include "tests/support/plan_run.h"

namespace weightwire::layout {
namespace {

constexpr const char* kConfig =
    R"({"model_type":"qwen3_moe","hidden_size":4,"num_hidden_layers":2,"num_attention_heads":2,
        "num_key_value_heads":2,"head_dim":2,"intermediate_size":4,"moe_intermediate_size":2,
        "num_experts":3,"vocab_size":6})";

ModelLayout Derived(const std::string& spec) {
  auto layout = LayoutFromScheme(kConfig, *ParseParallelSpec(spec));
  EXPECT_TRUE(layout.has_value()) << spec << ": " << layout.error().ToString();
  return layout.has_value() ? std::move(*layout) : ModelLayout{};
}

/// Canonical names that some piece of the layout holds.
std::set<std::string> Held(const ModelLayout& layout) {
  std::set<std::string> names;
  for (const RankLayout& rank : layout.ranks) {
    for (const LocalTensor& tensor : rank.tensors) {
      for (const Piece& piece : tensor.pieces) {
        names.insert(layout.canonical.tensors[piece.tensor].name);
      }
    }
  }
  return names;
}

TEST(GlobMatches, KnowsStarsAndQuestionMarks) {
  for (const auto& [glob, name] :
       std::vector<std::pair<const char*, const char*>>{{"a.b", "a.b"},
                                                        {"*", ""},
                                                        {"*", "a.b"},
                                                        {"a*", "a"},
                                                        {"a*c*e", "abcde"},
                                                        {"*.0.*", "x.0.y"},
                                                        {"?", "x"},
                                                        {"a?c", "a.c"},
                                                        {"*ab", "aab"},
                                                        {"*a*b", "aabab"},
                                                        {"**x**", "x"},
                                                        {"", ""}}) {
    EXPECT_TRUE(GlobMatches(glob, name)) << glob << " " << name;
  }
  for (const auto& [glob, name] :
       std::vector<std::pair<const char*, const char*>>{{"a.b", "a.bc"},
                                                        {"a.b", "xa.b"},
                                                        {"?", ""},
                                                        {"?", "ab"},
                                                        {"a*c", "ab"},
                                                        {"*.0.*", "x.10.y"},
                                                        {"", "a"},
                                                        {"a?", "a"},
                                                        {"*ab", "aba"},
                                                        {"[a]", "a"}}) {
    EXPECT_FALSE(GlobMatches(glob, name)) << glob << " " << name;
  }
}

TEST(Filters, TakePiecesAndLeaveLocalTensors) {
  const std::string router = "model.layers.1.mlp.gate.weight";
  for (const std::string scheme : {"hf:", "megatron:tp2,", "vllm:tp2,", "sglang:tp2,", "fsdp:dp3,",
                                   "fsdp:dp3,kind=fsdp1,", "fsdp:dp3,kind=zero3,"}) {
    const ModelLayout whole = Derived(scheme + "skip=lm_head.weight");
    const ModelLayout filtered = Derived(scheme + "skip=lm_head.weight|" + router);
    std::set<std::string> want = Held(whole);
    EXPECT_EQ(want.count("lm_head.weight"), 0u) << scheme;
    EXPECT_EQ(want.erase(router), 1u) << scheme;
    EXPECT_EQ(Held(filtered), want) << scheme;
    EXPECT_EQ(filtered.canonical, whole.canonical);
    EXPECT_EQ(Validate(filtered), OkStatus());
    EXPECT_NE(FingerprintOf(filtered), FingerprintOf(whole));
    ASSERT_EQ(filtered.ranks.size(), whole.ranks.size());
    for (size_t rank = 0; rank < whole.ranks.size(); ++rank) {
      std::vector<ObservedTensor> observed;
      for (const LocalTensor& tensor : whole.ranks[rank].tensors) {
        observed.push_back({tensor.name, tensor.dtype, tensor.shape});
      }
      const auto reconciled = Reconcile(filtered.ranks[rank], observed);
      ASSERT_TRUE(reconciled.has_value()) << scheme << reconciled.error().ToString();
      EXPECT_EQ(*reconciled, filtered.ranks[rank]);
    }
  }
}

TEST(Filters, OnlyAndSkipTogetherKeepWhatOneNamesAndTheOtherDoesNot) {
  EXPECT_EQ(Held(Derived("hf:only=*.layers.0.self_attn.?_proj.*|lm_head.weight,skip=*.k_proj.*")),
            (std::set<std::string>{"lm_head.weight", "model.layers.0.self_attn.o_proj.weight",
                                   "model.layers.0.self_attn.q_proj.weight",
                                   "model.layers.0.self_attn.v_proj.weight"}));
}

// q and k go, v stays: the fused tensor keeps the one piece.
TEST(Filters, LeaveOutPartsOfFusedTensors) {
  const ModelLayout layout = Derived("vllm:skip=*.q_proj.weight|*.k_proj.weight");
  for (const LocalTensor& tensor : layout.ranks[0].tensors) {
    if (tensor.name != "model.layers.0.self_attn.qkv_proj.weight") continue;
    ASSERT_EQ(tensor.pieces.size(), 1u);
    EXPECT_EQ(tensor.pieces[0].local_offset, (4 + 4) * 4);
    return;
  }
  FAIL() << "no qkv_proj";
}

TEST(Filters, PlanMovesWhatBothSidesKeepAndNothingElse) {
  const std::string skip = ",skip=*.mlp.gate.weight|model.embed_tokens.weight";
  for (const std::string from : {"fsdp:dp3,tp2", "fsdp:dp2,kind=fsdp1", "megatron:tp2"}) {
    const ModelLayout source = Derived(from + skip), target = Derived("vllm:tp2" + skip);
    const auto plan = plan::BuildPlan(source, target);
    ASSERT_TRUE(plan.has_value()) << plan.error().ToString();
    EXPECT_EQ(plan::VerifyPlan(*plan, source, target), OkStatus());
    testing::Memory got = testing::EmptyMemory(target);
    EXPECT_EQ(testing::RunPlan(*plan, testing::FilledMemory(source), got), 0);
    EXPECT_EQ(got, testing::FilledMemory(target));
    for (const plan::Stream& stream : plan->streams) {
      for (const plan::CopyOp& op : stream.ops) {
        const std::string& name = plan->tensor_names[op.canonical];
        EXPECT_FALSE(GlobMatches("*.mlp.gate.weight", name) || name == "model.embed_tokens.weight");
      }
    }
    // The source may hold more than the target wants, never less.
    EXPECT_TRUE(plan::BuildPlan(Derived(from), target).has_value());
    const auto refused = plan::BuildPlan(source, Derived("vllm:tp2"));
    ASSERT_FALSE(refused.has_value());
    EXPECT_EQ(refused.error().reason(), Reason::kUnownedElement);
    EXPECT_EQ(refused.error().tensor(), "model.embed_tokens.weight");
  }
}

TEST(Filters, RefuseGlobsThatMatchNothing) {
  for (const auto& [spec, named] : std::vector<std::pair<const char*, const char*>>{
           {"hf:skip=*.router.*", "skip=*.router.*"},
           {"vllm:tp2,only=lm_head.weight|model.norm", "only=model.norm "},
           {"fsdp:dp2,skip=lm_head.weight|", "skip= "},
           {"megatron:tp2,skip=*", "leave no tensor"}}) {
    const auto layout = LayoutFromScheme(kConfig, *ParseParallelSpec(spec));
    ASSERT_FALSE(layout.has_value()) << spec;
    EXPECT_EQ(layout.error().code(), Code::kInvalidArgument);
    EXPECT_EQ(layout.error().reason(), Reason::kTensorMissing);
    EXPECT_NE(layout.error().message().find(named), std::string::npos) << layout.error().ToString();
  }
}

}  // namespace
}  // namespace weightwire::layout
