#pragma once

#include <optional>
#include <string>
#include <vector>

#include "server/coordinator/epoch_planner.h"
#include "server/coordinator/epoch_runner.h"
#include "server/coordinator/fill_scheduler.h"
#include "server/coordinator/scheduling.h"
#include "server/coordinator/version_queue.h"

namespace weightwire::coordinator {

/// Versions from their publish to their release: takes them in and back, starts their attempts,
/// tries again what may go through, and gives up what cannot. Every rank that published is told
/// how its version ended.
class PublishQueue {
 public:
  PublishQueue(Shared& shared, EpochPlanner& planner, EpochRunner& runner, FillScheduler& fills);
  ~PublishQueue() { s_.strand.Cancel(timer_); }

  /// Errors: CoordinatorPort::Publish's.
  Status Publish(const control::PublishRequest& request);
  /// Errors: CoordinatorPort::Withdraw's.
  Status Withdraw(const control::WithdrawRequest& request);
  /// True when an epoch is about to run: no fill may begin.
  bool Start();
  /// An attempt is over. True: its version is committed.
  bool End(const EpochRun& run);
  void OnVoid(const PendingEpoch& pending);
  void OnPlanFailed(const PendingEpoch& pending);
  /// A trainer's rank is lost.
  void OnLost(const Group& trainer, uint32_t rank, const Status& why);
  /// Those that do not run.
  void GiveUpTo(const VersionId& id, const Status& why);
  void GiveUpWaiting(const Status& why);
  /// The version whose plans are made, if there is one.
  void Abandon(const Status& why);
  /// Nothing up to `id` is accepted any more.
  void SetFloor(const VersionId& id) { queue_.SetFloor(id); }
  /// To the next deadline of a version.
  void ArmTimer();

  /// Engines that a version waits for.
  size_t EnginesWanted() const;
  const std::map<Version, PendingVersion>& versions() const { return queue_.versions(); }
  const VersionId& floor() const { return queue_.floor(); }

 private:
  Status CheckPublish(const Membership::Place& place) const;
  std::vector<std::string> LeaveOut(PendingVersion& head, std::vector<const Group*>& engines) const;
  void ToldToPublish(PendingEpoch& planned, const PendingVersion& pending,
                     const Group& trainer) const;
  /// Every rank that published the version is still the one that did.
  bool TrainerHolds(const PendingVersion& pending) const;
  void GiveUpWhatWasLetGo();
  void GiveUp(PendingVersion pending, const Status& why);
  void GiveUpAll(std::vector<PendingVersion> versions, const Status& why);
  void AllowAgain(const PendingVersion& pending);
  void OnTimer();
  Status ExpiryOf(const PendingVersion& pending) const;
  /// A version that never came to an epoch leaves one, too: people look for it there.
  void RememberGivenUp(const PendingVersion& pending, const Status& why);

  Shared& shared_;
  Services& s_;
  EpochPlanner& planner_;
  EpochRunner& runner_;
  FillScheduler& fills_;
  VersionQueue queue_;
  Executor::TimerId timer_ = 0;
  CancelToken cancel_;
};

}  // namespace weightwire::coordinator
