#include "server/memory/host_memory.h"

#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <limits>

namespace weightwire::memory {
namespace {

namespace fs = std::filesystem;

uint64_t MachineMemory() {
  return static_cast<uint64_t>(sysconf(_SC_PHYS_PAGES)) *
         static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
}

/// None where the file is missing or says "max".
uint64_t LimitIn(const fs::path& file) {
  std::ifstream in(file);
  uint64_t bytes = 0;
  return in >> bytes ? bytes : std::numeric_limits<uint64_t>::max();
}

/// The least limit from `group` up to the mount. A container sees its own group at the mount, and
/// its path from outside may lead nowhere there.
uint64_t LeastLimit(const fs::path& mount, fs::path group, const char* name) {
  uint64_t least = LimitIn(mount / name);
  for (; !group.empty() && group != group.parent_path(); group = group.parent_path()) {
    least = std::min(least, LimitIn(mount / group.relative_path() / name));
  }
  return least;
}

}  // namespace

uint64_t MemoryLimit(const std::string& root) {
  uint64_t limit = MachineMemory();
  std::ifstream groups(fs::path(root) / "proc/self/cgroup");
  const fs::path mount = fs::path(root) / "sys/fs/cgroup";
  for (std::string line; std::getline(groups, line);) {  // "4:memory:/pod" (v1), "0::/pod" (v2)
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    std::string controllers = line.substr(first, second - first + 1);
    std::replace(controllers.begin(), controllers.end(), ',', ':');
    const fs::path group = line.substr(second + 1);
    if (controllers == "::") limit = std::min(limit, LeastLimit(mount, group, "memory.max"));
    if (controllers.find(":memory:") != std::string::npos) {
      limit = std::min(limit, LeastLimit(mount / "memory", group, "memory.limit_in_bytes"));
    }
  }
  return limit;
}

}  // namespace weightwire::memory
