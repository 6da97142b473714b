#pragma once

#include <algorithm>
#include <cstdint>

#include "server/base/clock.h"

namespace weightwire::coordinator {

/// Which engines a version waits for. All complete ones are asked; one that is late or fails under
/// `quorum` or `deadline` is left out of the version's next attempt, which reads only what has not
/// arrived yet. It is not ready from the COMMIT on, and is filled from a peer.
struct CommitPolicy {
  enum class Kind : int {
    kAll = 1,       ///< every complete engine
    kQuorum = 2,    ///< `quorum` engines, and who is staged within `grace` after them
    kDeadline = 3,  ///< who is there at the deadline of the phase, at least `min_engines`
  };
  Kind kind = Kind::kAll;
  uint32_t quorum = 1;
  Nanos grace = std::chrono::seconds(2);

  /// How long one engine may hold up others that can do without it; 0: to the deadline.
  Nanos Patience() const { return kind == Kind::kQuorum ? grace : Nanos(0); }
  /// Engines that are enough to go on without the others; 0: all are required.
  uint32_t Enough(uint32_t min_engines) const {
    if (kind == Kind::kAll) return 0;
    return std::max(kind == Kind::kQuorum ? quorum : 1, std::max(1u, min_engines));
  }
};

}  // namespace weightwire::coordinator
