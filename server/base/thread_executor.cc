#include "server/base/thread_executor.h"

#include <pthread.h>

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "server/base/status.h"

namespace weightwire {

namespace {

thread_local StrandHelper* helper_here = nullptr;

}  // namespace

struct ThreadExecutor::Impl {
  std::mutex mutex;
  std::condition_variable wake;
  struct Ready {
    TimerId timer = 0;    ///< 0: was posted
    bool helped = false;  ///< by a thread that will see to it
    Task task;
  };
  std::deque<Ready> ready;
  std::map<std::pair<Nanos, TimerId>, Task> timers;
  std::map<TimerId, Nanos> due_of;
  TimerId next_timer = 1;
  bool stopping = false;
  bool is_strand = false;
  std::thread::id at_work;  ///< who runs a strand's task
  std::vector<std::thread> threads;

  bool taken() const { return at_work != std::thread::id(); }
  bool NeedsUs() const {
    return std::ranges::any_of(ready, [](const Ready& one) { return !one.helped; });
  }

  void Run() {
    std::optional<StrandHelper> helper;
    if (!is_strand) helper.emplace();
    std::unique_lock lock(mutex);
    bool at_it = false;  // and then until nothing is left: who posts meanwhile relies on it
    while (!stopping) {
      MoveDueTimers();
      at_it = !taken() && (at_it ? !ready.empty() : NeedsUs());
      if (at_it) {
        RunFirst(lock);
        if (helper) {
          lock.unlock();
          helper->Run();
          lock.lock();
        }
      } else if (timers.empty()) {
        wake.wait(lock);
      } else {
        wake.wait_until(lock, std::chrono::steady_clock::time_point(timers.begin()->first.first));
      }
    }
  }

  void Help() {
    std::unique_lock lock(mutex);
    if (taken()) return;  // it goes on with what is ready
    while (!ready.empty() && ready.front().helped) RunFirst(lock);
    if (!ready.empty() || stopping) wake.notify_all();  // the strand's thread, or who stops it
  }

  void RunFirst(std::unique_lock<std::mutex>& lock) {
    Task task = std::move(ready.front().task);
    ready.pop_front();
    if (is_strand) at_work = std::this_thread::get_id();
    lock.unlock();
    task();
    task = nullptr;  // destroyed outside the lock: it may post
    lock.lock();
    at_work = {};
  }

  void MoveDueTimers() {
    const Nanos now = SystemClock().Now();
    while (!timers.empty() && timers.begin()->first.first <= now) {
      due_of.erase(timers.begin()->first.second);
      ready.push_back({timers.begin()->first.second, false, std::move(timers.begin()->second)});
      timers.erase(timers.begin());
    }
  }
};

ThreadExecutor::ThreadExecutor(const std::string& name, int thread_count)
    : impl_(std::make_shared<Impl>()) {
  WW_CHECK(thread_count >= 1);
  impl_->is_strand = thread_count == 1;
  for (int i = 0; i < thread_count; ++i) {
    impl_->threads.emplace_back([impl = impl_.get()] { impl->Run(); });
    pthread_setname_np(impl_->threads.back().native_handle(), name.substr(0, 15).c_str());
  }
}

ThreadExecutor::~ThreadExecutor() { Stop(); }

void ThreadExecutor::Post(Task task) {
  {
    StrandHelper* const helper = helper_here;
    const bool helped = impl_->is_strand && helper != nullptr &&
                        (helper->running_ == nullptr || helper->running_ == impl_.get());
    std::lock_guard lock(impl_->mutex);
    if (impl_->stopping) return;
    impl_->ready.push_back({0, helped, std::move(task)});
    if (impl_->taken()) return;  // whoever is at it goes on with it, or wakes the strand's thread
    if (helped) {
      auto& strands = helper->strands_;
      if (std::ranges::find(strands, impl_) == strands.end()) strands.push_back(impl_);
      return;
    }
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
  std::unique_lock lock(impl_->mutex);
  WW_CHECK(impl_->at_work != std::this_thread::get_id());
  impl_->wake.wait(lock, [this] { return !impl_->taken(); });
}

StrandHelper::StrandHelper() {
  WW_CHECK(helper_here == nullptr);
  helper_here = this;
}

StrandHelper::~StrandHelper() {
  Run();
  helper_here = nullptr;
}

void StrandHelper::Run() {
  // What runs may post to the same strands again, which are taken then.
  for (const auto& strand : std::exchange(strands_, {})) {
    running_ = strand.get();
    strand->Help();
    running_ = nullptr;
  }
}

}  // namespace weightwire
