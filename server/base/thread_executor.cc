#include "server/base/thread_executor.h"

#include <pthread.h>

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "server/base/status.h"

namespace weightwire {

struct ThreadExecutor::Impl {
  std::mutex mutex;
  std::condition_variable wake;
  struct Ready {
    TimerId timer = 0;  ///< 0: was posted
    Task task;
  };
  std::deque<Ready> ready;
  std::map<std::pair<Nanos, TimerId>, Task> timers;
  std::map<TimerId, Nanos> due_of;
  TimerId next_timer = 1;
  bool stopping = false;
  std::vector<std::thread> threads;

  void Run() {
    std::unique_lock lock(mutex);
    while (!stopping) {
      MoveDueTimers();
      if (!ready.empty()) {
        Task task = std::move(ready.front().task);
        ready.pop_front();
        lock.unlock();
        task();
        task = nullptr;  // destroyed outside the lock: it may post
        lock.lock();
      } else if (timers.empty()) {
        wake.wait(lock);
      } else {
        wake.wait_until(lock, std::chrono::steady_clock::time_point(timers.begin()->first.first));
      }
    }
  }

  void MoveDueTimers() {
    const Nanos now = SystemClock().Now();
    while (!timers.empty() && timers.begin()->first.first <= now) {
      due_of.erase(timers.begin()->first.second);
      ready.push_back({timers.begin()->first.second, std::move(timers.begin()->second)});
      timers.erase(timers.begin());
    }
  }
};

ThreadExecutor::ThreadExecutor(const std::string& name, int thread_count)
    : impl_(std::make_unique<Impl>()) {
  WW_CHECK(thread_count >= 1);
  for (int i = 0; i < thread_count; ++i) {
    impl_->threads.emplace_back([impl = impl_.get()] { impl->Run(); });
    pthread_setname_np(impl_->threads.back().native_handle(), name.substr(0, 15).c_str());
  }
}

ThreadExecutor::~ThreadExecutor() { Stop(); }

void ThreadExecutor::Post(Task task) {
  {
    std::lock_guard lock(impl_->mutex);
    if (impl_->stopping) return;
    impl_->ready.push_back({0, std::move(task)});
  }
  impl_->wake.notify_one();
}

Executor::TimerId ThreadExecutor::PostAfter(Nanos delay, Task task) {
  TimerId timer;
  {
    std::lock_guard lock(impl_->mutex);
    timer = impl_->next_timer++;
    if (impl_->stopping) return timer;
    const Nanos due = SystemClock().Now() + delay;
    impl_->timers.emplace(std::pair(due, timer), std::move(task));
    impl_->due_of.emplace(timer, due);
  }
  impl_->wake.notify_one();
  return timer;
}

void ThreadExecutor::Cancel(TimerId timer) {
  Task dropped;
  std::lock_guard lock(impl_->mutex);
  auto due = impl_->due_of.find(timer);
  if (due == impl_->due_of.end()) {
    // It may be due already and wait behind the task that calls us.
    auto ready = std::ranges::find(impl_->ready, timer, &Impl::Ready::timer);
    if (timer == 0 || ready == impl_->ready.end()) return;
    dropped = std::move(ready->task);
    impl_->ready.erase(ready);
    return;
  }
  auto entry = impl_->timers.find({due->second, timer});
  dropped = std::move(entry->second);
  impl_->timers.erase(entry);
  impl_->due_of.erase(due);
}

void ThreadExecutor::Stop() {
  std::deque<Impl::Ready> dropped_ready;
  std::map<std::pair<Nanos, TimerId>, Task> dropped_timers;
  {
    std::lock_guard lock(impl_->mutex);
    impl_->stopping = true;
    dropped_ready.swap(impl_->ready);
    dropped_timers.swap(impl_->timers);
    impl_->due_of.clear();
  }
  impl_->wake.notify_all();
  dropped_ready.clear();
  dropped_timers.clear();
  for (std::thread& thread : impl_->threads) {
    WW_CHECK(thread.get_id() != std::this_thread::get_id());
    if (thread.joinable()) thread.join();
  }
}

}  // namespace weightwire
