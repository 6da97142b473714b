#pragma once

#include <map>
#include <utility>

#include "server/base/executor.h"

namespace weightwire::sim {

/// The threads of one simulated process: what it has posted ends with it. Must not outlive `base`.
class ProcessExecutor final : public Executor {
 public:
  explicit ProcessExecutor(Executor& base) : base_(base) {}
  ~ProcessExecutor() override { Kill(); }

  void Post(Task task) override { PostAfter(Nanos{0}, std::move(task)); }
  TimerId PostAfter(Nanos delay, Task task) override {
    if (dead_) return kNever;
    const TimerId id = ++last_;
    const TimerId timer = base_.PostAfter(delay, [this, id] {
      auto node = tasks_.extract(id);
      node.mapped().second();
    });
    tasks_.emplace(id, std::pair(timer, std::move(task)));
    return id;
  }
  void Cancel(TimerId id) override {
    auto node = tasks_.extract(id);
    if (!node.empty()) base_.Cancel(node.mapped().first);
  }
  /// Nothing that was posted runs any more, nor what is posted from now on.
  void Kill() {
    dead_ = true;
    for (const auto& [id, task] : tasks_) base_.Cancel(task.first);
    const auto dropped = std::exchange(tasks_, {});
  }

 private:
  static constexpr TimerId kNever = ~TimerId{0};

  Executor& base_;
  bool dead_ = false;
  TimerId last_ = 0;
  std::map<TimerId, std::pair<TimerId, Task>> tasks_;
};

}  // namespace weightwire::sim
