#include "server/memory/fd_passing.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <dirent.h>
#include <cstring>
#include <future>

#include "gtest/gtest.h"

namespace weightwire::memory {
namespace {

struct Pair {
  explicit Pair(int flags = 0) {
    int ends[2];
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | flags, 0, ends), 0);
    a = UniqueFd(ends[0]);
    b = UniqueFd(ends[1]);
  }
  UniqueFd a;
  UniqueFd b;
};

std::vector<std::byte> Bytes(size_t count) {
  std::vector<std::byte> bytes(count);
  for (size_t i = 0; i < count; ++i) bytes[i] = static_cast<std::byte>(i * 7 + 1);
  return bytes;
}

ino_t InodeOf(int fd) {
  struct stat info {};
  EXPECT_EQ(fstat(fd, &info), 0);
  return info.st_ino;
}

size_t OpenFds() {
  DIR* folder = opendir("/proc/self/fd");
  size_t count = 0;
  while (readdir(folder) != nullptr) ++count;
  closedir(folder);
  return count;
}

TEST(FdPassing, BytesAndDescriptorsArriveTogether) {
  Pair pair;
  auto region = MemoryRegion::Allocate("passed", 4096);
  ASSERT_TRUE(region.has_value());
  const std::vector<std::byte> sent = Bytes(10);
  const int fds[] = {(*region)->fd(), pair.a.get()};
  ASSERT_EQ(SendWithFds(pair.a.get(), sent, fds), OkStatus());
  std::vector<std::byte> into(100);
  auto received = ReceiveWithFds(pair.b.get(), into);
  ASSERT_TRUE(received.has_value());
  into.resize(received->bytes);
  EXPECT_EQ(into, sent);
  ASSERT_EQ(received->fds.size(), 2u);
  EXPECT_EQ(InodeOf(received->fds[0].get()), InodeOf((*region)->fd()));
  EXPECT_EQ(InodeOf(received->fds[1].get()), InodeOf(pair.a.get()));
  for (const UniqueFd& fd : received->fds) EXPECT_EQ(fcntl(fd.get(), F_GETFD), FD_CLOEXEC);
}

TEST(FdPassing, LongMessagesArriveWholeWithTheDescriptorOnce) {
  Pair pair;
  const std::vector<std::byte> sent = Bytes(3'000'001);
  const int fds[] = {pair.a.get()};
  auto sender =
      std::async(std::launch::async, [&] { return SendWithFds(pair.a.get(), sent, fds); });
  std::vector<std::byte> all;
  size_t fd_count = 0;
  while (all.size() < sent.size()) {
    std::vector<std::byte> into(100'000);
    auto received = ReceiveWithFds(pair.b.get(), into);
    ASSERT_TRUE(received.has_value());
    ASSERT_GT(received->bytes, 0u);
    if (!received->fds.empty()) {
      EXPECT_TRUE(all.empty()) << "the descriptor belongs to the first byte";
    }
    fd_count += received->fds.size();
    all.insert(all.end(), into.begin(),
               into.begin() + static_cast<std::ptrdiff_t>(received->bytes));
  }
  EXPECT_EQ(sender.get(), OkStatus());
  EXPECT_EQ(all, sent);
  EXPECT_EQ(fd_count, 1u);
}

TEST(FdPassing, TheLimitOfDescriptorsHoldsOnBothSides) {
  Pair pair;
  const std::vector<int> most(kFdsPerMessageMax, pair.a.get());
  const std::vector<int> more(kFdsPerMessageMax + 1, pair.a.get());
  EXPECT_EQ(SendWithFds(pair.a.get(), Bytes(1), more).reason(), Reason::kLimitExceeded);
  EXPECT_EQ(SendWithFds(pair.a.get(), {}, most).code(), Code::kInvalidArgument);
  ASSERT_EQ(SendWithFds(pair.a.get(), Bytes(1), most), OkStatus());
  std::vector<std::byte> into(10);
  auto received = ReceiveWithFds(pair.b.get(), into);
  ASSERT_TRUE(received.has_value());
  EXPECT_EQ(received->fds.size(), kFdsPerMessageMax);
}

TEST(FdPassing, TooManyFromAStrangerAreRefusedAndNoneLeaks) {
  Pair pair;
  constexpr size_t kCount = 100;
  std::vector<int> fds(kCount, pair.a.get());
  std::vector<char> control(CMSG_SPACE(kCount * sizeof(int)));
  char byte = 1;
  iovec data{&byte, 1};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  cmsghdr* header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(kCount * sizeof(int));
  std::memcpy(CMSG_DATA(header), fds.data(), kCount * sizeof(int));
  ASSERT_EQ(sendmsg(pair.a.get(), &message, 0), 1);
  const size_t before = OpenFds();
  std::vector<std::byte> into(10);
  auto received = ReceiveWithFds(pair.b.get(), into);
  ASSERT_FALSE(received.has_value());
  EXPECT_EQ(received.error().code(), Code::kInvalidArgument);
  EXPECT_EQ(received.error().reason(), Reason::kLimitExceeded);
  EXPECT_EQ(OpenFds(), before);
}

TEST(FdPassing, TellsTheEndFromNothingYet) {
  Pair pair(SOCK_NONBLOCK);
  std::vector<std::byte> into(10);
  auto nothing = ReceiveWithFds(pair.b.get(), into);
  ASSERT_TRUE(nothing.has_value());
  EXPECT_TRUE(nothing->would_block);
  pair.a = UniqueFd();
  auto end = ReceiveWithFds(pair.b.get(), into);
  ASSERT_TRUE(end.has_value());
  EXPECT_FALSE(end->would_block);
  EXPECT_EQ(end->bytes, 0u);
}

TEST(FdPassing, AGoneReaderIsAStatusAndNoSignal) {
  Pair pair;
  pair.b = UniqueFd();
  const Status status = SendWithFds(pair.a.get(), Bytes(1), {});
  EXPECT_EQ(status.code(), Code::kUnavailable);
  EXPECT_EQ(status.reason(), Reason::kIoError);
}

TEST(FdPassing, SendSomeNeverWaits) {
  Pair pair;  // in blocking mode
  const std::vector<std::byte> bytes = Bytes(1 << 20);
  size_t total = 0;
  for (;;) {
    auto sent = SendSomeWithFds(pair.a.get(), bytes, {});
    ASSERT_TRUE(sent.has_value());
    if (*sent == 0) break;
    total += *sent;
  }
  EXPECT_GT(total, 0u);
}

}  // namespace
}  // namespace weightwire::memory
