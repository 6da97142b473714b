#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "etcd/rpc.pb.h"
#include "server/base/clock.h"
#include "server/base/status.h"

namespace weightwire::store {

/// etcd's v3 API over gRPC as far as journal and election need it. Calls block, end within their
/// limit and may come from any thread. One that finds its server unavailable leaves the next one to
/// the next endpoint; whoever calls tries again.
///   kUnavailable / kJournalFailed  no answer: what was asked for may have happened, or not
class EtcdClient {
 public:
  /// "host:port" each; at least one. Plaintext.
  explicit EtcdClient(const std::vector<std::string>& endpoints);
  ~EtcdClient();

  Result<etcdserverpb::TxnResponse> Txn(const etcdserverpb::TxnRequest& request, Nanos limit);
  /// Linearizable.
  Result<etcdserverpb::RangeResponse> Range(const etcdserverpb::RangeRequest& request, Nanos limit);
  Result<int64_t> GrantLease(std::chrono::seconds ttl, Nanos limit);
  /// False: the lease is gone.
  Result<bool> KeepAlive(int64_t lease, Nanos limit);
  Status Revoke(int64_t lease, Nanos limit);

 private:
  struct Endpoint;
  template <typename Call>
  Status Ask(const char* what, Nanos limit, const Call& call);

  std::vector<std::unique_ptr<Endpoint>> endpoints_;
  std::atomic<size_t> current_{0};
};

}  // namespace weightwire::store
