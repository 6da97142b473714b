// Peers that do not keep to the protocol: bytes on plain sockets.
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <cstring>

#include "server/memory/region.h"
#include "server/transport/address.h"
#include "server/transport/frame.h"
#include "server/transport/tcp/tcp_handshake.h"
#include "tests/conformance/counting_sink.h"
#include "tests/conformance/pattern.h"
#include "tests/conformance/rig.h"

namespace weightwire::conformance {
namespace {

using memory::UniqueFd;
using transport::Frame;
using transport::FrameType;
using transport::kFrameBytes;

struct Address {
  sockaddr_storage storage{};
  socklen_t size = 0;
  int family = AF_INET;
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
};

Address AddressOf(const std::string& text) {
  Address address;
  if (text.front() == '@') {
    auto* local = reinterpret_cast<sockaddr_un*>(&address.storage);
    local->sun_family = AF_UNIX;
    std::memcpy(local->sun_path + 1, text.data() + 1, text.size() - 1);
    address.size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + text.size());
    address.family = AF_UNIX;
  } else {
    auto* inet = reinterpret_cast<sockaddr_in*>(&address.storage);
    inet->sin_family = AF_INET;
    inet->sin_port = htons(transport::SplitAddress(text)->second);
    inet->sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    address.size = sizeof(sockaddr_in);
  }
  return address;
}

/// A plain blocking socket.
class Plain {
 public:
  explicit Plain(UniqueFd fd) : fd_(std::move(fd)) {}
  static Plain ConnectTo(const std::string& text) {
    const Address address = AddressOf(text);
    UniqueFd fd(socket(address.family, SOCK_STREAM | SOCK_CLOEXEC, 0));
    EXPECT_EQ(connect(fd.get(), address.get(), address.size), 0) << std::strerror(errno);
    return Plain(std::move(fd));
  }
  /// Bytes that the peer no longer takes are its right.
  void Send(std::span<const std::byte> bytes) {
    while (!bytes.empty()) {
      const ssize_t sent = send(fd_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (sent <= 0) return;
      bytes = bytes.subspan(static_cast<size_t>(sent));
    }
  }
  void Send(const Frame& frame) {
    std::array<std::byte, kFrameBytes> bytes;
    EncodeFrame(frame, bytes);
    Send(bytes);
  }
  /// False when the peer closed before all had come.
  bool Receive(std::span<std::byte> into) {
    while (!into.empty()) {
      const ssize_t got = recv(fd_.get(), into.data(), into.size(), 0);
      if (got <= 0) return false;
      into = into.subspan(static_cast<size_t>(got));
    }
    return true;
  }
  /// Reads until the peer closes; false when it does not within the deadline of a failure.
  bool SeesEnd() {
    std::array<std::byte, 4096> ignored;
    for (;;) {
      pollfd poll_fd{fd_.get(), POLLIN, 0};
      if (poll(&poll_fd, 1, 30'000) <= 0) return false;
      if (recv(fd_.get(), ignored.data(), ignored.size(), 0) <= 0) return true;
    }
  }

 private:
  UniqueFd fd_;
};

class RawSockets : public Conformance {
 protected:
  RawSockets() : sink(rig) {
    side =
        rig.MakeSide({.handshake_timeout = 300ms, .inbound_handshakes_max = 4, .metrics = &sink});
  }
  bool is_tcp() const { return rig.kind().backend == "tcp"; }

  /// The first bytes of a caller, right in every way.
  std::vector<std::byte> Introduction() {
    const Hello hello = rig.HelloFor(*side, side->self);
    if (is_tcp()) {
      const auto bytes = transport::EncodeOpen({hello, 1});
      return {bytes.begin(), bytes.end()};
    }
    const auto bytes = transport::EncodeHello(hello);
    return {bytes.begin(), bytes.end()};
  }
  std::vector<std::byte> HalfAnIntroduction() {
    std::vector<std::byte> bytes = Introduction();
    bytes.resize(bytes.size() / 2);
    return bytes;
  }
  size_t WelcomeBytes() const {
    return is_tcp() ? transport::kWelcomeBytes : transport::kHelloReplyBytes;
  }
  /// A session whose other end is ours.
  Plain OpenSession() {
    Plain plain = Plain::ConnectTo(side->transport->address());
    plain.Send(Introduction());
    std::vector<std::byte> welcome(WelcomeBytes());
    EXPECT_TRUE(plain.Receive(welcome));
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
  std::vector<Plain> silent;
  for (int i = 0; i < 5; ++i) silent.push_back(Plain::ConnectTo(side->transport->address()));
  EXPECT_TRUE(Counted("accept_errors_total handshakes_full"));
  for (Plain& plain : silent) EXPECT_TRUE(plain.SeesEnd());
  EXPECT_TRUE(rig.Wait([&] { return sink.counts["connections handshaking"] == 0; }));
  Plain good = OpenSession();
  EXPECT_TRUE(rig.Wait([&] { return side->recorder.accepted.size() == 1; }));
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
  plain.Send(transport::EncodeJoin({{1, 2, 3}, 1}));
  std::vector<std::byte> bytes(transport::kWelcomeBytes);
  ASSERT_TRUE(plain.Receive(bytes));
  auto welcome = transport::DecodeWelcome(bytes);
  ASSERT_TRUE(welcome.has_value());
  EXPECT_EQ(welcome->reply.code, Code::kUnauthenticated);
  EXPECT_TRUE(plain.SeesEnd());
}

TEST_P(RawSockets, ASessionThatMissesSocketsTimesOut) {
  if (!is_tcp()) GTEST_SKIP() << "only tcp has several sockets";
  Plain plain = Plain::ConnectTo(side->transport->address());
  plain.Send(transport::EncodeOpen({rig.HelloFor(*side, side->self), 4}));
  EXPECT_TRUE(plain.SeesEnd());
  EXPECT_TRUE(Counted("transport_closes_total handshake_timeout"));
  EXPECT_TRUE(side->recorder.accepted.empty());
}

/// A listener that is no weightwire.
class RawListener {
 public:
  explicit RawListener(bool is_tcp)
      : fd_(socket(is_tcp ? AF_INET : AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    text_ = is_tcp ? "127.0.0.1:0" : "@ww-raw-" + std::to_string(getpid());
    Address address = AddressOf(text_);
    EXPECT_EQ(bind(fd_.get(), address.get(), address.size), 0);
    EXPECT_EQ(listen(fd_.get(), 8), 0);
    if (is_tcp) {
      sockaddr_in bound{};
      socklen_t size = sizeof(bound);
      EXPECT_EQ(getsockname(fd_.get(), reinterpret_cast<sockaddr*>(&bound), &size), 0);
      text_ = "127.0.0.1:" + std::to_string(ntohs(bound.sin_port));
    }
  }
  const std::string& address() const { return text_; }
  Plain Accept() { return Plain(UniqueFd(accept(fd_.get(), nullptr, nullptr))); }

 private:
  UniqueFd fd_;
  std::string text_;
};

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
  std::vector<std::byte> introduction(Introduction().size());
  ASSERT_TRUE(plain.Receive(introduction));
  const transport::HelloReply reply{transport::kProtocolMax, 0, Code::kOk, Reason::kNone};
  if (is_tcp()) {
    plain.Send(transport::EncodeWelcome({reply, {}, 1}));
  } else {
    plain.Send(transport::EncodeHelloReply(reply));
  }
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
                         ::testing::Values(Kind{"shm", "shm", 1}, Kind{"tcp", "tcp", 1}), KindName);

}  // namespace
}  // namespace weightwire::conformance
