#pragma once

#include <memory>
#include <string>
#include <vector>

#include "server/coordinator/epoch_run.h"
#include "server/coordinator/scheduling.h"

namespace weightwire::coordinator {

/// Makes the plans of epochs that are to begin: of one publish and of fills. A draft binds nobody:
/// who is gone when its plans are there is left out, or the draft is void and counts for nothing.
class EpochPlanner {
 public:
  class Owner {
   public:
    virtual ~Owner() = default;
    /// Its plans are there, and its members are.
    virtual void OnPlanned(const Draft& draft) = 0;
    /// Its members are not what they were.
    virtual void OnVoid(const Draft& draft) = 0;
    /// Layouts do not fit together: no better at the next attempt.
    virtual void OnPlanFailed(const Draft& draft) = 0;
  };
  EpochPlanner(Shared& shared, Owner& owner) : shared_(shared), s_(shared.s), owner_(owner) {}

  std::shared_ptr<Draft> NewDraft(epoch::Spec spec) const;
  void Plan(const std::shared_ptr<Draft>& draft, const Group& source,
            const std::vector<const Group*>& engines);
  std::unique_ptr<EpochRun> RunFrom(const Draft& draft) const;
  void DropPublish() { publish_.reset(); }
  void DropFills() { fills_.clear(); }

  /// Of a publish; null when none is planned.
  const Draft* publish() const { return publish_.get(); }
  const std::vector<std::shared_ptr<Draft>>& fills() const { return fills_; }
  /// Whose plans are made; that of the fleet first.
  std::vector<const Draft*> Drafts() const;

 private:
  /// `number`: of the engine in the draft.
  void Planned(const std::shared_ptr<Draft>& draft, size_t number,
               const Result<PlannedPairPtr>& pair);
  void Finish(const std::shared_ptr<Draft>& draft);
  /// Whether the epoch's members may move what the plan quantizes.
  Status CheckQuantizes(const epoch::Spec& spec, const epoch::EngineMembers& engine,
                        const PlannedPair& pair) const;
  bool DropsReaders(const epoch::Spec& spec) const;
  bool IsStill(const std::string& name, const std::vector<epoch::Member>& ranks) const;
  void LeaveOutTheLost(Draft& draft) const;
  /// Its groups are what they were when its plans were asked for.
  bool StillComplete(const epoch::Spec& spec) const;

  Shared& shared_;
  Services& s_;
  Owner& owner_;
  std::shared_ptr<Draft> publish_;
  std::vector<std::shared_ptr<Draft>> fills_;
  Lifeline lifeline_;
};

}  // namespace weightwire::coordinator
