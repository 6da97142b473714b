#pragma once

#include <cstdint>
#include <string>

namespace weightwire::transfer {

/// When a sender codes what changed since earlier versions, and what it keeps for that.
struct DeltaPolicy {
  enum class Mode : uint8_t {
    kOff,
    kAuto,    ///< to readers behind a network or a rate limit, as long as it makes streams shorter
    kAlways,  ///< to every reader that can, over transports that do not map memory
  };
  Mode mode = Mode::kAuto;
  /// Codes that are kept of a segment, newest first: so many versions may a reader have missed.
  uint32_t chain_max = 4;
  /// Bases are files of this folder, which are nobody else's and vanish with the process; empty:
  /// they are memory.
  std::string folder;
};

}  // namespace weightwire::transfer
