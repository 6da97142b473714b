#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "server/coordinator/epoch_planner.h"
#include "server/coordinator/epoch_runner.h"
#include "server/coordinator/fill_scheduler.h"
#include "server/coordinator/publish_queue.h"
#include "server/coordinator/rollback_scheduler.h"
#include "server/coordinator/scheduling.h"

namespace weightwire::coordinator {

/// Decides what runs: at most one epoch of the fleet; while there is none, fills.
///
///   PublishQueue ─┐                    ┌─ epoch::Step, one machine for each epoch
///   Rollback ─────┼─ pending epoch ─ plans ─ EpochRunner
///   FillScheduler ┘   (EpochPlanner)   └─ …committed or aborted, and what follows
///
/// epoch_scheduler_rejoin.cc takes up what another coordinator or a cut left unfinished;
/// epoch_scheduler_status.cc tells people. Strand only.
class EpochScheduler : private EpochRunner::Owner, private EpochPlanner::Owner {
 public:
  /// `committed`: the last decision of the journal, epoch 0 when there is none. `first`, `history`:
  /// see EpochNumbers. `changed` runs after every change that a status would show.
  EpochScheduler(Services services, CommitRecord committed, Epoch first, JournalId history,
                 std::function<void()> changed);
  /// Makes the first reservation of epoch numbers.
  void Start() { shared_.numbers.Reserve(); }

  /// Errors: CoordinatorPort::Publish's.
  Status Publish(const control::PublishRequest& request) { return publishes_.Publish(request); }
  /// Errors: CoordinatorPort::Withdraw's.
  Status Withdraw(const control::WithdrawRequest& request) { return publishes_.Withdraw(request); }
  Status Commit(Epoch epoch);
  Status Abort(Epoch epoch, const std::string& why);
  /// As Coordinator::Rollback; `reply` runs in the middle of a change.
  void Rollback(Version version, control::Reply<RolledBack> reply) {
    rollbacks_.Ask(version, std::move(reply));
  }
  /// The member is registered and the sender is its agent. False: no such epoch runs.
  bool OnReport(const epoch::Report& report) { return runner_.OnReport(report); }
  void OnLost(const Group& group, uint32_t rank, const epoch::Member& member, const Status& why);
  /// The member takes no part in what runs any more; a version that it holds waits for it.
  void OnCutOff(const Group& group, uint32_t rank, const epoch::Member& member, const Status& why);
  /// A member that registers holds this, whatever the journal says: no number at or below is handed
  /// out again. What it serves was decided; a journal that does not have that decision (it was put
  /// back, or records were deleted) gets it again, and everybody is told.
  void OnRejoinState(const std::string& rank, const control::RejoinState& claim);
  /// As Journal::OnHindered.
  void OnHindered(const Status& why);
  /// What its ranks claim to hold counts from now on; a group whose claims do not fit together or
  /// the journal is evicted.
  void OnComplete(Group& group);
  /// Starts whatever can start now: the one place where something begins. Everything that may have
  /// made a beginning possible (a publish, a complete group, the end of an epoch, reserved numbers)
  /// calls it, and it asks the whole question anew.
  void TryStart();
  /// Starts nothing any more; `done` when nothing runs.
  void Shutdown(std::function<void()> done);

  const Decisions& decisions() const { return shared_.decisions; }
  bool deciding() const { return shared_.decisions.deciding; }
  /// As Coordinator::Readiness.
  Status Readiness() const;
  void Describe(const StatusQuery& query, StatusSnapshot& snapshot) const;
  /// As Coordinator::Describe.
  Result<EpochTrace> Describe(Epoch epoch) const;
  std::vector<EpochEdges> Edges() const { return shared_.history.Edges(); }
  /// How long the member's agent has given no sign of life; 0 while that is no reason to worry.
  double SilentSeconds(const epoch::Member& member) const;
  /// What a drained engine still takes part in.
  std::vector<std::string> BusyWith(const Group& engine) const;
  EngineState StateOf(const Group& engine) const;
  /// Versions away from the committed one; 0 only when it serves that.
  Version LagOf(const Group& engine) const;
  /// It serves what is committed, or is required to change to it.
  bool IsReady(const Group& engine) const;
  /// The last version's epoch that was committed here and that its engines serve.
  Epoch served() const { return served_; }
  /// Plans of the newest epoch, by engine.
  const std::map<std::string, PlannedPairPtr>& newest_plans() const { return newest_plans_; }

 private:
  void OnDurable(const EpochRun& run) override;
  void OnEnded(const EpochRun& run) override;
  void OnUndecidable(const Status& why) override { Halt(why); }
  void OnPlanned(const PendingEpoch& pending) override;
  void OnVoid(const PendingEpoch& pending) override;
  void OnPlanFailed(const PendingEpoch& pending) override;
  /// By metrics.
  void TellCommitted();
  void AbortRuns(const Status& why);
  void Halt(const Status& why);
  void FinishShutdownWhenIdle();
  void LeaveRuns(const Group& group, uint32_t rank, const epoch::Member& member, const Status& why);

  // ---- epoch_scheduler_rejoin.cc ----
  /// What a rank holds that has not been cut off itself, while others of its engine were.
  control::RejoinState KnownOf(const Group& engine, uint32_t rank) const;
  bool IsExcluded(const std::string& engine, Epoch epoch) const;
  void DropExcluded(const Group& engine, std::vector<control::RejoinState>& claims);
  bool Forgotten(const epoch::Content& served) const;
  void Restore(const epoch::Content& served);

  // ---- epoch_scheduler_status.cc ----
  void DescribeEpochs(const StatusQuery& query, StatusSnapshot& snapshot) const;
  EpochStatus StatusOfRun(const EpochRun& run, size_t lines_max) const;
  void SetProgress(const EpochRun& run, EpochStatus& status) const;
  /// What everyone waits for, and since when; 0: not known.
  std::pair<std::string, Nanos> Waiting() const;
  std::string WaitingMembersLine() const;
  std::string WaitingVersionLine(const PendingVersion& pending) const;
  std::string WaitingFillLine() const;

  Shared shared_;
  Services& s_;
  EpochPlanner planner_;
  EpochRunner runner_;
  FillScheduler fills_;
  RollbackScheduler rollbacks_;
  PublishQueue publishes_;
  std::function<void()> stopped_;
  Epoch served_{};
  std::map<std::string, PlannedPairPtr> newest_plans_;
  CancelToken cancel_;
};

}  // namespace weightwire::coordinator
