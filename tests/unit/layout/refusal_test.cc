// What is refused says which tensor (or field of config.json) it is about, what was expected, what
// was found, and what to do. The rank is added where it is known:
// tests/integration/bad_layout_test.cc sees all five through the service, and this file for
// explicit layouts.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <nlohmann/json.hpp>

#include "server/layout/scheme.h"
#include "server/layout/trace.h"

namespace weightwire::layout {
namespace {

nlohmann::json Dense() {
  return {{"model_type", "qwen2"},     {"hidden_size", 24},           {"num_hidden_layers", 2},
          {"num_attention_heads", 12}, {"num_key_value_heads", 3},    {"intermediate_size", 36},
          {"vocab_size", 50},          {"tie_word_embeddings", false}};
}
nlohmann::json Mixture() {
  nlohmann::json config = Dense();
  config["model_type"] = "qwen3_moe";
  config["num_experts"] = 4;
  config["moe_intermediate_size"] = 12;
  return config;
}
nlohmann::json With(nlohmann::json config, const char* key, const nlohmann::json& value) {
  config[key] = value;
  return config;
}

Result<ModelLayout> Derive(const nlohmann::json& config, const char* spec) {
  return LayoutFromScheme(config.dump(), *ParseParallelSpec(spec));
}
Status Refused(const Result<ModelLayout>& layout) { return layout ? OkStatus() : layout.error(); }

using Observed = std::vector<ObservedTensor>;

/// What the ranks of a running model of `found` report, compared with what `config` says of them;
/// the first refusal.
Status Compared(
    const nlohmann::json& config, const nlohmann::json& found, const char* spec,
    const std::function<void(Observed&)>& change = [](Observed&) {}) {
  const ModelLayout expected = Derive(config, spec).value(), running = Derive(found, spec).value();
  for (size_t rank = 0; rank < running.ranks.size(); ++rank) {
    Observed observed;
    for (const LocalTensor& tensor : running.ranks[rank].tensors) {
      observed.push_back({tensor.name, tensor.dtype, tensor.shape});
    }
    change(observed);
    const auto agreed = Reconcile(expected.ranks[rank], observed);
    if (!agreed) return agreed.error();
  }
  return OkStatus();
}

constexpr const char* kNorm = "model.norm.weight";
constexpr const char* kHead = "lm_head.weight";
constexpr const char* kQ = "model.layers.0.self_attn.q_proj.weight";
constexpr const char* kGate = "model.layers.0.mlp.experts.0.gate_proj.weight";

ObservedTensor& Named(Observed& observed, const std::string& name) {
  return *std::find_if(observed.begin(), observed.end(),
                       [&](const ObservedTensor& tensor) { return tensor.name == name; });
}

/// A parameter "w" of 6 elements that a loader filled, reported as `seen`.
Status Bound(const Observed& seen) {
  RankLayout traced;
  traced.tensors.push_back({"w", DType::kBF16, {6}, {{0, {{0}, {6}}, 0, {1}}}});
  const auto bound = BindTrace(traced, seen);
  return bound ? OkStatus() : bound.error();
}

/// One rank with "w" of 6 elements, a piece of which begins at `offset`.
Status Explicit(int64_t offset) {
  ModelLayout layout{{{{"w", DType::kBF16, {6}}}}, {}};
  layout.ranks.push_back({{{"local", DType::kBF16, {6}, {{0, {{0}, {6}}, offset, {1}}}}}});
  return Validate(layout);
}

CanonicalSpace Canonical(const nlohmann::json& config) {
  return *CanonicalFromConfig(config.dump());
}

struct Refusal {
  const char* name;
  Status status;
  Reason reason;
  std::string tensor, expected, found, hint;
};

std::vector<Refusal> Refusals() {
  const nlohmann::json tied = With(Dense(), "tie_word_embeddings", true);
  nlohmann::json nested = With(Dense(), "tie_word_embeddings", true);
  nested["text_config"] = {{"tie_word_embeddings", false}};
  return {
      {"missing tensor",
       Compared(Dense(), Dense(), "hf",
                [](Observed& seen) {
                  std::erase_if(seen, [](const auto& tensor) { return tensor.name == kNorm; });
                }),
       Reason::kTensorMissing, kNorm, "expected BF16 [24]", "found none", "report it"},
      {"extra tensor",
       Compared(Dense(), Dense(), "hf",
                [](Observed& seen) {
                  seen.push_back({"model.extra", DType::kF32, {3}});
                }),
       Reason::kTensorUnexpected, "model.extra", "expected none", "found F32 [3]",
       "do not report it"},
      {"tensor twice",
       Compared(Dense(), Dense(), "hf", [](Observed& seen) { seen.push_back(seen[0]); }),
       Reason::kTensorUnexpected, kHead, "expected once", "found twice", "once"},
      {"shape",
       Compared(Dense(), Dense(), "hf", [](Observed& seen) { Named(seen, kNorm).shape = {25}; }),
       Reason::kShapeMismatch, kNorm, "expected BF16 [24]", "found BF16 [25]", "config.json"},
      {"padded vocabulary", Compared(Dense(), With(Dense(), "vocab_size", 65), "vllm:tp1"),
       Reason::kShapeMismatch, "model.embed_tokens.weight", "expected BF16 [64, 24]",
       "found BF16 [128, 24]", "vocab_pad_to=N"},
      {"dtype",
       Compared(Dense(), Dense(), "hf",
                [](Observed& seen) { Named(seen, kNorm).dtype = DType::kI8; }),
       Reason::kDtypeMismatch, kNorm, "expected BF16", "found I8", "BF16, F16 or F32"},
      {"indivisible heads, Megatron", Refused(Derive(Dense(), "megatron:tp5")),
       Reason::kShapeMismatch, kQ, "num_attention_heads: expected a multiple of tp 5", "found 12",
       "tp must divide 12: 1, 2, 3, 4, 6 or 12"},
      {"indivisible heads, vLLM", Refused(Derive(Dense(), "vllm:tp8")), Reason::kShapeMismatch, kQ,
       "expected a multiple of tp 8", "found 12", "tp must divide 12"},
      {"indivisible kv heads", Refused(Derive(Dense(), "sglang:tp2")), Reason::kShapeMismatch,
       "model.layers.0.self_attn.k_proj.weight",
       "num_key_value_heads: expected a divisor or a multiple of tp 2", "found 3",
       "divides num_key_value_heads"},
      {"indivisible MLP", Refused(Derive(With(Dense(), "intermediate_size", 35), "vllm:tp3")),
       Reason::kShapeMismatch, "model.layers.0.mlp.gate_proj.weight",
       "intermediate_size: expected a multiple of tp 3", "found 35",
       "tp must divide 35: 1, 5, 7 or 35"},
      {"experts that ep does not divide", Refused(Derive(Mixture(), "megatron:ep3,dp3")),
       Reason::kShapeMismatch, kGate, "the number of experts: expected a multiple of ep 3",
       "found 4", "ep must divide 4: 1, 2 or 4"},
      {"experts that etp does not divide",
       Refused(Derive(With(Mixture(), "moe_intermediate_size", 7), "megatron:tp3,etp3")),
       Reason::kShapeMismatch, kGate, "moe_intermediate_size: expected a multiple of etp 3",
       "found 7", "etp"},
      {"fewer experts than ranks", Refused(Derive(Mixture(), "vllm:tp3,dp2,ep")),
       Reason::kShapeMismatch, kGate, "expected at least one expert for each of 6", "found 4",
       "smaller group"},
      {"ep that does not divide tp", Refused(Derive(Mixture(), "sglang:tp3,ep2")),
       Reason::kShapeMismatch, kGate, "tp: expected a multiple of ep 2", "found 3", "ep"},
      {"stacked experts of another number",
       Compared(Mixture(), With(Mixture(), "num_experts", 5), "vllm:tp1,ep"),
       Reason::kShapeMismatch, "model.layers.0.mlp.gate.weight", "expected BF16 [4, 24]",
       "found BF16 [5, 24]", "config.json"},
      {"more experts than the config has",
       Compared(Mixture(), With(Mixture(), "num_experts", 6), "megatron:ep2,dp2",
                [](Observed& seen) {
                  std::erase_if(seen, [](const auto& tensor) {
                    return !tensor.name.ends_with("2.linear_fc1.weight");
                  });
                }),
       Reason::kTensorUnexpected, "decoder.layers.0.mlp.experts.local_experts.2.linear_fc1.weight",
       "expected none", "found BF16 [24, 24]", "number of experts in config.json"},
      {"unknown family", Refused(Derive(With(Dense(), "model_type", "gpt2"), "hf")),
       Reason::kUnknownModel, "", "model_type: expected one that a family describes",
       "found \"gpt2\"", "llama, llama4, llama4_text, minimax_m2"},
      {"tied by config, a head is there", Compared(tied, Dense(), "hf"), Reason::kTensorUnexpected,
       kHead, "expected none", "found BF16 [50, 24]", "set tie_word_embeddings to false"},
      {"untied by config, no head", Compared(Dense(), tied, "hf"), Reason::kTensorMissing, kHead,
       "expected BF16 [50, 24]", "found none", "set tie_word_embeddings to true"},
      {"config that contradicts itself", Refused(Derive(nested, "hf")), Reason::kInvalidRequest,
       kHead, "tie_word_embeddings: expected true in text_config", "found false", "make both say"},
      {"trainer with a head, engine without", CheckTie(Canonical(Dense()), Canonical(tied)),
       Reason::kTensorUnexpected, kHead, "expected none in the source", "found BF16 [50, 24]",
       "same tie_word_embeddings"},
      {"engine with a head, trainer without", CheckTie(Canonical(tied), Canonical(Dense())),
       Reason::kTensorMissing, kHead, "expected BF16 [50, 24] in the source", "found none",
       "same tie_word_embeddings"},
      {"ranks of different models", CheckSameModel(Canonical(Dense()), Canonical(tied)),
       Reason::kShapeMismatch, kHead, "expected BF16 [50, 24]", "found none", "same config.json"},
      {"ranks with other sizes",
       CheckSameModel(Canonical(Dense()), Canonical(With(Dense(), "intermediate_size", 37))),
       Reason::kShapeMismatch, "model.layers.0.mlp.down_proj.weight", "expected BF16 [24, 36]",
       "found BF16 [24, 37]", "same config.json"},
      {"traced parameter that is not there", Bound({}), Reason::kTensorMissing, "w",
       "expected name, dtype and shape", "found none of 1", "trace the loader"},
      {"traced parameter of another dtype", Bound({{"w", DType::kF32, {6}}}),
       Reason::kDtypeMismatch, "w", "expected BF16", "found F32", "trace the loader"},
      {"traced parameter that is smaller", Bound({{"w", DType::kBF16, {5}}}),
       Reason::kShapeMismatch, "w", "expected 6 elements", "found 5", "trace the loader"},
      {"explicit piece outside its tensor", Explicit(1), Reason::kShapeMismatch, "local",
       "expected an end of at most 6", "found one that begins at 1", "correct the layout"},
  };
}

TEST(Refusal, NamesTensorExpectedFoundAndHint) {
  for (const Refusal& refusal : Refusals()) {
    SCOPED_TRACE(std::string(refusal.name) + ": " + refusal.status.ToString());
    EXPECT_EQ(ReasonName(refusal.status.reason()), ReasonName(refusal.reason));
    EXPECT_EQ(refusal.status.tensor(), refusal.tensor);
    EXPECT_NE(refusal.status.message().find(refusal.expected), std::string::npos);
    EXPECT_NE(refusal.status.message().find(refusal.found), std::string::npos);
    EXPECT_NE(refusal.status.remedy().find(refusal.hint), std::string::npos);
  }
}

TEST(Refusal, NamesTheRankOfAnExplicitLayout) { EXPECT_EQ(Explicit(1).rank(), "rank 0"); }

TEST(Refusal, LeavesWhatAgreesAlone) {
  const nlohmann::json tied = With(Dense(), "tie_word_embeddings", true);
  EXPECT_EQ(Compared(Dense(), Dense(), "vllm:tp3,vocab_pad_to=3"), OkStatus());
  EXPECT_EQ(CheckSameModel(Canonical(Dense()), Canonical(Dense())), OkStatus());
  EXPECT_EQ(CheckTie(Canonical(Dense()), Canonical(Dense())), OkStatus());
  EXPECT_EQ(CheckTie(Canonical(tied), Canonical(tied)), OkStatus());
  const CanonicalSpace boxes{{{"lm_head.weight", DType::kBF16, {50, 24}}}};
  EXPECT_EQ(CheckTie(boxes, Canonical(tied)), OkStatus());  // explicit boxes of a part
  nlohmann::json nested = tied;
  nested["text_config"] = {{"tie_word_embeddings", true}};
  EXPECT_TRUE(Derive(nested, "hf").has_value());
}

TEST(Refusal, ATieOfOneSideIsSeenUnderEveryNameOfTheHead) {
  using Names = std::pair<std::string, std::string>;
  for (const auto& [embedding, head] :
       {Names{"language_model.model.embed_tokens.weight", "language_model.lm_head.weight"},
        Names{"model.language_model.embed_tokens.weight", "lm_head.weight"},
        Names{"backbone.embeddings.weight", "lm_head.weight"},
        Names{"model.word_embeddings.weight", "lm_head.weight"}}) {
    const CanonicalSpace tied{{{embedding, DType::kBF16, {50, 24}}}};
    CanonicalSpace untied = tied;
    untied.tensors.push_back({head, DType::kBF16, {50, 24}});
    std::ranges::sort(untied.tensors, {}, &TensorSpec::name);
    EXPECT_EQ(CheckTie(untied, untied), OkStatus());
    EXPECT_EQ(CheckTie(tied, tied), OkStatus());
    EXPECT_EQ(CheckTie(untied, tied).reason(), Reason::kTensorUnexpected) << head;
    EXPECT_EQ(CheckTie(tied, untied).reason(), Reason::kTensorMissing) << head;
    EXPECT_EQ(CheckTie(untied, tied).tensor(), head);
  }
  // What only looks like a head, or like an embedding.
  const CanonicalSpace plain{{{"model.embed_tokens.weight", DType::kBF16, {50, 24}}}};
  for (const char* other :
       {"my_lm_head.weight", "lm_head.bias", "model.layers.3.embed_tokens.weight",
        "visual.position_embeddings.weights"}) {
    CanonicalSpace more = plain;
    more.tensors.push_back({other, DType::kBF16, {50, 24}});
    std::ranges::sort(more.tensors, {}, &TensorSpec::name);
    EXPECT_EQ(CheckTie(more, plain), OkStatus()) << other;
  }
}

}  // namespace
}  // namespace weightwire::layout
