#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "server/coordinator/coordinator.h"
#include "tests/support/memory_journal.h"
#include "tests/support/sim_executor.h"
#include "tests/unit/coordinator/strict_sink.h"

namespace weightwire::coordinator::testing {

using weightwire::testing::MemoryJournal;
using weightwire::testing::SimExecutor;

/// The canonical model of most tests: two small tensors of odd sizes.
layout::CanonicalSpace SmallModel();
/// Rank `rank` of `world` holds its part of the rows of every tensor, in storage of its own.
layout::RankLayout RowShard(const layout::CanonicalSpace& model, uint32_t rank, uint32_t world);

class Fleet;

/// An agent that plays by the protocol, unless `deaf` says otherwise: it answers every command
/// through the executor, with digests that both sides of a stream compute alike.
class FakeAgent final : public control::AgentPort {
 public:
  FakeAgent(Fleet& fleet, std::string name) : fleet_(fleet), name_(std::move(name)) {}
  void OnCommand(epoch::Command command) override;
  void OnSessionLost(Status why) override;

  /// Opens a session and, unless told otherwise, keeps it by heartbeats.
  Result<control::AgentWelcome> Open(bool heartbeats = true);
  void StopHeartbeats() { beating_ = false; }
  control::Troubles troubles;  ///< that its heartbeats tell
  std::vector<control::Receiving> receiving;
  void Report(epoch::Report report);
  AgentId id() const { return id_; }
  const std::string& name() const { return name_; }
  Incarnation incarnation{};

  /// Commands for which this returns true are received and not answered.
  std::function<bool(const epoch::Command&)> deaf;
  /// Spoils the digests that a target reports.
  bool corrupt = false;
  /// Versions that its ranks hold beside what they serve; 0: they have one buffer.
  size_t retain = 1;
  /// May change what a rank (the second argument) says that it serves.
  std::function<void(epoch::HashedReport&, uint32_t)> attested;
  /// Whom its targets say that they read from over tcp, for half a second, as many bytes as the
  /// epoch's number.
  ParticipantId reads_from{};
  /// What each of its ranks serves.
  std::map<epoch::Member, epoch::Content> serves;

  std::vector<epoch::Command> commands;
  std::optional<Status> session_lost;

  template <typename T>
  std::vector<T> All() const {
    std::vector<T> all;
    for (const epoch::Command& command : commands) {
      if (const T* c = std::get_if<T>(&command)) all.push_back(*c);
    }
    return all;
  }
  template <typename T>
  std::optional<T> Last() const {
    const std::vector<T> all = All<T>();
    return all.empty() ? std::nullopt : std::optional<T>(all.back());
  }

 private:
  void Beat();
  /// What the rank holds while an epoch moves: the oldest has given way to it.
  epoch::Contents HeldBeyond(const epoch::Member& member);
  void Answer(const epoch::PrepareCommand& command);
  void Answer(const epoch::TransferCommand& command);
  void Answer(const epoch::ReleaseCommand&) {}
  void Answer(const epoch::CommitCommand& command);
  void Answer(const epoch::CommittedEverywhereCommand& command) {
    serves[command.member] = committed_.at(command.member);
    held_[command.member] = keeps_[command.member];
  }
  void Answer(const epoch::AbortCommand& command);
  void Answer(const epoch::EvictCommand&) {}
  void Answer(const epoch::StaleCommand&) {}
  void Answer(const epoch::HashCommand& command);
  void Answer(const epoch::ExcludeCommand&) {}

  Fleet& fleet_;
  std::string name_;
  AgentId id_{};
  bool beating_ = false;
  std::map<epoch::Member, epoch::PrepareCommand> prepared_;
  std::map<epoch::Member, epoch::Content> committed_;
  std::map<epoch::Member, epoch::Contents> held_;
  std::map<epoch::Member, epoch::Contents> keeps_;  ///< becomes `held_` with the swap
};

/// A coordinator under virtual time with fake agents. `Restart` makes a new one on the same
/// journal.
class Fleet {
 public:
  explicit Fleet(Options options = {});
  ~Fleet();

  FakeAgent& Agent(const std::string& name);  ///< made and opened at the first call
  Result<epoch::Member> Register(const std::string& agent, control::GroupRole role,
                                 const std::string& group, uint32_t rank, uint32_t world,
                                 uint64_t incarnation = 0, const control::RejoinState& claim = {});
  Result<control::LayoutReply> Submit(control::LayoutSubmission submission);
  Status SubmitRows(const epoch::Member& member, uint32_t rank, uint32_t world);
  /// Registers all ranks of a group on agent "<group>-agent" (or `agent`) and agrees on row shards.
  std::vector<epoch::Member> Join(control::GroupRole role, const std::string& group, uint32_t world,
                                  std::string agent = "");
  std::vector<epoch::Member> Trainer(uint32_t world = 2) {
    return Join(control::GroupRole::kTrainer, "trainer", world);
  }
  std::vector<epoch::Member> Engine(const std::string& name, uint32_t world = 1) {
    return Join(control::GroupRole::kEngine, name, world);
  }
  Status Publish(const epoch::Member& member, uint64_t version, bool manual = false,
                 Nanos deadline = std::chrono::seconds(100));
  /// Every rank publishes; expects that all are accepted.
  void PublishAll(const std::vector<epoch::Member>& trainer, uint64_t version, bool manual = false,
                  Nanos deadline = std::chrono::seconds(100));
  void Run(Nanos span = std::chrono::milliseconds(100)) { sim.RunFor(span); }
  void Restart();

  EngineStatus EngineNamed(const std::string& name) const;
  /// How the version ended for the member; nullopt while it is held.
  std::optional<Status> Released(const epoch::Member& member, uint64_t version) const;
  EpochStatus Newest() const { return coordinator->Snapshot().epochs.at(0); }

  Options options;
  SimExecutor sim;
  MemoryJournal journal{sim, std::chrono::milliseconds(2)};
  StrictSink metrics;
  std::unique_ptr<Coordinator> coordinator;
  std::map<std::string, std::unique_ptr<FakeAgent>> agents;
  uint64_t next_incarnation = 1000;
  uint64_t agent_features = control::kFeatureContentHash;  ///< of agents that open from now on
  /// Every command that any agent received, as one line each.
  std::vector<std::string> trace;
};

}  // namespace weightwire::coordinator::testing
