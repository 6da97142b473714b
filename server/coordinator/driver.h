#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "server/coordinator/coordinator.h"
#include "server/coordinator/epoch_numbers.h"
#include "server/coordinator/epoch_run.h"
#include "server/coordinator/lifeline.h"
#include "server/coordinator/membership.h"
#include "server/coordinator/outbox.h"
#include "server/coordinator/plan_cache.h"
#include "server/coordinator/stragglers.h"
#include "server/coordinator/version_queue.h"
#include "server/metrics/metrics.h"

namespace weightwire::coordinator {

/// Decides what runs: at most one epoch of the fleet; while there is none, fills.
///
///   version complete → take a number → plans (workers) → machine → …committed or aborted
///
/// driver.cc starts and ends epochs and fills, driver_rollback.cc rollbacks, driver_recall.cc what
/// another coordinator left unfinished; driver_withdraw.cc ends what a publisher takes back;
/// driver_actions.cc feeds the machine and carries out its actions; driver_status.cc tells people.
/// Strand only.
class Driver {
 public:
  struct Services {
    const Options& options;
    Clock& clock;
    Executor& strand;
    Membership& membership;
    PlanCache& plans;
    Outbox& outbox;
    Journal& journal;
    metrics::Sink& metrics;
  };
  /// `committed`: the last decision of the journal, epoch 0 when there is none. `first`, `history`:
  /// see EpochNumbers. `changed` runs after every change that a status would show.
  Driver(Services services, CommitRecord committed, Epoch first, History history,
         std::function<void()> changed);
  ~Driver();
  /// Makes the first reservation of epoch numbers.
  void Start() { numbers_.Reserve(); }

  /// Errors: CoordinatorPort::Publish's.
  Status Publish(const control::PublishRequest& request);
  /// Errors: CoordinatorPort::Withdraw's.
  Status Withdraw(const control::WithdrawRequest& request);
  Status Commit(Epoch epoch);
  Status Abort(Epoch epoch, const std::string& why);
  /// As Coordinator::Rollback; `reply` runs in the middle of a change.
  void Rollback(Version version, control::Reply<RolledBack> reply);
  /// The member is registered and the sender is its agent. False: no such epoch runs.
  bool OnReport(const epoch::Report& report);
  void OnLost(const Group& group, uint32_t rank, const epoch::Member& member, const Status& why);
  /// The member takes no part in what runs any more; a version that it holds waits for it.
  void OnCutOff(Group& group, uint32_t rank, const epoch::Member& member, const Status& why);
  /// A member that registers holds this, whatever the journal says: no number at or below is handed
  /// out again. What it serves was decided; a journal that does not have that decision (it was put
  /// back, or records were deleted) gets it again, and everybody is told.
  void OnClaim(const std::string& rank, const control::Claim& claim);
  /// As Journal::OnHindered.
  void OnHindered(const Status& why);
  /// What its ranks claim to hold counts from now on; a group whose claims do not fit together or
  /// the journal is evicted.
  void OnComplete(Group& group);
  /// Starts whatever can start now.
  void TryStart();
  /// Starts nothing any more; `done` when nothing runs.
  void Shutdown(std::function<void()> done);

