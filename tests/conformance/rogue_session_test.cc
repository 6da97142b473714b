// Peers that would open a session without the ticket, on plain sockets: who has none, who replays
// what another one said, who reads along and joins, and who answers in a callee's place.
#include <algorithm>

#include "server/transport/tcp/tcp_preamble.h"
#include "tests/conformance/counting_sink.h"
#include "tests/conformance/plain_socket.h"
#include "tests/conformance/raw_session.h"
#include "tests/conformance/rig.h"

namespace weightwire::conformance {
namespace {

class RogueSessions : public Conformance {
 protected:
  RogueSessions() : sink(rig), side(rig.MakeSide({.metrics = &sink})) {}
  bool is_tcp() const { return rig.kind().backend == "tcp"; }
  Plain Visit() { return Plain::ConnectTo(side->transport->address()); }
  RawCaller RightCaller(uint32_t connections = 1) {
    return RawCaller(is_tcp(), rig.HelloFor(*side, side->self), connections);
  }
  void ExpectRefused(const RawCaller& caller, Plain& plain, const std::string& counted) {
    EXPECT_EQ(caller.verdict.code, Code::kUnauthenticated);
    EXPECT_EQ(caller.verdict.reason, Reason::kTicketRejected);
    EXPECT_TRUE(plain.SeesEnd());
    EXPECT_TRUE(rig.Wait([&] { return sink.counts["auth_failures_total " + counted] == 1; }));
    EXPECT_TRUE(side->recorder.accepted.empty());
  }

