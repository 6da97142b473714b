#include "server/store/sqlite_journal.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sqlite3.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <optional>
#include <set>

#include "server/base/thread_executor.h"

namespace weightwire::store {
namespace {

using coordinator::CommitRecord;
using coordinator::DrainRecord;
using coordinator::JournalRecord;
using coordinator::ReserveRecord;

std::vector<JournalRecord> SomeRecords() {
  return {ReserveRecord{Epoch(1'024)}, CommitRecord{Epoch(1), Version(10), {"engine-a"}},
          CommitRecord{Epoch(3), Version(12), {"engine-a", "engine-b"}}};
}

class SqliteJournalTest : public ::testing::Test {
 protected:
  void SetUp() override {
    char pattern[] = "/tmp/weightwire-store-XXXXXX";
    directory_ = mkdtemp(pattern);
    path_ = directory_ + "/journal.sqlite";
  }
  void TearDown() override {
    chmod(directory_.c_str(), 0700);
    std::filesystem::remove_all(directory_);
  }

  std::unique_ptr<SqliteJournal> Open() {
    auto journal = SqliteJournal::Open(path_, Strand(), metrics::Null());
    EXPECT_TRUE(journal) << journal.error().ToString();
    return std::move(*journal);
  }

  /// Appends and waits for the answer.
  Status Append(SqliteJournal& journal, JournalRecord record) {
    std::mutex mutex;
    std::condition_variable answered;
    std::optional<Status> out;
    journal.Append(std::move(record), [&](Status status) {
      std::lock_guard lock(mutex);
      out = std::move(status);
      answered.notify_all();
    });
    std::unique_lock lock(mutex);
    answered.wait(lock, [&] { return out.has_value(); });
    return *out;
  }

  void Execute(const std::string& sql) {
    sqlite3* db = nullptr;
    ASSERT_EQ(sqlite3_open(path_.c_str(), &db), SQLITE_OK);
    EXPECT_EQ(sqlite3_exec(db, sql.c_str(), nullptr, nullptr, nullptr), SQLITE_OK)
        << sqlite3_errmsg(db);
    sqlite3_close(db);
  }

  /// Another process, killed as soon as all of them are durable.
  void AppendSomeRecordsAndDie() {
    const pid_t child = fork();
    if (child == 0) {
      ThreadExecutor strand("strand", 1);
      auto journal = SqliteJournal::Open(path_, strand, metrics::Null());
      std::atomic<int> durable = 0;
      for (const auto& record : SomeRecords()) {
        (*journal)->Append(record, [&](Status status) {
          if (!status.ok()) _exit(1);
          if (++durable == 3) kill(getpid(), SIGKILL);
        });
      }
      pause();
    }
    int how = 0;
    waitpid(child, &how, 0);
    ASSERT_TRUE(WIFSIGNALED(how));
  }

  /// Made when it is wanted: a child of fork() has no other threads, but the locks that they held.
  ThreadExecutor& Strand() {
    if (!strand_) strand_.emplace("strand", 1);
    return *strand_;
  }

  std::optional<ThreadExecutor> strand_;
  std::string directory_;
  std::string path_;
};

TEST_F(SqliteJournalTest, GivesBackWhatWasAppendedInOrder) {
  for (const auto& record : SomeRecords()) EXPECT_TRUE(Append(*Open(), record).ok());
  EXPECT_EQ(Open()->Read(), SomeRecords());
}

TEST_F(SqliteJournalTest, InMemoryForgets) {
  path_.clear();
  auto journal = Open();
  EXPECT_TRUE(Append(*journal, SomeRecords()[0]).ok());
  EXPECT_EQ(journal->Read()->size(), 1u);
  EXPECT_TRUE(Open()->Read()->empty());
}

TEST_F(SqliteJournalTest, AnswersInTheOrderOfTheCallsOnTheStrand) {
  auto journal = Open();
  std::vector<int> order;
  for (int i = 0; i < 50; ++i) {
    journal->Append(ReserveRecord{Epoch(i)}, [&order, i](Status status) {
      EXPECT_TRUE(status.ok());
      order.push_back(i);  // unguarded: only the strand runs this
    });
  }
  EXPECT_TRUE(Append(*journal, ReserveRecord{Epoch(50)}).ok());
  ASSERT_EQ(order.size(), 50u);
  for (int i = 0; i < 50; ++i) EXPECT_EQ(order[i], i);
}

TEST_F(SqliteJournalTest, DestructionWritesWhatWasAppended) {
  {
    auto journal = Open();
    for (const auto& record : SomeRecords()) journal->Append(record, [](Status) {});
  }
  EXPECT_EQ(Open()->Read(), SomeRecords());
}

TEST_F(SqliteJournalTest, SurvivesKillOfTheProcess) {
  AppendSomeRecordsAndDie();
  EXPECT_EQ(Open()->Read(), SomeRecords());
}

TEST_F(SqliteJournalTest, ForgetsOldRecordsButNeverTheLastOfAKind) {
  path_.clear();
  auto journal = Open();
  for (const uint64_t epoch : {1u, 2u}) {
    EXPECT_TRUE(Append(*journal, CommitRecord{Epoch(epoch), Version(epoch), {"engine-a"}}).ok());
  }
  for (uint64_t i = 1; i <= 4'000; ++i) journal->Append(ReserveRecord{Epoch(i)}, [](Status) {});
  EXPECT_TRUE(Append(*journal, ReserveRecord{Epoch(4'001)}).ok());
  auto records = journal->Read();
  ASSERT_TRUE(records);
  // The last commit is the oldest that counts, so nothing behind it goes.
  EXPECT_EQ(records->size(), 4'002u);
  EXPECT_EQ(std::get<CommitRecord>(records->front()).epoch, Epoch(2));
  for (uint64_t i = 3; i <= 3'000; ++i) {
    journal->Append(CommitRecord{Epoch(i), Version(i), {"engine-a"}}, [](Status) {});
    if (i % 500 == 0) journal->Append(ReserveRecord{Epoch(4'000 + i)}, [](Status) {});
  }
  EXPECT_TRUE(Append(*journal, ReserveRecord{Epoch(8'000)}).ok());
  records = journal->Read();
  ASSERT_TRUE(records);
  EXPECT_LE(records->size(), 2 * 1'024u);
  EXPECT_GE(records->size(), 1'024u);
  EXPECT_EQ(std::get<CommitRecord>((*records)[records->size() - 3]).epoch, Epoch(3'000));
  EXPECT_EQ(records->back(), JournalRecord(ReserveRecord{Epoch(8'000)}));
}

TEST_F(SqliteJournalTest, WhoWasDrainedInAnEarlierLifeIsNeverForgotten) {
  const JournalRecord drain = DrainRecord{{{"engine-a", Incarnation(7)}}};
  EXPECT_TRUE(Append(*Open(), drain).ok());
  auto journal = Open();
  ASSERT_TRUE(journal->Read());
  for (uint64_t i = 1; i <= 1'024; ++i) {
    journal->Append(CommitRecord{Epoch(i), Version(i), {"engine-a"}}, [](Status) {});
    journal->Append(ReserveRecord{Epoch(i)}, [](Status) {});
  }
  EXPECT_TRUE(Append(*journal, ReserveRecord{Epoch(2'000)}).ok());
  EXPECT_EQ(journal->Read()->front(), drain);
}

/// A machine that stopped in the middle of a write: the log ends anywhere, or its end is garbage.
TEST_F(SqliteJournalTest, ATornTailLosesAtMostTheLastRecords) {
  const std::string log = path_ + "-wal";
  AppendSomeRecordsAndDie();
  const std::string kept = directory_ + "-kept";
  std::filesystem::copy(directory_, kept);
  const auto size = static_cast<int64_t>(std::filesystem::file_size(log));
  ASSERT_GT(size, 3 * 4'096) << "the records are still in the log";
  std::set<size_t> survivors;
  for (int64_t cut = size; cut >= 0; cut -= 1'999) {
    for (const bool garbage : {false, true}) {
      SCOPED_TRACE((garbage ? "garbage from byte " : "cut at byte ") + std::to_string(cut));
      for (const auto& file : std::filesystem::directory_iterator(kept)) {
        std::filesystem::copy(file, std::filesystem::path(directory_) / file.path().filename(),
                              std::filesystem::copy_options::overwrite_existing);
      }
      std::filesystem::resize_file(log, static_cast<uintmax_t>(cut));
      if (garbage)
        std::ofstream(log, std::ios::app | std::ios::binary)
            << std::string(static_cast<size_t>(size - cut), '\xa5');
      std::vector<JournalRecord> expected = SomeRecords();
      const auto records = Open()->Read();
      ASSERT_TRUE(records) << records.error().ToString();
      ASSERT_LE(records->size(), expected.size());
      expected.resize(records->size());
      EXPECT_EQ(*records, expected);
      EXPECT_TRUE(Append(*Open(), ReserveRecord{Epoch(5'000)}).ok());
      survivors.insert(records->size());
    }
  }
  std::filesystem::remove_all(kept);
  EXPECT_EQ(survivors, (std::set<size_t>{0, 1, 2, 3}));
}

TEST_F(SqliteJournalTest, RefusesASecondOwner) {
  auto first = Open();
  // Another connection of the same process would share SQLite's locks only under shared cache.
  auto second = SqliteJournal::Open(path_, Strand(), metrics::Null());
  ASSERT_FALSE(second);
  EXPECT_EQ(second.error().reason(), Reason::kJournalFailed);
  EXPECT_NE(second.error().message().find(path_), std::string::npos);
}

TEST_F(SqliteJournalTest, RefusesAnUnknownSchema) {
  Open();
  Execute("UPDATE meta SET schema = 99");
  auto journal = SqliteJournal::Open(path_, Strand(), metrics::Null());
  ASSERT_FALSE(journal);
  EXPECT_NE(journal.error().message().find("schema 99"), std::string::npos);
}

TEST_F(SqliteJournalTest, NamesARowThatDoesNotDecode) {
  EXPECT_TRUE(Append(*Open(), SomeRecords()[0]).ok());
  Execute("UPDATE journal SET record = x'00'");
  auto records = Open()->Read();
  ASSERT_FALSE(records);
  EXPECT_EQ(records.error().code(), Code::kDataLoss);
  EXPECT_NE(records.error().message().find("row 1"), std::string::npos);
}

TEST_F(SqliteJournalTest, RefusesAFileThatIsNoDatabase) {
  { std::ofstream(path_) << "this is no database, but it is long enough to look at"; }
  EXPECT_FALSE(SqliteJournal::Open(path_, Strand(), metrics::Null()));
}

TEST_F(SqliteJournalTest, RefusesADirectoryThatIsAbsent) {
  auto journal = SqliteJournal::Open(directory_ + "/absent/journal", Strand(), metrics::Null());
  ASSERT_FALSE(journal);
  EXPECT_EQ(journal.error().reason(), Reason::kJournalFailed);
}

TEST_F(SqliteJournalTest, RefusesAReadOnlyFile) {
  Open();
  ASSERT_EQ(chmod(path_.c_str(), 0444), 0);
  ASSERT_EQ(chmod(directory_.c_str(), 0555), 0);
  const bool root = geteuid() == 0;  // may write everywhere, so it becomes somebody else
  ASSERT_EQ(root ? seteuid(65534) : 0, 0);
  auto journal = SqliteJournal::Open(path_, Strand(), metrics::Null());
  ASSERT_EQ(root ? seteuid(0) : 0, 0);
  ASSERT_FALSE(journal);
  EXPECT_EQ(journal.error().reason(), Reason::kJournalFailed);
}

/// A full disk, as far as a process can make one for itself: no file may grow beyond the limit.
TEST_F(SqliteJournalTest, FailsForGoodWhenTheDiskIsFull) {
  auto journal = Open();
  ASSERT_TRUE(Append(*journal, ReserveRecord{Epoch(1)}).ok());
  rlimit before{};
  getrlimit(RLIMIT_FSIZE, &before);
  signal(SIGXFSZ, SIG_IGN);
  rlimit full = before;
  full.rlim_cur = 64 << 10;
  setrlimit(RLIMIT_FSIZE, &full);
  const JournalRecord large = CommitRecord{Epoch(2), Version(2), {std::string(256 << 10, 'e')}};
  const Status status = Append(*journal, large);
  setrlimit(RLIMIT_FSIZE, &before);
  EXPECT_EQ(status.reason(), Reason::kJournalFailed);
  // Space is back, but a record after a lost one would be a lie.
  EXPECT_EQ(Append(*journal, ReserveRecord{Epoch(3)}).reason(), Reason::kJournalFailed);
  journal.reset();
  EXPECT_EQ(Open()->Read(), (std::vector<JournalRecord>{ReserveRecord{Epoch(1)}}));
}

}  // namespace
}  // namespace weightwire::store
