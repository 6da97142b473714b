#include "server/wire/status.h"

#include <gtest/gtest.h>

#include "server/wire/limits.h"
#include "tests/unit/wire/random_domain.h"

namespace weightwire::wire {
namespace {

TEST(StatusWire, OutcomesComeBackEqual) {
  Dice dice(SeedFromEnvironment());
  for (int i = 0; i < 2'000; ++i) {
    const Status status = RandomStatus(dice);
    ASSERT_EQ(FromProto("why", OutcomeOf(status)), status);
  }
}

TEST(StatusWire, CallDetailsComeBackEqual) {
  Dice dice(SeedFromEnvironment());
  for (int i = 0; i < 2'000; ++i) {
    const Status status = RandomStatus(dice);
    if (status.ok()) continue;
    ASSERT_EQ(FromCall(static_cast<int>(status.code()), status.message(), EncodeDetails(status)),
              status);
  }
}

TEST(StatusWire, LongestErrorFitsIntoGrpcTrailers) {
  const Status status =
      Status(Code::kInvalidArgument, Reason::kShapeMismatch, std::string(100'000, 'm'))
          .AtRank(std::string(10'000, 'r'))
          .AtTensor(std::string(10'000, 't'))
          .Remedy(std::string(10'000, 'd'));
  const size_t details = EncodeDetails(status).size();
  EXPECT_LE(kErrorMessageBytesMax + (details + 2) / 3 * 4, 8'192u - 512u);
}

TEST(StatusWire, MessageOfDetailsIsTheMessageOfTheCall) {
  const Status status(Code::kAborted, Reason::kMemberLost, std::string(5'000, 'x'));
  EXPECT_EQ(RpcStatusOf(status).message().size(), kErrorMessageBytesMax);
}

TEST(StatusWire, BareFailuresGetAReasonByTheirCode) {
  EXPECT_EQ(FromCall(14, "connect failed", "").reason(), Reason::kTransportFailed);
  EXPECT_EQ(FromCall(8, "too large", "").reason(), Reason::kMessageTooLarge);
  EXPECT_EQ(FromCall(4, "late", "").reason(), Reason::kDeadlineExceeded);
  EXPECT_EQ(FromCall(4, "late", "garbage").reason(), Reason::kDeadlineExceeded);
  EXPECT_EQ(FromCall(14, "connect failed", "").message(), "connect failed");
}

TEST(StatusWire, IgnoresDetailsThatContradictTheCall) {
  const Status inner(Code::kAborted, Reason::kMemberLost, "inner");
  const Status outer = FromCall(14, "outer", EncodeDetails(inner));
  EXPECT_EQ(outer.code(), Code::kUnavailable);
  EXPECT_EQ(outer.reason(), Reason::kTransportFailed);
  EXPECT_EQ(outer.message(), "outer");
}

TEST(StatusWire, NeverMakesAFailureOk) {
  EXPECT_EQ(FromCall(0, "odd", "").code(), Code::kUnknown);
  EXPECT_EQ(FromCall(99, "odd", "").code(), Code::kUnknown);
}

}  // namespace
}  // namespace weightwire::wire
