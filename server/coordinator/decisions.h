#pragma once

#include <set>
#include <string>
#include <utility>
#include <vector>

#include "server/coordinator/command_queue.h"
#include "server/coordinator/coordinator.h"
#include "server/coordinator/membership.h"
#include "server/coordinator/plan_cache.h"
#include "server/metrics/metrics.h"

namespace weightwire::coordinator {

/// What the schedulers call.
struct Services {
  const Options& options;
  Clock& clock;
  Executor& strand;
  Membership& membership;
  PlanCache& plans;
  CommandQueue& commands;
  Journal& journal;
  metrics::Sink& metrics;
};

/// What is decided, and whether this coordinator may decide more. EpochScheduler and EpochRunner
/// write it; PublishQueue writes `published`.
struct Decisions {
  CommitRecord committed;  ///< the last decision; epoch 0 when there is none
  double committed_wall = 0;
  const Epoch read;   ///< the newest decision that the journal had at the start
  const Epoch first;  ///< of the numbers that this coordinator hands out
  const JournalId history;
  epoch::Content forgotten;  ///< the newest that is served and that the journal did not have
  std::string journal_lost;  ///< of it, for people; empty: the journal has lost nothing
  /// The last epoch that was committed here, and the engines without which it went on.
  std::pair<Epoch, std::set<std::string>> excluded = {};
  bool published = false;  ///< something, in this process
  bool deciding = true;
  Status stopped_why = {};
  Status hindered = {};   ///< why the append under way does not become durable
  bool stopping = false;  ///< the coordinator shuts down

  /// `committed` is another one from now on.
  void Set(const CommitRecord& record);
  /// `runs` of a record that comes after `committed`, or is it.
  std::vector<LineageRun> RunsWith(const CommitRecord& record) const;
  /// Of the bytes that were committed under the epoch, by whichever coordinator; 0: before
  /// kLineageRunsMax changes of lineage, or the journal is from before it knew.
  uint64_t LineageOf(Epoch epoch) const;
  /// Nothing up to it is accepted from a trainer that starts anew.
  VersionId Floor() const;
  /// A trainer that was overtaken by one that went back to an earlier step publishes nothing more,
  /// whatever its numbers are: that is the fence. Errors: CoordinatorPort::Publish's.
  Status CheckLineage(const control::PublishRequest& request) const;
  ///   kUnavailable / kShuttingDown | kJournalFailed
  Status Check() const;
};

}  // namespace weightwire::coordinator
