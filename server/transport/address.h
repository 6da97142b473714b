#pragma once

#include <string>
#include <utility>

#include "server/base/status.h"

namespace weightwire::transport {

/// "host:port" or "[v6]:port" as (host, port).
///   kInvalidArgument / kConfigInvalid  no port, or one that is no number up to 65535
Result<std::pair<std::string, uint16_t>> SplitAddress(const std::string& address);
std::string JoinAddress(const std::string& host, uint16_t port);

}  // namespace weightwire::transport
