#include "server/daemon/directories.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>

namespace weightwire::daemon {

Status MakePrivateDirectory(const std::string& path) {
  auto io_error = [&](const std::string& cause) {
    return Status(Code::kUnavailable, Reason::kIoError,
                  "cannot use directory " + path + ": " + cause);
  };
  const std::string parent = DirectoryOf(path);
  if (parent != path && access(parent.c_str(), F_OK) != 0) {
    WW_RETURN_IF_ERROR(MakePrivateDirectory(parent));
  }
  if (mkdir(path.c_str(), 0700) == 0) return OkStatus();
  if (errno != EEXIST) return io_error(std::strerror(errno));
  struct stat info {};
  if (stat(path.c_str(), &info) != 0) return io_error(std::strerror(errno));
  if (!S_ISDIR(info.st_mode)) return io_error("it is no directory");
  if (info.st_uid != geteuid()) {
    return Status(Code::kPermissionDenied, Reason::kConfigInvalid,
                  "directory " + path + " belongs to another user")
        .Remedy("choose another directory");
  }
  if ((info.st_mode & 077) != 0) {
    return Status(Code::kPermissionDenied, Reason::kConfigInvalid,
                  "directory " + path + " can be entered by others")
        .Remedy("chmod 700 " + path + ", or choose another directory");
  }
  return OkStatus();
}

std::string DirectoryOf(const std::string& path) {
  const std::string parent = std::filesystem::path(path).parent_path().string();
  return parent.empty() ? "." : parent;
}

}  // namespace weightwire::daemon
