// Tables: `meta(schema)` holds one row; `journal(id, record)` one blob for each record, encoded by
// wire/journal.h. An append is one INSERT in its own implicit transaction: with synchronous=FULL it
// returns after the write-ahead log was synced.
#include "server/store/sqlite_journal.h"

#include <sqlite3.h>

#include <algorithm>
#include <mutex>
#include <utility>

#include "server/store/append_worker.h"
#include "server/wire/journal.h"

namespace weightwire::store {
namespace {

using coordinator::JournalRecord;

constexpr int kSchema = 1;
// Older records are deleted, this many at a time: a journal stays within some 100 KiB.
constexpr int64_t kRecordsKept = 1024;

struct CloseDatabase {
  void operator()(sqlite3* db) const { sqlite3_close_v2(db); }
};
using Database = std::unique_ptr<sqlite3, CloseDatabase>;

struct FinalizeStatement {
  void operator()(sqlite3_stmt* statement) const { sqlite3_finalize(statement); }
};
using Statement = std::unique_ptr<sqlite3_stmt, FinalizeStatement>;

Status Failed(const std::string& path, const std::string& what) {
  return Status(Code::kUnavailable, Reason::kJournalFailed, "journal " + path + ": " + what)
      .Remedy("check that state_dir exists, is writable, has space and is used by nobody else");
}

Status FailedNow(const std::string& path, sqlite3* db) {
  std::string cause = sqlite3_errmsg(db);
  const int extended = sqlite3_extended_errcode(db);
  return Failed(path, cause + " (sqlite " + std::to_string(extended) + ")");
}

Status Execute(const std::string& path, sqlite3* db, const char* sql) {
  return sqlite3_exec(db, sql, nullptr, nullptr, nullptr) == SQLITE_OK ? OkStatus()
                                                                       : FailedNow(path, db);
}

Result<Statement> Prepare(const std::string& path, sqlite3* db, const char* sql) {
  sqlite3_stmt* statement = nullptr;
  if (sqlite3_prepare_v2(db, sql, -1, &statement, nullptr) != SQLITE_OK) {
    return Fail(FailedNow(path, db));
  }
  return Statement(statement);
}

Status CheckSchema(const std::string& path, sqlite3* db) {
  WW_ASSIGN_OR_STATUS(Statement select, Prepare(path, db, "SELECT schema FROM meta"));
  const int step = sqlite3_step(select.get());
  if (step == SQLITE_DONE) {
    const std::string insert = "INSERT INTO meta(schema) VALUES (" + std::to_string(kSchema) + ")";
    select.reset();
    return Execute(path, db, insert.c_str());
  }
  if (step != SQLITE_ROW) return FailedNow(path, db);
  const int schema = sqlite3_column_int(select.get(), 0);
  if (schema == kSchema) return OkStatus();
  return Failed(
      path, "schema " + std::to_string(schema) + ", this build knows " + std::to_string(kSchema));
}

Result<int64_t> BytesKept(const std::string& path, sqlite3* db) {
  WW_ASSIGN(Statement sum,
            Prepare(path, db, "SELECT COALESCE(SUM(LENGTH(record)), 0) FROM journal"));
  if (sqlite3_step(sum.get()) != SQLITE_ROW) return Fail(FailedNow(path, db));
  return sqlite3_column_int64(sum.get(), 0);
}

Result<Database> OpenDatabase(const std::string& path) {
  sqlite3* raw = nullptr;
  const std::string name = path.empty() ? ":memory:" : path;
  const int flags = SQLITE_OPEN_READWRITE | SQLITE_OPEN_CREATE | SQLITE_OPEN_NOMUTEX;
  const int opened = sqlite3_open_v2(name.c_str(), &raw, flags, nullptr);
  Database db(raw);
  if (raw == nullptr) return Fail(Failed(name, "out of memory"));
  if (opened != SQLITE_OK) return Fail(FailedNow(name, raw));
  // The lock is taken by the first write and never given back: a second process fails here.
  WW_FAIL_IF_ERROR(Execute(name, raw, "PRAGMA locking_mode=EXCLUSIVE"));
  WW_FAIL_IF_ERROR(Execute(name, raw, "PRAGMA journal_mode=WAL"));
  WW_FAIL_IF_ERROR(Execute(name, raw, "PRAGMA synchronous=FULL"));
  WW_FAIL_IF_ERROR(Execute(name, raw,
                           "BEGIN IMMEDIATE;"
                           "CREATE TABLE IF NOT EXISTS meta(schema INTEGER NOT NULL);"
                           "CREATE TABLE IF NOT EXISTS journal("
                           "  id INTEGER PRIMARY KEY AUTOINCREMENT, record BLOB NOT NULL);"
                           "COMMIT"));
  WW_FAIL_IF_ERROR(CheckSchema(name, raw));
  return db;
}

}  // namespace

struct SqliteJournal::Impl {
  Impl(std::string file, int64_t bytes, Database database, Statement statement, Executor& strand,
       metrics::Sink& sink)
      : path(std::move(file)),
        bytes_kept(bytes),
        db(std::move(database)),
        insert(std::move(statement)),
        metrics(sink),
        worker(strand, sink, [this](const JournalRecord& record) { return Write(record); }) {}

