#include "server/memory/fd_passing.h"

#include <sys/socket.h>
#include <sys/uio.h>

#include <cerrno>
#include <cstring>
#include <optional>

namespace weightwire::memory {
namespace {

constexpr size_t kControlBytes = CMSG_SPACE(kFdsPerMessageMax * sizeof(int));

tl::unexpected<Status> IoFailure(const char* what) {
  return Fail(Code::kUnavailable, Reason::kIoError,
              std::string(what) + ": " + std::strerror(errno));
}

/// One sendmsg. nullopt when the socket is full and `flags` forbid to wait.
Result<std::optional<size_t>> SendOnce(int socket, std::span<const std::byte> bytes,
                                       std::span<const int> fds, int flags) {
  if (fds.size() > kFdsPerMessageMax || bytes.empty()) {
    return Fail(Code::kInvalidArgument, Reason::kLimitExceeded,
                "a message needs a byte and carries at most 64 file descriptors");
  }
  alignas(cmsghdr) char control[kControlBytes] = {};
  iovec data{const_cast<std::byte*>(bytes.data()), bytes.size()};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  if (!fds.empty()) {
    message.msg_control = control;
    message.msg_controllen = CMSG_SPACE(fds.size_bytes());
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(fds.size_bytes());
    std::memcpy(CMSG_DATA(header), fds.data(), fds.size_bytes());
  }
  ssize_t sent;
  do {
    sent = sendmsg(socket, &message, flags | MSG_NOSIGNAL);
  } while (sent < 0 && errno == EINTR);
  if (sent >= 0) return static_cast<size_t>(sent);
  if (errno == EAGAIN || errno == EWOULDBLOCK) return std::optional<size_t>();
  return IoFailure("sendmsg");
}

std::vector<UniqueFd> TakeFds(msghdr& message) {
  std::vector<UniqueFd> fds;
  for (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr;
       header = CMSG_NXTHDR(&message, header)) {
    if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
    const size_t count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i) {
      int fd;
      std::memcpy(&fd, CMSG_DATA(header) + i * sizeof(int), sizeof(int));
      fds.emplace_back(fd);
    }
  }
  return fds;
}

}  // namespace

Status SendWithFds(int socket, std::span<const std::byte> bytes, std::span<const int> fds) {
  do {
    WW_ASSIGN_OR_STATUS(std::optional<size_t> sent, SendOnce(socket, bytes, fds, 0));
    if (!sent.has_value()) {
      return Status(Code::kUnavailable, Reason::kIoError, "the peer did not read in time");
    }
    bytes = bytes.subspan(*sent);
    if (*sent > 0) fds = {};
  } while (!bytes.empty());
  return OkStatus();
}

Result<size_t> SendSomeWithFds(int socket, std::span<const std::byte> bytes,
                               std::span<const int> fds) {
  WW_ASSIGN(std::optional<size_t> sent, SendOnce(socket, bytes, fds, MSG_DONTWAIT));
  return sent.value_or(0);
}

Result<FdMessage> ReceiveWithFds(int socket, std::span<std::byte> into) {
  alignas(cmsghdr) char control[kControlBytes];
  iovec data{into.data(), into.size()};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  ssize_t got;
  do {
    got = recvmsg(socket, &message, MSG_CMSG_CLOEXEC);
  } while (got < 0 && errno == EINTR);
  if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
    return FdMessage{.bytes = 0, .fds = {}, .would_block = true};
  }
  if (got < 0) return IoFailure("recvmsg");
  FdMessage received{
      .bytes = static_cast<size_t>(got), .fds = TakeFds(message), .would_block = false};
  if ((message.msg_flags & MSG_CTRUNC) != 0) {
    return Fail(Code::kInvalidArgument, Reason::kLimitExceeded,
                "more than 64 file descriptors in one message");
  }
  return received;
}

}  // namespace weightwire::memory
