#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "server/memory/stage_store.h"
#include "tests/sim/ledger.h"
#include "tests/sim/process.h"

namespace weightwire::sim {

/// A rollout engine: swaps all its ranks at one step boundary, then its leader acknowledges. One
/// rank's end stops the whole engine. Checks whenever it stops or flips, and when it is asked:
///   I1 every rank serves the bytes of one version, all of them, by the oracle
///   I2 a flip only to a durable COMMIT
///   I4 the served epoch never decreases; nor does what is served go back to an earlier version or
///      from a later lineage to an earlier one, but for a rollback, not even from life to life
///   I14 what is served is taken from an engine only when one of its processes or their agents
///   died,
///       or when it refused a version itself
class Rollout {
 public:
  struct Served {
    Epoch content;
    coordinator::VersionId id;
    int buffer = 0;
    /// Of each rank: what it serves, and what that must be.
    std::vector<std::pair<const memory::MemoryRegion*, const std::vector<uint8_t>*>> bytes;
  };
  Rollout(testing::SimExecutor& executor, std::mt19937_64& random, const Model& model,
          std::string name, Party party, std::vector<Node*> nodes, uint32_t buffers,
          const Ledger& ledger);

  void Start();
  /// Every rank has its stage.
  bool Ready() const;
  const std::string& name() const { return name_; }
  const std::optional<Served>& served() const { return served_; }
  uint64_t version() const { return served_ ? served_->id.version.value : 0; }
  bool Serves(uint64_t version, uint64_t lineage = coordinator::kFirstLineage) const {
    return served_ && served_->id == coordinator::VersionId{lineage, Version{version}};
  }
  uint32_t size() const { return static_cast<uint32_t>(ranks_.size()); }
  uint64_t flips() const { return flips_; }
  uint64_t lives() const { return lives_; }
  uint64_t rooms() const { return rooms_; }

  void KillRank(uint32_t rank);
  void SetRestart(bool restart) { restart_ = restart; }
  /// The step boundary comes this long after the offer, at most.
  void SetStepMax(Nanos step) {
    step_max_ = step;
    FlipWhenAllAreOffered();
  }
  /// Called right before a flip; for faults at that moment.
  std::function<void()> before_flip;
  /// Asked when every rank was offered a version: true, and the engine does not want it.
  std::function<bool()> refuses;

  /// I1: every byte that is served, against the oracle.
  void CheckServedBytes() const;
  /// I6: some buffer of every rank that lives holds the version whole.
  bool HoldsStaged(const coordinator::VersionId& id) const;

 private:
  struct Offer {
    Epoch epoch, content;
    coordinator::VersionId id;
    int buffer = 0;
    bool leader = false;
  };
  struct Rank {
    Node* node = nullptr;
    std::shared_ptr<Process> process;
    std::optional<agent::StageInfo> stage;
    std::optional<Offer> offer;
    Epoch swapped{};  ///< content that this process last swapped to
  };
  void Spawn(uint32_t rank);
  void Ended(uint32_t rank, const Process& process, const Status& why);
  void Committed(uint32_t rank, const Process& process, Offer offer);
  void MakeRoom(uint32_t rank, const Process& process, Epoch epoch);
  void FlipWhenAllAreOffered();
  void Flip(Epoch epoch);
  void ExpectMayFollow(const Served& next) const;
  bool AllOffered(Epoch epoch) const;
  static bool Holds(const memory::MemoryRegion& region, const std::vector<uint8_t>& wanted);

  testing::SimExecutor& executor_;
  std::mt19937_64& random_;
  const Model& model_;
  const std::string name_;
  const Party party_;
  const uint32_t buffers_;
  const Ledger& ledger_;
  std::vector<Rank> ranks_;
  std::vector<std::shared_ptr<Process>> processes_;
  std::optional<Served> served_;
  Epoch last_content_{};  ///< that was served, in whatever life
  coordinator::VersionId last_{0, {}};
  Nanos step_max_ = std::chrono::milliseconds(20);
  bool restart_ = true;
  uint64_t flips_ = 0;
  uint64_t rooms_ = 0;   ///< times that a rank gave up what it served
  uint64_t lives_ = 1;   ///< raised whenever a rank ends
  uint64_t deaths_ = 0;  ///< of processes and agents, and refusals
  uint64_t deaths_at_flip_ = 0;
};

}  // namespace weightwire::sim
