#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "server/base/status.h"

namespace weightwire::daemon {

struct HostPort {
  std::string host;  ///< without brackets
  uint16_t port = 0;
};
/// "host:port" or "[v6]:port". kInvalidArgument / kConfigInvalid.
Result<HostPort> ParseHostPort(std::string_view address);

/// Only this host can reach it: 127.0.0.0/8, ::1 or "localhost".
bool IsLoopback(std::string_view host);

}  // namespace weightwire::daemon
