#include "server/store/etcd/etcd_journal.h"

#include <cinttypes>
#include <cstdio>
#include <thread>
#include <utility>

#include "server/wire/journal.h"

namespace weightwire::store {
namespace {

namespace pb = etcdserverpb;
using coordinator::JournalRecord;

constexpr uint64_t kCommitsKept = 64;  // the newest one counts; the others are for people
constexpr Nanos kCallLimit = std::chrono::seconds(2);
// Longer than a lease: whoever leads by then recovers from what is there.
constexpr Nanos kReadLimit = std::chrono::seconds(8);
constexpr Nanos kRetry = std::chrono::milliseconds(50);

}  // namespace

EtcdJournal::EtcdJournal(std::string prefix, Term term, EtcdClient& client, Executor& strand,
                         metrics::Sink& metrics)
    : prefix_(std::move(prefix)),
      term_(std::move(term)),
      client_(client),
      metrics_(metrics),
      worker_(strand, metrics, [this](const JournalRecord& record, const std::string& bytes) {
        return Write(record, bytes);
      }) {}

void EtcdJournal::Append(JournalRecord record, std::function<void(Status)> done) {
  worker_.Append(std::move(record), std::move(done));
}

void EtcdJournal::OnHindered(std::function<void(Status)> tell) {
  worker_.OnHindered(std::move(tell));
}

Result<std::vector<JournalRecord>> EtcdJournal::Read() {
  WW_ASSIGN(const uint64_t newest, NewestCommit());
  pb::TxnRequest request = Transaction();
  request.add_success()->mutable_request_range()->set_key(prefix_ + "reserve");
  request.add_success()->mutable_request_range()->set_key(prefix_ + "drained");
  request.add_success()->mutable_request_range()->set_key(CommitKey(newest));
  WW_ASSIGN(const pb::TxnResponse response, Carry(request));
  std::vector<JournalRecord> records;
  for (const pb::ResponseOp& answer : response.responses()) {
    for (const pb::KeyValue& pair : answer.response_range().kvs()) {
      auto record = wire::DecodeRecord(pair.value());
      if (!record) {
        const Status& why = record.error();
        return Fail(Status(Code::kDataLoss, Reason::kJournalFailed,
                           "etcd key " + pair.key() + ": " + why.message())
                        .Remedy(why.remedy().empty() ? "restore etcd from a snapshot, or delete " +
                                                           prefix_ + ", and every rank begins anew"
                                                     : why.remedy()));
      }
      Note(pair.key(), pair.value().size());
      records.push_back(std::move(*record));
    }
  }
  return records;
}

/// 0: there is none. Digit by digit of the epoch's number, from the highest one: which is the
/// largest that some key is at or above. No value is read, however many there are and however long.
Result<uint64_t> EtcdJournal::NewestCommit() {
  constexpr int kBits = 4;
  constexpr uint64_t kDigits = (1 << kBits) - 1;
  uint64_t newest = 0;
  for (int shift = 64 - kBits; shift >= 0; shift -= kBits) {
    pb::TxnRequest request = Transaction();
    for (uint64_t digit = 1; digit <= kDigits; ++digit) {
      pb::RangeRequest& count = *request.add_success()->mutable_request_range();
      count.set_key(CommitKey(newest + (digit << shift)));
      count.set_range_end(prefix_ + "commit0");  // '0' is next to '/'
      count.set_count_only(true);
    }
    WW_ASSIGN(const pb::TxnResponse response, Carry(request));
    uint64_t found = 0;
    for (const pb::ResponseOp& answer : response.responses()) {
      found += answer.response_range().count() > 0 ? 1 : 0;
    }
    newest += found << shift;
  }
  return newest;
}

Status EtcdJournal::Write(const JournalRecord& record, const std::string& value) {
  const auto* commit = std::get_if<coordinator::CommitRecord>(&record);
  const bool drain = std::holds_alternative<coordinator::DrainRecord>(record);
  const std::string key =
      commit ? CommitKey(commit->epoch.value) : prefix_ + (drain ? "drained" : "reserve");
  pb::TxnRequest request = Transaction();
  pb::PutRequest& put = *request.add_success()->mutable_request_put();
  put.set_key(key);
  put.set_value(value);
  if (commit && commit->epoch.value > kCommitsKept) {
    pb::DeleteRangeRequest& old = *request.add_success()->mutable_request_delete_range();
    old.set_key(CommitKey(0));
    old.set_range_end(CommitKey(commit->epoch.value - kCommitsKept));
  }
  auto response = Once(request);
  if (!response) return std::move(response.error());
  if (commit && commit->epoch.value > kCommitsKept) {
    bytes_.erase(bytes_.lower_bound(CommitKey(0)),
                 bytes_.lower_bound(CommitKey(commit->epoch.value - kCommitsKept)));
  }
  Note(key, value.size());
  return OkStatus();
}

/// One that nothing but the leader of this term can carry out.
pb::TxnRequest EtcdJournal::Transaction() const {
  pb::TxnRequest request;
  *request.add_compare() = StillLeads(term_);
  return request;
}

Result<pb::TxnResponse> EtcdJournal::Once(const pb::TxnRequest& request) {
  auto response = client_.Txn(request, kCallLimit);
  if (response && !response->succeeded()) {
    return Fail(Code::kAborted, Reason::kLeaseExpired,
                "another coordinator leads, or has led: " + term_.key +
                    " in etcd is not as of revision " + std::to_string(term_.revision));
  }
  return response;
}

Result<pb::TxnResponse> EtcdJournal::Carry(const pb::TxnRequest& request) {
  const Nanos end = SystemClock().Now() + kReadLimit;
  auto response = Once(request);
  while (!response && response.error().code() == Code::kUnavailable && SystemClock().Now() < end) {
    std::this_thread::sleep_for(kRetry);
    response = Once(request);
  }
  return response;
}

std::string EtcdJournal::CommitKey(uint64_t epoch) const {
  char number[24];  // of equal length, so that etcd's order is that of the epochs
  std::snprintf(number, sizeof(number), "%020" PRIu64, epoch);
  return prefix_ + "commit/" + number;
}

void EtcdJournal::Note(const std::string& key, size_t bytes) {
  bytes_[key] = bytes;
  double sum = 0;
  for (const auto& [name, size] : bytes_) sum += static_cast<double>(size);
  metrics_.Set("journal_bytes", sum);
}

}  // namespace weightwire::store
