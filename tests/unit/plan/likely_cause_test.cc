#include "server/plan/likely_cause.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>

namespace weightwire::plan {
namespace {

using layout::CanonicalSpace;
using layout::DType;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

CanonicalSpace Space(std::vector<std::string> names) {
  std::ranges::sort(names);
  CanonicalSpace space;
  for (std::string& name : names) space.tensors.push_back({std::move(name), DType::kBF16, {4, 4}});
  return space;
}

std::string Missing(const std::vector<std::string>& source, std::vector<std::string> target,
                    const std::string& missing) {
  target.push_back(missing);
  return MissingRemedy(Space(source), Space(target), {missing, DType::kBF16, {4, 4}});
}

constexpr const char* kSame = "compare their config.json";

TEST(MissingRemedy, NamesAPrefixThatOneSideHas) {
  EXPECT_THAT(Missing({"model.language_model.layers.0.mlp.up_proj.weight", "model.norm.weight"},
                      {"model.norm.weight"}, "model.layers.0.mlp.up_proj.weight"),
              AllOf(HasSubstr("\"model.language_model.\" where the target has \"model.\""),
                    Not(HasSubstr(kSame))));
  EXPECT_THAT(Missing({"language_model.lm_head.weight"}, {}, "lm_head.weight"),
              HasSubstr("\"language_model.\" where the target has \"\""));
}

TEST(MissingRemedy, NamesFusedAndSingleForms) {
  const std::string mlp = "model.layers.3.mlp.", attention = "model.layers.3.self_attn.";
  for (const auto& [has, wants] : std::vector<std::pair<std::string, std::string>>{
           {mlp + "experts.gate_up_proj", mlp + "experts.7.gate_proj.weight"},
           {mlp + "experts.gate_up_proj", mlp + "experts.7.up_proj.weight"},
           {mlp + "experts.down_proj", mlp + "experts.7.down_proj.weight"},
           {mlp + "experts.0.gate_proj.weight", mlp + "experts.gate_up_proj"},
           {mlp + "experts.0.down_proj.weight", mlp + "experts.down_proj"},
           {attention + "qkv_proj.weight", attention + "k_proj.weight"},
           {attention + "q_proj.weight", attention + "qkv_proj.weight"},
           {mlp + "gate_up_proj.weight", mlp + "up_proj.weight"}}) {
    EXPECT_THAT(Missing({has, "model.norm.weight"}, {"model.norm.weight"}, wants),
                AllOf(HasSubstr("the source has " + has + ", another form"), Not(HasSubstr(kSame))))
        << wants;
  }
}

TEST(MissingRemedy, NamesTheNearestThatOnlyTheSourceHas) {
  const std::string layer = "model.layers.0.";
  EXPECT_THAT(Missing({layer + "block_sparse_moe.gate.weight", layer + "self_attn.q_norm.weight"},
                      {layer + "self_attn.q_norm.weight"}, layer + "moe.gate.weight"),
              HasSubstr(layer + "block_sparse_moe.gate.weight"));
  // Its sibling is no other name of it, for the target has it too.
  EXPECT_THAT(Missing({layer + "self_attn.q_norm.weight"}, {layer + "self_attn.q_norm.weight"},
                      layer + "self_attn.k_norm.weight"),
              AllOf(HasSubstr("skip="), Not(HasSubstr("q_norm")), Not(HasSubstr(kSame))));
}

TEST(MissingRemedy, SpeaksOfScales) {
  EXPECT_THAT(Missing({"a.b.weight"}, {"a.b.weight"}, "a.b.weight_scale_inv"),
              AllOf(HasSubstr("a.b.weight as BF16 without scales"), HasSubstr("weight_block_size"),
                    Not(HasSubstr(kSame))));
}

TEST(MissingRemedy, SaysThatModelsDifferWhereTheyDo) {
  EXPECT_THAT(Missing({"model.layers.0.mlp.up_proj.weight"}, {"model.layers.0.mlp.up_proj.weight"},
                      "model.layers.1.mlp.up_proj.weight"),
              HasSubstr(kSame));
  EXPECT_THAT(Missing({"wte.weight", "h.0.attn.c_attn.weight"}, {"model.norm.weight"},
                      "model.layers.0.self_attn.q_proj.weight"),
              HasSubstr(kSame));
}

TEST(MissingRemedy, IsQuickOverAHundredThousandNames) {
  std::vector<std::string> source, target;
  for (int layer = 0; layer < 61; ++layer) {
    for (int expert = 0; expert < 550; ++expert) {
      const std::string at =
          "layers." + std::to_string(layer) + ".mlp.experts." + std::to_string(expert) + ".";
      for (const char* matrix : {"w1", "w2", "w3"}) {
        source.push_back("language_model.model." + at + matrix + ".weight");
        target.push_back("model." + at + matrix + "_other.weight");
      }
    }
  }
  const CanonicalSpace from = Space(source), to = Space(target);
  ASSERT_GT(from.tensors.size(), 100'000u);
  const auto start = std::chrono::steady_clock::now();
  EXPECT_FALSE(MissingRemedy(from, to, to.tensors.back()).empty());
  // 0.1 s on a quiet machine; quadratic in the names would be hours.
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(20));
}

TEST(ShapeRemedy, IsOfTheLikeliestCause) {
  const layout::TensorSpec embed{"model.embed_tokens.weight", DType::kBF16, {100, 8}};
  EXPECT_THAT(ShapeRemedy(embed, {128, 8}), HasSubstr("pad the vocabulary"));
  EXPECT_THAT(ShapeRemedy(embed, {8, 100}), HasSubstr("transposed"));
  EXPECT_THAT(ShapeRemedy(embed, {100, 16}), HasSubstr(kSame));
  EXPECT_THAT(ShapeRemedy({"model.norm.weight", DType::kBF16, {8}}, {16}), HasSubstr(kSame));
}

}  // namespace
}  // namespace weightwire::plan
