#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "server/control/control.h"
#include "server/coordinator/journal.h"

namespace weightwire::coordinator {

/// What the claims of an engine's ranks, held against the journal, say of the engine.
///
/// A claim is an agent's knowledge of buffers that it verified and of swaps that it saw, under the
/// same history; what it may not know is how the epoch ended that was running. That says the
/// journal's newest decision, or a rank that was told of COMMIT: what is decided goes on, all else
/// is aborted.
struct RejoinResult {
  epoch::Content serving;  ///< what every rank serves; nothing when it is empty
  /// Every rank has staged this epoch, whose content was decided: it goes on with its swap. 0:
  /// none.
  Epoch unfinished{};
  /// Ranks that miss only the end of a swap that others of the engine have made.
  std::vector<uint32_t> behind_the_swap;
  /// Ranks that staged what nobody decided. (Whether an epoch older than the committed one was
  /// decided, the journal may have forgotten: it is left to the next one, which drains it.)
  std::vector<uint32_t> undecided;
  epoch::Content decided = {};  ///< of `unfinished` and `behind_the_swap`
  friend bool operator==(const RejoinResult&, const RejoinResult&) = default;
};
/// `claims`: by rank, at least one. kAborted / kStaleEpoch: ranks serve different epochs, one that
/// was never committed, or may be in the middle of a swap that the others do not know of; nothing
/// can be said of the engine but that it must begin anew.
Result<RejoinResult> Rejoin(const std::vector<control::RejoinState>& claims,
                            const CommitRecord& committed);

}  // namespace weightwire::coordinator
