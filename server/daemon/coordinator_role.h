#pragma once

#include <memory>
#include <string>

#include "server/base/thread_executor.h"
#include "server/coordinator/communicators.h"
#include "server/coordinator/coordinator.h"
#include "server/daemon/config.h"
#include "server/daemon/host.h"
#include "server/daemon/leadership.h"
#include "server/rpc/acceptor.h"
#include "server/rpc/communicator_service.h"
#include "server/rpc/coordinator_service.h"
#include "server/rpc/server.h"

namespace weightwire::daemon {

/// The coordinator of this process: its strand, journal and gRPC server. Constructed and stopped by
/// the main thread.
class CoordinatorRole {
 public:
  /// `leadership`: where the journal is in etcd; it leads, and outlives this.
  ///   kUnavailable / kJournalFailed | kIoError  the journal or the listener
  static Result<std::unique_ptr<CoordinatorRole>> Start(const Config& config, const Host& host,
                                                        Leadership* leadership);
  ~CoordinatorRole();

  coordinator::Coordinator& coordinator() { return *coordinator_; }
  Executor& strand() { return strand_; }
  std::string address() const { return acceptor_->address(); }
  Window window();
  /// Aborts what may be aborted, answers everything, closes. Idempotent.
  void Stop();

 private:
  CoordinatorRole() = default;
  Status OpenJournal(const Config& config, const Host& host, Leadership* leadership);
  Status Serve(const Config& config, const Host& host);

  ThreadExecutor strand_{"coordinator", 1};
  std::unique_ptr<coordinator::Journal> journal_;
  std::unique_ptr<coordinator::Coordinator> coordinator_;
  coordinator::Communicators communicators_{strand_};
  std::unique_ptr<rpc::CoordinatorService> service_;
  std::unique_ptr<rpc::CommunicatorService> communicator_service_;
  std::unique_ptr<rpc::GrpcServer> server_;
  std::unique_ptr<rpc::Acceptor> acceptor_;
};

}  // namespace weightwire::daemon
