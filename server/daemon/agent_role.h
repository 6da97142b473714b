#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "server/agent/agent.h"
#include "server/base/thread_executor.h"
#include "server/daemon/config.h"
#include "server/daemon/coordinator_role.h"
#include "server/daemon/host.h"
#include "server/memory/gpu_memory_pool.h"
#include "server/rpc/acceptor.h"
#include "server/rpc/agent_service.h"
#include "server/rpc/fd_server.h"
#include "server/rpc/local_processes.h"
#include "server/rpc/server.h"
#include "server/transport/transport.h"

namespace weightwire::daemon {

/// The agent of this process: its strand, transports, transfers, gRPC server and fd socket.
/// Constructed and stopped by the main thread.
class AgentRole {
 public:
  /// `embedded`: the coordinator of this process, which outlives the role; null: the one at
  /// config.coordinator.
  ///   kUnavailable / kIoError, kFailedPrecondition / kTransportFailed  no transport can run here
  static Result<std::unique_ptr<AgentRole>> Start(const Config& config, const Host& host,
                                                  CoordinatorRole* embedded);
  ~AgentRole();

  /// "unix:/path"
  std::string address() const { return acceptor_->address(); }
  Window window();
  /// Waits until there is a session with the coordinator, for at most `limit`. False: there is
  /// none.
  bool AwaitSession(Nanos limit);
  /// Agent::SessionStatus.
  Status SessionStatus();
  /// Drains transfers, tells the coordinator, evicts local processes, closes. Idempotent.
  void Stop();

 private:
  AgentRole() = default;
  Status MakeTransports(const Config& config, const Host& host);
  Status MakeAgent(const Config& config, const Host& host, CoordinatorRole* embedded);
  Status Serve(const Config& config, const Host& host);
  void WatchSession();

  ThreadExecutor strand_{"agent", 1};
  Incarnation incarnation_;
  std::map<std::string, std::string> addresses_;
  memory::GpuMemoryPools gpu_pools_;
  std::vector<std::unique_ptr<transport::Transport>> transports_;
  std::unique_ptr<transfer::Engine> transfers_;
  std::unique_ptr<control::CoordinatorPort> port_;
  std::unique_ptr<agent::Agent> agent_;
  std::shared_ptr<rpc::LocalProcesses> processes_;
  std::unique_ptr<rpc::FdTable> fds_;
  std::unique_ptr<rpc::FdServer> fd_server_;
  std::unique_ptr<rpc::AgentService> service_;
  std::unique_ptr<rpc::GrpcServer> server_;
  std::unique_ptr<rpc::Acceptor> acceptor_;
  std::unique_ptr<rpc::Acceptor> fd_acceptor_;
};

}  // namespace weightwire::daemon
