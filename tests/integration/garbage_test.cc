#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <random>

#include "server/memory/fd_passing.h"
#include "server/wire/fd_protocol.h"
#include "tests/integration/bad_input.h"

namespace weightwire::integration {
namespace {

/// Bytes that are no message of anybody; the seed is printed and taken from WEIGHTWIRE_SEED.
std::string Noise(size_t bytes) {
  const char* given = std::getenv("WEIGHTWIRE_SEED");
  const auto seed = given != nullptr ? std::strtoull(given, nullptr, 10) : 20'251'121ull;
  std::printf("seed %llu\n", seed);
  std::mt19937_64 random(seed);
  std::string noise;
  for (size_t i = 0; i < bytes; ++i) noise.push_back(static_cast<char>(random()));
  return noise;
}

class Garbage : public BadInput {
 protected:
  std::string FdSocket() const { return "unix:" + daemon_.agent_socket() + ".fd"; }
  static wire::FdFrame Frame(const wire::FdRequest& request) { return wire::Encode(request); }
  static std::string Text(const wire::FdFrame& frame) {
    return {reinterpret_cast<const char*>(frame.data()), frame.size()};
  }
  /// What the fd server answers before it closes the connection.
  static wire::FdReply ReplyBeforeClose(int socket) {
    const std::string answer = ReadUntilClosed(socket).value_or("kept open");
    wire::FdFrame frame{};
    EXPECT_EQ(answer.size(), frame.size()) << answer;
    std::memcpy(frame.data(), answer.data(), std::min(answer.size(), frame.size()));
    const auto reply = wire::DecodeFdReply(frame);
    EXPECT_TRUE(reply.has_value());
    return reply.value_or(wire::FdReply());
  }
  /// Noise, and the start of something valid and then noise, end the connection.
  void ExpectNoiseEndsConnection(const std::string& address, const std::string& beginning) {
    for (const std::string& bytes : {Noise(100'000), beginning + Noise(100'000)}) {
      const memory::UniqueFd socket = ConnectTo(address);
      SendAll(socket.get(), bytes);
      EXPECT_TRUE(ReadUntilClosed(socket.get()).has_value()) << address << " kept it open";
    }
  }
};

TEST_F(Garbage, OnTheFdSocketIsAnsweredAndClosed) {
  const memory::UniqueFd socket = ConnectTo(FdSocket());
  SendAll(socket.get(), Noise(wire::kFdFrameBytes));
  EXPECT_EQ(ReplyBeforeClose(socket.get()).reason, Reason::kInvalidRequest);
}

TEST_F(Garbage, UnknownOperationOnTheFdSocketIsAnsweredAndClosed) {
  const memory::UniqueFd socket = ConnectTo(FdSocket());
  std::string frame = Text(Frame({wire::FdOp::kGet, 1}));
  frame[4] = 77;
  SendAll(socket.get(), frame);
  EXPECT_EQ(ReplyBeforeClose(socket.get()).reason, Reason::kUnknownEnum);
}

TEST_F(Garbage, PutWithoutAnFdIsAnsweredAndClosed) {
  const memory::UniqueFd socket = ConnectTo(FdSocket());
  SendAll(socket.get(), Text(Frame({wire::FdOp::kPut, 0})));
  EXPECT_EQ(ReplyBeforeClose(socket.get()).reason, Reason::kInvalidRequest);
}

TEST_F(Garbage, PutWithTwoFdsIsAnsweredAndClosed) {
  const memory::UniqueFd socket = ConnectTo(FdSocket());
  const int fds[] = {0, 1};
  ASSERT_TRUE(memory::SendWithFds(socket.get(), Frame({wire::FdOp::kPut, 0}), fds).ok());
  EXPECT_EQ(ReplyBeforeClose(socket.get()).reason, Reason::kInvalidRequest);
}

TEST_F(Garbage, UnknownTokenIsAnsweredAndTheConnectionGoesOn) {
  const memory::UniqueFd socket = ConnectTo(FdSocket());
  for (const uint64_t token : {1, 2}) {
    SendAll(socket.get(), Text(Frame({wire::FdOp::kGet, token})));
    wire::FdFrame frame{};
    const auto got = memory::ReceiveWithFds(socket.get(), frame);
    ASSERT_TRUE(got.has_value() && got->bytes == frame.size());
    EXPECT_EQ(wire::DecodeFdReply(frame)->reason, Reason::kNotRegistered);
  }
}

TEST_F(Garbage, HalfAFrameHoldsNobodyUp) {
  const memory::UniqueFd half = ConnectTo(FdSocket());
  SendAll(half.get(), Text(Frame({wire::FdOp::kPut, 0})).substr(0, 7));
  ExpectGoodPublish();
}

TEST_F(Garbage, OnTheDataPortEndsTheConnection) {
  ExpectNoiseEndsConnection(daemon_.DataAddress(), "WWTP");
}

TEST_F(Garbage, SilenceOnTheDataPortHoldsNobodyUp) {
  const memory::UniqueFd silent = ConnectTo(daemon_.DataAddress());
  ExpectGoodPublish();
}

TEST_F(Garbage, OnTheGrpcPortEndsTheConnection) {
  ExpectNoiseEndsConnection(daemon_.grpc(), "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n");
}

TEST_F(Garbage, OnTheAgentSocketEndsTheConnection) {
  ExpectNoiseEndsConnection("unix:" + daemon_.agent_socket(), "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n");
}

TEST_F(Garbage, OnTheHttpPortEndsTheConnection) {
  ExpectNoiseEndsConnection(daemon_.http(), "GET /metrics HTTP/1.1\r\n");
}

TEST_F(Garbage, ManyConnectionsThatEndAtOnceHoldNobodyUp) {
  for (int i = 0; i < 300; ++i) {
    for (const std::string& address : {daemon_.grpc(), daemon_.http(), FdSocket()}) {
      SendAll(ConnectTo(address).get(), "x");
    }
  }
}

}  // namespace
}  // namespace weightwire::integration
