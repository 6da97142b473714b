// Against the real etcd: elections, a leader's journal, and what a leader that was overtaken cannot
// do.
#include <arpa/inet.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <condition_variable>
#include <cstring>
#include <filesystem>
#include <future>
#include <mutex>
#include <optional>
#include <thread>

#include "server/base/thread_executor.h"
#include "server/store/etcd/etcd_journal.h"
#include "server/wire/journal.h"

namespace weightwire::store {
namespace {

using coordinator::CommitRecord;
using coordinator::DrainRecord;
using coordinator::JournalRecord;
using coordinator::ReserveRecord;
using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr seconds kPatience(60);

bool EtcdIsHere() { return access("/usr/bin/etcd", X_OK) == 0; }

/// A port that nobody listens to now.
int FreePort() {
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  EXPECT_EQ(bind(fd, reinterpret_cast<sockaddr*>(&address), size), 0);
  getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size);
  close(fd);
  return ntohs(address.sin_port);
}

/// One etcd in a directory of its own; may be killed and started again.
class Etcd {
 public:
  Etcd() {
    char pattern[] = "/tmp/weightwire-etcd-XXXXXX";
    directory_ = mkdtemp(pattern);
    Start();
  }
  ~Etcd() {
    Kill();
    std::filesystem::remove_all(directory_);
  }

  void Start() {
    const std::string peer = "http://127.0.0.1:" + std::to_string(peer_port_);
    const std::string cluster = "default=" + peer;
    const std::string client = "http://" + endpoint();
    // Not fork(): its child would allocate, and another thread can hold the allocator's lock.
    const std::array<const char*, 14> arguments{"etcd",
                                                "--data-dir",
                                                directory_.c_str(),
                                                "--listen-client-urls",
                                                client.c_str(),
                                                "--advertise-client-urls",
                                                client.c_str(),
                                                "--listen-peer-urls",
                                                peer.c_str(),
                                                "--initial-advertise-peer-urls",
                                                peer.c_str(),
                                                "--initial-cluster",
                                                cluster.c_str(),
                                                nullptr};
    posix_spawn_file_actions_t quiet;
    posix_spawn_file_actions_init(&quiet);
    posix_spawn_file_actions_addopen(&quiet, STDOUT_FILENO, "/dev/null", O_WRONLY, 0);
    posix_spawn_file_actions_adddup2(&quiet, STDOUT_FILENO, STDERR_FILENO);
    const int error = posix_spawn(&pid_, "/usr/bin/etcd", &quiet, nullptr,
                                  const_cast<char* const*>(arguments.data()), environ);
    posix_spawn_file_actions_destroy(&quiet);
    ASSERT_EQ(error, 0) << std::strerror(error);
  }
  void Kill() {
    if (pid_ <= 0) return;
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
    pid_ = -1;
  }
  std::string endpoint() const { return "127.0.0.1:" + std::to_string(client_port_); }

 private:
  const int client_port_ = FreePort();
  const int peer_port_ = FreePort();
  std::string directory_;
  pid_t pid_ = -1;
};

/// A candidate that notes what it is told.
class Candidate {
 public:
  Candidate(EtcdClient& client, const std::string& name, seconds ttl = seconds(2)) {
    Election::Events events;
    events.stands_by = [this](const std::string& leader) { Note([&] { leader_ = leader; }); };
    events.hindered = [this](const Status&) { Note([&] { ++hindered_; }); };
    events.refused = [this](const Status& why) { Note([&] { refused_ = why; }); };
    events.won = [this](const Term& term) { Note([&] { term_ = term; }); };
    events.lost = [this](const Status& why) { Note([&] { lost_ = why; }); };
    election_.emplace(client, Election::Options{"weightwire/test/leader", name, ttl},
                      std::move(events));
  }
  /// The leadership is given back.
  void Resign() { election_.reset(); }

