#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

#include "server/base/executor.h"
#include "server/base/status.h"
#include "server/coordinator/journal.h"
#include "server/metrics/metrics.h"

namespace weightwire::store {

/// Makes records durable one after another on a thread of its own and answers on the strand. After
/// a failed append every later one fails too, so that no record can follow a lost one; only a new
/// process, which reads what is durable, may go on. Observes journal_fsync_seconds.
class AppendWorker {
 public:
  /// OK: the record survives any crash. Runs on the worker's thread.
  using Write = std::function<Status(const coordinator::JournalRecord&)>;

  /// `strand` and `metrics` outlive it.
  AppendWorker(Executor& strand, metrics::Sink& metrics, Write write);
  /// Appends under way end first; their answers still reach the strand.
  ~AppendWorker();
  AppendWorker(const AppendWorker&) = delete;
  AppendWorker& operator=(const AppendWorker&) = delete;

  void Append(coordinator::JournalRecord record, std::function<void(Status)> done);

 private:
  struct Entry {
    coordinator::JournalRecord record;
    std::function<void(Status)> done;
  };
  void Run();
  Status Timed(const coordinator::JournalRecord& record);

  Executor& strand_;
  metrics::Sink& metrics_;
  const Write write_;
  Status failed_;  ///< the worker's
  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<Entry> queue_;
  bool stopping_ = false;
  std::thread thread_;  ///< last: it uses all of the above
};

}  // namespace weightwire::store
