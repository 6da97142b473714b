#pragma once

#include <memory>
#include <string>
#include <vector>

#include "server/coordinator/epoch_run.h"
#include "server/coordinator/scheduling.h"

namespace weightwire::coordinator {

/// Makes the plans of epochs that are to begin: of one publish and of fills. A pending epoch
/// binds nobody: who is gone when its plans are there is left out, or the pending epoch is void and
/// counts for nothing.
class EpochPlanner {
 public:
  class Owner {
   public:
    virtual ~Owner() = default;
    /// Its plans are there, and its members are.
    virtual void OnPlanned(const PendingEpoch& pending) = 0;
    /// Its members are not what they were.
    virtual void OnVoid(const PendingEpoch& pending) = 0;
    /// Layouts do not fit together: no better at the next attempt.
    virtual void OnPlanFailed(const PendingEpoch& pending) = 0;
  };
  EpochPlanner(Shared& shared, Owner& owner) : shared_(shared), s_(shared.s), owner_(owner) {}

  std::shared_ptr<PendingEpoch> NewPending(epoch::Spec spec) const;
  void Plan(const std::shared_ptr<PendingEpoch>& pending, const Group& source,
            const std::vector<const Group*>& engines);
  std::unique_ptr<EpochRun> RunFrom(const PendingEpoch& pending) const;
  void DropPublish() { publish_.reset(); }
  void DropFills() { fills_.clear(); }

  /// Of a publish; null when none is planned.
  const PendingEpoch* publish() const { return publish_.get(); }
  const std::vector<std::shared_ptr<PendingEpoch>>& fills() const { return fills_; }
  /// Whose plans are made; that of the fleet first.
  std::vector<const PendingEpoch*> PendingEpochs() const;

 private:
  /// `number`: of the engine in the pending epoch.
  void Planned(const std::shared_ptr<PendingEpoch>& pending, size_t number,
               const Result<PlannedPairPtr>& pair);
  void Finish(const std::shared_ptr<PendingEpoch>& pending);
  /// Whether the epoch's members may move what the plan quantizes.
  Status CheckQuantizes(const epoch::Spec& spec, const epoch::EngineMembers& engine,
                        const PlannedPair& pair) const;
  bool DropsReaders(const epoch::Spec& spec) const;
  bool IsStill(const std::string& name, const std::vector<epoch::Member>& ranks) const;
  void LeaveOutTheLost(PendingEpoch& pending) const;
  /// Its groups are what they were when its plans were asked for.
  bool StillComplete(const epoch::Spec& spec) const;

  Shared& shared_;
  Services& s_;
  Owner& owner_;
  std::shared_ptr<PendingEpoch> publish_;
  std::vector<std::shared_ptr<PendingEpoch>> fills_;
  CancelToken cancel_;
};

}  // namespace weightwire::coordinator