  Term AwaitTerm() {
    std::unique_lock lock(mutex_);
    EXPECT_TRUE(changed_.wait_for(lock, kPatience, [&] { return term_.has_value(); }));
    return term_.value_or(Term{});
  }
  Status AwaitLoss() {
    std::unique_lock lock(mutex_);
    EXPECT_TRUE(changed_.wait_for(lock, kPatience, [&] { return lost_.has_value(); }));
    return lost_.value_or(OkStatus());
  }
  Status AwaitRefusal() {
    std::unique_lock lock(mutex_);
    EXPECT_TRUE(changed_.wait_for(lock, kPatience, [&] { return refused_.has_value(); }));
    return refused_.value_or(OkStatus());
  }
  void AwaitLeader(const std::string& name) {
    std::unique_lock lock(mutex_);
    EXPECT_TRUE(changed_.wait_for(lock, kPatience, [&] { return leader_ == name; })) << leader_;
  }
  bool leads() {
    std::lock_guard lock(mutex_);
    return term_.has_value() && !lost_.has_value();
  }
  int hindered() {
    std::lock_guard lock(mutex_);
    return hindered_;
  }

 private:
  template <typename Change>
  void Note(const Change& change) {
    {
      std::lock_guard lock(mutex_);
      change();
    }
    changed_.notify_all();
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::string leader_;
  std::optional<Term> term_;
  std::optional<Status> lost_;
  std::optional<Status> refused_;
  int hindered_ = 0;
  std::optional<Election> election_;
};

class EtcdTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!EtcdIsHere()) GTEST_SKIP() << "no /usr/bin/etcd (Debian: etcd-server)";
    etcd_.emplace();
    client_.emplace(EtcdClient::Options{{etcd_->endpoint()}, {}, "", ""});
  }

  EtcdJournal Journal(const Term& term) {
    return {"weightwire/test/", term, *client_, strand_, metrics::Null()};
  }
  static Status Append(EtcdJournal& journal, JournalRecord record) {
    std::promise<Status> answer;
    journal.Append(std::move(record), [&](Status status) { answer.set_value(std::move(status)); });
    return answer.get_future().get();
  }
  etcdserverpb::RangeResponse Everything() {
    etcdserverpb::RangeRequest request;
    request.set_key("weightwire/test/");
    request.set_range_end("weightwire/test0");
    auto response = client_->Range(request, seconds(10));
    EXPECT_TRUE(response) << response.error().ToString();
    return response.value_or(etcdserverpb::RangeResponse());
  }

  std::optional<Etcd> etcd_;
  std::optional<EtcdClient> client_;
  ThreadExecutor strand_{"strand", 1};
};

