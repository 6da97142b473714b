#include <gtest/gtest.h>

#include <algorithm>
#include <cctype>
#include <string>
#include <utility>
#include <vector>

#include "server/base/status.h"
#include "server/layout/types.h"
#include "server/plan/plan.h"
#include "weightwire/v1/types.pb.h"

namespace weightwire {
namespace {

std::string Upper(std::string_view text) {
  std::string upper(text);
  std::transform(upper.begin(), upper.end(), upper.begin(),
                 [](unsigned char c) { return static_cast<char>(std::toupper(c)); });
  return upper;
}

constexpr int kNumberMax = 1'000;  // above every number in use

TEST(WireEnums, ReasonsAgreeByNameAndNumber) {
  for (int number = -1; number < kNumberMax; ++number) {
    const auto reason = ReasonFromNumber(number);
    ASSERT_EQ(reason.has_value(), v1::Reason_IsValid(number)) << number;
    if (!reason) continue;
    EXPECT_EQ("REASON_" + Upper(ReasonName(*reason)),
              v1::Reason_Name(static_cast<v1::Reason>(number)));
  }
  EXPECT_LT(v1::Reason_MAX, kNumberMax);
}

TEST(WireEnums, DTypesAgreeByNameAndNumber) {
  for (int number = -1; number < kNumberMax; ++number) {
    const auto dtype = layout::DTypeFromNumber(number);
    ASSERT_EQ(dtype.has_value(), v1::DType_IsValid(number) && number != v1::DTYPE_UNSPECIFIED)
        << number;
    if (!dtype) continue;
    EXPECT_EQ("DTYPE_" + Upper(layout::DTypeName(*dtype)),
              v1::DType_Name(static_cast<v1::DType>(number)));
  }
  EXPECT_LT(v1::DType_MAX, kNumberMax);
}

TEST(WireEnums, WhatCopiesMakeHasTheSameNumbers) {
  EXPECT_EQ(static_cast<int>(plan::Transform::kElements), v1::MAKES_ELEMENTS);
  EXPECT_EQ(static_cast<int>(plan::Transform::kCodes), v1::MAKES_CODES);
  EXPECT_EQ(static_cast<int>(plan::Transform::kScales), v1::MAKES_SCALES);
  const std::vector<std::pair<layout::ScaleRule, std::string>> rules = {
      {layout::ScaleRule::kQuotient, ""},
      {layout::ScaleRule::kPowerOfTwo, "_POWER_OF_TWO"},
      {layout::ScaleRule::kOwnKind, "_OWN_KIND"},
      {layout::ScaleRule::kPowerOfTwoRounded, "_POWER_OF_TWO_ROUNDED"},
      {layout::ScaleRule::kMxFp4, "_MXFP4"},
      {layout::ScaleRule::kMxFp4Rounded, "_MXFP4_ROUNDED"},
      {layout::ScaleRule::kNvFp4, "_NVFP4"},
      {layout::ScaleRule::kInt4, "_INT4"},
      {layout::ScaleRule::kNvFp4Modelopt, "_NVFP4_MODELOPT"},
      {layout::ScaleRule::kOwnQuotient, "_OWN_QUOTIENT"}};
  for (const auto& [rule, suffix] : rules) {
    for (const bool codes : {true, false}) {
      plan::CopyOp op;
      op.transform = codes ? plan::Transform::kCodes : plan::Transform::kScales;
      op.rule = rule;
      const int number = plan::MakesNumber(op);
      EXPECT_EQ(std::string(codes ? "MAKES_CODES" : "MAKES_SCALES").append(suffix),
                v1::Makes_Name(static_cast<v1::Makes>(number)));
      plan::CopyOp back;
      EXPECT_TRUE(plan::SetMakes(number, back));
      EXPECT_EQ(back, op);
    }
  }
  plan::CopyOp op;
  EXPECT_FALSE(plan::SetMakes(v1::Makes_MAX + 1, op) || plan::SetMakes(-1, op));
  EXPECT_EQ(v1::Makes_ARRAYSIZE, 21);
}

}  // namespace
}  // namespace weightwire
