#pragma once

#include <memory>

#include "server/coordinator/communicators.h"
#include "server/rpc/runtime.h"

namespace grpc {
class Service;
}  // namespace grpc

namespace weightwire::rpc {

/// weightwire.v1.Communicators over a coordinator::Communicators: converts, posts to its strand,
/// finishes. `communicators` and `runtime` outlive the gRPC server that the service was added to.
class CommunicatorService {
 public:
  static std::unique_ptr<CommunicatorService> Make(Runtime runtime,
                                                   coordinator::Communicators& communicators);
  virtual ~CommunicatorService() = default;
  /// To be added to a server.
  virtual grpc::Service* service() = 0;
};

}  // namespace weightwire::rpc
