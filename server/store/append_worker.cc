#include "server/store/append_worker.h"

#include <utility>

#include "server/base/clock.h"
#include "server/base/failpoint.h"

namespace weightwire::store {

AppendWorker::AppendWorker(Executor& strand, metrics::Sink& metrics, Write write)
    : strand_(strand), metrics_(metrics), write_(std::move(write)), thread_([this] { Run(); }) {}

AppendWorker::~AppendWorker() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_one();
  thread_.join();
}

void AppendWorker::Append(coordinator::JournalRecord record, std::function<void(Status)> done) {
  {
    std::lock_guard lock(mutex_);
    queue_.push_back({std::move(record), std::move(done)});
  }
  wake_.notify_one();
}

void AppendWorker::Run() {
  std::unique_lock lock(mutex_);
  while (true) {
    wake_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
    if (queue_.empty()) return;
    Entry entry = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    WW_FAILPOINT("store.before_a_record_is_written");
    if (failed_.ok()) failed_ = Timed(entry.record);
    WW_FAILPOINT("store.after_a_record_is_durable_before_its_answer");
    strand_.Post([done = std::move(entry.done), status = failed_] { done(status); });
    lock.lock();
  }
}

Status AppendWorker::Timed(const coordinator::JournalRecord& record) {
  const Nanos start = SystemClock().Now();
  Status status = write_(record);
  metrics_.Observe("journal_fsync_seconds",
                   std::chrono::duration<double>(SystemClock().Now() - start).count());
  return status;
}

}  // namespace weightwire::store
