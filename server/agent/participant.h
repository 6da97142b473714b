#pragma once

#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "server/agent/agent.h"
#include "server/agent/attempt.h"
#include "server/agent/content_hasher.h"
#include "server/agent/publication.h"
#include "server/agent/rank_memory.h"
#include "server/agent/services.h"
#include "server/epoch/member_machine.h"

namespace weightwire::agent {

/// One local rank: feeds commands and local events to its member machine and carries out what the
/// machine answers. The methods are Agent's, for one handle; see there for errors.
///
/// Held by the agent until nothing of it runs, and by every drain and job until they end, so that
/// its memory outlives whoever may touch it. Belongs to the agent's strand.
class Participant : public std::enable_shared_from_this<Participant> {
 public:
  Participant(std::shared_ptr<Services> services, Handle handle, AttachRequest request,
              epoch::Member member, Application* application);

  const epoch::Member& member() const { return machine_.self; }
  bool is_engine() const { return request_.role == control::GroupRole::kEngine; }
  Handle handle() const { return handle_; }
  int64_t pid() const { return request_.pid; }  ///< as the process told it
  /// How far it is with the epoch that it receives; nothing when it receives none.
  std::optional<control::Receiving> Receives() const;
  bool Holds(const std::string& job, const std::string& group, uint32_t rank) const {
    return request_.job == job && request_.group == group && request_.rank == rank;
  }

  void SubmitLayout(control::LayoutSubmission submission,
                    control::Reply<control::LayoutReply> reply);
  Result<uint64_t> ImportMemory(memory::UniqueFd fd, uint64_t bytes);
  Result<GpuAllocation> AllocateGpuMemory(uint64_t bytes);
  Status Bind(const std::vector<TensorBinding>& bindings);
  Result<StageInfo> OpenStage();
  void Publish(const PublishCall& call, control::Done done);
  void Withdraw(const WithdrawCall& call, control::Reply<Withdrawal> reply);
  Status AcknowledgeSwap(Epoch epoch, double flip_seconds);
  Status RefuseSwap(Epoch epoch, const std::string& why);
  Status MakeRoom(Epoch epoch);
  Status CopyChecked(uint64_t verification, Status why);
  LocalStatus Describe() const;

  void OnCommand(epoch::Command command);
  /// The session with the coordinator was lost: keeps what is whole and stops the rest.
  void Orphan();
  /// A session with a coordinator of the same history is open, as `agent`: registers again, as soon
  /// as nothing drains any more.
  void Rejoin(AgentId agent);
  /// The process left: its application is not called any more.
  void Leave(Status why);
  /// We are going: the application is told like one that was evicted.
  void Dismiss(Status why);
  /// The agent is destroyed: nobody is told.
  void Abandon();

 private:
  bool EveryByteWasRead(Version version) const;
  /// The attempt cannot go on, whatever it is at.
  void Fails(const std::shared_ptr<Attempt>& attempt, const Status& why);
  Status RequireRole(control::GroupRole role) const;
  void TellRefused();
  /// To this rank as the leader, and not acknowledged yet.
  Status CheckOffered(Epoch epoch) const;
  void Answered(std::shared_ptr<const control::LayoutSubmission> submission,
                Result<control::LayoutReply> result, control::Reply<control::LayoutReply> reply);
  void Agreed(std::shared_ptr<const control::LayoutSubmission> submission,
              Result<control::LayoutReply> result, control::Reply<control::LayoutReply> reply);

  void Dispatch(epoch::MemberEvent event);
  void Do(const epoch::DoPrepare&);
  void Do(const epoch::DoTransfer&);
  void Do(const epoch::DoExclude& action);
  void Do(const epoch::DoDrain& action);
  void Do(const epoch::OfferSwap& action);
  void Do(const epoch::DoInstall&);
  void Do(const epoch::TellReleased& action);
  void Do(const epoch::TellEvicted& action);
  void Do(const epoch::SendPrepared&);
  void Do(const epoch::SendTransferred&);
  void Do(const epoch::SendSwapped&);
  void Do(const epoch::SendDrained& action);
  void Do(const epoch::SendFailed& action);
  void Do(const epoch::SendLost& action);

