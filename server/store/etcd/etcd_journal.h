#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "server/base/executor.h"
#include "server/coordinator/journal.h"
#include "server/metrics/metrics.h"
#include "server/store/append_worker.h"
#include "server/store/etcd/election.h"

namespace weightwire::store {

/// The leader's journal in etcd: below `prefix` a key for the last reservation, one for who is
/// drained and one for each commit of the last 64 epochs. Every append is one transaction that etcd
/// carries out only while `term` holds, and that is tried again while etcd does not answer: the
/// same transaction twice is the same as once.
///
/// Appends are those of an AppendWorker. Sets journal_bytes.
class EtcdJournal final : public coordinator::Journal {
 public:
  /// `strand`, `client` and `metrics` outlive the journal.
  EtcdJournal(std::string prefix, Term term, EtcdClient& client, Executor& strand,
              metrics::Sink& metrics);

  void Append(coordinator::JournalRecord record, std::function<void(Status)> done) override;
  void OnHindered(std::function<void(Status)> tell) override;
  /// Reads three values, and finds the newest commit by counts alone, however many there are.
  ///   kUnavailable / kJournalFailed  etcd does not answer
  ///   kAborted / kLeaseExpired       the term is over
  ///   any code of EtcdClient's       refused for good
  ///   kDataLoss / kJournalFailed     a value does not decode: names its key
  Result<std::vector<coordinator::JournalRecord>> Read() override;

 private:
  Status Write(const coordinator::JournalRecord& record, const std::string& bytes);
  Result<uint64_t> NewestCommit();
  etcdserverpb::TxnRequest Transaction() const;
  Result<etcdserverpb::TxnResponse> Once(const etcdserverpb::TxnRequest& request);
  Result<etcdserverpb::TxnResponse> Carry(const etcdserverpb::TxnRequest& request);
  std::string CommitKey(uint64_t epoch) const;
  void Note(const std::string& key, size_t bytes);

  const std::string prefix_;
  const Term term_;
  EtcdClient& client_;
  metrics::Sink& metrics_;
  std::map<std::string, size_t> bytes_;  ///< of each value; Read's, then the worker's
  AppendWorker worker_;                  ///< last: it uses all of the above
};

}  // namespace weightwire::store
