#include <algorithm>
#include <utility>

#include "server/agent/participant.h"
#include "server/base/failpoint.h"

// A participant outlives its coordinator. What is whole stays: the version that an engine serves,
// one that it has staged, one that a publisher holds; what was moving is stopped. When a session is
// open again the rank registers once more, as the same incarnation, and says what it holds; then it
// submits the layout that it agreed to, and its version. Every call is repeated while it may
// succeed later; a refusal is the participant's end, as an eviction is.
namespace weightwire::agent {

void Participant::Orphan() {
  if (ended_) return;
  ++session_;
  orphaned_ = true;
  rejoin_.reset();
  publication_->Pause();
  ArmOverdue();
  Dispatch(epoch::LocalCutOff{});
  WW_FAILPOINT("agent.after_coordinator_lost");
}

void Participant::ArmOverdue() {
  services_->strand.Cancel(overdue_timer_);
  const auto due = publication_->DueBy();
  if (!orphaned_ || !due) return;
  overdue_timer_ = services_->strand.PostAfter(std::max(Nanos(0), *due - services_->clock.Now()),
                                               [weak = weak_from_this()] {
                                                 if (auto self = weak.lock())
                                                   self->ReleaseOverdue();
                                               });
}

void Participant::ReleaseOverdue() {
  if (ended_ || !orphaned_) return;
  auto give_up = [self = shared_from_this()] {
    self->publication_->GiveUp(
        Status(Code::kUnavailable, Reason::kNotReady,
               "the coordinator was lost, and none came back before the version's deadline")
            .AtRank(self->name_)
            .Remedy("publish again"));
  };
  if (!attempt_) return give_up();
  Drain(attempt_, std::move(give_up));
}

void Participant::Rejoin(AgentId agent) {
  if (ended_) return;
  rejoin_ = agent;
  RegisterWhenQuiet();
}

void Participant::RegisterWhenQuiet() {
  if (!rejoin_ || ended_ || stepping_ || machine_.phase == epoch::MemberPhase::kDraining) return;
  agent_ = *std::exchange(rejoin_, std::nullopt);
  Register();
}

control::RejoinState Participant::RejoinStateNow() const {
  control::RejoinState claim;
  claim.released = machine_.released;
  if (!memory_->stage()) return claim;
  const auto serving = memory_->stage()->served();
  claim.serving = {serving.epoch, serving.version};
  claim.holds = memory_->held();
  if (machine_.current) {  // kDone or kCommitting: all else was drained
    claim.staged = machine_.current->epoch;
    claim.content = machine_.current->content;
    claim.version = machine_.current->version;
    claim.told = machine_.phase == epoch::MemberPhase::kCommitting;
  }
  return claim;
}

void Participant::Register() {
  WW_FAILPOINT("agent.before_claim");
  control::RegisterRequest request{agent_,
                                   request_.job,
                                   request_.role,
                                   request_.group,
                                   request_.rank,
                                   request_.world_size,
                                   request_.incarnation,
                                   request_.pid,
                                   request_.trace_id,
                                   RejoinStateNow(),
                                   {}};
  services_->coordinator.Register(
      std::move(request),
      [weak = weak_from_this(), services = services_,
       registered = InThisSession<Result<control::RegisterReply>>(&Participant::Registered)](
          const Result<control::RegisterReply>& reply) {
        const auto self = weak.lock();
        if (self && !self->ended_) return registered(reply);
        if (!reply) return;
        // It ended meanwhile, under its old name: nobody else would give the place back.
        services->report(epoch::LostReport{
            reply->member, Status(Code::kAborted, Reason::kMemberLost, "the process left")});
      });
}

void Participant::Registered(const Result<control::RegisterReply>& reply) {
  if (!reply) return RepeatOrDismiss(reply.error(), &Participant::Register);
  WW_FAILPOINT("agent.after_claim_taken");
  services_->registered(handle_, reply->member);
  Dispatch(epoch::LocalRejoined{reply->member});
  submission_ ? ResubmitLayout() : Rejoined();
}

void Participant::ResubmitLayout() {
  control::LayoutSubmission submission = *submission_;
  submission.member = member();
  services_->coordinator.SubmitLayout(
      std::move(submission),
      InThisSession<Result<control::LayoutReply>>(&Participant::Resubmitted));
}

void Participant::Resubmitted(const Result<control::LayoutReply>& reply) {
  if (!reply) return RepeatOrDismiss(reply.error(), &Participant::ResubmitLayout);
  if (*reply->agreed != *memory_->layout()) {
    return Dismiss(Status(Code::kFailedPrecondition, Reason::kStaleIncarnation,
                          "the coordinator that is there now reads the layout in another way")
                       .AtRank(name_)
                       .Remedy("attach again with a new incarnation"));
  }
  Rejoined();
}

void Participant::Rejoined() {
  orphaned_ = false;
  WW_FAILPOINT("agent.before_version_published_again");
  services_->strand.Cancel(overdue_timer_);
  publication_->Resume(member());
}

void Participant::RepeatOrDismiss(const Status& why, void (Participant::*again)()) {
  if (why.code() != Code::kUnavailable && why.code() != Code::kDeadlineExceeded) {
    return Dismiss(Status(why));
  }
  services_->strand.PostAfter(services_->options.reconnect,
                              [weak = weak_from_this(), session = session_, again] {
                                auto self = weak.lock();
                                if (self && !self->ended_ && self->session_ == session) {
                                  (self.get()->*again)();
                                }
                              });
}

}  // namespace weightwire::agent
