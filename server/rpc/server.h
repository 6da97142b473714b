#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "server/base/clock.h"
#include "server/memory/region.h"

namespace grpc {
class ServerCredentials;
class Service;
}  // namespace grpc

namespace weightwire::rpc {

/// One gRPC server without listeners of its own: connections are accepted by an Acceptor and handed
/// over, because gRPC's own listener stays dead after the process once ran out of descriptors.
///
/// Health (grpc.health.v1) and reflection are on. Thread-safe.
class GrpcServer {
 public:
  struct Options {
    size_t message_bytes_max = 16 << 20;
    /// Of the connections that are handed over; null: plaintext.
    std::shared_ptr<grpc::ServerCredentials> credentials;
  };
  /// `services` outlive the server. kInternal when gRPC refuses to start.
  static Result<std::unique_ptr<GrpcServer>> Start(Options options,
                                                   std::vector<grpc::Service*> services);
  virtual ~GrpcServer() = default;

  /// A connected stream socket.
  virtual void HandOver(memory::UniqueFd connection) = 0;
  /// What the health service answers for "" and for `service`.
  virtual void SetServing(const std::string& service, bool serving) = 0;
  /// Refuses new calls, lets running ones end for at most `grace`, cancels the rest and waits for
  /// them. Idempotent; the destructor calls it with no grace. Not on a gRPC thread.
  virtual void Shutdown(Nanos grace) = 0;
};

}  // namespace weightwire::rpc
