#include "server/memory/uid_refusal.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <system_error>

#include "server/memory/region.h"

namespace weightwire::memory {
namespace {

constexpr int kWordMillis = 1'000;

std::string Own() { return "; this process has uid " + std::to_string(geteuid()); }

/// The first of the directories to `path`, or `path` itself, that keeps this user out.
std::string Closed(const std::string& path) {
  std::filesystem::path at;
  std::error_code none;  // a process without a working directory has no absolute path
  for (const auto& part : std::filesystem::absolute(path, none).lexically_normal()) {
    at /= part;
    struct stat info {};
    if (stat(at.c_str(), &info) != 0) return "";
    if (eaccess(at.c_str(), S_ISDIR(info.st_mode) ? X_OK : W_OK) == 0) continue;
    return at.string() + " belongs to uid " + std::to_string(info.st_uid) +
           ", which lets nobody else reach the agent" + Own();
  }
  return "";
}

}  // namespace

std::string UidRefusal(const std::string& path) {
  sockaddr_un to{};
  to.sun_family = AF_UNIX;
  if (path.size() >= sizeof to.sun_path) return "";
  path.copy(to.sun_path, sizeof to.sun_path - 1);
  const UniqueFd fd(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd.valid()) return "";
  if (connect(fd.get(), reinterpret_cast<const sockaddr*>(&to), sizeof to) != 0) {
    return errno == EACCES ? Closed(path) : "";
  }
  ucred agent{};
  socklen_t size = sizeof agent;
  if (getsockopt(fd.get(), SOL_SOCKET, SO_PEERCRED, &agent, &size) != 0) return "";
  if (agent.uid == geteuid()) return "";
  // An agent that takes the connection speaks first (HTTP/2); one that refuses it closes at once.
  pollfd word{fd.get(), POLLIN, 0};
  if (poll(&word, 1, kWordMillis) != 1) return "";
  char first = 0;
  if (recv(fd.get(), &first, 1, MSG_PEEK) > 0) return "";
  return "its agent has uid " + std::to_string(agent.uid) + " and refuses other users" + Own();
}

std::string UidRefusalRemedy(uint32_t uid) {
  return "run engine or trainer and their agent as the same user (runAsUser), or name uid " +
         std::to_string(uid) + " in the agent's allow_uids";
}

}  // namespace weightwire::memory
