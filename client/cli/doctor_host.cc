// What this host has: limits, memory, directories, ports.
#include <netdb.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/un.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>

#include "client/cli/doctor.h"
#include "server/daemon/directories.h"
#include "server/daemon/listen_address.h"
#include "server/memory/uid_refusal.h"

namespace weightwire::cli {
namespace {

using daemon::HasAgent;
using daemon::HasCoordinator;

constexpr long kTmpfs = 0x01021994;
constexpr long kRamfs = 0x858458f6;

uint64_t Limit(__rlimit_resource resource) {
  rlimit limit{};
  return getrlimit(resource, &limit) == 0 ? limit.rlim_cur : 0;
}

/// The control group's limit, the least of this one's and its parents'; version 2 only. The maximum
/// where there is none.
uint64_t GroupMemory() {
  uint64_t least = UINT64_MAX;
  std::ifstream in("/proc/self/cgroup");
  for (std::string line; std::getline(in, line);) {
    if (line.rfind("0::", 0) != 0) continue;
    std::filesystem::path group = line.substr(4);
    while (true) {
      std::ifstream limit(std::filesystem::path("/sys/fs/cgroup") / group / "memory.max");
      uint64_t bytes = 0;
      if (limit >> bytes) least = std::min(least, bytes);  // "max" is no number
      if (group.empty()) break;
      group = group.parent_path();
    }
  }
  return least;
}

/// What stands in the way of making or using the directory `path`, of which others may have no
/// right in `mask`; empty: nothing.
std::string ObstacleOf(const std::filesystem::path& path, mode_t mask) {
  std::error_code error;
  std::filesystem::path there = std::filesystem::absolute(path, error);
  while (!std::filesystem::exists(there, error) && there.has_relative_path()) {
    if (error) break;
    there = there.parent_path();
  }
  struct stat info {};
  if (stat(there.c_str(), &info) != 0) return there.string() + ": " + std::strerror(errno);
  if (!S_ISDIR(info.st_mode)) return there.string() + " is no directory";
  if (access(there.c_str(), W_OK | X_OK) != 0) {
    return there.string() + " cannot be written: " + std::strerror(errno);
  }
  if (there != std::filesystem::absolute(path, error)) return "";
  if (info.st_uid != geteuid()) return there.string() + " belongs to another user";
  if ((info.st_mode & mask & 022) != 0) return there.string() + " can be changed by others";
  if ((info.st_mode & mask) != 0) return there.string() + " can be entered by others";
  return "";
}

bool LiesInMemory(std::filesystem::path path) {
  std::error_code error;
  path = std::filesystem::absolute(path, error);
  while (!std::filesystem::exists(path, error) && path.has_relative_path()) {
    path = path.parent_path();
  }
  struct statfs info {};
  if (statfs(path.c_str(), &info) != 0) return false;
  return static_cast<long>(info.f_type) == kTmpfs || static_cast<long>(info.f_type) == kRamfs;
}

/// Why nothing can listen there now; empty: it can, or the name cannot be looked up here.
std::string WhyNotListen(const std::string& address) {
  const auto parsed = daemon::ParseHostPort(address);
  if (!parsed || parsed->port == 0) return "";
  addrinfo hints{};
  hints.ai_flags = AI_PASSIVE;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (getaddrinfo(parsed->host.c_str(), std::to_string(parsed->port).c_str(), &hints, &found) !=
      0) {
    return "the host's name is not known here";
  }
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> owner(found, freeaddrinfo);
  const int fd = socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return "";
  const int on = 1;
  setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  const bool bound = bind(fd, found->ai_addr, found->ai_addrlen) == 0;
  const std::string why = bound ? "" : std::strerror(errno);
  close(fd);
  return why;
}

void CheckDirectory(const NamedConfig& named, const char* check, const std::string& path,
                    bool shared, Findings& out) {
  const std::string obstacle = ObstacleOf(path, shared ? 022 : 077);
  if (obstacle.empty()) return;
  const std::string common = daemon::AdviceForSharedDirectory(path);
  out.push_back({check, named.path, "cannot be used: " + obstacle,
                 !common.empty()
                     ? common
                     : "choose a directory that its user owns alone: chmod " +
                           std::string(shared ? "711 " : "700 ") + path + ", or another path"});
}

void CheckPort(const NamedConfig& named, const char* key, const std::string& address,
               Findings& out) {
  if (address.empty()) return;
  const std::string why = WhyNotListen(address);
  if (why.empty()) return;
  out.push_back({"port", named.path, std::string(key) + ": " + address + ": " + why,
                 "stop what listens there (ss -ltnp), or choose another address"});
}

}  // namespace

HostFacts ReadHostFacts() {
  HostFacts facts;
  facts.open_files_max = Limit(RLIMIT_NOFILE);
  facts.locked_bytes_max = Limit(RLIMIT_MEMLOCK);
  facts.ram_bytes =
      static_cast<uint64_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  facts.memory_bytes = std::min(facts.ram_bytes, GroupMemory());
  struct statvfs shm {};
  if (statvfs("/dev/shm", &shm) == 0) facts.shm_bytes = shm.f_blocks * shm.f_frsize;
  return facts;
}

Findings CheckPlaces(const NamedConfig& named) {
  Findings out;
  const daemon::Config& config = named.config;
  CheckPort(named, "http", config.http, out);
  if (HasCoordinator(config.role)) {
    CheckPort(named, "listen", config.listen, out);
    if (!config.state_dir.empty()) {
      CheckDirectory(named, "state_dir", config.state_dir, false, out);
      if (LiesInMemory(config.state_dir)) {
        out.push_back({"state_dir", named.path,
                       config.state_dir + " lies in memory: the journal is lost with this host",
                       "choose a directory on a disk"});
      }
    }
  }
  if (HasAgent(config.role)) {
    CheckPort(named, "data_listen", config.data_listen, out);
    const auto folder = std::filesystem::path(config.agent_socket).parent_path().string();
    CheckDirectory(named, "agent_socket", folder.empty() ? "." : folder, !config.allow_uids.empty(),
                   out);
  }
  return out;
}

std::string AgentSocketHere() {
  const char* named = std::getenv("WEIGHTWIRE_AGENT_SOCKET");
  return named == nullptr ? "" : named;
}

Findings CheckAgentSocket(const std::string& path) {
  if (path.empty()) return {};
  if (const std::string refusal = memory::UidRefusal(path); !refusal.empty()) {
    return {{"uid", path, refusal + " and cannot attach", memory::UidRefusalRemedy(geteuid())}};
  }
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd < 0) return {};
  sockaddr_un to{};
  to.sun_family = AF_UNIX;
  path.copy(to.sun_path, sizeof to.sun_path - 1);
  const bool listens = connect(fd, reinterpret_cast<const sockaddr*>(&to), sizeof to) == 0;
  const std::string why = listens ? "" : std::strerror(errno);
  close(fd);
  if (listens) return {};
  return {{"agent_socket", path, "no agent listens there: " + why,
           "start the agent (its log says why it ended), or set WEIGHTWIRE_AGENT_SOCKET to its "
           "agent_socket"}};
}

}  // namespace weightwire::cli
