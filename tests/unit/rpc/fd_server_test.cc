#include "server/rpc/fd_server.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <boost/asio/io_context.hpp>

#include "server/memory/fd_passing.h"
#include "server/wire/fd_protocol.h"
#include "tests/support/sim_executor.h"

namespace weightwire::rpc {
namespace {

class FdServerTest : public ::testing::Test {
 protected:
  void SetUp() override {
    int pair[2];
    ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair), 0);
    client_ = memory::UniqueFd(pair[0]);
    server_->Serve(memory::UniqueFd(pair[1]));
  }

  void Send(std::span<const std::byte> bytes, std::vector<int> fds = {}) {
    ASSERT_TRUE(memory::SendWithFds(client_.get(), bytes, fds).ok());
    io_.restart();
    io_.poll();
  }

  /// The reply, and the fd that came with it; the connection's end is a zero-sized answer.
  memory::Received Receive() {
    io_.restart();
    io_.poll();
    fcntl(client_.get(), F_SETFL, O_NONBLOCK);
    auto got = memory::ReceiveWithFds(client_.get(), frame_);
    fcntl(client_.get(), F_SETFL, 0);
    EXPECT_TRUE(got);
    return std::move(*got);
  }

  wire::FdReply Reply() { return *wire::DecodeFdReply(frame_); }

  testing::SimExecutor sim_;
  boost::asio::io_context io_;
  FdTable table_{sim_, {.entries_max = 2}};
  std::unique_ptr<FdServer> server_ = FdServer::Make(io_, table_);
  memory::UniqueFd client_;
  wire::FdFrame frame_{};
};

ino_t InodeOf(int fd) {
  struct stat info {};
  EXPECT_EQ(fstat(fd, &info), 0);
  return info.st_ino;
}

memory::UniqueFd Memfd() { return memory::UniqueFd(memfd_create("test", MFD_CLOEXEC)); }

TEST_F(FdServerTest, GivesBackTheFdThatWasPut) {
  memory::UniqueFd fd = Memfd();
  Send(wire::Encode(wire::FdRequest{wire::FdOp::kPut, 0}), {fd.get()});
  EXPECT_EQ(Receive().bytes, wire::kFdFrameBytes);
  EXPECT_EQ(Reply().reason, Reason::kNone);
  const uint64_t token = Reply().token;
  Send(wire::Encode(wire::FdRequest{wire::FdOp::kGet, token}));
  memory::Received got = Receive();
  EXPECT_EQ(Reply().reason, Reason::kNone);
  ASSERT_EQ(got.fds.size(), 1u);
  EXPECT_EQ(InodeOf(got.fds[0].get()), InodeOf(fd.get()));
}

TEST_F(FdServerTest, TakesARequestInPieces) {
  memory::UniqueFd fd = Memfd();
  const wire::FdFrame frame = wire::Encode(wire::FdRequest{wire::FdOp::kPut, 0});
  Send(std::span(frame).first(5), {fd.get()});
  EXPECT_TRUE(Receive().would_block);
  Send(std::span(frame).subspan(5));
  EXPECT_EQ(Receive().bytes, wire::kFdFrameBytes);
  EXPECT_EQ(Reply().reason, Reason::kNone);
}

TEST_F(FdServerTest, AnswersAnUnknownTokenAndGoesOn) {
  Send(wire::Encode(wire::FdRequest{wire::FdOp::kGet, 99}));
  EXPECT_TRUE(Receive().fds.empty());
  EXPECT_EQ(Reply().reason, Reason::kNotRegistered);
  Send(wire::Encode(wire::FdRequest{wire::FdOp::kGet, 98}));
  EXPECT_EQ(Receive().bytes, wire::kFdFrameBytes);
}

TEST_F(FdServerTest, AnswersAFullTable) {
  memory::UniqueFd fd = Memfd();
  for (int i = 0; i < 3; ++i) {
    Send(wire::Encode(wire::FdRequest{wire::FdOp::kPut, 0}), {fd.get()});
    EXPECT_EQ(Receive().bytes, wire::kFdFrameBytes);
  }
  EXPECT_EQ(Reply().reason, Reason::kLimitExceeded);
  EXPECT_EQ(table_.size(), 2u);
}

TEST_F(FdServerTest, ClosesAfterAMalformedRequest) {
  memory::UniqueFd fd = Memfd();
  wire::FdFrame frame{};
  Send(frame);
  EXPECT_EQ(Receive().bytes, wire::kFdFrameBytes);
  EXPECT_EQ(Reply().reason, Reason::kInvalidRequest);
  memory::Received end = Receive();
  EXPECT_EQ(end.bytes, 0u);
  EXPECT_FALSE(end.would_block);
}

TEST_F(FdServerTest, RefusesAPutOfTwoFds) {
  memory::UniqueFd fd = Memfd();
  Send(wire::Encode(wire::FdRequest{wire::FdOp::kPut, 0}), {fd.get(), fd.get()});
  Receive();
  EXPECT_EQ(Reply().reason, Reason::kInvalidRequest);
  EXPECT_EQ(table_.size(), 0u);
}

TEST_F(FdServerTest, RefusesAPutWithoutFd) {
  Send(wire::Encode(wire::FdRequest{wire::FdOp::kPut, 0}));
  Receive();
  EXPECT_EQ(Reply().reason, Reason::kInvalidRequest);
}

}  // namespace
}  // namespace weightwire::rpc
