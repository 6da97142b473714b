#pragma once

#include <boost/asio/io_context.hpp>
#include <memory>
#include <optional>
#include <string>

#include "server/base/executor.h"
#include "server/coordinator/journal.h"
#include "server/daemon/config.h"
#include "server/metrics/metrics.h"
#include "server/store/etcd/election.h"

namespace weightwire::daemon {

/// One of several coordinators of a job: the one that etcd says leads, or a standby. A standby
/// listens to no gRPC, so that whoever tries all addresses finds the leader. A leader whose lease
/// is over ends its process at once, as a crash would: its supervisor starts it again as a standby.
class Leadership {
 public:
  /// That what `config` names for etcd can be read. kInvalidArgument / kConfigInvalid
  static Status CheckFiles(const Config& config);
  /// Both outlive it. Sets the gauge `leader`.
  Leadership(const Config& config, boost::asio::io_context& io, metrics::Sink& metrics);

  /// Runs `io` until this process leads. False: `io` was stopped before that. A failure: etcd
  /// refuses what it is asked for, whom it does not know or may not let in.
  Result<bool> Await();
  /// OK once it leads; else who does.
  Status Standing() const { return standing_; }
  /// After Await.
  std::unique_ptr<coordinator::Journal> OpenJournal(Executor& strand, metrics::Sink& metrics);

 private:
  store::Election::Options Candidate(const Config& config) const;
  store::Election::Events Events();
  void Stands(Status standing);

  boost::asio::io_context& io_;
  metrics::Sink& metrics_;
  const std::string prefix_;  ///< of this job's keys
  Status standing_;           ///< the io thread's
  std::optional<store::Term> term_;
  Status refused_;
  store::EtcdClient client_;
  std::optional<store::Election> election_;
};

}  // namespace weightwire::daemon
