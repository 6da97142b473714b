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

constexpr const char* kLatentWithMtp =
    R"({"model_type":"deepseek_v3","hidden_size":16,"num_hidden_layers":2,"num_attention_heads":4,
        "intermediate_size":8,"vocab_size":100,"kv_lora_rank":6,"q_lora_rank":8,
        "qk_nope_head_dim":4,"qk_rope_head_dim":2,"v_head_dim":4,"num_nextn_predict_layers":1})";

RankLayout Latent(const char* spec) {
  auto layout = LayoutFromScheme(kLatentWithMtp, *ParseParallelSpec(spec));
  EXPECT_TRUE(layout.has_value()) << layout.error().ToString();
  return layout->ranks.back();
}

const LocalTensor* NamedIn(const RankLayout& rank, const std::string& name) {
  const auto it = std::ranges::find(rank.tensors, name, &LocalTensor::name);
  return it == rank.tensors.end() ? nullptr : &*it;
}

TEST(Reconcile, UnderstandsTheMtpNameOfNewerMegatron) {
  const RankLayout expected = Latent("megatron:tp2");
  auto observed = Observe(expected);
  size_t renamed = 0;
  for (ObservedTensor& tensor : observed) {
    const size_t at = tensor.name.find("transformer_layer");
    if (at == std::string::npos) continue;
    tensor.name.replace(at, 17, "mtp_model_layer");
    ++renamed;
  }
  ASSERT_GT(renamed, 5u);
  const auto result = Reconcile(expected, observed);
  ASSERT_TRUE(result.has_value()) << result.error().ToString();
  ASSERT_EQ(result->tensors.size(), expected.tensors.size());
  for (size_t i = 0; i < observed.size(); ++i) {
    EXPECT_EQ(result->tensors[i].name, observed[i].name);
    EXPECT_EQ(result->tensors[i].pieces, expected.tensors[i].pieces);
  }
  // Both names at once are one too many.
  observed.push_back(Observe(expected).back());
  observed.push_back({"mtp.layers.0.transformer_layer.input_layernorm.weight", DType::kBF16, {16}});
  EXPECT_FALSE(Reconcile(expected, observed).has_value());
}

TEST(Reconcile, UnderstandsTheFusedDownProjectionOfNewerMegatron) {
  for (const char* spec : {"megatron:spec=te", "megatron:tp2,spec=local"}) {
    const RankLayout expected = Latent(spec);
    const std::string at = "decoder.layers.1.";
    const std::string q = at + "self_attention.linear_q_down_proj.weight";
    const std::string kv = at + "self_attention.linear_kv_down_proj.weight";
    const std::string fused = at + "self_attention.linear_qkv_down_proj.weight";
    auto observed = Observe(expected);
    const int64_t q_rows = Named(observed, q).shape[0], kv_rows = Named(observed, kv).shape[0];
    Named(observed, q) = {fused, DType::kBF16, {q_rows + kv_rows, 16}};
    std::erase_if(observed, [&kv](const ObservedTensor& tensor) { return tensor.name == kv; });
    Named(observed, at + "input_layernorm.weight").name =
        at + "self_attention.linear_qkv_down_proj.layer_norm_weight";
    const auto result = Reconcile(expected, observed);
    ASSERT_TRUE(result.has_value()) << result.error().ToString();
    const LocalTensor* held = NamedIn(*result, fused);
    ASSERT_NE(held, nullptr);
    ASSERT_EQ(held->pieces.size(), 2u);
    EXPECT_EQ(held->pieces[0], NamedIn(expected, q)->pieces[0]);
    Piece second = NamedIn(expected, kv)->pieces[0];
    second.local_offset = q_rows * 16;
    EXPECT_EQ(held->pieces[1], second);
    // A row too many is no fused tensor of this model.
    Named(observed, fused).shape[0] += 1;
    const auto wrong = Reconcile(expected, observed);
    ASSERT_FALSE(wrong.has_value());
    EXPECT_EQ(wrong.error().tensor(), fused);
  }
}

}  // namespace
}  // namespace weightwire::layout
