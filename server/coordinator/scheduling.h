#pragma once

#include <array>
#include <functional>
#include <random>
#include <vector>

#include "server/coordinator/absent_models.h"
#include "server/coordinator/cancel_token.h"
#include "server/coordinator/decisions.h"
#include "server/coordinator/epoch_history.h"
#include "server/coordinator/epoch_numbers.h"
#include "server/coordinator/stragglers.h"

namespace weightwire::coordinator {

/// So many leases one version waits for engines of a model that come and go.
inline constexpr int kLeasesForModels = 3;

/// What the schedulers share: strand only.
struct Shared {
  Shared(const Services& services, CommitRecord committed, Epoch first, JournalId epochs_of,
         std::function<void()> starts, std::function<void()> changes,
         std::function<void(const Status&)> undecidable);

  Services s;
  Decisions decisions;
  EpochNumbers numbers;
  Stragglers stragglers;
  EpochHistory history;
  AbsentModels absent_models;
  /// Starts whatever can start now.
  std::function<void()> try_start;
  /// Runs after every change that a status would show.
  std::function<void()> changed;
  std::mt19937_64 random;
  CancelToken cancel;

  /// Engines whose every rank is connected.
  std::vector<const Group*> CompleteEngines() const;
  /// Complete, not drained, and not yet to swap to something older.
  std::vector<const Group*> PartakingEngines() const;
  /// What would begin with these engines waits for one of another model first (AbsentModels);
  /// whatever can start is started when that is over.
  bool AwaitsAModel(const std::vector<const Group*>& engines, AwaitedModel& awaited);
  /// The engine's agents learn that it serves less than what is committed.
  void SendStale(const Group& engine);
};

/// Of an epoch that nobody outside has given a trace: unique among all coordinators of the journal.
std::array<uint8_t, 16> OwnTraceId(JournalId history, Epoch epoch);

}  // namespace weightwire::coordinator
