#include "server/daemon/directories.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>

namespace weightwire::daemon {

namespace {

constexpr mode_t kOthers = 077;  ///< all that other users may do
constexpr mode_t kChange = 022;  ///< of it: make and remove files
constexpr mode_t kPass = 011;    ///< of it: pass through
constexpr mode_t kGroupPass = 010;

Status IoError(const std::string& path, const std::string& cause) {
  return Status(Code::kUnavailable, Reason::kIoError,
                "cannot use directory " + path + ": " + cause);
}

Status Unfit(const std::string& path, const std::string& what) {
  return {Code::kPermissionDenied, Reason::kConfigInvalid, "directory " + path + ' ' + what};
}

std::string Advice(const std::string& path, const std::string& command) {
  const std::string common = AdviceForSharedDirectory(path);
  return common.empty() ? command + ' ' + path + ", or choose another directory" : common;
}

/// Whether any other user, or any member of `group`, may pass through the directory.
bool Passes(const struct stat& info, std::optional<uint32_t> group) {
  if (!group) return (info.st_mode & kPass) == kPass;
  return (info.st_mode & (info.st_gid == *group ? kGroupPass : 001)) != 0;
}

/// Makes `path` (and its parents) when it is absent, so that `pass` of other users may go through.
Status MakeDirectory(const std::string& path, mode_t pass, std::optional<uint32_t> group) {
  const std::string parent = DirectoryOf(path);
  if (parent != path && access(parent.c_str(), F_OK) != 0) {
    WW_RETURN_IF_ERROR(MakeDirectory(parent, pass, group));
  }
  if (mkdir(path.c_str(), 0700) == 0) {
    if (group && chown(path.c_str(), static_cast<uid_t>(-1), *group) != 0) {
      return Status(IoError(path, "group " + std::to_string(*group) + ": " + std::strerror(errno)))
          .Remedy("socket_group must be a group of weightwired's user");
    }
    if (pass != 0 && chmod(path.c_str(), 0700 | pass) != 0) {
      return IoError(path, std::strerror(errno));
    }
    return OkStatus();
  }
  if (errno != EEXIST) return IoError(path, std::strerror(errno));
  struct stat info {};
  if (stat(path.c_str(), &info) != 0) return IoError(path, std::strerror(errno));
  if (!S_ISDIR(info.st_mode)) return IoError(path, "it is no directory");
  if (info.st_uid != geteuid()) {
    return Unfit(path, "belongs to another user").Remedy("choose another directory");
  }
  if (pass == 0) {
    if ((info.st_mode & kOthers) == 0) return OkStatus();
    return Unfit(path, "can be entered by others").Remedy(Advice(path, "chmod 700"));
  }
  const std::string command =
      group ? "chgrp " + std::to_string(*group) + ' ' + path + " && chmod 710" : "chmod 711";
  if ((info.st_mode & kChange) != 0) {
    return Unfit(path, "can be changed by others").Remedy(Advice(path, command));
  }
  if (Passes(info, group)) return OkStatus();
  return Unfit(path, group ? "does not let members of group " + std::to_string(*group) +
                                 " (socket_group) pass"
                           : std::string("does not let the users of allow_uids pass"))
      .Remedy(command + ' ' + path + ", or choose another directory");
}

}  // namespace

Status MakePrivateDirectory(const std::string& path) { return MakeDirectory(path, 0, {}); }

Status MakeSocketDirectory(const std::string& path, std::optional<uint32_t> group) {
  return MakeDirectory(path, group ? kGroupPass : kPass, group);
}

std::string AdviceForSharedDirectory(const std::string& path) {
  struct stat info {};
  const bool shared = stat(path.c_str(), &info) == 0 && (info.st_mode & S_ISVTX) != 0;
  if (!shared && path != "/") return "";
  return "choose a directory of its own, for example " + path + (path == "/" ? "" : "/") +
         "weightwire";
}

std::string ClosedAbove(const std::string& path, std::optional<uint32_t> group) {
  const std::string full = std::filesystem::absolute(path).lexically_normal().string();
  for (std::string at = DirectoryOf(full);; at = DirectoryOf(at)) {
    struct stat info {};
    if (stat(at.c_str(), &info) == 0 && !Passes(info, group)) return at;
    if (at == DirectoryOf(at)) return "";
  }
}

std::string DirectoryOf(const std::string& path) {
  const std::string parent = std::filesystem::path(path).parent_path().string();
  return parent.empty() ? "." : parent;
}

}  // namespace weightwire::daemon
