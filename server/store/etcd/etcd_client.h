#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "etcd/rpc.pb.h"
#include "server/base/clock.h"
#include "server/base/status.h"
#include "server/tls/tls_files.h"

namespace grpc {
class ClientContext;
class Status;
}  // namespace grpc

namespace weightwire::store {

/// etcd's v3 API over gRPC as far as journal and election need it. Calls block, end within their
/// limit and may come from any thread. One that finds its server unavailable leaves the next one to
/// the next endpoint; whoever calls tries again.
///   kUnavailable / kJournalFailed       no answer, or none for now (no quorum, no space): what was
///                                       asked for may have happened, or not
///   any other code / kJournalFailed     refused, and so it will be again: says what to mend
class EtcdClient {
 public:
  struct Options {
    std::vector<std::string> endpoints;  ///< "host:port" each; at least one
    tls::TlsFiles tls;                   ///< none: plaintext; cert and key: etcd may know the user
    std::string user;                    ///< empty: none is named
    std::string password_file;           ///< of `user`; read whenever it is needed
  };
  explicit EtcdClient(Options options);
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
  Status Failed(const Endpoint& endpoint, const char* what, const grpc::Status& status) const;
  /// Of `user`, which etcd gives for the password.
  Result<std::string> Token(Endpoint& endpoint, Nanos limit);

  const Options options_;
  std::vector<std::unique_ptr<Endpoint>> endpoints_;
  std::atomic<size_t> current_{0};
  std::mutex mutex_;
  std::string token_;  ///< empty: none yet, or the last one is over
};

}  // namespace weightwire::store
