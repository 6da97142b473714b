#include "server/base/status.h"

#include <gtest/gtest.h>

#include <set>
#include <string>

namespace weightwire {
namespace {

Result<int> Half(int value) {
  if (value % 2 != 0) return Fail(Code::kInvalidArgument, Reason::kInvalidRequest, "odd");
  return value / 2;
}

Result<int> Quarter(int value) {
  WW_ASSIGN(int half, Half(value));
  return Half(half);
}

Status CheckQuarter(int value) {
  WW_ASSIGN_OR_STATUS(int quarter, Quarter(value));
  return quarter > 0 ? OkStatus() : Status(Code::kOutOfRange, Reason::kInvalidRequest, "zero");
}

TEST(Status, SaysWhatWhereAndWhatToDo) {
  const Status status =
      Status(Code::kFailedPrecondition, Reason::kStaleVersion, "version 3 is not newer than 4")
          .AtRank("trainer/0")
          .AtTensor("lm_head.weight")
          .AtEpoch(Epoch(7))
          .Remedy("publish a version above 4");
  EXPECT_EQ(status.ToString(),
            "FAILED_PRECONDITION (stale_version): version 3 is not newer than 4 [rank trainer/0, "
            "tensor lm_head.weight, epoch 7]; publish a version above 4");
}

TEST(Status, MacrosHandTheFirstFailureOn) {
  EXPECT_EQ(Quarter(8).value(), 2);
  EXPECT_EQ(Quarter(6).error().message(), "odd");
  EXPECT_TRUE(CheckQuarter(8).ok());
  EXPECT_EQ(CheckQuarter(5).message(), "odd");
  EXPECT_EQ(CheckQuarter(0).code(), Code::kOutOfRange);
}

TEST(Reason, NamesAreUniqueAndNumbersRoundTrip) {
  std::set<std::string_view> names;
  int count = 0;
  while (auto reason = ReasonFromNumber(count)) {
    EXPECT_EQ(static_cast<int>(*reason), count);
    EXPECT_TRUE(names.insert(ReasonName(*reason)).second) << ReasonName(*reason);
    ++count;
  }
  EXPECT_EQ(count, static_cast<int>(Reason::kInternal) + 1);
  EXPECT_FALSE(ReasonFromNumber(-1).has_value());
}

}  // namespace
}  // namespace weightwire
