#include "server/rpc/fd_server.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <boost/asio/io_context.hpp>
#include <functional>

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
  memory::FdMessage Receive() {
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
  memory::FdMessage got = Receive();
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
  memory::FdMessage end = Receive();
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

/// A listener that children of the test connect to: the kernel names them to the server.
class FdProcessesTest : public ::testing::Test {
 protected:
  FdProcessesTest() : listener_(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    address_.sun_family = AF_UNIX;  // and no path: the kernel chooses one
    EXPECT_EQ(bind(listener_.get(), Address(), sizeof(sa_family_t)), 0);
    size_ = sizeof(address_);
    EXPECT_EQ(getsockname(listener_.get(), Address(), &size_), 0);
    EXPECT_EQ(listen(listener_.get(), 512), 0);
    int pipe_ends[2];
    EXPECT_EQ(pipe2(pipe_ends, O_CLOEXEC), 0);
    go_ = memory::UniqueFd(pipe_ends[0]);
    hold_ = memory::UniqueFd(pipe_ends[1]);
  }
  ~FdProcessesTest() override { EndChild(); }

  /// `child` runs in a process of its own, which lives until EndChild.
  void Start(const std::function<void()>& child) {
    child_ = fork();
    ASSERT_GE(child_, 0);
    if (child_ > 0) return;
    hold_ = {};
    child();
    char byte;
    _exit(read(go_.get(), &byte, 1) == 0 ? 0 : 1);
  }
  void EndChild() {
    hold_ = {};
    if (child_ > 0) waitpid(child_, nullptr, 0);
    child_ = -1;
  }
  memory::UniqueFd Connect() {
    memory::UniqueFd fd(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    return connect(fd.get(), Address(), size_) == 0 ? std::move(fd) : memory::UniqueFd();
  }
  void AcceptOne() {
    const int fd = accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC);
    ASSERT_GE(fd, 0);
    server_->Serve(memory::UniqueFd(fd));
  }
  /// What a put of this process is answered.
  Reason Put() {
    const memory::UniqueFd connection = Connect();
    AcceptOne();
    const int fd = go_.get();
    const wire::FdFrame put = wire::Encode(wire::FdRequest{wire::FdOp::kPut, 0});
    EXPECT_TRUE(memory::SendWithFds(connection.get(), put, {&fd, 1}).ok());
    io_.restart();
    io_.poll();
    wire::FdFrame frame{};
    EXPECT_EQ(recv(connection.get(), frame.data(), frame.size(), MSG_DONTWAIT),
              static_cast<ssize_t>(frame.size()));
    return wire::DecodeFdReply(frame)->reason;
  }

  testing::SimExecutor sim_;
  boost::asio::io_context io_;
  FdTable table_{sim_};
  std::unique_ptr<FdServer> server_ = FdServer::Make(io_, table_);
  memory::UniqueFd listener_;
  sockaddr_un address_{};
  socklen_t size_ = 0;
  memory::UniqueFd go_;
  memory::UniqueFd hold_;
  pid_t child_ = -1;

 private:
  sockaddr* Address() { return reinterpret_cast<sockaddr*>(&address_); }
};

TEST_F(FdProcessesTest, AProcessThatPutsAThousandFdsHindersNobodyAndLeavesNone) {
  constexpr int kPuts = 1'024;
  Start([this] {
    const memory::UniqueFd connection = Connect();
    const int fd = go_.get();
    const wire::FdFrame put = wire::Encode(wire::FdRequest{wire::FdOp::kPut, 0});
    for (int i = 0; i < kPuts; ++i) {
      if (!memory::SendWithFds(connection.get(), put, {&fd, 1}).ok()) _exit(2);
      wire::FdFrame frame;
      if (recv(connection.get(), frame.data(), frame.size(), MSG_WAITALL) <= 0) _exit(3);
    }
    wire::FdFrame last{};  // says that all were answered
    last[0] = std::byte{1};
    if (!memory::SendWithFds(connection.get(), last, {}).ok()) _exit(4);
    char byte;
    _exit(read(go_.get(), &byte, 1) == 0 ? 0 : 5);
  });
  AcceptOne();
  io_.run();  // until the last frame, which is malformed, has ended the connection
  EXPECT_EQ(table_.size(), 256u);
  EXPECT_EQ(Put(), Reason::kNone) << "the others' places are theirs";
  EXPECT_EQ(table_.size(), 257u);
  EndChild();
  EXPECT_EQ(table_.size(), 1u) << "what the process put ended with it";
}

TEST_F(FdProcessesTest, AProcessWithManyConnectionsHindersNobody) {
  constexpr int kConnections = 400;
  Start([this] {
    std::vector<memory::UniqueFd> connections;
    for (int i = 0; i < kConnections; ++i) connections.push_back(Connect());
    char byte;
    _exit(read(go_.get(), &byte, 1) == 0 ? 0 : 1);
  });
  for (int i = 0; i < kConnections; ++i) AcceptOne();
  const memory::UniqueFd mine = Connect();
  AcceptOne();
  EXPECT_EQ(Put(), Reason::kNone);
  char byte;
  EXPECT_EQ(recv(mine.get(), &byte, 1, MSG_DONTWAIT), -1) << "closed";
}

}  // namespace
}  // namespace weightwire::rpc
