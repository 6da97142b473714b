#include <gtest/gtest.h>

#include <algorithm>

#include "server/layout/scheme.h"

namespace weightwire::layout {
namespace {

constexpr const char* kConfig =
    R"({"model_type":"qwen2","hidden_size":16,"num_hidden_layers":3,"num_attention_heads":4,
        "intermediate_size":8,"vocab_size":100})";

RankLayout Expected(const char* spec = "megatron:tp2") {
  auto layout = LayoutFromScheme(kConfig, *ParseParallelSpec(spec));
  EXPECT_TRUE(layout.has_value());
  return layout->ranks[1];
}

std::vector<ObservedTensor> Observe(const RankLayout& rank) {
  std::vector<ObservedTensor> observed;
  for (const LocalTensor& tensor : rank.tensors) {
    observed.push_back({tensor.name, tensor.dtype, tensor.shape});
  }
  return observed;
}

ObservedTensor& Named(std::vector<ObservedTensor>& observed, const std::string& name) {
  return *std::find_if(observed.begin(), observed.end(),
                       [&](const ObservedTensor& tensor) { return tensor.name == name; });
}

constexpr const char* kFc2 = "decoder.layers.1.mlp.linear_fc2.weight";
constexpr const char* kEmbedding = "embedding.word_embeddings.weight";

TEST(Reconcile, KeepsTheObservedOrderAndDtypes) {
  const RankLayout expected = Expected();
  auto observed = Observe(expected);
  std::reverse(observed.begin(), observed.end());
  observed[2].dtype = DType::kF32;
  const auto result = Reconcile(expected, observed);
  ASSERT_TRUE(result.has_value()) << result.error().ToString();
  ASSERT_EQ(result->tensors.size(), expected.tensors.size());
  for (size_t i = 0; i < observed.size(); ++i) {
    LocalTensor want = expected.tensors[expected.tensors.size() - 1 - i];
    want.dtype = observed[i].dtype;
    EXPECT_EQ(result->tensors[i], want);
  }
}

TEST(Reconcile, IgnoresExtraState) {
  const RankLayout expected = Expected();
  auto observed = Observe(expected);
  observed.insert(observed.begin(),
                  {"decoder.layers.0.mlp.linear_fc1._extra_state", DType::kU8, {0}});
  const auto result = Reconcile(expected, observed);
  ASSERT_TRUE(result.has_value());
  EXPECT_EQ(*result, expected);
}

TEST(Reconcile, RefusesMissingTensor) {
  auto observed = Observe(Expected());
  std::erase_if(observed, [](const ObservedTensor& tensor) { return tensor.name == kFc2; });
  const auto result = Reconcile(Expected(), observed);
  ASSERT_FALSE(result.has_value());
  EXPECT_EQ(result.error().code(), Code::kFailedPrecondition);
  EXPECT_EQ(result.error().reason(), Reason::kTensorMissing);
  EXPECT_EQ(result.error().tensor(), kFc2);
  EXPECT_NE(result.error().message().find("expected BF16 [16, 4], found none"), std::string::npos);
}

TEST(Reconcile, RefusesUnexpectedTensor) {
  auto observed = Observe(Expected());
  observed.push_back({"adapter.weight", DType::kF32, {3}});
  const auto result = Reconcile(Expected(), observed);
  ASSERT_FALSE(result.has_value());
  EXPECT_EQ(result.error().reason(), Reason::kTensorUnexpected);
  EXPECT_EQ(result.error().tensor(), "adapter.weight");
  EXPECT_NE(result.error().message().find("found F32 [3]"), std::string::npos);
}

TEST(Reconcile, RefusesTensorReportedTwice) {
  auto observed = Observe(Expected());
  observed.push_back(observed[0]);
  const auto result = Reconcile(Expected(), observed);
  ASSERT_FALSE(result.has_value());
  EXPECT_EQ(result.error().reason(), Reason::kTensorUnexpected);
  EXPECT_EQ(result.error().tensor(), observed[0].name);
}

TEST(Reconcile, RefusesOtherShape) {
  auto observed = Observe(Expected());
  Named(observed, kFc2).shape = {16, 8};
  const auto result = Reconcile(Expected(), observed);
  ASSERT_FALSE(result.has_value());
  EXPECT_EQ(result.error().reason(), Reason::kShapeMismatch);
  EXPECT_EQ(result.error().tensor(), kFc2);
  EXPECT_NE(result.error().message().find("expected BF16 [16, 4], found BF16 [16, 8]"),
            std::string::npos);
  EXPECT_EQ(result.error().remedy().find("vocab_pad"), std::string::npos);
}

TEST(Reconcile, RefusesDtypeWithoutCast) {
  auto observed = Observe(Expected());
  Named(observed, kFc2).dtype = DType::kF8E4M3;
  const auto result = Reconcile(Expected(), observed);
  ASSERT_FALSE(result.has_value());
  EXPECT_EQ(result.error().reason(), Reason::kDtypeMismatch);
  EXPECT_EQ(result.error().tensor(), kFc2);
}

TEST(Reconcile, TellsWhichVocabularyPaddingToPass) {
  auto observed = Observe(Expected());
  Named(observed, kEmbedding).shape = {64, 16};
  auto result = Reconcile(Expected(), observed);
  ASSERT_FALSE(result.has_value());
  EXPECT_EQ(result.error().reason(), Reason::kShapeMismatch);
  EXPECT_EQ(result.error().remedy(), "pass vocab_pad=N with N = 64 × tp");

  observed = Observe(Expected("vllm:tp2"));
  Named(observed, "lm_head.weight").shape = {256, 16};
  result = Reconcile(Expected("vllm:tp2"), observed);
  ASSERT_FALSE(result.has_value());
  EXPECT_NE(result.error().remedy().find("vocab_pad_to"), std::string::npos);

  observed = Observe(Expected());
  Named(observed, kEmbedding).shape = {128, 8};
  result = Reconcile(Expected(), observed);
  ASSERT_FALSE(result.has_value());
  EXPECT_EQ(result.error().remedy().find("vocab_pad"), std::string::npos);
}

TEST(Reconcile, WritesAtMostTwentyLinesAndCountsTheRest) {
  std::vector<ObservedTensor> observed;
  for (int i = 0; i < 30; ++i) observed.push_back({"x" + std::to_string(i), DType::kBF16, {1}});
  const auto result = Reconcile(RankLayout{}, observed);
  ASSERT_FALSE(result.has_value());
  const std::string& message = result.error().message();
  EXPECT_EQ(std::count(message.begin(), message.end(), '\n'), 21);
  EXPECT_NE(message.find("30 tensors differ"), std::string::npos);
  EXPECT_NE(message.find("and 10 more"), std::string::npos);
  EXPECT_EQ(result.error().tensor(), "x0");
}

}  // namespace
}  // namespace weightwire::layout
