#pragma once

#include <optional>
#include <set>
#include <string>
#include <vector>

#include "server/coordinator/epoch_planner.h"
#include "server/coordinator/epoch_runner.h"
#include "server/coordinator/fill_scheduler.h"
#include "server/coordinator/scheduling.h"

namespace weightwire::coordinator {

/// Back to a version that engines still hold, by an operator or because an engine refused what was
/// committed.
class RollbackScheduler {
 public:
  RollbackScheduler(Shared& shared, EpochPlanner& planner, EpochRunner& runner,
                    FillScheduler& fills)
      : shared_(shared), s_(shared.s), planner_(planner), runner_(runner), fills_(fills) {}

  /// As Coordinator::Rollback; `reply` runs in the middle of a change.
  void Ask(Version version, control::Reply<RolledBack> reply);
  /// True when an epoch is about to run: nothing else may begin.
  bool Start();
  void End(const EpochRun& run);
  /// After a publish that an engine refused: to what the others hold.
  void GoBackFrom(const EpochRun& refused);
  /// Nothing when none was asked for.
  void Answer(const Result<RolledBack>& result);
  /// Asked for, and not ended yet.
  std::optional<Version> pending() const {
    return pending_ ? std::optional(pending_->version) : std::nullopt;
  }
  AwaitedModel awaited() const { return pending_ ? pending_->awaited : AwaitedModel{}; }

 private:
  struct Pending {
    Version version{};
    uint32_t attempts = 0;
    std::set<std::string> without;  ///< engines that failed an attempt
    AwaitedModel awaited;
    std::vector<control::Reply<RolledBack>> replies;
  };
  Status Check(Version version) const;
  bool IsCommitted(Version version) const;
  epoch::Contents HeldTogether(const std::set<std::string>& without) const;
  epoch::Content HeldOf(const Pending& rollback) const;
  Status NoHolder(Version version) const;

  Shared& shared_;
  Services& s_;
  EpochPlanner& planner_;
  EpochRunner& runner_;
  FillScheduler& fills_;
  std::optional<Pending> pending_;
};

}  // namespace weightwire::coordinator
