// Tables: `meta(schema)` holds one row; `journal(id, record)` one blob for each record, encoded by
// wire/journal.h. An append is one INSERT in its own implicit transaction: with synchronous=FULL it
// returns after the write-ahead log was synced. It names the row's id and replaces what is there,
// so that an append of unknown fate can be made again.
#include "server/store/sqlite_journal.h"

#include <sqlite3.h>

#include <algorithm>
#include <array>
#include <mutex>
#include <optional>
#include <set>
#include <utility>
#include <variant>

#include "server/store/append_worker.h"
#include "server/store/file_lock.h"
#include "server/wire/journal.h"

namespace weightwire::store {
namespace {

using coordinator::JournalRecord;

constexpr int kSchema = 1;
// Older records are deleted, now and then at most so many: a journal stays within some 20 KiB, and
// one that an earlier version left with gigabytes holds up no append for long.
constexpr int64_t kRecordsKept = 256;
constexpr int64_t kBetweenDeletions = 64;
constexpr int64_t kDeletedAtOnce = 128;

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

Status Damaged(const std::string& path, const std::string& what) {
  return Status(Code::kDataLoss, Reason::kJournalFailed, "journal " + path + ": " + what)
      .Remedy(
          "put a copy of the file back, or start with another state_dir, where every rank "
          "begins anew");
}

/// Whether it may pass by itself (kUnavailable) or not.
Status FailedNow(const std::string& path, sqlite3* db) {
  const int extended = sqlite3_extended_errcode(db);
  const std::string cause =
      std::string(sqlite3_errmsg(db)) + " (sqlite " + std::to_string(extended) + ")";
  const Status failed = Failed(path, cause);
  switch (extended & 0xff) {
    case SQLITE_FULL:
    case SQLITE_IOERR:
      return Status(failed).Remedy("free space on the disk of state_dir, or repair it");
    case SQLITE_BUSY:
    case SQLITE_LOCKED:
    case SQLITE_NOMEM:
    case SQLITE_CANTOPEN:
      return failed;
    case SQLITE_PERM:
    case SQLITE_READONLY:
    case SQLITE_AUTH:
      return Status(Code::kPermissionDenied, failed.reason(), failed.message())
          .Remedy("let this user write state_dir, and start it again");
    default:
      return Damaged(path, cause);
  }
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
  return Damaged(
      path, "schema " + std::to_string(schema) + ", this build knows " + std::to_string(kSchema));
}

Result<int64_t> BytesKept(const std::string& path, sqlite3* db) {
  WW_ASSIGN(Statement sum,
            Prepare(path, db, "SELECT COALESCE(SUM(LENGTH(record)), 0) FROM journal"));
  if (sqlite3_step(sum.get()) != SQLITE_ROW) return Fail(FailedNow(path, db));
  return sqlite3_column_int64(sum.get(), 0);
}

/// Of the newest record of each kind; 0: there is none.
struct Newest {
  std::array<int64_t, std::variant_size_v<JournalRecord>> ids{};
  int64_t last = 0;

