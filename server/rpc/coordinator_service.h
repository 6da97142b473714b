#pragma once

#include <memory>

#include "server/base/status.h"
#include "server/coordinator/coordinator.h"
#include "server/rpc/runtime.h"

namespace grpc {
class Service;
}  // namespace grpc

namespace weightwire::rpc {

/// weightwire.v1.Coordinator over a Coordinator: converts, posts to its strand, finishes.
///
/// `coordinator` and `runtime` outlive the gRPC server that the service was added to.
class CoordinatorService {
 public:
  static std::unique_ptr<CoordinatorService> Make(Runtime runtime,
                                                  coordinator::Coordinator& coordinator);
  virtual ~CoordinatorService() = default;
  /// To be added to a server.
  virtual grpc::Service* service() = 0;
  /// Ends every session, watch and slice with `why`. Thread-safe.
  virtual void EndStreams(const Status& why) = 0;
};

}  // namespace weightwire::rpc
