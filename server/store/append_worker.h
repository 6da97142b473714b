#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <string>
#include <thread>

#include "server/base/clock.h"
#include "server/base/executor.h"
#include "server/base/status.h"
#include "server/coordinator/journal.h"
#include "server/metrics/metrics.h"

namespace weightwire::store {

/// Makes records durable one after another on a thread of its own and answers on the strand. What
/// may pass is waited for: the same write is asked for again, with a pause that grows to 1 s. After
/// any other failure every later append fails too, so that no record can follow a lost one; only a
/// new process, which reads what is durable, may go on. Observes journal_fsync_seconds.
class AppendWorker {
 public:
  /// OK: the record, whose `bytes` these are, survives any crash. kUnavailable: it may do so later;
  /// whether it does already is not known. The same record twice in a row is as once. Runs on the
  /// worker's thread.
  using Write =
      std::function<Status(const coordinator::JournalRecord& record, const std::string& bytes)>;

  /// `strand` and `metrics` outlive it.
  AppendWorker(Executor& strand, metrics::Sink& metrics, Write write);
  /// Appends under way end first, but for those that wait for something to pass: these fail. Their
  /// answers still reach the strand.
  ~AppendWorker();
  AppendWorker(const AppendWorker&) = delete;
  AppendWorker& operator=(const AppendWorker&) = delete;

  void Append(coordinator::JournalRecord record, std::function<void(Status)> done);
  /// As Journal::OnHindered.
  void OnHindered(std::function<void(Status)> tell);

 private:
  struct Entry {
    coordinator::JournalRecord record;
    std::function<void(Status)> done;
  };
  void Run();
  Status Carry(const coordinator::JournalRecord& record);
  Status Timed(const coordinator::JournalRecord& record, const std::string& bytes);
  void Tell(const Status& why);
  /// False: no time is left to wait.
  bool Pause(Nanos pause);

  Executor& strand_;
  metrics::Sink& metrics_;
  const Write write_;
  Status failed_;  ///< the worker's
  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<Entry> queue_;
  std::function<void(Status)> tell_;
  bool stopping_ = false;
  std::thread thread_;  ///< last: it uses all of the above
};

}  // namespace weightwire::store
