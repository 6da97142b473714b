#pragma once

#include <memory>
#include <string>

#include "server/base/executor.h"
#include "server/coordinator/journal.h"
#include "server/metrics/metrics.h"

namespace weightwire::store {

/// The journal in one SQLite file: write-ahead log, synchronous=FULL, one row for each record with
/// an id that only rises. One process at a time: the file, and one beside it that says who has it
/// (".lock"), are locked as long as the journal lives.
///
/// Appends are those of an AppendWorker: a full disk or an I/O error may pass, a damaged file does
/// not. All but the last 256 to 319 records are deleted, never the last of a kind; of an older
/// journal, which kept more, some at a time. Sets journal_bytes.
class SqliteJournal final : public coordinator::Journal {
 public:
  /// `path` empty: in memory, for tests and throw-away fleets; nothing survives the process.
  /// `strand` and `metrics` outlive the journal.
  ///   kUnavailable / kJournalFailed  cannot open, lock or write the file; names path and cause
  ///   kDataLoss / kJournalFailed     it is damaged or of an unknown schema
  static Result<std::unique_ptr<SqliteJournal>> Open(const std::string& path, Executor& strand,
                                                     metrics::Sink& metrics);
  /// Appends under way end first; their answers still reach the strand.
  ~SqliteJournal() override;

  void Append(coordinator::JournalRecord record, std::function<void(Status)> done) override;
  void OnHindered(std::function<void(Status)> tell) override;
  /// Reads no more than three rows whole, however many there are.
  ///   kDataLoss / kJournalFailed  a row does not decode: names its id
  Result<std::vector<coordinator::JournalRecord>> Read() override;

 private:
  struct Impl;
  explicit SqliteJournal(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace weightwire::store
