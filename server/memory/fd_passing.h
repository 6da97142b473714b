#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "server/memory/region.h"

namespace weightwire::memory {

/// Most fds that one message may carry.
inline constexpr size_t kFdsPerMessageMax = 64;

/// Sends all of `bytes` with `fds` attached to the first byte, on a connected Unix stream socket in
/// blocking mode. kUnavailable / kIoError when the peer is gone.
Status SendWithFds(int socket, std::span<const std::byte> bytes, std::span<const int> fds);

struct Received {
  size_t bytes = 0;            ///< 0: the peer closed in good order
  std::vector<UniqueFd> fds;   ///< close-on-exec
};
/// Receives up to `into.size()` bytes and the fds that came with them; one recvmsg.
///   kInvalidArgument / kLimitExceeded  more fds than kFdsPerMessageMax (none is leaked)
///   kUnavailable / kIoError
Result<Received> ReceiveWithFds(int socket, std::span<std::byte> into);

}  // namespace weightwire::memory
