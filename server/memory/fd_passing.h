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

/// The same in one sendmsg that never waits: how many bytes went, 0 when the socket is full. Once a
/// byte has gone, the fds have gone with it.
Result<size_t> SendSomeWithFds(int socket, std::span<const std::byte> bytes,
                               std::span<const int> fds);

struct FdMessage {
  size_t bytes = 0;           ///< 0: the peer closed in good order, unless `would_block`
  std::vector<UniqueFd> fds;  ///< close-on-exec
  bool would_block = false;   ///< a non-blocking socket with nothing to read
};
/// Receives up to `into.size()` bytes and the fds that came with them; one recvmsg. Waits only on a
/// socket in blocking mode.
///   kInvalidArgument / kLimitExceeded  more fds than kFdsPerMessageMax (none is leaked)
///   kUnavailable / kIoError
Result<FdMessage> ReceiveWithFds(int socket, std::span<std::byte> into);

}  // namespace weightwire::memory
