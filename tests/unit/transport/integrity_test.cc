// How two sides come to speak with MACs, and that nobody between them can talk them out of it.
#include <algorithm>
#include <utility>

#include "gtest/gtest.h"
#include "server/transport/handshake.h"

namespace weightwire::transport {
namespace {

constexpr Incarnation kCaller(7), kCallee(9);
const Ticket kTicket = {1, 2, 3};

class Admits final : public Handler {
 public:
  Result<Ticket> OnHello(const CallerHello&) override {
    ++asked;
    return kTicket;
  }
  void OnAccepted(std::shared_ptr<Endpoint>) override {}
  void OnNotify(const std::shared_ptr<Endpoint>&, std::span<const std::byte>) override {}
  void OnClosed(const std::shared_ptr<Endpoint>&, const Status&) override {}
  int asked = 0;
};

Hello HelloWith(uint64_t features) {
  Hello hello;
  hello.features = features;
  hello.caller = kCaller;
  hello.callee = kCallee;
  hello.ticket = kTicket;
  return hello;
}

/// What the caller makes of it; `callee`: the features that the other side insists on.
Status Outcome(uint64_t caller_features, uint64_t callee_features) {
  Admits handler;
  CallerHandshake caller(HelloWith(caller_features));
  const auto first = EncodeCallerHello(caller.caller_hello());
  const CalleeHandshake callee(caller.caller_hello(), first, kCallee, handler, callee_features);
  if (!callee.awaits_proof()) return StatusOf(callee.reply());
  const auto proof = caller.OnCalleeProof(first, callee.callee_proof());
  return proof.has_value() ? StatusOf(*callee.OnProof(*proof)) : proof.error();
}

TEST(Integrity, ASessionNeedsTheSameOnBothSides) {
  EXPECT_TRUE(Outcome(0, 0).ok());
  EXPECT_TRUE(Outcome(kFeatureMac, kFeatureMac).ok());
  // The second callee answers as one does that has never heard of the feature.
  for (const auto& [caller, callee] : {std::pair(uint64_t{0}, kFeatureMac), {kFeatureMac, 0}}) {
    const Status status = Outcome(caller, callee);
    EXPECT_EQ(status.code(), Code::kFailedPrecondition);
    EXPECT_EQ(status.reason(), Reason::kConfigInvalid);
    EXPECT_NE(status.message().find("integrity is mac"), std::string::npos) << status.message();
    EXPECT_NE(status.remedy().find("alike"), std::string::npos);
  }
}

TEST(Integrity, FeaturesThatThisBuildDoesNotKnowAreIgnored) {
  EXPECT_TRUE(Outcome(uint64_t{1} << 40, 0).ok());
  EXPECT_TRUE(Outcome(kFeatureMac | uint64_t{1} << 40, kFeatureMac).ok());
}

TEST(Integrity, WhoDoesNotSealIsRefusedBeforeTheTicketIsLookedAt) {
  Admits handler;
  CallerHandshake caller(HelloWith(0));
  const auto first = EncodeCallerHello(caller.caller_hello());
  const CalleeHandshake callee(caller.caller_hello(), first, kCallee, handler, kFeatureMac);
  EXPECT_EQ(callee.reply().reason, Reason::kConfigInvalid);
  EXPECT_EQ(handler.asked, 0);
}

TEST(Integrity, ATicketThatIsShownMakesNoKeys) {
  Admits handler;
  Hello hello = HelloWith(kFeatureMac);
  hello.protocol_min = hello.protocol_max = kProtocolProof - 1;
  CallerHandshake caller(hello);
  const auto first = EncodeCallerHello(caller.caller_hello());
  const CalleeHandshake callee(caller.caller_hello(), first, kCallee, handler, kFeatureMac);
  EXPECT_EQ(callee.reply().reason, Reason::kConfigInvalid);
}

/// Two sides of which each would speak without, were it what the other wants.
TEST(Integrity, WhatWasAskedForCannotBeTakenAwayOnTheWay) {
  Admits handler;
  CallerHandshake caller(HelloWith(kFeatureMac));
  const auto first = EncodeCallerHello(caller.caller_hello());
  CallerHello stripped = caller.caller_hello();
  stripped.features = 0;
  const CalleeHandshake callee(stripped, EncodeCallerHello(stripped), kCallee, handler);
  ASSERT_TRUE(callee.awaits_proof());
  const auto proof = caller.OnCalleeProof(first, callee.callee_proof());
  ASSERT_FALSE(proof.has_value());
  EXPECT_EQ(proof.error().reason(), Reason::kTicketRejected);
}

TEST(Integrity, WhatWasGrantedCannotBeTakenAwayOnTheWay) {
  Admits handler;
  CallerHandshake caller(HelloWith(kFeatureMac));
  const auto first = EncodeCallerHello(caller.caller_hello());
  const CalleeHandshake callee(caller.caller_hello(), first, kCallee, handler, kFeatureMac);
  auto callee_proof = callee.callee_proof();
  CalleeReply reply = callee.reply();
  ASSERT_EQ(reply.features, kFeatureMac);
  reply.features = 0;
  std::ranges::copy(EncodeCalleeReply(reply), callee_proof.begin());
  const auto proof = caller.OnCalleeProof(first, callee_proof);
  ASSERT_FALSE(proof.has_value());
  EXPECT_EQ(proof.error().reason(), Reason::kTicketRejected);
}

}  // namespace
}  // namespace weightwire::transport
