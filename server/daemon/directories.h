#pragma once

#include <string>

#include "server/base/status.h"

namespace weightwire::daemon {

/// Makes `path` (and its parents) with mode 0700 when it is absent.
///   kUnavailable / kIoError            cannot be made
///   kPermissionDenied / kConfigInvalid exists and belongs to another user, or others may enter it
Status MakePrivateDirectory(const std::string& path);
/// The directory of a file's path; "." when it has none.
std::string DirectoryOf(const std::string& path);

}  // namespace weightwire::daemon
