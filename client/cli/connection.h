#pragma once

#include <functional>
#include <memory>
#include <string>

#include "server/base/status.h"
#include "server/tls/tls_files.h"
#include "weightwire/v1/coordinator.grpc.pb.h"

namespace weightwire::cli {

/// What of a status is wanted.
struct StatusAsk {
  uint32_t epochs_max = 0;  ///< the newest so many; 0: all that are remembered
  bool participants = true;
};

/// There is no asking for no epoch at all.
inline constexpr StatusAsk kEnginesOnly = {.epochs_max = 1, .participants = false};

/// As many epochs as are in progress at the most (a version, fills, and those that are planned),
/// and then some.
inline constexpr uint32_t kEpochsAround = 64;

/// The coordinator at `address` ("127.0.0.1:7411"). Each call waits `seconds` at most.
class Connection {
 public:
  /// Without `files`: plaintext.
  Connection(const std::string& address, double seconds, const tls::TlsFiles& files);

  /// Page by page; epochs may have numbers in place of names (epoch_engines.h). Of an epoch in
  /// progress it has the first lines only of what it waits for.
  Result<v1::StatusResponse> GetStatus(const StatusAsk& ask = {});
  Result<std::string> Explain(const std::string& engine, const std::string& tensor);
  Status Abort(uint64_t epoch, const std::string& why);
  Status Commit(uint64_t epoch);
  Result<v1::RollbackResponse> Rollback(uint64_t version);
  Result<v1::VerifyResponse> Verify(const std::string& engine);
  Result<v1::DescribeEpochResponse> DescribeEpoch(uint64_t epoch);
  Result<v1::DrainResponse> Drain(const std::string& name, bool undo);
  Status Evict(const std::string& group, const std::string& why);
  /// Calls `each` after every change, at most every `min_interval_ms`, until it returns false or
  /// the server ends the stream.
  Status Watch(uint32_t min_interval_ms, const StatusAsk& ask,
               const std::function<bool(const v1::StatusResponse&)>& each);

 private:
  std::unique_ptr<grpc::ClientContext> Context() const;
  Result<v1::StatusResponse> GetPage(const v1::StatusRequest& request);

  std::string address_;
  double seconds_;
  std::unique_ptr<v1::Coordinator::Stub> stub_;
};

}  // namespace weightwire::cli