const JournalRecord kReserve = ReserveRecord{Epoch(1'024)};
const JournalRecord kDrain = DrainRecord{{{"engine-a", Incarnation(7)}}};
const JournalRecord kCommit = CommitRecord{Epoch(3), Version(12), {"engine-a", "engine-b"}};

TEST_F(EtcdTest, OneLeadsAndTheNextOneFollowsWhenItResigns) {
  Candidate first(*client_, "first");
  const Term term = first.AwaitTerm();
  Candidate second(*client_, "second");
  second.AwaitLeader("first");
  EXPECT_FALSE(second.leads());
  first.Resign();
  const Term next = second.AwaitTerm();
  EXPECT_GT(next.revision, term.revision);
}

TEST_F(EtcdTest, ALeaderHoldsOnBeyondItsLease) {
  Candidate first(*client_, "first");
  first.AwaitTerm();
  Candidate second(*client_, "second");
  second.AwaitLeader("first");
  std::this_thread::sleep_for(
      seconds(5));  // two and a half leases: what is tested is that time passes
  EXPECT_TRUE(first.leads());
  EXPECT_FALSE(second.leads());
}

TEST_F(EtcdTest, ALeaderWhoseKeyIsGoneIsTold) {
  Candidate first(*client_, "first");
  const Term term = first.AwaitTerm();
  etcdserverpb::TxnRequest request;
  request.add_success()->mutable_request_delete_range()->set_key(term.key);
  ASSERT_TRUE(client_->Txn(request, seconds(10)));
  const Status why = first.AwaitLoss();
  EXPECT_EQ(why.reason(), Reason::kLeaseExpired);
  EXPECT_NE(why.message().find(term.key), std::string::npos) << why.ToString();
}

TEST_F(EtcdTest, ALeaderThatEtcdDoesNotAnswerGivesUpWithinItsLease) {
  Candidate first(*client_, "first");
  first.AwaitTerm();
  etcd_->Kill();
  EXPECT_EQ(first.AwaitLoss().reason(), Reason::kJournalFailed);
  Candidate second(*client_, "second");
  etcd_->Start();
  second.AwaitTerm();
}

TEST_F(EtcdTest, TheNextLeaderReadsWhatWasAppended) {
  Candidate first(*client_, "first");
  {
    EtcdJournal journal = Journal(first.AwaitTerm());
    EXPECT_EQ(journal.Read(), std::vector<JournalRecord>());
    EXPECT_TRUE(Append(journal, kReserve).ok());
    EXPECT_TRUE(Append(journal, kCommit).ok());
    EXPECT_TRUE(Append(journal, DrainRecord{}).ok());
    EXPECT_TRUE(Append(journal, kDrain).ok());
  }
  first.Resign();
  Candidate second(*client_, "second");
  EXPECT_EQ(Journal(second.AwaitTerm()).Read(),
            (std::vector<JournalRecord>{kReserve, kDrain, kCommit}));
}

TEST_F(EtcdTest, ALeaderThatWasOvertakenAppendsNothing) {
  Candidate first(*client_, "first");
  EtcdJournal stale = Journal(first.AwaitTerm());
  ASSERT_TRUE(Append(stale, kReserve).ok());
  first.Resign();
  Candidate second(*client_, "second");
  EtcdJournal journal = Journal(second.AwaitTerm());
  const Status refused = Append(stale, kCommit);
  EXPECT_EQ(refused.reason(), Reason::kLeaseExpired) << refused.ToString();
  EXPECT_EQ(Append(stale, ReserveRecord{Epoch(4'096)}), refused) << "a failure is for good";
  EXPECT_EQ(stale.Read().error().reason(), Reason::kLeaseExpired);
  EXPECT_EQ(journal.Read(), std::vector<JournalRecord>{kReserve});
}

TEST_F(EtcdTest, AnAppendWaitsForAnEtcdThatComesBack) {
  Candidate first(*client_, "first", seconds(30));
  EtcdJournal journal = Journal(first.AwaitTerm());
  etcd_->Kill();
  std::promise<Status> answer;
  journal.Append(kCommit, [&](Status status) { answer.set_value(std::move(status)); });
  etcd_->Start();
  const Status status = answer.get_future().get();
  EXPECT_TRUE(status.ok()) << status.ToString();
  EXPECT_EQ(journal.Read(), std::vector<JournalRecord>{kCommit});
}

TEST_F(EtcdTest, OldCommitsAreDeletedAndTheNewestOneIsRead) {
  Candidate first(*client_, "first", seconds(30));
  EtcdJournal journal = Journal(first.AwaitTerm());
  ASSERT_TRUE(Append(journal, kReserve).ok());
  for (const uint64_t epoch : {uint64_t{1}, uint64_t{15}, uint64_t{16}, uint64_t{1'000'000'007},
                               uint64_t{1'000'000'064}, (uint64_t{1} << 63) + 5}) {
    const CommitRecord commit{Epoch(epoch), Version(epoch), {"engine-a"}};
    ASSERT_TRUE(Append(journal, commit).ok());
    EXPECT_EQ(journal.Read(), (std::vector<JournalRecord>{kReserve, commit}));
  }
  EXPECT_EQ(Everything().kvs_size(), 3) << "leader, reservation, one commit";
}

TEST_F(EtcdTest, NamesAKeyThatDoesNotDecode) {
  Candidate first(*client_, "first", seconds(30));
  EtcdJournal journal = Journal(first.AwaitTerm());
  ASSERT_TRUE(Append(journal, kCommit).ok());
  const auto pairs = Everything();
  etcdserverpb::TxnRequest request;
  std::string key;
  for (const auto& pair : pairs.kvs()) {
    if (pair.key().find("commit/") != std::string::npos) key = pair.key();
  }
  request.add_success()->mutable_request_put()->set_key(key);
  request.mutable_success(0)->mutable_request_put()->set_value("damaged");
  ASSERT_TRUE(client_->Txn(request, seconds(10)));
  const auto records = journal.Read();
  ASSERT_FALSE(records);
  EXPECT_EQ(records.error().code(), Code::kDataLoss);
  EXPECT_NE(records.error().message().find(key), std::string::npos) << records.error().ToString();
}

TEST_F(EtcdTest, AnEndpointThatIsDownIsPassedOver) {
  EtcdClient several({{"127.0.0.1:" + std::to_string(FreePort()), etcd_->endpoint()}, {}, "", ""});
  Candidate first(several, "first");
  first.AwaitTerm();
  EXPECT_GE(first.hindered(), 1);
}

}  // namespace
}  // namespace weightwire::store
