#pragma once

#include <map>
#include <string>
#include <string_view>
#include <unordered_set>
#include <vector>

#include "server/coordinator/epoch_planner.h"
#include "server/coordinator/epoch_runner.h"
#include "server/coordinator/scheduling.h"

namespace weightwire::coordinator {

/// An engine that has missed the newest version gets it from another engine: several fills at a
/// time, one per holder; who failed is filled alone, after a pause of its own.
class FillScheduler {
 public:
  /// An engine, waiting or holding, of which fills have failed since the last commit.
  struct Trouble {
    std::vector<epoch::Member> ranks;  ///< others than these begin anew
    uint32_t failures = 0;
    Nanos not_before{};
    bool fits_nobody = false;  ///< there is no plan for it
  };
  FillScheduler(Shared& shared, EpochPlanner& planner, EpochRunner& runner)
      : shared_(shared), s_(shared.s), planner_(planner), runner_(runner) {}

  void Start();
  void End(const EpochRun& run);
  /// False while a fill still runs: it is told to stop, unless it is decided.
  bool GaveWay();
  void FitsNobody(const Group& engine) { troubles_[engine.name] = {engine.Members(), 1, {}, true}; }
  void Forget(const std::string& engine) { troubles_.erase(engine); }
  void ForgetAll() { troubles_.clear(); }
  /// Null when it has none.
  const Trouble* TroubleOf(const Group& engine) const;

 private:
  bool StartOne();
  void Failed(Group& engine, const Status& why);
  /// Engines that are filled, or from which one is. Valid until a fill is planned or ends.
  std::unordered_set<std::string_view> InFills() const;

  Shared& shared_;
  Services& s_;
  EpochPlanner& planner_;
  EpochRunner& runner_;
  std::map<std::string, Trouble> troubles_;  ///< by engine
};

}  // namespace weightwire::coordinator
