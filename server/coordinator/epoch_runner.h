#pragma once

#include <deque>
#include <memory>
#include <utility>
#include <vector>

#include "server/coordinator/epoch_run.h"
#include "server/coordinator/scheduling.h"

namespace weightwire::coordinator {

/// Runs epochs that somebody has begun: feeds their machines with what is heard and carries out
/// what they answer. At most one epoch of the fleet (a publish or a rollback), and fills. What to
/// begin, and what follows an end, is for its owner to say.
class EpochRunner {
 public:
  class Owner {
   public:
    virtual ~Owner() = default;
    /// COMMIT of the epoch is durable; it is in Decisions already.
    virtual void OnDurable(const EpochRun& run) = 0;
    virtual void OnEnded(const EpochRun& run) = 0;
    /// The fate of a decision is unknown.
    virtual void OnUndecidable(const Status& why) = 0;
  };
  EpochRunner(Shared& shared, Owner& owner) : shared_(shared), s_(shared.s), owner_(owner) {}
  ~EpochRunner();

  void Begin(std::unique_ptr<EpochRun> run);
  /// At once, or after the event that is being stepped.
  void Dispatch(Epoch epoch, epoch::Event event);
  /// In a task of its own.
  void FeedLater(Epoch epoch, epoch::Event event);
  /// Those of them that can be aborted are, for something else.
  void GiveWay(const std::vector<Epoch>& epochs, const Status& why);
  /// False: it belongs to no epoch that runs.
  bool OnReport(const epoch::Report& report);
  /// The member takes no part in what runs any more.
  void OnLost(const epoch::Member& member, const Status& why);

  /// What runs; the epoch of the fleet first.
  std::vector<EpochRun*> Runs() const;
  /// Null when it does not run.
  EpochRun* RunOf(Epoch epoch) const;
  /// The epoch of the fleet; null when there is none.
  EpochRun* fleet() const { return fleet_.get(); }
  const std::vector<std::unique_ptr<EpochRun>>& fills() const { return fills_; }

 private:
  EpochRun& Add(std::unique_ptr<EpochRun> run);
  void Advance();
  void StepRun(EpochRun& run, const epoch::Event& event);
  void Perform(EpochRun& run, const std::vector<epoch::Action>& actions);
  void Do(EpochRun& run, const epoch::SendPrepare&);
  void Do(EpochRun& run, const epoch::SendTransfer&);
  void Do(EpochRun& run, const epoch::SendRelease&);
  void Do(EpochRun& run, const epoch::AppendCommit&);
  void Do(EpochRun& run, const epoch::SendCommit&);
  void Do(EpochRun& run, const epoch::SendCommittedEverywhere&);
  void Do(EpochRun& run, const epoch::SendAbort&);
  void Do(EpochRun& run, const epoch::EvictEngine&);
  void Do(EpochRun& run, const epoch::MarkStale&);
  void Do(EpochRun& run, const epoch::ExcludeEngine&);
  void Do(EpochRun& run, const epoch::EvictSource&);
  void Do(EpochRun& run, const epoch::Finish&);
  void Do(EpochRun& run, const epoch::Halt&);
  void Do(EpochRun& run, const epoch::ArmGrace&);
  void Do(EpochRun& run, const epoch::ArmDeadline&);
  void Appended(const CommitRecord& record, const Status& status);
  Nanos DeadlineOf(epoch::Phase phase) const;
  void EndRun(Epoch epoch);
  void CountEnd(const EpochRun& run);

  // ---- epoch_runner_trace.cc: for people; decides nothing ----
  void NoteBeginning(const EpochRun& run) const;
  void NotePhase(EpochRun& run, epoch::Phase left, double seconds) const;
  void NoteReport(EpochRun& run, const epoch::Report& report);
  void NoteEnd(const EpochRun& run) const;
  void Log(const EpochRun& run, std::string text, bool bad) const;
  void KeepTrace(EpochRun& run);

  Shared& shared_;
  Services& s_;
  Owner& owner_;
  std::unique_ptr<EpochRun> fleet_;
  std::vector<std::unique_ptr<EpochRun>> fills_;
  std::deque<std::pair<Epoch, epoch::Event>> events_;
  bool stepping_ = false;
  CancelToken cancel_;
};

}  // namespace weightwire::coordinator
