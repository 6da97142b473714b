#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "tests/sim/node.h"
#include "tests/sim/rollout.h"
#include "tests/sim/trainer.h"
#include "tests/support/memory_journal.h"

namespace weightwire::sim {

/// A whole fleet in one thread under virtual time: the real coordinator, agents, transfer engines
/// and machines; simulated are the network, the journal's disk, the applications and the clock.
/// Equal options give equal runs.
///
/// The invariants are checked all the time: what engines serve after every step of the executor,
/// one engine in turn, and before and after it changes (rollout.h); I6 when a trainer is released
/// and when a COMMIT is submitted, I3 when an ABORT is sent, I5 when a coordinator starts, I8 (of
/// lineages, ledger.h) when a COMMIT is submitted; an
/// epoch's number is used once, also across coordinators. (I7, of drains: drains.h.) A violation is
/// a test failure.
class Fleet {
 public:
  struct EngineSpec {
    std::string name;
    Party party;
    std::vector<std::string> nodes;  ///< rank i runs on node i mod size
    uint32_t buffers = memory::kBuffersUsual;
  };
  struct Options {
    uint64_t seed = 1;
    /// Node name → host name. Nodes of one host map each other's memory.
    std::vector<std::pair<std::string, std::string>> nodes = {{"trainer-a", "host-1"},
                                                              {"trainer-b", "host-2"},
                                                              {"rollout-a", "host-1"},
                                                              {"rollout-b", "host-3"},
                                                              {"rollout-c", "host-4"}};
    Party trainer = MegatronTp2Pp2();
    std::vector<std::string> trainer_nodes = {"trainer-a", "trainer-b"};
    std::vector<EngineSpec> engines = {{"one", VllmTp1(), {"rollout-a"}},
                                       {"two", VllmTp2(), {"rollout-b", "rollout-c"}},
                                       {"hf", HuggingFace(), {"rollout-c"}}};
    Nanos message_delay_max = std::chrono::milliseconds(2);
    Nanos journal_delay = std::chrono::milliseconds(3);
    bool repeat_reports = false;  ///< some of them
    transport::FakeLink link = {.latency = std::chrono::microseconds(50),
                                .bytes_per_second = 20'000'000};
    transfer::Tuning tuning = SmallTuning();
    transfer::DeltaPolicy delta = {};
    coordinator::Options coordinator;
  };
  /// Slots and segments so small that even the tiny model takes many of each.
  static transfer::Tuning SmallTuning();

  explicit Fleet(Options options);
  ~Fleet();

  /// Starts every node and process; true when the fleet stands.
  bool Start();

  // ---- running ----
  /// Runs until `done`, at most `span` of virtual time. False when it did not come to that.
  bool RunUntil(const std::function<bool()>& done, Nanos span);
  void RunFor(Nanos span);
  /// Publishes on all ranks and runs until every rank was released, at most `deadline` and a bit.
  Status Publish(uint64_t version, agent::PublishMode mode = agent::PublishMode::kHold,
                 Nanos deadline = std::chrono::seconds(60),
                 uint64_t lineage = coordinator::kFirstLineage);
  /// Goes back to `version` and runs until that has ended; nullopt when it does not.
  std::optional<Status> Rollback(uint64_t version);
  /// Runs until every engine serves `version`.
  bool AllServe(uint64_t version, Nanos span = std::chrono::seconds(30),
                uint64_t lineage = coordinator::kFirstLineage);
  /// The phase of the newest publish; kAborted when there is none.
  epoch::Phase NewestPhase() const;
  bool RunUntilPhase(epoch::Phase phase, Nanos span = std::chrono::seconds(30));

  // ---- faults ----
  /// Runs `task` then, if the fleet still stands.
  void Later(Nanos delay, Task task);
  /// Every link over the network, from now on.
  void SetLinks(const transport::FakeLink& link);
  /// kill -9 of the coordinator; some of the appends under way become durable.
  void CrashCoordinator();
  void StartCoordinator();
  /// Cuts the nodes off the coordinator, which lives, and refuses them for `span`. It learns of it
  /// at once, or only by the leases.
  void CutOff(const std::vector<Node*>& nodes, bool coordinator_learns, Nanos span);
  std::vector<Node*> Nodes() const;

  /// Called with every command that the coordinator sends, and to whom.
  std::function<void(const Node&, const epoch::Command&)> on_command;

  // ---- parts ----
  testing::SimExecutor executor;
  std::mt19937_64 random;
  transport::FakeNetwork network;
  testing::MemoryJournal journal;
  const Ledger ledger{journal};
  Model model;
  coordinator::Coordinator* coordinator() { return coordinator_.get(); }
  Node& node(const std::string& name);
  std::vector<std::unique_ptr<Node>>& nodes() { return nodes_; }
  Trainer& trainer() { return *trainer_; }
  Rollout& engine(const std::string& name);
  std::vector<std::unique_ptr<Rollout>>& engines() { return engines_; }
  /// Ranks that were told to read from another engine.
  uint64_t relayed() const { return relayed_; }
  /// Times that a rank was told to drop a reader.
  uint64_t excluded() const { return excluded_; }
  /// Engines that a coordinator took over with what they held, and that it refused to.
  uint64_t recalled() const { return counts_.kept; }
  uint64_t refused() const { return counts_.refused; }
  /// Versions that an engine did not want, which the others took back.
  uint64_t taken_back() const { return counts_.taken_back; }
  coordinator::EngineStatus StatusOf(const std::string& engine) const;

 private:
  /// Of all that a coordinator counts, this.
  struct Counts final : metrics::Sink {
    using Labels = metrics::Labels;
    void DeclareCounter(std::string_view, std::string_view, std::vector<Labels>) override {}
    void DeclareGauge(std::string_view, std::string_view, std::vector<Labels>) override {}
    void DeclareHistogram(std::string_view, std::string_view, std::vector<double>,
                          std::vector<Labels>) override {}
    void Add(std::string_view counter, double, const Labels& labels) override {
      if (counter == "engines_recalled_total") {
        ++(labels.front().second == "kept" ? kept : refused);
      } else if (counter == "versions_refused_total") {
        taken_back += labels.front().second == "rolled_back";
      }
    }
    void Set(std::string_view, double, const Labels&) override {}
    void Observe(std::string_view, double, const Labels&) override {}
    uint64_t kept = 0, refused = 0, taken_back = 0;
  };
  void OnCommand(const Node& node, const epoch::Command& command);
  void OnRelease(const epoch::ReleaseCommand& release);
  void Disconnect(const std::string& address);
  void OnAppend(const coordinator::JournalRecord& record);
  bool Required(Epoch epoch, const epoch::Member& member) const;

  Options options_;
  Node::Surroundings surroundings_;
  std::vector<std::unique_ptr<Node>> nodes_;
  Counts counts_;
  std::unique_ptr<coordinator::Coordinator> coordinator_;
  std::unique_ptr<Trainer> trainer_;
  std::vector<std::unique_ptr<Rollout>> engines_;
  std::set<Epoch> submitted_;  ///< whose COMMIT was handed to the journal
  std::set<Epoch> released_;   ///< whose trainer was told so
  Epoch newest_{};             ///< highest epoch prepared by this coordinator
  Epoch floor_{};              ///< highest epoch prepared by earlier ones
  uint64_t relayed_ = 0;
  uint64_t excluded_ = 0;
  size_t steps_ = 0;
  bool closing_ = false;
};

}  // namespace weightwire::sim
