// Peers that do not keep to the protocol: bytes on plain sockets.
#include "server/memory/region.h"
#include "server/transport/tcp/tcp_handshake.h"
#include "tests/conformance/counting_sink.h"
#include "tests/conformance/pattern.h"
#include "tests/conformance/plain_socket.h"
#include "tests/conformance/raw_session.h"
#include "tests/conformance/rig.h"

namespace weightwire::conformance {
namespace {

class RawSockets : public Conformance {
 protected:
  RawSockets() : sink(rig) { Listen(kLong); }
  /// Who waits for the timeout has a short one; others might not be done within it on a busy host.
  void Listen(Nanos handshake_timeout) {
    side = rig.MakeSide(
        {.handshake_timeout = handshake_timeout, .inbound_handshakes_max = 4, .metrics = &sink});
  }
  bool is_tcp() const { return rig.kind().backend == "tcp"; }

  std::vector<std::byte> HalfAnIntroduction() {
    RawCaller caller(is_tcp(), rig.HelloFor(*side, side->self));
    std::vector<std::byte> bytes = caller.first();
    bytes.resize(bytes.size() / 2);
    return bytes;
  }
  /// A session whose other end is ours.
  Plain OpenSession() {
    Plain plain = Plain::ConnectTo(side->transport->address());
    RawCaller caller(is_tcp(), rig.HelloFor(*side, side->self));
    EXPECT_TRUE(caller.Open(plain));
    return plain;
  }
  bool Counted(const std::string& what, double count = 1) {
    return rig.Wait([&] { return sink.counts[what] >= count; });
  }