  CountingSink sink;
  std::unique_ptr<Side> side;
};

bool Holds(std::span<const std::byte> bytes, const Ticket& ticket) {
  const auto secret = std::as_bytes(std::span(ticket));
  return !std::ranges::search(bytes, secret).empty();
}

TEST_P(RogueSessions, WhoHasNoTicketIsRefused) {
  transport::Hello hello = rig.HelloFor(*side, side->self);
  hello.ticket = {6, 6, 6};
  RawCaller caller(is_tcp(), hello);
  Plain plain = Visit();
  EXPECT_FALSE(caller.Challenged(plain).has_value());
  ExpectRefused(caller, plain, "ticket");
}

/// The name of a ticket can be read on the way. It opens nothing.
TEST_P(RogueSessions, WhoKnowsOnlyTheTicketsNameIsRefused) {
  RawCaller right = RightCaller();
  transport::Hello hello = rig.HelloFor(*side, side->self);
  hello.ticket = {6, 6, 6};
  RawCaller caller(is_tcp(), hello);
  caller.first() = right.first();
  Plain plain = Visit();
  EXPECT_FALSE(caller.Challenged(plain).has_value()) << "the callee's proof is not to be made";
  ASSERT_TRUE(caller.Conclude(plain, transport::EncodeCallerProof({1, 2, 3})));
  ExpectRefused(caller, plain, "proof");
}

TEST_P(RogueSessions, AReplayedOpeningIsRefused) {
  RawCaller right = RightCaller();
  std::optional<std::vector<std::byte>> proof;
  {
    Plain plain = Visit();
    proof = right.Challenged(plain);
    ASSERT_TRUE(proof && right.Conclude(plain, *proof));
    EXPECT_EQ(right.verdict.code, Code::kOk);
    ASSERT_TRUE(rig.Wait([&] { return side->recorder.accepted.size() == 1; }));
    rig.Update([&] { side->recorder.accepted.clear(); });
  }
  RawCaller replay = RightCaller();
  replay.first() = right.first();
  Plain plain = Visit();
  ASSERT_TRUE(replay.Challenged(plain).has_value());
  ASSERT_TRUE(replay.Conclude(plain, *proof));
  ExpectRefused(replay, plain, "proof");
}

TEST_P(RogueSessions, WhatWasSaidCannotBeChangedOnTheWay) {
  RawCaller right = RightCaller();
  RawCaller changed = RightCaller();
  changed.first() = right.first();
  transport::CallerHello said =
      *transport::DecodeCallerHello(std::span(right.first()).first(transport::kCallerHelloBytes));
  said.features ^= 1;
  std::ranges::copy(transport::EncodeCallerHello(said), changed.first().begin());
  if (is_tcp()) {
    const auto open = transport::EncodeOpen({said, 1});
    changed.first().assign(open.begin(), open.end());
  }
  Plain plain = Visit();
  plain.Send(changed.first());
  std::array<std::byte, transport::kProvedReplyBytes> callee_proof;
  ASSERT_TRUE(plain.Receive(callee_proof));
  transport::CallerHandshake honest(rig.HelloFor(*side, side->self));
  const auto proof = honest.OnCalleeProof(right.first(), callee_proof);
  ASSERT_FALSE(proof.has_value()) << "the caller sees that the callee heard something else";
  EXPECT_EQ(proof.error().reason(), Reason::kTicketRejected);
}

TEST_P(RogueSessions, WhoAnswersInTheCalleesPlaceIsLeftAndLearnsNothing) {
  RawListener listener(is_tcp());
  auto call = rig.Connect(*side, listener.address(), rig.HelloFor(*side, Incarnation(1)));
  Plain plain = listener.Accept();
  std::vector<std::byte> first(is_tcp() ? transport::kPreambleBytes : transport::kCallerHelloBytes);
  ASSERT_TRUE(plain.Receive(first));
  EXPECT_FALSE(Holds(first, TheTicket()));
  plain.Send(transport::EncodeCalleeReply({transport::kProtocolMax, 0, Code::kOk, Reason::kNone}));
  plain.Send(transport::EncodeCalleeProof({{4, 5}, {6, 7}}));
  EXPECT_TRUE(plain.SeesEnd());
  ASSERT_TRUE(rig.WaitFor(call));
  EXPECT_EQ(call->status.code(), Code::kUnauthenticated);
  EXPECT_EQ(call->status.reason(), Reason::kTicketRejected);
  EXPECT_EQ(call->endpoint, nullptr);
}

/// Refusing in words that one speaks an older protocol does not bring a caller to show its ticket.
TEST_P(RogueSessions, ACalleeThatPretendsToBeOlderLearnsNothing) {
  RawListener listener(is_tcp());
  auto call = rig.Connect(*side, listener.address(), rig.HelloFor(*side, Incarnation(1)));
  Plain plain = listener.Accept();
  std::vector<std::byte> first(is_tcp() ? transport::kPreambleBytes : transport::kCallerHelloBytes);
  ASSERT_TRUE(plain.Receive(first));
  plain.Send(
      transport::EncodeCalleeReply({transport::kProtocolProof - 1, 0, Code::kOk, Reason::kNone}));
  plain.Send(transport::EncodeCalleeProof({{4, 5}, {6, 7}}));
  EXPECT_TRUE(plain.SeesEnd());
  ASSERT_TRUE(rig.WaitFor(call));
  EXPECT_EQ(call->status.reason(), Reason::kTicketRejected);
}

TEST_P(RogueSessions, WhoReadTheTokenCannotJoin) {
  if (!is_tcp()) GTEST_SKIP() << "only tcp has several sockets";
  RawCaller caller = RightCaller(2);
  Plain plain = Visit();
  ASSERT_TRUE(caller.Open(plain));
  for (const transport::Proof& proof :
       {transport::Proof{}, transport::JoinProof(caller.key(), caller.token, 2)}) {
    Plain other = Visit();
    other.Send(transport::EncodeJoin({caller.token, 1, proof}));
    std::vector<std::byte> bytes(transport::kWelcomeBytes);
    ASSERT_TRUE(other.Receive(bytes));
    EXPECT_EQ(transport::DecodeWelcome(bytes)->reply.code, Code::kUnauthenticated);
    EXPECT_TRUE(other.SeesEnd());
  }
  EXPECT_TRUE(rig.Wait([&] { return sink.counts["auth_failures_total proof"] == 2; }));
  Plain right = Visit();
  right.Send(transport::EncodeJoin(
      {caller.token, 1, transport::JoinProof(caller.key(), caller.token, 1)}));
  EXPECT_TRUE(rig.Wait([&] { return side->recorder.accepted.size() == 1; }));
}

INSTANTIATE_TEST_SUITE_P(Transports, RogueSessions,
                         ::testing::Values(Kind{"shm", "shm", 1}, Kind{"cuda_ipc", "cuda_ipc", 1},
                                           Kind{"tcp", "tcp", 1}),
                         KindName);

}  // namespace
}  // namespace weightwire::conformance
