#include "client/cpp/fd_socket.h"

#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>

#include <cerrno>
#include <cstring>

#include "server/memory/fd_passing.h"
#include "server/wire/fd_protocol.h"

namespace weightwire::client {
namespace {

Status IoFailure(const std::string& path, const std::string& what) {
  return Status(Code::kUnavailable, Reason::kIoError, "fd socket " + path + ": " + what)
      .Remedy("is weightwired running with this agent socket?");
}

Result<memory::UniqueFd> Connect(const std::string& path, Nanos timeout) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof address.sun_path) return Fail(IoFailure(path, "the path is too long"));
  std::memcpy(address.sun_path, path.c_str(), path.size());
  memory::UniqueFd socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(timeout);
  timeval limit{};
  limit.tv_sec = seconds.count();
  limit.tv_usec = std::chrono::duration_cast<std::chrono::microseconds>(timeout - seconds).count();
  setsockopt(socket.get(), SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
  setsockopt(socket.get(), SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
  if (connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) {
    return Fail(IoFailure(path, std::strerror(errno)));
  }
  return socket;
}

struct Answer {
  wire::FdReply reply;
  std::vector<memory::UniqueFd> fds;
};

Result<Answer> Exchange(const std::string& path, const wire::FdRequest& request,
                        std::span<const int> fds, Nanos timeout) {
  WW_ASSIGN(const memory::UniqueFd socket, Connect(path, timeout));
  WW_FAIL_IF_ERROR(memory::SendWithFds(socket.get(), wire::Encode(request), fds));
  wire::FdFrame frame{};
  Answer answer;
  for (size_t filled = 0; filled < frame.size();) {
    WW_ASSIGN(memory::FdMessage received,
              memory::ReceiveWithFds(socket.get(), std::span(frame).subspan(filled)));
    if (received.bytes == 0) return Fail(IoFailure(path, "the agent closed it"));
    filled += received.bytes;
    for (memory::UniqueFd& fd : received.fds) answer.fds.push_back(std::move(fd));
  }
  WW_ASSIGN(answer.reply, wire::DecodeFdReply(frame));
  if (answer.reply.reason != Reason::kNone) {
    return Fail(Code::kInvalidArgument, answer.reply.reason, "the agent refused a file descriptor");
  }
  return answer;
}

}  // namespace

Result<uint64_t> PutFd(const std::string& path, int fd, Nanos timeout) {
  WW_ASSIGN(const Answer answer,
            Exchange(path, {wire::FdOp::kPut, 0}, std::span<const int>(&fd, 1), timeout));
  return answer.reply.token;
}

Result<memory::UniqueFd> GetFd(const std::string& path, uint64_t token, Nanos timeout) {
  WW_ASSIGN(Answer answer, Exchange(path, {wire::FdOp::kGet, token}, {}, timeout));
  if (answer.fds.size() != 1) return Fail(IoFailure(path, "the answer carried no descriptor"));
  return std::move(answer.fds.front());
}

}  // namespace weightwire::client