  CountingSink sink;
  std::unique_ptr<Side> side;
};

TEST_P(RawSockets, GarbageInsteadOfAHelloIsClosedAndCounted) {
  Plain plain = Plain::ConnectTo(side->transport->address());
  plain.Send(std::vector<std::byte>(200, std::byte{'G'}));
  EXPECT_TRUE(plain.SeesEnd());
  EXPECT_TRUE(Counted("transport_closes_total garbage"));
  EXPECT_TRUE(side->recorder.hellos.empty());
}

TEST_P(RawSockets, ASlowHelloIsClosedAfterTheHandshakeTimeout) {
  Listen(300ms);
  Plain plain = Plain::ConnectTo(side->transport->address());
  plain.Send(HalfAnIntroduction());
  EXPECT_TRUE(plain.SeesEnd());
  EXPECT_TRUE(Counted("transport_closes_total handshake_timeout"));
}

TEST_P(RawSockets, AHelloThatEndsEarlyIsForgotten) {
  {
    Plain plain = Plain::ConnectTo(side->transport->address());
    plain.Send(HalfAnIntroduction());
  }
  EXPECT_TRUE(rig.Wait([&] {
    return sink.counts["transport_closes_total broken"] +
               sink.counts["transport_closes_total peer_closed"] ==
           1;
  }));
  EXPECT_TRUE(rig.Wait([&] { return sink.counts["connections handshaking"] == 0; }));
}

TEST_P(RawSockets, SilentVisitorsAreBounded) {
  Listen(1s);
  std::vector<Plain> silent;
  for (int i = 0; i < 5; ++i) silent.push_back(Plain::ConnectTo(side->transport->address()));
  EXPECT_TRUE(Counted("accept_errors_total handshakes_full"));
  for (Plain& plain : silent) EXPECT_TRUE(plain.SeesEnd());
  EXPECT_TRUE(rig.Wait([&] { return sink.counts["connections handshaking"] == 0; }));
  Plain good = OpenSession();
  EXPECT_TRUE(rig.Wait([&] { return side->recorder.accepted.size() == 1; }));
}

TEST_P(RawSockets, SilentVisitorsStopNoNewSession) {
  if (!is_tcp()) GTEST_SKIP() << "the others are of one user on one host";
  auto open = rig.MakeSide({.handshake_timeout = kLong,
                            .inbound_handshakes_max = 4,
                            .handshake_grace = 10ms,
                            .metrics = &sink});
  std::vector<Plain> silent;
  for (int i = 0; i < 200; ++i) silent.push_back(Plain::ConnectTo(open->transport->address()));
  auto call = rig.Connect(*side, open->transport->address(), rig.HelloFor(*side, open->self));
  ASSERT_TRUE(rig.WaitFor(call));
  EXPECT_EQ(call->status, OkStatus());
  EXPECT_TRUE(silent.front().SeesEnd()) << "the oldest goes first";
  EXPECT_TRUE(Counted("transport_closes_total displaced", 196));
}

TEST_P(RawSockets, TheAddressWithMostSilentVisitorsMakesRoom) {
  if (!is_tcp()) GTEST_SKIP() << "only tcp has addresses";
  auto open = rig.MakeSide({.handshake_timeout = kLong,
                            .inbound_handshakes_max = 4,
                            .handshake_grace = 10ms,
                            .metrics = &sink});
  const std::string& address = open->transport->address();
  Plain oldest = Plain::ConnectTo(address);
  std::vector<Plain> many;
  for (int i = 0; i < 8; ++i) many.push_back(Plain::ConnectTo(address, INADDR_LOOPBACK + 1));
  EXPECT_TRUE(many.front().SeesEnd());
  EXPECT_TRUE(Counted("transport_closes_total displaced", 5));
  RawCaller caller(true, rig.HelloFor(*open, open->self));
  EXPECT_TRUE(caller.Open(oldest)) << "older than any other, and alone at its address";
}

TEST_P(RawSockets, AVisitorKeepsItsPlaceForItsGrace) {
  if (!is_tcp()) GTEST_SKIP() << "the others wait in the backlog";
  auto open = rig.MakeSide({.handshake_timeout = kLong,
                            .inbound_handshakes_max = 4,
                            .handshake_grace = kLong,
                            .metrics = &sink});
  const std::string& address = open->transport->address();
  std::vector<Plain> visitors;
  for (int i = 0; i < 8; ++i) visitors.push_back(Plain::ConnectTo(address));
  for (Plain& visitor : visitors) {  // each makes room for the next
    RawCaller caller(true, rig.HelloFor(*open, open->self));
    EXPECT_TRUE(caller.Open(visitor));
  }
  EXPECT_TRUE(rig.Wait([&] { return open->recorder.accepted.size() == visitors.size(); }));
  EXPECT_EQ(rig.Read<double>([&] { return sink.counts["transport_closes_total displaced"]; }), 0);
}

TEST_P(RawSockets, GarbageOnASessionEndsIt) {
  const auto frame = [](FrameType type, uint64_t length) {
    return Frame{.type = type, .request = 1, .length = length};
  };
  std::vector<std::function<void(Plain&)>> offences = {
      [](Plain& plain) { plain.Send(std::vector<std::byte>(64, std::byte{'G'})); },
      [&](Plain& plain) { plain.Send(frame(FrameType::kGetReply, 0)); },
      [&](Plain& plain) { plain.Send(frame(FrameType::kMapReply, 0)); },
      [&](Plain& plain) { plain.Send(frame(FrameType::kRegion, 4096)); },
      [&](Plain& plain) { plain.Send(frame(FrameType::kGetEnd, 0)); },
      [&](Plain& plain) {
        plain.Send(frame(FrameType::kNotify, 65));
        plain.Send(std::vector<std::byte>(65));
      },
      [&](Plain& plain) { plain.Send(frame(FrameType::kNotify, UINT64_MAX)); },
  };
  double offence_count = 0;
  for (const auto& offend : offences) {
    Plain plain = OpenSession();
    offend(plain);
    EXPECT_TRUE(plain.SeesEnd()) << "offence " << offence_count;
    EXPECT_TRUE(Counted("transport_closes_total garbage", ++offence_count));
  }
  EXPECT_TRUE(rig.Wait([&] { return side->recorder.closed.size() == offences.size(); }));
  EXPECT_TRUE(side->recorder.notifies.empty());
}

TEST_P(RawSockets, MoreRequestsThanAllowedEndTheSession) {
  auto region = PatternRegion(8 << 20);
  const RegionKey key = side->transport->Export({{region, 0, region->size()}});
  Plain plain = OpenSession();
  for (uint64_t request = 1; request <= 400; ++request) {
    plain.Send(Frame{.type = FrameType::kGet, .request = request, .key = key, .length = 8 << 20});
  }
  EXPECT_TRUE(Counted("transport_closes_total garbage"));
  ASSERT_TRUE(rig.WaitFor(rig.Revoke(*side, key)));
}

TEST_P(RawSockets, AnyBytesAfterAGoodHelloLeaveTheOthersAlone) {
  std::mt19937_64 random(Seed());
  auto region = PatternRegion(100'000);
  const RegionKey key = side->transport->Export({{region, 0, region->size()}});
  auto reader = rig.MakeSide();
  auto endpoint = rig.Open(*reader, *side);
  for (int round = 0; round < 60; ++round) {
    Plain plain = OpenSession();
    std::vector<std::byte> bytes;
    for (int i = 0; i < 8; ++i) {
      std::array<std::byte, kFrameBytes> encoded;
      transport::EncodeFrame({.type = static_cast<FrameType>(1 + random() % 8),
                              .request = random() % 3,
                              .key = {key.id - random() % 2, key.generation - random() % 2},
                              .offset = random() % 3 == 0 ? random() : random() % 1000,
                              .length = random() % 3 == 0 ? random() : random() % 70},
                             encoded);
      if (random() % 4 == 0) encoded[random() % kFrameBytes] ^= std::byte{1};
      bytes.insert(bytes.end(), encoded.begin(), encoded.end());
    }
    plain.Send(bytes);
  }
  std::vector<std::byte> buffer(100'000);
  auto call = rig.Get(endpoint, key, 0, {buffer});
  ASSERT_TRUE(rig.WaitFor(call));
  EXPECT_EQ(call->status, OkStatus());
  EXPECT_EQ(FirstDifference(buffer, 0), -1);
}

TEST_P(RawSockets, RefusesMoreSessionsThanItsBound) {
  auto tight = rig.MakeSide({.inbound_sessions_max = 1});
  auto caller = rig.MakeSide();
  auto first = rig.Open(*caller, *tight);
  ASSERT_TRUE(rig.Wait([&] { return tight->recorder.accepted.size() == 1; }));
  auto second =
      rig.Connect(*caller, tight->transport->address(), rig.HelloFor(*caller, tight->self));
  ASSERT_TRUE(rig.WaitFor(second));
  EXPECT_EQ(second->status.code(), Code::kResourceExhausted);
  EXPECT_EQ(second->status.reason(), Reason::kLimitExceeded);
}

TEST_P(RawSockets, AJoinWithoutASessionIsRefused) {
  if (!is_tcp()) GTEST_SKIP() << "only tcp has several sockets";
  Plain plain = Plain::ConnectTo(side->transport->address());
  plain.Send(transport::EncodeJoin({{1, 2, 3}, 1, {}}));
  std::vector<std::byte> bytes(transport::kWelcomeBytes);
  ASSERT_TRUE(plain.Receive(bytes));
  auto welcome = transport::DecodeWelcome(bytes);
  ASSERT_TRUE(welcome.has_value());
  EXPECT_EQ(welcome->reply.code, Code::kUnauthenticated);
  EXPECT_TRUE(plain.SeesEnd());
}

TEST_P(RawSockets, ASessionThatMissesSocketsTimesOut) {
  if (!is_tcp()) GTEST_SKIP() << "only tcp has several sockets";
  Listen(300ms);
  Plain plain = Plain::ConnectTo(side->transport->address());
  RawCaller caller(true, rig.HelloFor(*side, side->self), 4);
  EXPECT_TRUE(caller.Open(plain));
  EXPECT_TRUE(plain.SeesEnd());
  EXPECT_TRUE(Counted("transport_closes_total handshake_timeout"));
  EXPECT_TRUE(side->recorder.accepted.empty());
}

TEST_P(RawSockets, ACalleeThatNeverAnswersMeetsTheDeadline) {
  RawListener listener(is_tcp());
  auto call = rig.Connect(*side, listener.address(), rig.HelloFor(*side, Incarnation(1)), 200ms);
  ASSERT_TRUE(rig.WaitFor(call));
  EXPECT_EQ(call->status.code(), Code::kDeadlineExceeded);
}

TEST_P(RawSockets, ACalleeThatAnswersGarbageIsLeft) {
  RawListener listener(is_tcp());
  auto call = rig.Connect(*side, listener.address(), rig.HelloFor(*side, Incarnation(1)));
  Plain plain = listener.Accept();
  plain.Send(std::vector<std::byte>(100, std::byte{'G'}));
  ASSERT_TRUE(rig.WaitFor(call));
  EXPECT_EQ(call->status.code(), Code::kUnavailable);
  EXPECT_EQ(call->status.reason(), Reason::kTransportFailed);
  EXPECT_TRUE(plain.SeesEnd());
}

TEST_P(RawSockets, AReplyThatDoesNotFitItsGetTouchesNothing) {
  RawListener listener(is_tcp());
  auto connect = rig.Connect(*side, listener.address(), rig.HelloFor(*side, Incarnation(1)));
  Plain plain = listener.Accept();
  ASSERT_TRUE(AnswerRaw(is_tcp(), plain, Incarnation(1), side->recorder));
  ASSERT_TRUE(rig.WaitFor(connect));
  ASSERT_EQ(connect->status, OkStatus());
  std::vector<std::byte> buffer(100, std::byte{0xee});
  auto get = rig.Get(connect->endpoint, {1, 1}, 0, {buffer});
  std::array<std::byte, kFrameBytes> request;
  ASSERT_TRUE(plain.Receive(request));
  auto frame = transport::DecodeFrame(request);
  ASSERT_TRUE(frame.has_value());
  EXPECT_EQ(frame->length, 100u);
  plain.Send(Frame{.type = FrameType::kGetReply, .request = frame->request, .length = 120});
  plain.Send(std::vector<std::byte>(120));
  ASSERT_TRUE(rig.WaitFor(get));
  EXPECT_EQ(get->status.code(), Code::kUnavailable);
  EXPECT_EQ(buffer, std::vector<std::byte>(100, std::byte{0xee}));
}

INSTANTIATE_TEST_SUITE_P(Transports, RawSockets,
                         ::testing::Values(Kind{"shm", "shm", 1}, Kind{"cuda_ipc", "cuda_ipc", 1},
                                           Kind{"tcp", "tcp", 1}),
                         KindName);

}  // namespace
}  // namespace weightwire::conformance
