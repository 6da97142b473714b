#pragma once

#include <memory>
#include <string>
#include <vector>

#include "server/base/executor.h"

namespace weightwire {

/// `thread_count` threads over one queue. With one thread it is a strand, and others may help it
/// (StrandHelper); the threads of a pool do.
///
/// Idle threads sleep on a condition variable; timers wake them exactly when due. The destructor
/// lets running tasks end, drops queued ones and joins; it must not run in one of its own tasks.
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
  friend class StrandHelper;
  struct Impl;
  std::shared_ptr<Impl> impl_;
};

/// Of the thread that makes it, which serves something of its own. What this thread posts to a
/// strand then wakes nobody: the thread runs it itself, between two tasks of its own, unless the
/// strand is at work already. So a message that came in and the answer to it cost no trip to the
/// strand's thread and back, two wake-ups each.
///
/// For tasks nothing changes but the thread: still one at a time and in the order of posting. What
/// threads without a helper post runs on the strand's own thread only, and so do timers; so does
/// what a task that runs here posts to another strand. No such task may wait for its thread.
class StrandHelper {
 public:
  StrandHelper();
  ~StrandHelper();
  StrandHelper(const StrandHelper&) = delete;
  StrandHelper& operator=(const StrandHelper&) = delete;

  /// Between two tasks. Costs next to nothing when nothing was posted.
  void Run();

 private:
  friend class ThreadExecutor;
  std::vector<std::shared_ptr<ThreadExecutor::Impl>> strands_;  ///< that were posted to
  const ThreadExecutor::Impl* running_ = nullptr;
};

}  // namespace weightwire
