#pragma once

#include <optional>
#include <string>

#include "server/base/status.h"

namespace weightwire::daemon {

/// Makes `path` (and its parents) with mode 0700 when it is absent.
///   kUnavailable / kIoError            cannot be made
///   kPermissionDenied / kConfigInvalid exists and belongs to another user, or others may enter it
Status MakePrivateDirectory(const std::string& path);
/// The same for a directory with a socket that other users may reach: they may pass through it, and
/// neither list nor change it. Mode 0711, or 0710 for members of `group` alone.
Status MakeSocketDirectory(const std::string& path, std::optional<uint32_t> group);
/// What to advise of a directory like /tmp: many programs use it, and its mode is not to be changed
/// for one of them. Empty: it is none.
std::string AdviceForSharedDirectory(const std::string& path);
/// Which directory above `path` keeps others (members of `group` where one is given) from it;
/// empty: none.
std::string ClosedAbove(const std::string& path, std::optional<uint32_t> group);
/// The directory of a file's path; "." when it has none.
std::string DirectoryOf(const std::string& path);

}  // namespace weightwire::daemon