  bool complete() const { return std::find(ids.begin(), ids.end(), int64_t{0}) == ids.end(); }
};

struct CloseBlob {
  void operator()(sqlite3_blob* blob) const { sqlite3_blob_close(blob); }
};

/// Reads the heads of records from the newest one back, never a whole one. One of no known kind is
/// refused: it may be the decision that counts.
Result<Newest> FindNewest(const std::string& path, sqlite3* db) {
  WW_ASSIGN(Statement ids, Prepare(path, db, "SELECT id FROM journal ORDER BY id DESC"));
  Newest newest;
  std::unique_ptr<sqlite3_blob, CloseBlob> blob;
  int step;
  while ((step = sqlite3_step(ids.get())) == SQLITE_ROW) {
    const int64_t id = sqlite3_column_int64(ids.get(), 0);
    if (newest.last == 0) newest.last = id;
    if (newest.complete()) return newest;
    int opened;
    if (blob == nullptr) {
      sqlite3_blob* raw = nullptr;
      opened = sqlite3_blob_open(db, "main", "journal", "record", id, /*flags=*/0, &raw);
      blob.reset(raw);
    } else {
      opened = sqlite3_blob_reopen(blob.get(), id);
    }
    char head[wire::kHeadBytes] = {};
    const bool whole = opened == SQLITE_OK && sqlite3_blob_bytes(blob.get()) >= int{sizeof(head)};
    if (opened != SQLITE_OK ||
        (whole && sqlite3_blob_read(blob.get(), head, sizeof(head), 0) != SQLITE_OK)) {
      return Fail(FailedNow(path, db));
    }
    const auto kind = whole ? wire::KindOf({head, sizeof(head)}) : std::nullopt;
    if (!kind) {
      newest.ids.fill(id);  // Read says what is wrong with it
      return newest;
    }
    if (newest.ids[*kind] == 0) newest.ids[*kind] = id;
  }
  if (step != SQLITE_DONE) return Fail(FailedNow(path, db));
  return newest;
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
  Impl(std::string file, FileLock file_lock, int64_t bytes, Newest found, Database database,
       Statement statement, Executor& strand, metrics::Sink& sink)
      : path(std::move(file)),
        lock(std::move(file_lock)),
        bytes_kept(bytes),
        newest(found),
        db(std::move(database)),
        insert(std::move(statement)),
        metrics(sink),
        worker(strand, sink, [this](const JournalRecord& record, const std::string& encoded) {
          return Write(record, encoded);
        }) {}

  Status Write(const JournalRecord& record, const std::string& bytes) {
    std::lock_guard guard(database_mutex);
    const int64_t id = newest.last + 1;
    sqlite3_bind_int64(insert.get(), 1, id);
    sqlite3_bind_blob(insert.get(), 2, bytes.data(), static_cast<int>(bytes.size()),
                      SQLITE_TRANSIENT);
    const int step = sqlite3_step(insert.get());
    Status status = step == SQLITE_DONE ? OkStatus() : FailedNow(path, db.get());
    sqlite3_reset(insert.get());
    if (!status.ok()) return status;
    SetBytes(bytes_kept + static_cast<int64_t>(bytes.size()));
    newest.ids[record.index()] = newest.last = id;
    if (id % kBetweenDeletions == 0) DeleteOld();
    return OkStatus();
  }

  /// Never the last record of a kind: recovery needs all. What fails here is tried again later;
  /// the record itself is durable.
  void DeleteOld() {
    std::string kept = "0";
    for (const int64_t id : newest.ids) kept.append(",").append(std::to_string(id));
    const Status deleted =
        Execute(path, db.get(),
                ("DELETE FROM journal WHERE id IN (SELECT id FROM journal WHERE id <= " +
                 std::to_string(newest.last - kRecordsKept) + " AND id NOT IN (" + kept +
                 ") ORDER BY id LIMIT " + std::to_string(kDeletedAtOnce) + ")")
                    .c_str());
    if (!deleted.ok()) return;
    if (auto bytes = BytesKept(path, db.get())) SetBytes(*bytes);
  }

  void SetBytes(int64_t bytes) {
    bytes_kept = bytes;
    metrics.Set("journal_bytes", static_cast<double>(bytes));
  }

  const std::string path;
  const FileLock lock;
  int64_t bytes_kept = 0;  ///< in records
  Newest newest;
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
  FileLock lock;
  if (!path.empty()) {
    WW_ASSIGN(lock, FileLock::Take(path + ".lock"));
  }
  WW_ASSIGN(Database db, OpenDatabase(path));
  WW_ASSIGN(Statement insert,
            Prepare(path, db.get(), "INSERT OR REPLACE INTO journal(id, record) VALUES (?, ?)"));
  WW_ASSIGN(const Newest newest, FindNewest(path, db.get()));
  WW_ASSIGN(int64_t bytes, BytesKept(path, db.get()));
  metrics.Set("journal_bytes", static_cast<double>(bytes));
  return std::unique_ptr<SqliteJournal>(new SqliteJournal(
      std::make_unique<Impl>(path.empty() ? ":memory:" : path, std::move(lock), bytes, newest,
                             std::move(db), std::move(insert), strand, metrics)));
}

void SqliteJournal::Append(JournalRecord record, std::function<void(Status)> done) {
  impl_->worker.Append(std::move(record), std::move(done));
}

void SqliteJournal::OnHindered(std::function<void(Status)> tell) {
  impl_->worker.OnHindered(std::move(tell));
}

Result<std::vector<JournalRecord>> SqliteJournal::Read() {
  std::lock_guard lock(impl_->database_mutex);
  WW_ASSIGN(Statement select,
            Prepare(impl_->path, impl_->db.get(), "SELECT record FROM journal WHERE id = ?"));
  const auto& ids = impl_->newest.ids;
  std::vector<JournalRecord> out;
  for (const int64_t id : std::set<int64_t>(ids.begin(), ids.end())) {
    if (id == 0) continue;
    sqlite3_reset(select.get());
    sqlite3_bind_int64(select.get(), 1, id);
    if (sqlite3_step(select.get()) != SQLITE_ROW) {
      return Fail(FailedNow(impl_->path, impl_->db.get()));
    }
    const auto* bytes = static_cast<const char*>(sqlite3_column_blob(select.get(), 0));
    const auto size = static_cast<size_t>(sqlite3_column_bytes(select.get(), 0));
    auto record = wire::DecodeRecord({bytes, bytes == nullptr ? 0 : size});
    if (!record) {
      const Status& why = record.error();
      return Fail(
          Status(Code::kDataLoss, Reason::kJournalFailed,
                 "journal " + impl_->path + ": row " + std::to_string(id) + ": " + why.message())
              .Remedy(why.remedy().empty() ? Damaged("", "").remedy() : why.remedy()));
    }
    out.push_back(std::move(*record));
  }
  return out;
}

}  // namespace weightwire::store
