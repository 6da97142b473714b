#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstring>
#include <filesystem>

#include "gtest/gtest.h"
#include "server/transport/session.h"
#include "server/transport/shm/shm_transport.h"

namespace weightwire::transport {
namespace {

class NoSessions final : public Handler {
 public:
  Result<Ticket> OnHello(const CallerHello&) override {
    ADD_FAILURE() << "the handler must not be asked";
    return Ticket{};
  }
  void OnAccepted(std::shared_ptr<Endpoint>) override {}
  void OnNotify(const std::shared_ptr<Endpoint>&, std::span<const std::byte>) override {}
  void OnClosed(const std::shared_ptr<Endpoint>&, const Status&) override {}
};

TEST(ShmPeer, AnotherUserIsRefused) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root to become another user";
  NoSessions handler;
  auto transport = MakeShmTransport({});
  ASSERT_EQ(transport->Start(&handler, Incarnation(5)), OkStatus());
  const std::string address = transport->address();
  CallerHello caller_hello;
  caller_hello.callee = Incarnation(5);
  const auto hello_bytes = EncodeCallerHello(caller_hello);
  int answer[2];
  ASSERT_EQ(pipe(answer), 0);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {  // only system calls: a thread of the parent can hold the allocator's lock
    sockaddr_un to{};
    to.sun_family = AF_UNIX;
    std::memcpy(to.sun_path + 1, address.data() + 1, address.size() - 1);
    std::array<std::byte, kCalleeReplyBytes> reply{};
    const int fd = socket(AF_UNIX, SOCK_STREAM, 0);
    const auto size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + address.size());
    if (syscall(SYS_setuid, 65534) != 0) _exit(2);
    if (connect(fd, reinterpret_cast<sockaddr*>(&to), size) != 0) _exit(3);
    send(fd, hello_bytes.data(), hello_bytes.size(), MSG_NOSIGNAL);
    if (recv(fd, reply.data(), reply.size(), MSG_WAITALL) != kCalleeReplyBytes) _exit(4);
    _exit(write(answer[1], reply.data(), reply.size()) == kCalleeReplyBytes ? 0 : 5);
  }
  close(answer[1]);
  int state = 0;
  ASSERT_EQ(waitpid(child, &state, 0), child);
  EXPECT_TRUE(WIFEXITED(state));
  ASSERT_EQ(WEXITSTATUS(state), 0);
  std::array<std::byte, kCalleeReplyBytes> reply{};
  ASSERT_EQ(read(answer[0], reply.data(), reply.size()), kCalleeReplyBytes);
  close(answer[0]);
  const auto decoded = DecodeCalleeReply(reply);
  ASSERT_TRUE(decoded.has_value()) << decoded.error().ToString();
  EXPECT_EQ(decoded->reason, Reason::kPermissionDenied);
}

TEST(ShmAddress, APathIsMadeAndRemovedAndAStaleOneReplaced) {
  const std::string path = "/tmp/weightwire-shm-test-" + std::to_string(getpid());
  NoSessions handler;
  {  // what a killed process leaves behind
    const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_un to{};
    to.sun_family = AF_UNIX;
    std::memcpy(to.sun_path, path.data(), path.size());
    ASSERT_EQ(bind(fd, reinterpret_cast<sockaddr*>(&to), sizeof(to)), 0);
    close(fd);
  }
  ShmOptions options;
  options.address = path;
  auto transport = MakeShmTransport(options);
  ASSERT_EQ(transport->Start(&handler, Incarnation(5)), OkStatus());
  EXPECT_EQ(transport->address(), path);
  auto second = MakeShmTransport(options);
  EXPECT_EQ(second->Start(&handler, Incarnation(6)).code(), Code::kUnavailable)
      << "a live one is not replaced";
  transport.reset();
  EXPECT_FALSE(std::filesystem::exists(path));
}

TEST(ShmAddress, RefusesAnAddressThatIsTooLong) {
  NoSessions handler;
  ShmOptions options;
  options.address = "@" + std::string(200, 'x');
  auto transport = MakeShmTransport(options);
  EXPECT_EQ(transport->Start(&handler, Incarnation(5)).reason(), Reason::kConfigInvalid);
}

}  // namespace
}  // namespace weightwire::transport
