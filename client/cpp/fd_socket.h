#pragma once

#include <string>

#include "server/base/clock.h"
#include "server/base/status.h"
#include "server/memory/region.h"

namespace weightwire::client {

/// Hands `fd` to the agent through the fd socket at `path`; the token for it.
///   kUnavailable / kIoError; what the agent answered
Result<uint64_t> PutFd(const std::string& path, int fd, Nanos timeout);
/// Redeems a token.
Result<memory::UniqueFd> GetFd(const std::string& path, uint64_t token, Nanos timeout);

}  // namespace weightwire::client
