#include "server/store/append_worker.h"

#include <algorithm>
#include <utility>

#include "server/base/failpoint.h"
#include "server/wire/journal.h"

namespace weightwire::store {
namespace {

constexpr Nanos kFirstPause = std::chrono::milliseconds(50);
constexpr Nanos kLongestPause = std::chrono::seconds(1);

}  // namespace

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

void AppendWorker::OnHindered(std::function<void(Status)> tell) {
  std::lock_guard lock(mutex_);
  tell_ = std::move(tell);
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
    Status status = Carry(entry.record);
    WW_FAILPOINT("store.after_a_record_is_durable_before_its_answer");
    strand_.Post([done = std::move(entry.done), status = std::move(status)] { done(status); });
    lock.lock();
  }
}

Status AppendWorker::Carry(const coordinator::JournalRecord& record) {
  if (!failed_.ok()) return failed_;
  const std::string bytes = wire::EncodeRecord(record);
  if (bytes.size() > coordinator::kRecordBytesMax) {
    return Status(Code::kInvalidArgument, Reason::kMessageTooLarge,
                  "a record of " + std::to_string(bytes.size()) + " bytes; the journal takes " +
                      std::to_string(coordinator::kRecordBytesMax))
        .Remedy("drain fewer engines at a time: wwctl drain --undo");
  }
  Status status = Timed(record, bytes);
  Status told;
  for (Nanos pause = kFirstPause; status.code() == Code::kUnavailable;) {
    if (std::exchange(told, status) != status) Tell(status);
    if (!Pause(pause)) break;
    pause = std::min(2 * pause, kLongestPause);
    status = Timed(record, bytes);
  }
  if (status.ok() && !told.ok()) Tell(status);
  failed_ = status;
  return status;
}

Status AppendWorker::Timed(const coordinator::JournalRecord& record, const std::string& bytes) {
  const Nanos start = SystemClock().Now();
  Status status = write_(record, bytes);
  metrics_.Observe("journal_fsync_seconds",
                   std::chrono::duration<double>(SystemClock().Now() - start).count());
  return status;
}

void AppendWorker::Tell(const Status& why) {
  std::unique_lock lock(mutex_);
  auto tell = tell_;
  lock.unlock();
  if (tell) strand_.Post([tell = std::move(tell), why] { tell(why); });
}

bool AppendWorker::Pause(Nanos pause) {
  std::unique_lock lock(mutex_);
  return !wake_.wait_for(lock, pause, [this] { return stopping_; });
}

}  // namespace weightwire::store
