#include "server/layout/models.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace weightwire::layout {
namespace {

using ::testing::ElementsAre;

RankOfModel Of(const std::string& model, std::vector<TensorSpec> tensors,
               std::vector<LocalTensor> local) {
  return {model, std::make_shared<const CanonicalSpace>(CanonicalSpace{std::move(tensors)}),
          std::make_shared<const RankLayout>(RankLayout{std::move(local)})};
}

TEST(Models, ANameHasItsModelUpToTheFirstSeparator) {
  EXPECT_EQ(NameInModel("actor", "lm_head.weight"), "actor::lm_head.weight");
  EXPECT_EQ(SplitName("actor::lm_head.weight"), (ModelAndTensor{"actor", "lm_head.weight"}));
  EXPECT_EQ(SplitName("actor::a::b"), (ModelAndTensor{"actor", "a::b"}));
  EXPECT_EQ(SplitName("model.layers.0:weight"), (ModelAndTensor{"", "model.layers.0:weight"}));
}

/// "a-b::x" comes before "a::x": the order of whole names is not that of models.
TEST(Models, JoinedSpacesAreSortedAndPiecesPointToTheirOwnTensors) {
  const Piece first{0, {{0}, {3}}, 0, {1}}, second{1, {{1}, {2}}, 0, {1}};
  const RankOfModel models[] = {
      Of("a", {{"x", DType::kF32, {3}}, {"y", DType::kBF16, {3}}},
         {{"px", DType::kF32, {3}, {first}}, {"py", DType::kBF16, {2}, {second}}}),
      Of("a-b", {{"x", DType::kF16, {4}}}, {{"px", DType::kF16, {3}, {first}}}),
      Of("c", {{"z", DType::kI8, {1}}}, {})};
  const auto joined = JoinModels(models);
  ASSERT_TRUE(joined.has_value());
  std::vector<std::string> names, local;
  for (const TensorSpec& tensor : joined->canonical.tensors) names.push_back(tensor.name);
  EXPECT_THAT(names, ElementsAre("a-b::x", "a::x", "a::y", "c::z"));
  EXPECT_EQ(joined->canonical.tensors[0].dtype, DType::kF16);
  EXPECT_TRUE(Validate(ModelLayout{joined->canonical, {joined->rank}}).ok());
  for (const LocalTensor& tensor : joined->rank.tensors) {
    local.push_back(tensor.name + " -> " + names[tensor.pieces.at(0).tensor]);
  }
  EXPECT_THAT(local, ElementsAre("a::px -> a::x", "a::py -> a::y", "a-b::px -> a-b::x"));
  EXPECT_THAT(ModelsOf(joined->canonical), ElementsAre("a", "a-b", "c"));
  EXPECT_EQ(joined->canonical.tensors[1], (TensorSpec{"a::x", DType::kF32, {3}}));
  EXPECT_EQ(joined->canonical.tensors[2], (TensorSpec{"a::y", DType::kBF16, {3}}));
}

TEST(Models, OfOneModelLocalNamesStay) {
  const RankOfModel one[] = {Of("actor", {{"x", DType::kF32, {3}}},
                                {{"px", DType::kF32, {3}, {{0, {{0}, {3}}, 0, {1}}}}})};
  const auto joined = JoinModels(one);
  EXPECT_EQ(joined->rank.tensors.at(0).name, "px");
  EXPECT_EQ(joined->canonical.tensors.at(0).name, "actor::x");
}

TEST(Models, AWeightStillFindsItsScales) {
  TensorSpec weight{"w", DType::kF8E4M3, {128, 128}};
  weight.block = {128, 128};
  const RankOfModel one[] = {Of("actor", {weight, {"w_scale_inv", DType::kF32, {1, 1}}}, {}),
                             Of("reward", {{"w", DType::kBF16, {128, 128}}}, {})};
  const CanonicalSpace joined = JoinModels(one)->canonical;
  EXPECT_EQ(joined.ScalesOf("actor::w"), joined.Find("actor::w_scale_inv"));
  EXPECT_EQ(joined.WeightOf(*joined.Find("actor::w_scale_inv")), joined.Find("actor::w"));
  EXPECT_TRUE(Validate(ModelLayout{joined, {}}).ok());
}

TEST(Models, ATensorWhoseNameGetsTooLongIsNamed) {
  const std::string longest(LayoutLimits{}.name_bytes_max, 'n');
  const RankOfModel models[] = {Of("actor", {{longest, DType::kF32, {3}}}, {})};
  const auto joined = JoinModels(models);
  ASSERT_FALSE(joined.has_value());
  EXPECT_EQ(joined.error().reason(), Reason::kLimitExceeded);
  EXPECT_EQ(joined.error().tensor(), "actor::" + longest);
}

TEST(Models, OneWithoutANameIsOneModel) {
  EXPECT_THAT(ModelsOf({{{"a", DType::kF32, {1}}, {"b", DType::kF32, {1}}}}), ElementsAre(""));
  EXPECT_THAT(ModelsOf({}), ElementsAre(""));
}

}  // namespace
}  // namespace weightwire::layout
