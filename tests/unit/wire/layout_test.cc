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
    ASSERT_EQ(back->config_json, submission.config_json);
    ASSERT_EQ(back->spec, submission.spec);
    ASSERT_EQ(back->trace, submission.trace);
    ASSERT_EQ(back->canonical, submission.canonical);
    ASSERT_EQ(back->layout, submission.layout);
    ExpectEqual(back->observed, submission.observed);
    ExpectEqual(back->checkpoint, submission.checkpoint);
  }
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