  bool deciding() const { return deciding_; }
  /// As Coordinator::Readiness.
  Status Readiness() const;
  void Describe(StatusSnapshot& snapshot) const;
  /// As Coordinator::Tell.
  Result<EpochStory> Tell(Epoch epoch) const;
  std::vector<EpochLinks> Links() const;
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
  // ---- driver.cc ----
  Status CheckDecides() const;
  Status CheckPublish(const Membership::Place& place) const;
  std::vector<const Group*> CompleteEngines() const;
  /// Complete, and not drained.
  std::vector<const Group*> PartakingEngines() const;
  bool StartPublish();
  /// Complete engines that a version waits for.
  size_t EnginesWanted() const;
  std::vector<std::string> LeaveOut(PendingVersion& head, std::vector<const Group*>& engines) const;
  bool FillsGaveWay();
  std::shared_ptr<Draft> NewDraft(epoch::Spec spec);
  void Plan(const std::shared_ptr<Draft>& draft, const Group& source,
            const std::vector<const Group*>& engines);
  /// Whether the epoch's members may move what the plan quantizes.
  Status CheckQuantizes(const epoch::Spec& spec, const std::string& engine,
                        const PlannedPair& pair) const;
  void Planned(const std::shared_ptr<Draft>& draft, const std::string& engine,
               const Result<PlannedPairPtr>& pair);
  void Launch(const std::shared_ptr<Draft>& draft);
  bool IsStill(const std::string& name, const std::vector<epoch::Member>& ranks) const;
  void LeaveOutTheLost(Draft& draft) const;
  /// Its groups are what they were when its plans were asked for.
  bool StillComplete(const epoch::Spec& spec) const;
  void LeaveRuns(const Group& group, uint32_t rank, const epoch::Member& member, const Status& why);
  void TellReleased(const epoch::ReleaseCommand& release);
  /// Every rank that published the version is still the one that did.
  bool TrainerHolds(const PendingVersion& pending) const;
  void PlanFailed(const Draft& draft);
  std::unique_ptr<EpochRun> RunFrom(const Draft& draft) const;
  void EndPublish(const EpochRun& run);
  bool MayRetry(const EpochRun& run, const PendingVersion& pending) const;
  void PauseAfter(const EpochRun& run, PendingVersion& pending);
  /// Anything up to a limit that doubles with every pause before this one; TryStart runs after it.
  Nanos Pause(uint32_t pauses, Nanos first, Nanos most);
  void GiveUp(PendingVersion pending, const Status& why);
  void AllowAgain(const PendingVersion& pending);
  void GiveUpAll(std::vector<PendingVersion> versions, const Status& why);
  void AbandonDrafts(const Status& why);
  void AbortRuns(const Status& why);
  void ArmVersionTimer();
  void OnVersionTimer();
  Status ExpiryOf(const PendingVersion& pending) const;
  void Remember(const EpochStatus& status);
  void StopDeciding(const Status& why);
  void FinishShutdownWhenIdle();

  // ---- driver_fill.cc ----
  /// An engine, waiting or holding, of which fills have failed since the last commit.
  struct FillTrouble {
    std::vector<epoch::Member> ranks;  ///< others than these begin anew
    uint32_t failures = 0;
    Nanos not_before{};
    bool fits_nobody = false;  ///< there is no plan for it
  };
  void StartFills();
  bool StartFill();
  void EndFill(const EpochRun& run);
  const FillTrouble* TroubleOf(const Group& engine) const;
  void Trouble(Group& engine, const Status& why);
  bool InFill(const std::string& engine) const;

  // ---- driver_rollback.cc ----
  struct PendingRollback {
    Version version{};
    uint32_t attempts = 0;
    std::set<std::string> without;  ///< engines that failed an attempt
    std::vector<control::Reply<RolledBack>> replies;
  };
  Status CheckRollback(Version version) const;
  bool IsCommitted(Version version) const;
  epoch::Content HeldOf(const PendingRollback& rollback) const;
  Status NoHolder(Version version) const;
  bool StartRollback();
  /// COMMIT of a rollback is durable: versions go on from here.
  void WentBack();
  void EndRollback(const EpochRun& run);
  /// After a publish that an engine refused: to what the others hold.
  void GoBackFrom(const EpochRun& refused);
  void AnswerRollback(const Result<RolledBack>& result);

  // ---- driver_recall.cc ----
  /// What a rank holds that has not been cut off itself, while others of its engine were.
  control::Claim KnownOf(const Group& engine, uint32_t rank) const;
  /// The engine has staged what is decided: it is asked to swap, now or when that is durable.
  void AwaitSwap(const std::string& engine, Straggler straggler);
  /// What is new waits, for a bounded time, for an engine that is about to swap.
  bool AwaitsSwaps() const;
  bool IsAwaited(const Group& engine) const;
  void GiveUpWhatWasLetGo();
  bool Forgotten(const epoch::Content& served) const;
  void Restore(const epoch::Content& served);

