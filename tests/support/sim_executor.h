#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <utility>

#include "server/base/clock.h"
#include "server/base/executor.h"
#include "server/base/status.h"

namespace weightwire::testing {

/// One thread under virtual time: strand, worker pool and clock of a whole fleet at once. Tasks run
/// in the order (due time, posting), so that a run is repeatable; time moves only when nothing is
/// due. Not thread-safe.
class SimExecutor final : public Executor, public Clock {
 public:
  void Post(Task task) override { Insert(now_, std::move(task)); }
  TimerId PostAfter(Nanos delay, Task task) override {
    return Insert(now_ + delay, std::move(task));
  }
  void Cancel(TimerId timer) override {
    auto due = due_of_.find(timer);
    if (due == due_of_.end()) return;
    tasks_.erase({due->second, timer});
    due_of_.erase(due);
  }
  Nanos Now() const override { return now_; }
  double WallSeconds() const override {
    return wall_start_ + std::chrono::duration<double>(now_).count();
  }

  /// Somebody sets the machine's clock; timers do not know.
  void JumpWall(double seconds) { wall_start_ += seconds; }

  bool idle() const { return tasks_.empty(); }
  size_t tasks_run() const { return tasks_run_; }

  /// Runs the next task, moving the clock to it. False when nothing is queued.
  bool RunOne() {
    if (tasks_.empty()) return false;
    auto first = tasks_.begin();
    now_ = std::max(now_, first->first.first);
    Task task = std::move(first->second);
    due_of_.erase(first->first.second);
    tasks_.erase(first);
    ++tasks_run_;
    task();
    return true;
  }
  /// Runs what is due now, and what that posts, without moving the clock.
  void RunReady() {
    while (!tasks_.empty() && tasks_.begin()->first.first <= now_) RunOne();
  }
  /// Runs everything, timers included, until nothing is queued. Something that re-arms a timer for
  /// ever ends the program: use RunFor or RunUntil there.
  void RunUntilIdle(size_t tasks_max = 10'000'000) {
    while (RunOne()) WW_CHECK(tasks_max-- > 0);
  }
  /// Runs everything that is due within `span`, and leaves the clock at its end.
  void RunFor(Nanos span) {
    const Nanos end = now_ + span;
    while (!tasks_.empty() && tasks_.begin()->first.first <= end) RunOne();
    now_ = end;
  }
  /// Runs until `done` holds, at most `span` of virtual time. True when it holds.
  bool RunUntil(const std::function<bool()>& done, Nanos span) {
    const Nanos end = now_ + span;
    while (!done()) {
      if (tasks_.empty() || tasks_.begin()->first.first > end) return false;
      RunOne();
    }
    return true;
  }

 private:
  TimerId Insert(Nanos due, Task task) {
    const TimerId timer = next_timer_++;
    tasks_.emplace(std::pair(due, timer), std::move(task));
    due_of_.emplace(timer, due);
    return timer;
  }

  Nanos now_{0};
  double wall_start_ = 1.7e9;
  TimerId next_timer_ = 1;
  size_t tasks_run_ = 0;
  std::map<std::pair<Nanos, TimerId>, Task> tasks_;
  std::map<TimerId, Nanos> due_of_;
};

}  // namespace weightwire::testing
