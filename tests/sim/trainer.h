#pragma once

#include <map>
#include <memory>
#include <vector>

#include "tests/sim/process.h"

namespace weightwire::sim {

/// A trainer group. Between versions it scribbles over its parameters, as an optimizer does.
class Trainer {
 public:
  Trainer(testing::SimExecutor& executor, std::mt19937_64& random, const Model& model, Party party,
          std::vector<Node*> nodes);

  void Start();
  /// Writes the version into every rank's memory and publishes it. All ranks must be idle, and have
  /// begun anew (Restart) since they published in another lineage.
  void Publish(uint64_t version, agent::PublishMode mode, Nanos deadline,
               uint64_t lineage = coordinator::kFirstLineage);
  /// Every rank is attached, bound and holds nothing.
  bool Idle() const;
  std::string Describe() const;
  /// Why the last version failed on some rank; OK when every rank was released with OK.
  const Status& outcome() const { return outcome_; }

  /// A rank does not wait any more. Once its bytes may change it scribbles over them; `again`: and
  /// publishes the version anew.
  void Withdraw(uint32_t rank, bool if_accepted, bool again);
  /// What withdrawals found, by agent::Withdrawal.
  const std::map<agent::Withdrawal, uint64_t>& withdrawals() const { return withdrawals_; }

  void KillRank(uint32_t rank);
  /// Every rank's process is killed; others come in their places, which know nothing.
  void Restart();
  /// Restarts ranks that end, from now on.
  void SetRestart(bool restart) { restart_ = restart; }
  uint32_t size() const { return static_cast<uint32_t>(ranks_.size()); }
  uint64_t evictions() const { return evictions_; }

 private:
  struct Rank {
    Node* node = nullptr;
    std::shared_ptr<Process> process;
    std::shared_ptr<memory::MemoryRegion> memory;
    std::vector<uint64_t> offsets;
    bool bound = false;
    bool publishing = false;
    uint64_t version = 0;  ///< held; 0 = none
    agent::PublishCall call;
  };
  void Spawn(uint32_t rank);
  void PublishFrom(uint32_t rank);
  void Withdrawn(uint32_t rank, agent::Withdrawal found, bool again);
  void Ready(uint32_t rank);
  void Ended(uint32_t rank, const Process& process, const Status& why);
  void Released(uint32_t rank, const Process& process, Version version, const Status& why);
  void Write(uint32_t rank);
  void Scribble(uint32_t rank);

  testing::SimExecutor& executor_;
  std::mt19937_64& random_;
  const Model& model_;
  const Party party_;
  std::vector<Rank> ranks_;
  std::vector<std::shared_ptr<Process>> ended_;
  Status outcome_;
  bool restart_ = true;
  uint64_t evictions_ = 0;
  std::map<agent::Withdrawal, uint64_t> withdrawals_;
};

}  // namespace weightwire::sim