  // ---- driver_actions.cc ----
  /// What runs; the epoch of the fleet first.
  std::vector<EpochRun*> Runs() const;
  EpochRun* RunOf(Epoch epoch) const;
  EpochRun& Add(std::unique_ptr<EpochRun> run);
  void Begin(std::unique_ptr<EpochRun> run);
  void Feed(Epoch epoch, epoch::Event event);
  void Pump();
  void StepRun(EpochRun& run, const epoch::Event& event);
  void Perform(EpochRun& run, const std::vector<epoch::Action>& actions);
  void Do(EpochRun& run, const epoch::SendPrepare&);
  void Do(EpochRun& run, const epoch::SendTransfer&);
  void Do(EpochRun& run, const epoch::SendRelease&);
  void Do(EpochRun& run, const epoch::AppendCommit&);
  void Do(EpochRun& run, const epoch::SendCommit&);
  void Do(EpochRun& run, const epoch::SendInstalled&);
  void Do(EpochRun& run, const epoch::SendAbort&);
  void Do(EpochRun& run, const epoch::EvictEngine&);
  void Do(EpochRun& run, const epoch::LeaveBehind&);
  void Do(EpochRun& run, const epoch::ExcludeEngine&);
  void Do(EpochRun& run, const epoch::EvictSource&);
  void Do(EpochRun& run, const epoch::Finish&);
  void Do(EpochRun& run, const epoch::StopDeciding&);
  void Do(EpochRun& run, const epoch::ArmGrace&);
  void Do(EpochRun& run, const epoch::ArmDeadline&);
  void Appended(const CommitRecord& record, const Status& status);
  /// Engines without which the newest epoch was committed are not ready from now on.
  void TellWhoIsBehind(const epoch::Spec& committed);
  void TellBehind(const Group& engine);
  bool OnStraggler(const epoch::Report& report);
  void AskToSwap(const Straggler& straggler);
  void RemindLater(const std::string& engine, uint64_t turn);
  void SendCommits(const std::vector<epoch::Member>& ranks, Epoch epoch,
                   const epoch::Content& content);
  void Install(const epoch::EngineMembers& engine, Epoch epoch, const epoch::Content& content,
               const std::map<epoch::Member, epoch::Contents>& keeps);
  Nanos DeadlineOf(epoch::Phase phase) const;
  void EndRun(Epoch epoch);
  void CountEnd(const EpochRun& run);

  // ---- driver_story.cc ----
  std::array<uint8_t, 16> OwnTraceId(Epoch epoch) const;
  void ToldToPublish(Draft& draft, const PendingVersion& pending, const Group& trainer) const;
  void NoteBeginning(const EpochRun& run) const;
  void NotePhase(EpochRun& run, epoch::Phase left, double seconds) const;
  void NoteReport(EpochRun& run, const epoch::Report& report);
  void NoteLoss(EpochRun& run, const epoch::Member& member, const Status& why) const;
  void NoteEnd(const EpochRun& run) const;
  void Log(const EpochRun& run, std::string text, bool bad) const;
  void KeepStory(EpochRun& run);
  /// A version that never came to an epoch leaves one, too: people look for it there.
  void RememberGivenUp(const PendingVersion& pending, const Status& why);

  // ---- driver_status.cc ----
  /// Whose plans are made; that of the fleet first.
  std::vector<std::shared_ptr<Draft>> Drafts() const;
  EpochStatus StatusOfRun(const EpochRun& run) const;
  /// What everyone waits for, and since when; 0: not known.
  std::pair<std::string, Nanos> Waiting() const;
  std::vector<std::string> SilentLines() const;
  std::vector<std::string> MissingLines(control::GroupRole role, bool gone_too) const;
  std::string WaitingMembersLine() const;
  std::string WaitingVersionLine(const PendingVersion& pending) const;
  std::string WaitingEnginesLine() const;
  std::string WaitingFillLine() const;

  Services s_;
  CommitRecord committed_;
  const Epoch read_;          ///< the newest decision that the journal had at the start
  const Epoch first_;         ///< of the numbers that this coordinator hands out
  epoch::Content forgotten_;  ///< the newest that is served and that the journal did not have
  std::string journal_lost_;  ///< of it, for people; empty: the journal has lost nothing
  double committed_wall_ = 0;
  std::function<void()> changed_;
  const History history_number_;
  EpochNumbers numbers_;
  VersionQueue queue_;
  std::optional<PendingRollback> rollback_;  ///< asked for, and not ended yet
  std::shared_ptr<Draft> publish_draft_;
  std::unique_ptr<EpochRun> publish_;  ///< or a rollback
  std::vector<std::shared_ptr<Draft>> fill_drafts_;
  std::vector<std::unique_ptr<EpochRun>> fills_;
  std::map<std::string, FillTrouble> fill_troubles_;  ///< by engine
  Stragglers stragglers_;
  std::mt19937_64 random_;
  std::deque<std::pair<Epoch, epoch::Event>> events_;
  bool stepping_ = false;
  bool published_ = false;  ///< in this process
  bool deciding_ = true;
  Status stopped_why_;
  Status hindered_;  ///< why the append under way does not become durable
  bool stopping_ = false;
  std::function<void()> stopped_;
  Executor::TimerId version_timer_ = 0;
  Epoch served_{};
  std::deque<EpochStatus> history_;  ///< newest first
  Stories stories_;                  ///< of epochs that ended
  std::map<std::string, PlannedPairPtr> newest_plans_;
  Lifeline lifeline_;
};

}  // namespace weightwire::coordinator
