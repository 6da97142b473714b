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
#include <future>
#include <mutex>
#include <optional>
#include <set>

#include "server/base/thread_executor.h"

namespace weightwire::store {
namespace {

using coordinator::CommitRecord;
using coordinator::DrainRecord;
using coordinator::EngineSum;
using coordinator::JournalRecord;
using coordinator::kRecordBytesMax;
using coordinator::ReserveRecord;

/// One of each kind.
std::vector<JournalRecord> SomeRecords() {
  return {ReserveRecord{Epoch(1'024)}, DrainRecord{{{"engine-a", Incarnation(7)}}},
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

  int Rows() {
    sqlite3* db = nullptr;
    int rows = -1;
    EXPECT_EQ(sqlite3_open(path_.c_str(), &db), SQLITE_OK);
    sqlite3_exec(
        db, "SELECT COUNT(*) FROM journal",
        [](void* out, int, char** values, char**) {
          *static_cast<int*>(out) = std::atoi(values[0]);
          return 0;
        },
        &rows, nullptr);
    sqlite3_close(db);
    return rows;
  }

  /// A record with its checksum, as every version writes it.
  static std::string Sealed(std::string body) {
    uint64_t hash = 0xcbf29ce484222325;
    for (const char c : body) hash = (hash ^ static_cast<uint8_t>(c)) * 0x100000001b3;
    const auto sum = static_cast<uint32_t>(hash ^ (hash >> 32));
    for (int i = 0; i < 4; ++i) body.push_back(static_cast<char>(sum >> (8 * i)));
    return body;
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

TEST_F(SqliteJournalTest, GivesBackTheNewestOfEachKindInOrder) {
  for (const auto& record : {JournalRecord(CommitRecord{Epoch(1), Version(10), {"engine-a"}}),
                             JournalRecord(ReserveRecord{Epoch(512)})}) {
    EXPECT_TRUE(Append(*Open(), record).ok());
  }
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
  {
    auto journal = Open();
    for (const auto& record : SomeRecords()) EXPECT_TRUE(Append(*journal, record).ok());
  }
  auto journal = Open();
  for (uint64_t i = 1; i <= 2'000; ++i) journal->Append(ReserveRecord{Epoch(i)}, [](Status) {});
  EXPECT_TRUE(Append(*journal, ReserveRecord{Epoch(4'000)}).ok());
  EXPECT_EQ(journal->Read(), (std::vector<JournalRecord>{SomeRecords()[1], SomeRecords()[2],
                                                         ReserveRecord{Epoch(4'000)}}));
  journal.reset();
  EXPECT_LE(Rows(), 256 + 64 + 2) << "neither holds back what is older than it";
  EXPECT_GE(Rows(), 256);
}

/// What earlier versions left: up to 2,047 commits that name their engines.
TEST_F(SqliteJournalTest, ReadsAHugeJournalOfAnEarlierVersionAtOnceAndClearsItAway) {
  Open();
  constexpr int kEngines = 10'000, kCommits = 100;
  std::string body("\x01\x01", 2);
  const auto number = [](uint64_t value, int bytes) {
    std::string out;
    for (int i = 0; i < bytes; ++i) out.push_back(static_cast<char>(value >> (8 * i)));
    return out;
  };
  std::string engines = number(kEngines, 4);
  EngineSum sum;
  for (int i = 0; i < kEngines; ++i) {
    std::string name = std::to_string(i);
    name.insert(0, 64 - name.size(), 'e');
    engines += number(name.size(), 4) + name;
    sum.Add(name);
  }
  sqlite3* db = nullptr;
  ASSERT_EQ(sqlite3_open(path_.c_str(), &db), SQLITE_OK);
  sqlite3_exec(db, "BEGIN", nullptr, nullptr, nullptr);
  sqlite3_stmt* insert = nullptr;
  sqlite3_prepare_v2(db, "INSERT INTO journal(record) VALUES (?)", -1, &insert, nullptr);
  for (uint64_t epoch = 1; epoch <= kCommits; ++epoch) {
    const std::string bytes = Sealed(body + number(epoch, 8) + number(epoch + 7, 8) + engines);
    sqlite3_bind_blob(insert, 1, bytes.data(), static_cast<int>(bytes.size()), SQLITE_TRANSIENT);
    ASSERT_EQ(sqlite3_step(insert), SQLITE_DONE);
    sqlite3_reset(insert);
  }
  sqlite3_finalize(insert);
  sqlite3_exec(db, "COMMIT", nullptr, nullptr, nullptr);
  sqlite3_close(db);
  auto journal = Open();
  CommitRecord newest{Epoch(kCommits), Version(kCommits + 7), {}};
  newest.engines = sum;
  EXPECT_EQ(journal->Read(), std::vector<JournalRecord>{newest});
  for (uint64_t i = 1; i <= 512; ++i) journal->Append(ReserveRecord{Epoch(i)}, [](Status) {});
  EXPECT_TRUE(Append(*journal, DrainRecord{}).ok());
  EXPECT_EQ(journal->Read()->front(), JournalRecord(newest));
  journal.reset();
  EXPECT_LE(Rows(), 256 + 64 + 1);
}

TEST_F(SqliteJournalTest, ARecordOverTheLimitIsRefusedAndHarmsNothing) {
  auto journal = Open();
  ASSERT_TRUE(Append(*journal, SomeRecords()[0]).ok());
  const Status refused =
      Append(*journal, DrainRecord{{{std::string(kRecordBytesMax, 'e'), Incarnation(7)}}});
  EXPECT_EQ(refused.reason(), Reason::kMessageTooLarge) << refused.ToString();
  EXPECT_TRUE(Append(*journal, SomeRecords()[2]).ok());
  EXPECT_EQ(journal->Read(), (std::vector<JournalRecord>{SomeRecords()[0], SomeRecords()[2]}));
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
  const std::string own = "process " + std::to_string(getpid()) + " on host ";
  EXPECT_NE(second.error().message().find(own), std::string::npos) << second.error().ToString();
  first.reset();
  Open();
}

TEST_F(SqliteJournalTest, ALockOfAProcessThatWasKilledHindersNobody) {
  AppendSomeRecordsAndDie();
  ASSERT_TRUE(std::filesystem::exists(path_ + ".lock"));
  EXPECT_EQ(Open()->Read(), SomeRecords());
}

TEST_F(SqliteJournalTest, ADamagedFileIsNoFailureThatPasses) {
  {
    auto journal = Open();
    for (uint64_t i = 1; i <= 200; ++i) journal->Append(ReserveRecord{Epoch(i)}, [](Status) {});
    ASSERT_TRUE(Append(*journal, SomeRecords()[2]).ok());
  }
  {
    std::fstream file(path_, std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(4'096);
    file << std::string(8'192, '\xa5');
  }
  auto journal = SqliteJournal::Open(path_, Strand(), metrics::Null());
  ASSERT_FALSE(journal);
  EXPECT_EQ(journal.error().code(), Code::kDataLoss) << journal.error().ToString();
  EXPECT_NE(journal.error().remedy().find("another state_dir"), std::string::npos);
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
class FullDisk {
 public:
  explicit FullDisk(rlim_t bytes) {
    getrlimit(RLIMIT_FSIZE, &before_);
    signal(SIGXFSZ, SIG_IGN);
    rlimit full = before_;
    full.rlim_cur = bytes;
    setrlimit(RLIMIT_FSIZE, &full);
  }
  ~FullDisk() { setrlimit(RLIMIT_FSIZE, &before_); }

 private:
  rlimit before_{};
};
const JournalRecord kLarge = DrainRecord{{{std::string(256 << 10, 'e'), Incarnation(7)}}};

TEST_F(SqliteJournalTest, GoesOnByItselfWhenTheDiskHasSpaceAgain) {
  auto journal = Open();
  ASSERT_TRUE(Append(*journal, ReserveRecord{Epoch(1)}).ok());
  std::promise<Status> hindered, relieved, large;
  journal->OnHindered([&](const Status& why) { (why.ok() ? relieved : hindered).set_value(why); });
  std::optional<FullDisk> full(64 << 10);
  std::atomic<bool> answered = false;
  journal->Append(kLarge, [&](const Status& status) {
    answered = true;
    large.set_value(status);
  });
  const Status why = hindered.get_future().get();
  EXPECT_EQ(why.code(), Code::kUnavailable);
  EXPECT_EQ(why.reason(), Reason::kJournalFailed);
  EXPECT_NE(why.ToString().find("free space"), std::string::npos) << why.ToString();
  EXPECT_FALSE(answered) << "its fate is open";
  full.reset();
  EXPECT_TRUE(relieved.get_future().get().ok());
  EXPECT_TRUE(large.get_future().get().ok());
  EXPECT_TRUE(Append(*journal, ReserveRecord{Epoch(3)}).ok());
  journal.reset();
  EXPECT_EQ(Open()->Read(), (std::vector<JournalRecord>{kLarge, ReserveRecord{Epoch(3)}}));
  EXPECT_EQ(Rows(), 3) << "the append that was made again is there once";
}

TEST_F(SqliteJournalTest, DestructionDoesNotWaitForAFullDisk) {
  auto journal = Open();
  ASSERT_TRUE(Append(*journal, ReserveRecord{Epoch(1)}).ok());
  std::promise<Status> hindered, large;
  journal->OnHindered([&](const Status& why) { hindered.set_value(why); });
  std::optional<FullDisk> full(64 << 10);
  journal->Append(kLarge, [&](const Status& status) { large.set_value(status); });
  hindered.get_future().wait();
  journal.reset();
  EXPECT_EQ(large.get_future().get().reason(), Reason::kJournalFailed);
  full.reset();
  EXPECT_EQ(Open()->Read(), (std::vector<JournalRecord>{ReserveRecord{Epoch(1)}}));
}

}  // namespace
}  // namespace weightwire::store
