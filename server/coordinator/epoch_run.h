#pragma once

#include <array>
#include <functional>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "server/base/executor.h"
#include "server/coordinator/coordinator.h"
#include "server/coordinator/plan_cache.h"
#include "server/coordinator/trace.h"
#include "server/epoch/coordinator_machine.h"

namespace weightwire::coordinator {

/// An epoch whose plans are being made: nobody has been told of it yet.
struct PendingEpoch {
  epoch::Spec spec;
  std::array<uint8_t, 16> trace_id{};
  uint32_t attempt = 1;
  Nanos started{};
  double started_wall = 0;
  std::set<std::string> direct;                 ///< PrepareInput's
  bool star = false;                            ///< attempts were lost with engines that relay
  std::map<std::string, PlannedPairPtr> plans;  ///< by engine
  size_t awaited = 0;
  Status failure;  ///< of the first plan that cannot be made
  std::string failed_engine;
  std::vector<std::string> left_out;
  Trace trace;
};

/// An epoch that runs: the machine's state and what people and metrics want to know of it.
struct EpochRun {
  epoch::State state;
  std::vector<epoch::PrepareCommand> prepares;
  std::map<epoch::Member, std::string> names;   ///< "trainer/0"
  std::map<std::string, PlannedPairPtr> plans;  ///< by engine
  std::vector<std::string> left_out;
  std::array<uint8_t, 16> trace_id{};
  Trace trace;
  uint32_t attempt = 1;
  Nanos started{};
  Nanos appended{};  ///< COMMIT was submitted
  Nanos phase_since{};
  double started_wall = 0;
  std::map<epoch::Phase, double> phase_seconds;
  Executor::TimerId timer = 0;
  std::map<epoch::Member, epoch::Contents> holds;  ///< what a target holds while the epoch moves
  std::map<epoch::Member, epoch::Contents> keeps;  ///< and beside the epoch when it is installed
  /// What a target that is part of the epoch has staged.
  struct Figures {
    int64_t bytes = 0;
    std::map<std::string, int64_t> bytes_by_transport;
    int64_t bytes_kept = 0;
    DeltaFigures delta;
  };
  std::map<epoch::Member, Figures> staged;
  double flip_seconds_max = 0;
  std::optional<epoch::Finish> finished;

  bool IsFill() const { return state.spec.kind == epoch::Kind::kFill; }
  bool CanAbort() const;
  /// Adds the time since the last call to the phase that ended.
  double LeavePhase(epoch::Phase left, Nanos now);
  /// Of the members that are waited for, those come first in `waiting_for` of which `first` is
  /// true, and it has `lines_max` at most.
  EpochStatus ToStatus(Nanos now, size_t lines_max = std::numeric_limits<size_t>::max(),
                       const std::function<bool(const epoch::Member&)>& first = nullptr) const;
  /// With the phase that is not over, if it is not.
  EpochTrace Describe(Nanos now) const;
  std::map<ParticipantId, std::string> ParticipantNames() const;

 private:
  /// "engine-a/1: staged", one for each member that the phase waits for.
  void SetWaiting(EpochStatus& status, size_t lines_max,
                  const std::function<bool(const epoch::Member&)>& first) const;
};

EpochStatus StatusOf(const PendingEpoch& pending, Nanos now);

}  // namespace weightwire::coordinator
