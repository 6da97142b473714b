#include "server/transport/tcp/tcp_handshake.h"

#include <netinet/tcp.h>

#include <boost/asio/io_context.hpp>
#include <random>

#include "gtest/gtest.h"

namespace weightwire::transport {
namespace {

TcpOpen SomeOpen() {
  TcpOpen open;
  open.caller_hello.caller = Incarnation(77);
  open.caller_hello.callee = Incarnation(88);
  open.caller_hello.shown.fill(3);
  open.connections = 5;
  return open;
}

TEST(TcpPreamble, RoundTrips) {
  auto open = DecodePreamble(EncodeOpen(SomeOpen()));
  ASSERT_TRUE(open.has_value() && std::holds_alternative<TcpOpen>(*open));
  EXPECT_EQ(std::get<TcpOpen>(*open).caller_hello, SomeOpen().caller_hello);
  EXPECT_EQ(std::get<TcpOpen>(*open).connections, 5u);
  auto join = DecodePreamble(EncodeJoin({{1, 2, 3}, 9, {4, 5}}));
  ASSERT_TRUE(join.has_value() && std::holds_alternative<TcpJoin>(*join));
  EXPECT_EQ(std::get<TcpJoin>(*join).token, (SessionToken{1, 2, 3}));
  EXPECT_EQ(std::get<TcpJoin>(*join).index, 9u);
  EXPECT_EQ(std::get<TcpJoin>(*join).proof, (Proof{4, 5}));
  auto welcome = DecodeWelcome(EncodeWelcome({{1, 2, Code::kOk, Reason::kNone}, {4, 5}, 3}));
  ASSERT_TRUE(welcome.has_value());
  EXPECT_EQ(welcome->reply, (CalleeReply{1, 2, Code::kOk, Reason::kNone}));
  EXPECT_EQ(welcome->token, (SessionToken{4, 5}));
  EXPECT_EQ(welcome->connections, 3u);
}

TEST(TcpPreamble, RefusesEverySingleBitFlip) {
  for (const Preamble& good : {EncodeOpen(SomeOpen()), EncodeJoin({{1, 2, 3}, 9, {4, 5}})}) {
    for (size_t bit = 0; bit < kPreambleBytes * 8; ++bit) {
      Preamble bytes = good;
      bytes[bit / 8] ^= static_cast<std::byte>(1 << (bit % 8));
      EXPECT_FALSE(DecodePreamble(bytes).has_value()) << "bit " << bit;
    }
  }
  for (size_t bit = 0; bit < kWelcomeBytes * 8; ++bit) {
    auto bytes = EncodeWelcome({{1, 2, Code::kOk, Reason::kNone}, {4, 5}, 3});
    bytes[bit / 8] ^= static_cast<std::byte>(1 << (bit % 8));
    EXPECT_FALSE(DecodeWelcome(bytes).has_value()) << "bit " << bit;
  }
}

TEST(TcpPreamble, RefusesCountsOutsideTheProtocol) {
  TcpOpen none = SomeOpen();
  none.connections = 0;
  EXPECT_FALSE(DecodePreamble(EncodeOpen(none)).has_value());
  for (uint32_t connections : {0u, kTcpConnectionsMax + 1, UINT32_MAX}) {
    const CalleeReply reply{1, 0, Code::kOk, Reason::kNone};
    EXPECT_FALSE(DecodeWelcome(EncodeWelcome({reply, {}, connections})).has_value());
  }
}

TEST(Tune, LetsNothingPaceWhatStaysOnThisHost) {
  using boost::asio::ip::tcp;
  boost::asio::io_context context;
  tcp::acceptor acceptor(context, {boost::asio::ip::address_v4::loopback(), 0});
  tcp::socket ours(context);
  ours.connect(acceptor.local_endpoint());
  tcp::socket theirs = acceptor.accept();
  for (tcp::socket* socket : {&ours, &theirs}) {
    Tune(*socket, {});
    char name[16] = {};
    socklen_t size = sizeof(name);
    ASSERT_EQ(getsockopt(socket->native_handle(), IPPROTO_TCP, TCP_CONGESTION, name, &size), 0);
    EXPECT_STREQ(name, "reno");
  }
}

}  // namespace
}  // namespace weightwire::transport
