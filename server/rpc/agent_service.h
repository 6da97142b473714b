#pragma once

#include <memory>

#include "server/agent/agent.h"
#include "server/base/status.h"
#include "server/rpc/fd_table.h"
#include "server/rpc/runtime.h"

namespace grpc {
class Service;
}  // namespace grpc

namespace weightwire::rpc {

/// weightwire.v1.Agent over an Agent: converts, posts to its strand, finishes. The end of an Attach
/// stream detaches its process at once.
///
/// `agent`, `fds` and `addresses` outlive the gRPC server that the service was added to.
class AgentService {
 public:
  /// `addresses` are the data plane's, for LocalStatus.
  static std::unique_ptr<AgentService> Make(Runtime runtime, agent::Agent& agent, FdTable& fds,
                                            std::map<std::string, std::string> addresses);
  virtual ~AgentService() = default;
  virtual grpc::Service* service() = 0;
  /// Ends every Attach stream with `why`. Thread-safe.
  virtual void EndStreams(const Status& why) = 0;
};

}  // namespace weightwire::rpc