  void BeginPrepare(const std::shared_ptr<Attempt>& attempt);
  Status CheckPrepare(const epoch::PrepareCommand& command) const;
  /// A buffer holds the content of this committed epoch.
  Status CheckHeld(Epoch held) const;
  void WantRoom(const std::shared_ptr<Attempt>& attempt);
  void FenceWhenEmptyTooLong();
  void FetchSlices(const std::shared_ptr<Attempt>& attempt);
  void PassGate(const std::shared_ptr<Attempt>& attempt, const Status& status);
  void CheckSlices(const std::shared_ptr<Attempt>& attempt);
  void MakeGather(const std::shared_ptr<Attempt>& attempt);
  void Prepared(const std::shared_ptr<Attempt>& attempt, Status status);
  void StartSource(const std::shared_ptr<Attempt>& attempt);
  void StartTarget(const std::shared_ptr<Attempt>& attempt);
  void StageHeld(const std::shared_ptr<Attempt>& attempt);
  /// The attempt goes on here: it is the current one and is not being stopped.
  bool Runs(const std::shared_ptr<Attempt>& attempt) const {
    return attempt == attempt_ && !attempt->draining;
  }
  /// Stops what runs of the attempt; `then` when nothing touches its memory any more.
  void Drain(const std::shared_ptr<Attempt>& attempt, std::function<void()> then);

  // ---- participant_rejoin.cc ----
  control::RejoinState RejoinStateNow() const;
  void RegisterWhenQuiet();
  void Register();
  void Registered(const Result<control::RegisterReply>& reply);
  void ResubmitLayout();
  void Resubmitted(const Result<control::LayoutReply>& reply);
  void Rejoined();
  /// Runs `again` after a pause when the call may succeed then; else the participant is dismissed.
  void RepeatOrDismiss(const Status& why, void (Participant::*again)());
  /// `call` unless the session in which this was made is over.
  template <typename Reply>
  std::function<void(Reply)> InThisSession(void (Participant::*call)(const Reply&)) {
    return [weak = weak_from_this(), session = session_, call](const Reply& reply) {
      auto self = weak.lock();
      if (self && !self->ended_ && self->session_ == session) (self.get()->*call)(reply);
    };
  }
  /// A version that no coordinator takes over in time is released.
  void ArmOverdue();
  void ReleaseOverdue();

  void HashContent(const epoch::HashCommand& command);
  /// `buffer` is about to be written.
  void SupersedeAttestation(int buffer);
  /// Answers when the bytes are summed and the application has spoken, or neither matters any more.
  void AttestedWhenWhole(const std::shared_ptr<ContentHasher>& job);
  /// `job`: its sums, if it was not superseded; null when there are none, for `why`.
  void Attested(const epoch::HashCommand& command, Status why,
                const std::shared_ptr<ContentHasher>& job);

  /// For the log, of the attempt that runs or ran last.
  void Note(std::string text, bool bad) const;
  /// Says once that there is no memory for what was sent last, so that everything is sent.
  void NoteMissingBase();
  void End(const Status& why);
  void TellEnd(const std::optional<Version>& owed, const Status& why);
  void GoneWhenIdle();

  const std::shared_ptr<Services> services_;
  const Handle handle_;
  const AttachRequest request_;
  const std::string name_;  ///< "trainer/3"
  Application* application_;
  epoch::MemberState machine_;
  std::deque<epoch::MemberEvent> events_;
  bool stepping_ = false;
  bool noted_missing_base_ = false;
  uint32_t submitting_ = 0;        ///< layouts without an answer
  uint64_t session_ = 0;           ///< rises with every session that is lost
  bool orphaned_ = false;          ///< between a session's loss and the end of the rejoining
  std::optional<AgentId> rejoin_;  ///< wanted, and not begun: something drains still
  AgentId agent_{};                ///< in the session that it rejoins
  std::shared_ptr<const control::LayoutSubmission> submission_;  ///< that was agreed to
  Executor::TimerId overdue_timer_ = 0;
  std::shared_ptr<RankMemory> memory_;
  std::shared_ptr<Publication> publication_;
  std::shared_ptr<Attempt> attempt_;
  std::shared_ptr<ContentHasher> hasher_;  ///< what is being summed; null: nothing
  uint32_t drains_ = 0;
  std::pair<Epoch, Nanos> drain_began_{};  ///< of the last drain
  double flip_seconds_ = 0;
  Epoch acknowledged_{};
  std::pair<Epoch, Status> refused_;  ///< by the engine, last; told again when it is asked again
  Epoch emptied_for_{};  ///< MakeRoom was called for it, and nothing was installed since
  Executor::TimerId room_timer_ = 0;
  bool ended_ = false;
  bool gone_ = false;
};

}  // namespace weightwire::agent
