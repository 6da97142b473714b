#include "server/wire/layout.h"

#include <gtest/gtest.h>

#include "server/wire/limits.h"
#include "tests/unit/wire/random_domain.h"

namespace weightwire::wire {
namespace {

void ExpectEqual(const std::vector<layout::ObservedTensor>& a,
                 const std::vector<layout::ObservedTensor>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t t = 0; t < a.size(); ++t) {
    ASSERT_EQ(a[t].name, b[t].name);
    ASSERT_EQ(a[t].dtype, b[t].dtype);
    ASSERT_EQ(a[t].shape, b[t].shape);
  }
}

void ExpectEqual(const control::LayoutSubmission& a, const control::LayoutSubmission& b) {
  ASSERT_EQ(a.config_json, b.config_json);
  ASSERT_EQ(a.spec, b.spec);
  ASSERT_EQ(a.trace, b.trace);
  ASSERT_EQ(a.canonical, b.canonical);
  ASSERT_EQ(a.layout, b.layout);
  ExpectEqual(a.observed, b.observed);
  ExpectEqual(a.checkpoint, b.checkpoint);
  ASSERT_EQ(a.models.size(), b.models.size());
  for (size_t m = 0; m < a.models.size(); ++m) {
    ASSERT_EQ(a.models[m].model, b.models[m].model);
    ASSERT_EQ(a.models[m].rank, b.models[m].rank);
    ASSERT_EQ(a.models[m].world_size, b.models[m].world_size);
    ExpectEqual(a.models[m].layout, b.models[m].layout);
  }
}

TEST(LayoutWire, SubmissionsComeBackEqual) {
  const uint64_t seed = SeedFromEnvironment();
  std::printf("seed %llu\n", static_cast<unsigned long long>(seed));
  Dice dice(seed);
  for (int i = 0; i < 2'000; ++i) {
    const control::LayoutSubmission submission = RandomSubmission(dice);
    v1::LayoutSubmission message;
    ASSERT_TRUE(message.ParseFromString(ToProto(submission).SerializeAsString()));
    auto back = FromProto("layout", message);
    ASSERT_TRUE(back) << back.error().ToString();
    ExpectEqual(*back, submission);
  }
}

TEST(LayoutWire, RefusesModelsThatAreNoneOrHaveModelsThemselves) {
  const auto refused = [](const v1::LayoutSubmission& submission) {
    const auto made = FromProto("layout", submission);
    return made ? std::string() : made.error().message();
  };
  v1::LayoutSubmission submission;
  submission.mutable_models();
  EXPECT_EQ(refused(submission), "layout.models: must not be empty");
  v1::LayoutSubmission::Model* model = submission.mutable_models()->add_models();
  model->set_name("actor");
  EXPECT_EQ(refused(submission),
            "layout.models[0].layout: needs a scheme, a trace, boxes or models");
  model->mutable_layout()->mutable_models();
  EXPECT_EQ(refused(submission), "layout.models[0].layout: must not have models itself");
  model->mutable_layout()->mutable_boxes();
  EXPECT_EQ(refused(submission), "");
  model->set_name("an actor");
  EXPECT_EQ(refused(submission), "no model can be called \"an actor\"");
}

TEST(LayoutWire, RefusesUnknownDTypeNamingTheTensor) {
  v1::TensorSpec spec;
  spec.set_name("model.norm.weight");
  spec.set_dtype(static_cast<v1::DType>(40));
  const auto refused = FromProto("layout.observed[3]", spec);
  ASSERT_FALSE(refused);
  const Status& status = refused.error();
  EXPECT_EQ(status.reason(), Reason::kUnknownEnum);
  EXPECT_EQ(status.tensor(), "model.norm.weight");
  EXPECT_NE(status.message().find("layout.observed[3].dtype"), std::string::npos);
  EXPECT_NE(status.message().find("40"), std::string::npos);
}

TEST(LayoutWire, RefusesMoreThanEightDimensions) {
  v1::TensorSpec spec;
  spec.set_name("t");
  spec.set_dtype(v1::DTYPE_F32);
  for (int i = 0; i < 9; ++i) spec.add_shape(1);
  EXPECT_EQ(FromProto("spec", spec).error().reason(), Reason::kMessageTooLarge);
}

TEST(LayoutWire, RefusesListsOfDifferentLength) {
  v1::RankLayout rank;
  v1::LocalTensor* tensor = rank.add_tensors();
  tensor->mutable_spec()->set_name("t");
  tensor->mutable_spec()->set_dtype(v1::DTYPE_F32);
  v1::Piece* piece = tensor->add_pieces();
  piece->add_begin(0);
  piece->add_extent(1);
  const auto refused = FromProto("rank", rank);
  ASSERT_FALSE(refused);
  const Status& status = refused.error();
  EXPECT_EQ(status.reason(), Reason::kInvalidRequest);
  EXPECT_EQ(status.tensor(), "t");
}

TEST(LayoutWire, RefusesOverlongNamesAndConfigs) {
  v1::TensorSpec spec;
  spec.set_name(std::string(kNameBytesMax + 1, 'n'));
  spec.set_dtype(v1::DTYPE_F32);
  EXPECT_EQ(FromProto("spec", spec).error().reason(), Reason::kMessageTooLarge);
  v1::LayoutSubmission submission;
  submission.mutable_scheme()->set_config_json(std::string(kConfigBytesMax + 1, ' '));
  submission.mutable_scheme()->mutable_topology()->set_spec("hf");
  EXPECT_EQ(FromProto("layout", submission).error().reason(), Reason::kMessageTooLarge);
}

TEST(LayoutWire, RefusesSubmissionOfNoKind) {
  EXPECT_EQ(FromProto("layout", v1::LayoutSubmission()).error().reason(), Reason::kInvalidRequest);
}

}  // namespace
}  // namespace weightwire::wire
