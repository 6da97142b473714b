#pragma once

#include <functional>
#include <memory>
#include <string>

#include "server/base/status.h"
#include "server/tls/tls_files.h"
#include "weightwire/v1/coordinator.grpc.pb.h"

namespace weightwire::cli {

/// The coordinator at `address` ("127.0.0.1:7411"). Each call waits `seconds` at most.
class Connection {
 public:
  /// Without `files`: plaintext.
  Connection(const std::string& address, double seconds, const tls::TlsFiles& files);

  Result<v1::StatusResponse> GetStatus();
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
  Status Watch(uint32_t min_interval_ms,
               const std::function<bool(const v1::StatusResponse&)>& each);

 private:
  std::unique_ptr<grpc::ClientContext> Context() const;

  std::string address_;
  double seconds_;
  std::unique_ptr<v1::Coordinator::Stub> stub_;
};

}  // namespace weightwire::cli
