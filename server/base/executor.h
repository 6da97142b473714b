#pragma once

#include <cstdint>
#include <functional>

#include "server/base/clock.h"

namespace weightwire {

using Task = std::function<void()>;

/// Runs tasks. A *strand* runs them one after another in the order of posting; a *worker pool*
/// runs several at once. Which one a parameter means is said where it is declared.
///
/// Thread-safe. A task never runs inside Post. Tasks that are still queued when the executor is
/// destroyed are dropped without running.
class Executor {
 public:
  using TimerId = uint64_t;
  virtual ~Executor() = default;
  virtual void Post(Task task) = 0;
  /// Runs `task` once, not before `delay` has passed. Never returns 0.
  virtual TimerId PostAfter(Nanos delay, Task task) = 0;
  /// After the return the task will not start, unless it has started already. Unknown ids are
  /// ignored. Called on a strand for its own timer it is exact: the task does not run any more.
  virtual void Cancel(TimerId timer) = 0;
};

}  // namespace weightwire
