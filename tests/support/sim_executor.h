#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <utility>
#include <vector>

#include "server/base/clock.h"
#include "server/base/executor.h"
#include "server/base/status.h"

namespace weightwire::testing {

/// One thread under virtual time: strand, worker pool and clock of a whole fleet at once. Tasks run
/// in the order (due time, posting), so that a run is repeatable; time moves only when nothing is
/// due. Not thread-safe.
class SimExecutor final : public Executor, public Clock {
 public:
  void Post(Task task) override { ready_.push_back({now_, next_order_++, Keep(std::move(task))}); }
  TimerId PostAfter(Nanos delay, Task task) override {
    const uint32_t slot = Keep(std::move(task));
    timers_.push_back({now_ + delay, next_order_++, slot});
    std::push_heap(timers_.begin(), timers_.end(), Later);
    return uint64_t{slots_[slot].life} << 32 | slot;
  }
  void Cancel(TimerId timer) override {
    const auto slot = static_cast<uint32_t>(timer);
    if (slot >= slots_.size() || slots_[slot].life != timer >> 32) return;
    ++slots_[slot].life;
    // (Its place in the heap goes when it is due; what it held may call this in its end.)
    const Task cancelled = std::exchange(slots_[slot].task, nullptr);
  }
  Nanos Now() const override { return now_; }
  double WallSeconds() const override {
    return wall_start_ + std::chrono::duration<double>(now_).count();
  }

  /// Somebody sets the machine's clock; timers do not know.
  void JumpWall(double seconds) { wall_start_ += seconds; }

  bool idle() { return Next() == nullptr; }
  size_t tasks_run() const { return tasks_run_; }

  /// Runs the next task, moving the clock to it. False when nothing is queued.
  bool RunOne() {
    const Queued* next = Next();
    if (next == nullptr) return false;
    now_ = std::max(now_, next->due);
    const uint32_t slot = next->slot;
    DropNext(next);
    const Task task = std::exchange(slots_[slot].task, nullptr);
    ++slots_[slot].life;
    free_.push_back(slot);
    ++tasks_run_;
    task();
    return true;
  }
  /// Runs what is due now, and what that posts, without moving the clock.
  void RunReady() {
    while (IsNextDue(now_)) RunOne();
  }
  /// Runs everything, timers included, until nothing is queued. Something that re-arms a timer for
  /// ever ends the program: use RunFor or RunUntil there.
  void RunUntilIdle(size_t tasks_max = 10'000'000) {
    while (RunOne()) WW_CHECK(tasks_max-- > 0);
  }
  /// Runs everything that is due within `span`, and leaves the clock at its end.
  void RunFor(Nanos span) {
    const Nanos end = now_ + span;
    while (IsNextDue(end)) RunOne();
    now_ = end;
  }
  /// Runs until `done` holds, at most `span` of virtual time. True when it holds.
  template <typename Done>
  bool RunUntil(const Done& done, Nanos span) {
    const Nanos end = now_ + span;
    while (!done()) {
      if (!IsNextDue(end)) return false;
      RunOne();
    }
    return true;
  }

 private:
  struct Queued {
    Nanos due;
    uint64_t order;  ///< of posting
    uint32_t slot;
  };
  struct Slot {
    Task task;          ///< empty: cancelled
    uint32_t life = 1;  ///< raised whenever the task has run or was cancelled
  };
  static bool Later(const Queued& a, const Queued& b) {
    return a.due != b.due ? a.due > b.due : a.order > b.order;
  }
  uint32_t Keep(Task task) {
    if (free_.empty()) {
      free_.push_back(static_cast<uint32_t>(slots_.size()));
      slots_.emplace_back();
    }
    const uint32_t slot = free_.back();
    free_.pop_back();
    slots_[slot].task = std::move(task);
    return slot;
  }
  /// Null when nothing is queued. What was cancelled is dropped on the way.
  const Queued* Next() {
    while (!timers_.empty() && slots_[timers_.front().slot].task == nullptr) {
      free_.push_back(timers_.front().slot);
      DropNext(&timers_.front());
    }
    if (timers_.empty()) return ready_.empty() ? nullptr : &ready_.front();
    if (ready_.empty() || Later(ready_.front(), timers_.front())) return &timers_.front();
    return &ready_.front();
  }
  void DropNext(const Queued* next) {
    if (!ready_.empty() && next == &ready_.front()) return ready_.pop_front();
    std::pop_heap(timers_.begin(), timers_.end(), Later);
    timers_.pop_back();
  }
  bool IsNextDue(Nanos by) {
    const Queued* next = Next();
    return next != nullptr && next->due <= by;
  }

  Nanos now_{0};
  double wall_start_ = 1.7e9;
  uint64_t next_order_ = 1;
  size_t tasks_run_ = 0;
  std::vector<Slot> slots_;
  std::vector<uint32_t> free_;  ///< slots
  std::deque<Queued> ready_;    ///< posted without a delay: in order, due when they were posted
  std::vector<Queued> timers_;  ///< a heap, the next one in front
};

}  // namespace weightwire::testing
