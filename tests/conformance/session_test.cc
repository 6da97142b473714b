#include "tests/conformance/pattern.h"
#include "tests/conformance/rig.h"

namespace weightwire::conformance {
namespace {

class Sessions : public Conformance {
 protected:
  Sessions() : callee(rig.MakeSide()), caller(rig.MakeSide()) {}
  std::shared_ptr<Call> Say(const Hello& hello) {
    auto call = rig.Connect(*caller, callee->transport->address(), hello);
    EXPECT_TRUE(rig.WaitFor(call));
    return call;
  }
  std::unique_ptr<Side> callee;
  std::unique_ptr<Side> caller;
};

TEST_P(Sessions, BothSidesKnowTheHello) {
  const Hello hello = rig.HelloFor(*caller, callee->self);
  auto call = Say(hello);
  ASSERT_EQ(call->status, OkStatus());
  EXPECT_EQ(call->endpoint->hello(), hello);
  EXPECT_EQ(call->endpoint->transport_name(), rig.kind().backend);
  ASSERT_TRUE(rig.Wait([&] { return callee->recorder.accepted.size() == 1; }));
  EXPECT_EQ(callee->recorder.accepted.front()->hello(), hello);
  ASSERT_EQ(callee->recorder.hellos.size(), 1u);
  EXPECT_EQ(callee->recorder.hellos[0].caller, hello.caller);
  EXPECT_EQ(callee->recorder.hellos[0].shown, transport::NameOf(hello.ticket));
}

TEST_P(Sessions, ACallerThatShowsItsTicketIsServedWhereTheHandlerLikesIt) {
  Hello hello = rig.HelloFor(*caller, callee->self);
  hello.protocol_min = hello.protocol_max = transport::kProtocolProof - 1;
  auto call = Say(hello);
  if (rig.kind().integrity == transport::Integrity::kMac) {
    EXPECT_EQ(call->status.reason(), Reason::kProtocolVersion) << "without a proof there is no key";
    EXPECT_TRUE(callee->recorder.accepted.empty());
    return;
  }
  ASSERT_EQ(call->status, OkStatus());
  ASSERT_TRUE(rig.Wait([&] { return callee->recorder.accepted.size() == 1; }));
  EXPECT_EQ(callee->recorder.accepted.front()->hello(), hello);
  EXPECT_EQ(callee->recorder.hellos[0].shown, hello.ticket);
}

TEST_P(Sessions, EndpointIdsDiffer) {
  auto one = rig.Open(*caller, *callee);
  auto two = rig.Open(*caller, *callee);
  ASSERT_TRUE(rig.Wait([&] { return callee->recorder.accepted.size() == 2; }));
  const std::set<uint64_t> ids = {one->id(), two->id(), callee->recorder.accepted[0]->id(),
                                  callee->recorder.accepted[1]->id()};
  EXPECT_EQ(ids.size(), 4u);
}

TEST_P(Sessions, RefusesAnotherIncarnationBeforeTheHandlerIsAsked) {
  auto call = Say(rig.HelloFor(*caller, Incarnation(callee->self.value + 1)));
  EXPECT_EQ(call->status.code(), Code::kFailedPrecondition);
  EXPECT_EQ(call->status.reason(), Reason::kStaleIncarnation);
  EXPECT_TRUE(callee->recorder.hellos.empty());
  EXPECT_TRUE(callee->recorder.accepted.empty());
}

TEST_P(Sessions, RefusesATicketThatTheHandlerRejects) {
  Hello hello = rig.HelloFor(*caller, callee->self);
  hello.ticket = {1};
  auto call = Say(hello);
  EXPECT_EQ(call->status.code(), Code::kUnauthenticated);
  EXPECT_EQ(call->status.reason(), Reason::kTicketRejected);
  EXPECT_TRUE(callee->recorder.accepted.empty());
}

TEST_P(Sessions, RefusesAProtocolOfAnotherAge) {
  Hello hello = rig.HelloFor(*caller, callee->self);
  hello.protocol_min = transport::kProtocolMax + 1;
  hello.protocol_max = transport::kProtocolMax + 5;
  auto call = Say(hello);
  EXPECT_EQ(call->status.code(), Code::kFailedPrecondition);
  EXPECT_EQ(call->status.reason(), Reason::kProtocolVersion);
}

TEST_P(Sessions, NobodyListening) {
  const std::string address = callee->transport->address();
  callee->transport.reset();
  auto call = rig.Connect(*caller, address, rig.HelloFor(*caller, callee->self));
  ASSERT_TRUE(rig.WaitFor(call));
  EXPECT_EQ(call->status.code(), Code::kUnavailable);
  EXPECT_EQ(call->status.reason(), Reason::kTransportFailed);
}

TEST_P(Sessions, ManyCallersAtOnceReachOneCallee) {
  // Under a sanitizer a TLS handshake takes long, and each session has four.
  const size_t kCount = GetParam().integrity == transport::Integrity::kTls ? 8 : 40;
  auto region = PatternRegion(100'003);
  const RegionKey key = callee->transport->Export({{region, 0, region->size()}});
  std::vector<std::shared_ptr<Call>> calls;
  for (size_t i = 0; i < kCount; ++i) {
    calls.push_back(
        rig.Connect(*caller, callee->transport->address(), rig.HelloFor(*caller, callee->self)));
  }
  std::vector<std::vector<std::byte>> buffers(kCount, std::vector<std::byte>(100'003));
  std::vector<std::shared_ptr<Call>> gets;
  for (size_t i = 0; i < kCount; ++i) {
    ASSERT_TRUE(rig.WaitFor(calls[i]));
    ASSERT_EQ(calls[i]->status, OkStatus());
    gets.push_back(rig.Get(calls[i]->endpoint, key, 0, {buffers[i]}));
  }
  for (size_t i = 0; i < kCount; ++i) {
    ASSERT_TRUE(rig.WaitFor(gets[i]));
    ASSERT_EQ(gets[i]->status, OkStatus());
    ASSERT_EQ(FirstDifference(buffers[i], 0), -1);
  }
}

INSTANTIATE_TEST_SUITE_P(Transports, Sessions, ::testing::ValuesIn(AllKinds()), KindName);

}  // namespace
}  // namespace weightwire::conformance
