#pragma once

#include <functional>
#include <optional>
#include <utility>

#include "server/base/ids.h"
#include "server/base/status.h"
#include "server/coordinator/cancel_token.h"
#include "server/coordinator/journal.h"

namespace weightwire::coordinator {

/// Hands out epoch numbers that only rise, also through restarts: a number is given only when a
/// reservation above it is durable, and a restart goes on above every reservation. Strand only.
class EpochNumbers {
 public:
  /// `first`: above everything that was ever handed out or reserved; `history`: the journal's,
  /// which every reservation carries. `more` runs when numbers have become available; `failed` when
  /// a reservation's fate is unknown: there will be no more.
  EpochNumbers(Epoch first, JournalId history, Journal& journal, std::function<void()> more,
               std::function<void(const Status&)> failed)
      : next_(first),
        limit_(first),
        history_(history),
        journal_(journal),
        more_(std::move(more)),
        failed_(std::move(failed)) {}
  /// Reserves a block when few are left. Called once at start.
  void Reserve();
  /// Numbers below `next` were handed out, by somebody whom the journal has forgotten.
  void Raise(Epoch next);
  /// nullopt: none is reserved now; `more` will run.
  std::optional<Epoch> Take();

 private:
  Epoch next_;
  Epoch limit_;
  const JournalId history_;
  bool reserving_ = false;
  Journal& journal_;
  std::function<void()> more_;
  std::function<void(const Status&)> failed_;
  CancelToken cancel_;
};

}  // namespace weightwire::coordinator
