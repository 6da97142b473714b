#pragma once

#include <memory>
#include <string>

#include "server/base/executor.h"

namespace weightwire {

/// `thread_count` threads over one queue. With one thread it is a strand.
///
/// Idle threads sleep on a condition variable; timers wake them exactly when due. The destructor
/// lets running tasks end, drops queued ones and joins; it must not run on one of its own threads.
class ThreadExecutor final : public Executor {
 public:
  /// `name` (≤ 15 characters) names the threads for `top -H` and debuggers.
  ThreadExecutor(const std::string& name, int thread_count);
  ~ThreadExecutor() override;
  void Post(Task task) override;
  TimerId PostAfter(Nanos delay, Task task) override;
  void Cancel(TimerId timer) override;
  /// Drops what is queued, waits for running tasks, joins. Later posts are dropped. Idempotent.
  void Stop();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace weightwire
