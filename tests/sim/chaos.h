#pragma once

#include <algorithm>
#include <optional>
#include <random>
#include <string>

#include "tests/sim/drains.h"
#include "tests/sim/fleet.h"
#include "tests/sim/reached.h"

namespace weightwire::sim {

/// One seed: versions are published one after another, and taken back, while faults of every kind
/// strike at random moments; the fleet checks its invariants all the while. Then the faults stop,
/// and within a bound a last version is served everywhere (L1, L2).
///
/// Which trainer and engines there are, how long it lasts and how the network is, the seed says
/// too: what is rare among everything at once is common in some of the small fleets.
class Chaos {
 public:
  Chaos(uint64_t seed, Reached& reached);
  void Run();

 private:
  static Fleet::Options OptionsFor(uint64_t seed);
  static bool OfTwoModels(uint64_t seed) { return seed % 5 == 3; }
  int64_t In(int64_t low, int64_t high) {
    return low + static_cast<int64_t>(random_() % static_cast<uint64_t>(high - low + 1));
  }
  Nanos Up(Nanos most) { return Nanos(In(0, most.count())); }
  Node& AnyNode();
  Rollout& AnyEngine();

  void Round();
  void Strike();
  /// The next version, by a trainer that goes on, that starts anew from an earlier step, or that
  /// was overtaken by one that did and does not know it.
  void Publish();
  void StartTrainerAnew();
  /// To a version that some engine holds, or to one that nobody may hold any more. It may run into
  /// whatever comes next: the answer is nobody's business.
  void GoBack();
  /// Of an engine or agent, or what was drained before is taken back; the coordinator may end
  /// before the answer, and after it.
  void DrainOrUndo();
  /// Some rank of the trainer does not wait any more; it may publish the version anew.
  void Withdraw();
  void KillNode();
  void HurtLink();
  /// All nodes, or some, off a coordinator that lives.
  void CutOff();
  void CrashCoordinator();
  void Heal();
  void Settle();
  /// No engine is taken for newer than it is. (An engine learns of its swap first.)
  void ExpectStatusIsTrue();
  void CountEpochs();

  std::mt19937_64 random_;
  const bool withdraws_;          ///< every fourth seed, another one
  bool settling_ = false;         ///< the faults are over
  std::optional<Drains> drains_;  ///< of every fourth seed
  Fleet fleet_;
  Reached& reached_;
  const bool goes_back_;   ///< the trainer, in every fourth seed, a third one
  const bool two_models_;  ///< that the trainer publishes, in every fifth seed
  uint64_t lineage_ = coordinator::kFirstLineage;
  uint64_t version_ = 0;
  uint64_t version_max_ = 0;  ///< of any lineage
};

}  // namespace weightwire::sim
