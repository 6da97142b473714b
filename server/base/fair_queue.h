#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

namespace weightwire {

/// Who waits for something scarce, by start-time fair queueing: users that wait all the time are
/// served in inverse proportion to what each turn costs them, and one that comes late or pauses is
/// neither starved nor owed anything. Equal turns are served first come first served.
/// Not thread-safe.
template <typename Waiter>
class FairQueue {
 public:
  /// One user's place in the queue's virtual time.
  struct Turn {
    double due = 0;
  };

  bool empty() const { return waiting_.empty(); }
  /// The user was served without waiting; its next turn is `cost` (≥ 0) later.
  void Pass(Turn& turn, double cost) { now_ = Take(turn, cost); }
  /// Returns a ticket for Cancel, never 0.
  uint64_t Push(Turn& turn, double cost, Waiter waiter) {
    waiting_.push_back({next_ticket_, Take(turn, cost), std::move(waiter)});
    return next_ticket_++;
  }
  /// The next to be served; the queue must not be empty.
  Waiter Pop() {
    const auto next = std::ranges::min_element(waiting_, {}, &Entry::start);
    now_ = next->start;
    Waiter waiter = std::move(next->waiter);
    waiting_.erase(next);
    return waiter;
  }
  void Cancel(uint64_t ticket) {
    std::erase_if(waiting_, [ticket](const Entry& entry) { return entry.ticket == ticket; });
  }

 private:
  struct Entry {
    uint64_t ticket = 0;
    double start = 0;
    Waiter waiter;
  };
  double Take(Turn& turn, double cost) {
    const double start = std::max(now_, turn.due);
    turn.due = start + cost;
    return start;
  }

  std::vector<Entry> waiting_;
  uint64_t next_ticket_ = 1;
  double now_ = 0;  ///< start of the turn that was served last
};

}  // namespace weightwire
