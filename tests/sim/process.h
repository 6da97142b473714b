#pragma once

#include <functional>
#include <memory>
#include <string>

#include "tests/sim/model.h"
#include "tests/sim/node.h"

namespace weightwire::sim {

/// One lifetime of an application process: a rank that attaches to its node's agent, agrees on its
/// layout, and is told what follows. Kept until the end of the run, so that a call after its end is
/// seen (and is a failure).
class Process final : public agent::Application {
 public:
  struct Hooks {
    std::function<void(Process&)> ready;                 ///< attached, with a layout
    std::function<void(Process&, const Status&)> ended;  ///< evicted, refused, or the agent died
    std::function<void(Process&, Version, Epoch, const Status&)> released;
    /// Epoch, content, version, its lineage (0: not known), buffer, leader.
    std::function<void(Process&, Epoch, Epoch, const coordinator::VersionId&, int, bool)> committed;
    std::function<void(Process&, Epoch, Epoch)> installed;
    std::function<void(Process&, Epoch)> room_wanted;
  };
  Process(Node& node, const Model& model, const Party& party, control::GroupRole role,
          std::string group, uint32_t rank, Incarnation incarnation, Incarnation previous,
          uint32_t buffers, Hooks hooks);

  void Attach();
  /// The process is killed: its agent sees the socket close.
  void Kill();
  /// The agent's process died.
  void AgentDied();

  bool live() const { return state_ != State::kEnded; }
  /// What it was attached as, for its next attachment; nothing when the process itself is dead.
  Incarnation survives() const { return killed_ ? Incarnation{} : incarnation_; }
  bool ready() const { return state_ == State::kReady; }
  uint32_t rank() const { return rank_; }
  agent::Handle handle() const { return handle_; }
  agent::Agent& agent() { return node_.agent(); }
  Node& node() { return node_; }

  void OnReleased(Version version, Epoch epoch, const Status& why) override;
  void OnCommitted(Epoch epoch, Epoch content, Version version, int buffer, bool leader,
                   const std::array<uint8_t, 16>& trace_id, uint64_t lineage) override;
  void OnRoomWanted(Epoch epoch, Version version) override;
  void OnInstalled(Epoch epoch, Epoch content) override;
  void OnEvicted(const Status& why) override;

 private:
  enum class State { kAttaching, kReady, kEnded };
  void SubmitLayout();
  void End(const Status& why);
  void ExpectLive(const char* call) const;

  Node& node_;
  const Model& model_;
  const Party& party_;
  const control::GroupRole role_;
  const std::string group_;
  const uint32_t rank_;
  const Incarnation incarnation_, previous_;
  const uint32_t buffers_;
  const Hooks hooks_;
  State state_ = State::kAttaching;
  bool killed_ = false;
  agent::Handle handle_{};
};

}  // namespace weightwire::sim
