#pragma once

#include <cstdint>
#include <functional>
#include <utility>

#include "server/base/fair_queue.h"

namespace weightwire::transfer {

/// Lets at most `capacity` things be under way at once. Those that wait are let in as FairQueue
/// says. Strand-only.
class FairSemaphore {
 public:
  using Waiter = std::function<void()>;
  using Turn = FairQueue<Waiter>::Turn;

  explicit FairSemaphore(uint32_t capacity) : free_(capacity) {}

  /// Calls `enter` at once, or inside another one's Leave. Returns a ticket for Cancel, 0 when it
  /// was called at once.
  uint64_t Enter(Turn& turn, double cost, Waiter enter) {
    if (free_ == 0) return waiting_.Push(turn, cost, std::move(enter));
    --free_;
    waiting_.Pass(turn, cost);
    enter();
    return 0;
  }
  void Cancel(uint64_t ticket) { waiting_.Cancel(ticket); }
  void Leave() {
    if (waiting_.empty()) {
      ++free_;
    } else {
      waiting_.Pop()();
    }
  }

 private:
  uint32_t free_;
  FairQueue<Waiter> waiting_;
};

}  // namespace weightwire::transfer
