#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "server/agent/agent.h"
#include "server/agent/rank_memory.h"
#include "server/agent/services.h"

namespace weightwire::agent {

/// The version that one trainer rank has published and that is not released yet: at most one.
///
///   hold:      submitted → held ───────────────────────────→ released
///   snapshot:  submitted → copying → held (told already) ──→ released
///   either:    submitted, held and not told → revoked
///
/// Only what is held is ever prepared, so what was revoked cannot be read, whatever the coordinator
/// believes: it may not have answered yet, or not be there. It is told until it has answered; its
/// answer to a Publish that is still on its way tells the two apart by their numbers.
///
/// The coordinator's commands may overtake its answer to Publish: a prepare waits for it
/// (WhenHeld), a release is kept until then. A version outlives the loss of its coordinator: the
/// next one is told of it (Resume), and one that it calls stale has done what it was held for (it
/// was committed, or another rank was released from it). Belongs to the agent's strand.
class Publication : public std::enable_shared_from_this<Publication> {
 public:
  using Tell = std::function<void(Version, Epoch, const Status&)>;

  /// `tell` reaches the application: once for each accepted version, unless End takes that over.
  Publication(std::shared_ptr<Services> services, std::string name,
              std::shared_ptr<RankMemory> memory, Tell tell)
      : services_(std::move(services)),
        name_(std::move(name)),
        memory_(std::move(memory)),
        tell_(std::move(tell)) {}

  bool active() const { return held_.has_value(); }

  /// `done` runs once. Needs a binding (Agent::Publish's errors otherwise).
  void Start(const epoch::Member& member, const PublishCall& call, control::Done done);
  /// `read`: every byte was, by an epoch that may still be committed. Not while it Copies.
  Withdrawal Withdraw(const WithdrawCall& call, bool read);
  bool Holds(Version version) const { return held_ && held_->request.version == version; }
  bool Copies(Version version) const { return Holds(version) && held_->step == Step::kCopying; }

  /// Calls `ready` when the bytes of `version` may be read, or with why they never may.
  void WhenHeld(Version version, control::Done ready);
  /// Where the bytes of the held version are.
  const transfer::Binding& Bytes() const;

  /// The coordinator was lost: asks nothing of it until Resume.
  void Pause() {
    paused_ = true;
    ++session_;
  }
  /// Another one knows the rank as `member`: submits what is held, for what is left of its
  /// deadline.
  void Resume(const epoch::Member& member);
  /// While paused: when GiveUp is due; nullopt when nothing is held.
  std::optional<Nanos> DueBy() const;
  /// Nothing reads the bytes any more, and no coordinator came in time. The version may be
  /// published again.
  void GiveUp(const Status& why);

  /// Nothing reads the bytes any more. Tells the application unless it was told.
  void Release(Version version, Epoch epoch, const Status& why);

  /// The participant ends: `done` and waiters get `why`. The version that the application was
  /// promised an OnReleased for, when there is one: the caller tells.
  std::optional<Version> End(const Status& why);

  uint64_t snapshot_bytes() const { return snapshot_share_.bytes(); }

 private:
  enum class Step { kSubmitted, kCopying, kHeld };
  struct Held {
    control::PublishRequest request;  ///< its `number` names the version here, too
    uint64_t call = 0;                ///< the application's last one
    bool submitted = false;
    Nanos since{};
    Nanos until{};       ///< deadline of the version
    Version before{};    ///< `accepted_` without it
    bool again = false;  ///< submitted to another coordinator than at first
    PublishMode mode = PublishMode::kHold;
    Step step = Step::kSubmitted;
    std::vector<control::Done> calls;  ///< of Publish, without an answer
    bool accepted = false;
    bool told = false;
    Status
        unreadable;  ///< not OK: withdrawn, or its snapshot could not be made: nobody may read it
    std::vector<control::Done> waiters;
    std::optional<std::pair<Epoch, Status>> release;  ///< came before the version was held
  };
  bool Is(uint64_t number) const { return held_ && held_->request.number == number; }
  Status CheckStart(const PublishCall& call) const;
  void Repeat(const PublishCall& call, control::Done done);
  void Revoke();
  void TellRevoked(Version version, uint64_t number);
  void MakeSnapshotRegion();
  void SnapshotRegionMade(uint64_t number, Result<std::shared_ptr<memory::MemoryRegion>> region,
                          Budget::Share share);
  void Submit();
  void Submitted(uint64_t number, const Status& status);
  void SubmitAfterPause();
  void Refused(const Status& why);
  void Copy();
  void SetHeld();
  void Finish(Epoch epoch, const Status& why);

  const std::shared_ptr<Services> services_;
  const std::string name_;
  const std::shared_ptr<RankMemory> memory_;
  const Tell tell_;
  std::optional<Held> held_;
  Version accepted_{};      ///< highest that was accepted; a repeat could never be released
  uint64_t lineage_ = 0;    ///< of `accepted_`
  uint64_t withdrawn_ = 0;  ///< a call up to this one is refused when it comes
  /// What was revoked after it was submitted, and is not known to the coordinator as that.
  std::map<Version, uint64_t> untold_;
  epoch::Member member_;  ///< in this session
  bool paused_ = false;
  uint64_t session_ = 0;  ///< a refusal of one that is over refuses nothing
  uint64_t next_number_ = 1;
  std::optional<transfer::Binding>
      snapshot_;  ///< made at the first snapshot, reused for every later one
  Budget::Share snapshot_share_;
  std::vector<uint64_t> copied_;  ///< by tensor: the generation that is in `snapshot_`; 0: none
};

/// Why nobody reads it.
Status Withdrawn(Version version);

}  // namespace weightwire::agent
