#include "server/base/beside_program.h"

#include <unistd.h>

#include <climits>

namespace weightwire {

std::string BesideProgram(const std::string& library) {
  char path[PATH_MAX];
  const ssize_t size = readlink("/proc/self/exe", path, sizeof(path));
  const std::string program(path, size > 0 ? static_cast<size_t>(size) : 0);
  const std::string folder = program.substr(0, program.rfind('/') + 1);
  for (const std::string& beside : {folder + library, folder + "../lib/" + library}) {
    if (access(beside.c_str(), R_OK) == 0) return beside;
  }
  return library;
}

}  // namespace weightwire