  Status Write(const JournalRecord& record) {
    std::lock_guard lock(database_mutex);
    const std::string bytes = wire::EncodeRecord(record);
    sqlite3_bind_blob(insert.get(), 1, bytes.data(), static_cast<int>(bytes.size()),
                      SQLITE_TRANSIENT);
    const int step = sqlite3_step(insert.get());
    Status status = step == SQLITE_DONE ? OkStatus() : FailedNow(path, db.get());
    sqlite3_reset(insert.get());
    if (!status.ok()) return status;
    SetBytes(bytes_kept + static_cast<int64_t>(bytes.size()));
    const int64_t id = sqlite3_last_insert_rowid(db.get());
    Keep(record, id);
    if (id % kRecordsKept == 0) Compact(id);
    return OkStatus();
  }

  void Keep(const JournalRecord& record, int64_t id) {
    if (std::holds_alternative<coordinator::CommitRecord>(record)) commit_id = id;
    if (std::holds_alternative<coordinator::ReserveRecord>(record)) reserve_id = id;
    if (std::holds_alternative<coordinator::DrainRecord>(record)) drain_id = id;
  }

  /// Never the last record of a kind: recovery needs all. What fails here is tried again later;
  /// the record itself is durable.
  void Compact(int64_t id) {
    const int64_t before = std::min({id - kRecordsKept, commit_id, reserve_id, drain_id});
    const Status deleted = Execute(
        path, db.get(), ("DELETE FROM journal WHERE id < " + std::to_string(before)).c_str());
    if (!deleted.ok()) return;
    if (auto bytes = BytesKept(path, db.get())) SetBytes(*bytes);
  }

  void SetBytes(int64_t bytes) {
    bytes_kept = bytes;
    metrics.Set("journal_bytes", static_cast<double>(bytes));
  }

  const std::string path;
  int64_t bytes_kept = 0;  ///< in records
  // The last record of each kind. Before there was one: of these two nothing is deleted, drains are
  // rare and may never come.
  int64_t commit_id = 0;
  int64_t reserve_id = 0;
  int64_t drain_id = INT64_MAX;
  std::mutex database_mutex;
  Database db;
  Statement insert;
  metrics::Sink& metrics;
  AppendWorker worker;  ///< last: it uses all of the above
};

SqliteJournal::SqliteJournal(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
SqliteJournal::~SqliteJournal() = default;

Result<std::unique_ptr<SqliteJournal>> SqliteJournal::Open(const std::string& path,
                                                           Executor& strand,
                                                           metrics::Sink& metrics) {
  WW_ASSIGN(Database db, OpenDatabase(path));
  WW_ASSIGN(Statement insert, Prepare(path, db.get(), "INSERT INTO journal(record) VALUES (?)"));
  WW_ASSIGN(int64_t bytes, BytesKept(path, db.get()));
  metrics.Set("journal_bytes", static_cast<double>(bytes));
  return std::unique_ptr<SqliteJournal>(new SqliteJournal(std::make_unique<Impl>(
      path.empty() ? ":memory:" : path, bytes, std::move(db), std::move(insert), strand, metrics)));
}

void SqliteJournal::Append(JournalRecord record, std::function<void(Status)> done) {
  impl_->worker.Append(std::move(record), std::move(done));
}

Result<std::vector<JournalRecord>> SqliteJournal::Read() {
  std::lock_guard lock(impl_->database_mutex);
  WW_ASSIGN(Statement select,
            Prepare(impl_->path, impl_->db.get(), "SELECT id, record FROM journal ORDER BY id"));
  std::vector<JournalRecord> out;
  int step;
  while ((step = sqlite3_step(select.get())) == SQLITE_ROW) {
    const auto* bytes = static_cast<const char*>(sqlite3_column_blob(select.get(), 1));
    const auto size = static_cast<size_t>(sqlite3_column_bytes(select.get(), 1));
    auto record = wire::DecodeRecord({bytes, bytes == nullptr ? 0 : size});
    if (!record) {
      return Fail(Code::kDataLoss, Reason::kJournalFailed,
                  "journal " + impl_->path + ": row " +
                      std::to_string(sqlite3_column_int64(select.get(), 0)) + ": " +
                      record.error().message());
    }
    impl_->Keep(*record, sqlite3_column_int64(select.get(), 0));
    out.push_back(std::move(*record));
  }
  if (step != SQLITE_DONE) return Fail(FailedNow(impl_->path, impl_->db.get()));
  return out;
}

}  // namespace weightwire::store
