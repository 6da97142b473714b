#include "server/daemon/host_identity.h"

#include <unistd.h>

#include <fstream>

namespace weightwire::daemon {
namespace {

std::string Unknown() { return '?' + std::to_string(getpid()); }

std::string BootId() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string line;
  return std::getline(file, line) && !line.empty() ? line : Unknown();
}

std::string Namespace(const char* path) {
  char target[64] = {};
  const ssize_t size = readlink(path, target, sizeof(target));
  return size > 0 ? std::string(target, static_cast<size_t>(size)) : Unknown();
}

}  // namespace

std::string HostIdentity() {
  return BootId() + "/" + Namespace("/proc/self/ns/net") + "/" + Namespace("/proc/self/ns/ipc");
}

}  // namespace weightwire::daemon
