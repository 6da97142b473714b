#include "server/agent/participant.h"

#include <utility>

#include "server/base/failpoint.h"

// Calls of the application. What the machine asks for is carried out in participant_actions.cc.
namespace weightwire::agent {

Participant::Participant(std::shared_ptr<Services> services, Handle handle, AttachRequest request,
                         epoch::Member member, Application* application)
    : services_(std::move(services)),
      handle_(handle),
      request_(std::move(request)),
      name_(request_.group + "/" + std::to_string(request_.rank)),
      application_(application) {
  machine_.self = member;
  std::shared_ptr<memory::GpuMemoryPool> gpu_pools;
  if (request_.device) {
    gpu_pools = services_->options.gpu_pools.Of(*request_.device).value_or(nullptr);
  }
  memory_ = std::make_shared<RankMemory>(
      services_, name_,
      request_.buffers != 0 ? request_.buffers : services_->options.retain_versions + 1,
      std::move(gpu_pools), request_.delta);
  publication_ = std::make_shared<Publication>(
      services_, name_, memory_, [this](Version version, Epoch epoch, const Status& why) {
        if (application_ != nullptr) application_->OnReleased(version, epoch, why);
      });
}

Status Participant::RequireRole(control::GroupRole role) const {
  if (ended_) return StaleHandle();
  if (request_.role == role) return OkStatus();
  return Status(Code::kInvalidArgument, Reason::kInvalidRequest,
                role == control::GroupRole::kTrainer ? "only a trainer rank may do this"
                                                     : "only a rank of an engine may do this")
      .AtRank(name_);
}

void Participant::SubmitLayout(control::LayoutSubmission submission,
                               control::Reply<control::LayoutReply> reply) {
  submission.member = member();
  auto kept = std::make_shared<const control::LayoutSubmission>(submission);
  ++submitting_;
  services_->coordinator.SubmitLayout(
      std::move(submission),
      [self = shared_from_this(), kept = std::move(kept), session = session_,
       reply = std::move(reply)](Result<control::LayoutReply> result) mutable {
        if (result && session != self->session_) {
          result = Fail(Status(Code::kUnavailable, Reason::kNotReady,
                               "the coordinator was lost meanwhile; submit the layout again")
                            .AtRank(self->name_));
        }
        self->Answered(std::move(kept), std::move(result), std::move(reply));
      });
}

void Participant::Answered(std::shared_ptr<const control::LayoutSubmission> submission,
                           Result<control::LayoutReply> result,
                           control::Reply<control::LayoutReply> reply) {
  --submitting_;
  Agreed(std::move(submission), std::move(result), std::move(reply));
  const auto attempt = attempt_;
  if (attempt && Runs(attempt) && std::exchange(attempt->awaits_layout, false)) {
    BeginPrepare(attempt);
  }
}

void Participant::Agreed(std::shared_ptr<const control::LayoutSubmission> submission,
                         Result<control::LayoutReply> result,
                         control::Reply<control::LayoutReply> reply) {
  if (ended_) return reply(Fail(StaleHandle()));
  if (!result) return reply(std::move(result));
  WW_FAILPOINT("agent.after_layout_agreed");
  if (memory_->layout() && *memory_->layout() != *result->agreed) {
    Status why = Status(Code::kFailedPrecondition, Reason::kStaleIncarnation,
                        "another layout was agreed before; it stays for the process's lifetime")
                     .AtRank(name_)
                     .Remedy("attach again with a new incarnation");
    reply(Fail(why));
    return Dismiss(std::move(why));
  }
  if (!memory_->layout()) {
    if (Status status = memory_->SetLayout(result->agreed); !status.ok()) {
      return reply(Fail(std::move(status).AtRank(name_)));
    }
  }
  submission_ = std::move(submission);
  if (!is_engine()) return reply(std::move(result));
  // The stage is made now, on the workers, so that OpenStage need not block. Its refusal is
  // OpenStage's to tell.
  memory_->MakeStage(
      [result = std::move(result), reply = std::move(reply)](const Status&) { reply(result); });
}

Result<uint64_t> Participant::ImportMemory(memory::UniqueFd fd, uint64_t bytes) {
  WW_FAIL_IF_ERROR(RequireRole(control::GroupRole::kTrainer));
  return memory_->Import(std::move(fd), bytes);
}

Result<GpuAllocation> Participant::AllocateGpuMemory(uint64_t bytes) {
  WW_FAIL_IF_ERROR(RequireRole(control::GroupRole::kTrainer));
  return memory_->AllocateGpuMemory(bytes);
}

Status Participant::Bind(const std::vector<TensorBinding>& bindings) {
  WW_RETURN_IF_ERROR(RequireRole(control::GroupRole::kTrainer));
  if (publication_->active()) {
    return Status(Code::kFailedPrecondition, Reason::kNotReady,
                  "a version is held: its bytes may still be read")
        .AtRank(name_)
        .Remedy("bind again when it has been released");
  }
  return memory_->Bind(bindings);
}

Result<StageInfo> Participant::OpenStage() {
  WW_FAIL_IF_ERROR(RequireRole(control::GroupRole::kEngine));
  return memory_->OpenStage();
}

void Participant::Publish(const PublishCall& call, control::Done done) {
  if (Status status = RequireRole(control::GroupRole::kTrainer); !status.ok()) {
    return done(std::move(status));
  }
  publication_->Start(member(), call, std::move(done));
  ArmOverdue();
}

void Participant::Withdraw(const WithdrawCall& call, control::Reply<Withdrawal> reply) {
  if (Status status = RequireRole(control::GroupRole::kTrainer); !status.ok()) {
    return reply(Fail(std::move(status)));
  }
  if (call.if_accepted && publication_->Copies(call.version)) {
    return publication_->WhenHeld(
        call.version, [self = shared_from_this(), call, reply = std::move(reply)](const Status&) {
          self->Withdraw(call, reply);
        });
  }
  const auto attempt = attempt_ && attempt_->command.version == call.version && !attempt_->drained
                           ? attempt_
                           : nullptr;
  const Withdrawal found = publication_->Withdraw(call, EveryByteWasRead(call.version));
  ArmOverdue();
  // (A second call may come while the first one waits for readers to stop.)
  const bool stops = found == Withdrawal::kRevoked || found == Withdrawal::kRead;
  if (!attempt || !stops) return reply(found);
  if (found == Withdrawal::kRevoked) Fails(attempt, Withdrawn(call.version).AtRank(name_));
  Drain(attempt, [reply = std::move(reply), found] { reply(found); });
}

/// Its sums were reported, and the epoch was not aborted as far as is known here: nobody asks this
/// rank again before it is committed.
bool Participant::EveryByteWasRead(Version version) const {
  return attempt_ && attempt_->command.version == version && attempt_->sourced &&
         !attempt_->aborted;
}

Status Participant::AcknowledgeSwap(Epoch epoch, double flip_seconds) {
  WW_RETURN_IF_ERROR(RequireRole(control::GroupRole::kEngine));
  if (epoch == acknowledged_ && epoch.value != 0) return OkStatus();
  WW_RETURN_IF_ERROR(CheckOffered(epoch));
  acknowledged_ = epoch;
  flip_seconds_ = flip_seconds;
  WW_FAILPOINT("agent.after_flip_before_acknowledged");
  Dispatch(epoch::LocalSwapped{epoch});
  return OkStatus();
}

/// Nothing changes here: the coordinator fences the engine, which ends this rank with the others.
Status Participant::RefuseSwap(Epoch epoch, const std::string& why) {
  WW_RETURN_IF_ERROR(RequireRole(control::GroupRole::kEngine));
  WW_RETURN_IF_ERROR(CheckOffered(epoch));
  refused_ = {epoch,
              Status(Code::kAborted, Reason::kAbortRequested, "the engine refuses it: " + why)
                  .AtRank(name_)
                  .AtEpoch(epoch)};
  TellRefused();
  return OkStatus();
}

void Participant::TellRefused() {
  services_->report(epoch::FailedReport{refused_.first, member(), refused_.second, true});
}

Status Participant::CheckOffered(Epoch epoch) const {
  const bool offered = machine_.phase == epoch::MemberPhase::kCommitting && machine_.current &&
                       machine_.current->epoch == epoch && acknowledged_ != epoch;
  if (!offered) {
    return Status(Code::kFailedPrecondition, Reason::kStaleEpoch,
                  "epoch " + std::to_string(epoch.value) + " is not offered for a swap")
        .AtRank(name_)
        .AtEpoch(epoch);
  }
  if (!machine_.leader) {
    return Status(Code::kPermissionDenied, Reason::kPermissionDenied,
                  "the engine's leader acknowledges for all ranks")
        .AtRank(name_)
        .AtEpoch(epoch);
  }
  return OkStatus();
}

LocalStatus Participant::Describe() const {
  LocalStatus status;
  status.handle = handle_;
  status.member = member();
  status.group = request_.group;
  status.rank = request_.rank;
  status.phase = epoch::MemberPhaseName(machine_.phase);
  status.epoch = machine_.current ? machine_.current->epoch : Epoch{};
  status.serving = machine_.serving;
  status.behind = machine_.behind;
  const ParticipantId runs_as = machine_.current ? machine_.current->member.id : member().id;
  const auto progress = services_->transfers.ProgressOf(status.epoch, runs_as);
  status.bytes_done = progress.bytes_done;
  status.bytes_total = progress.bytes_total;
  status.stage_bytes = memory_->stage_bytes() + publication_->snapshot_bytes();
  return status;
}

std::optional<control::Receiving> Participant::Receives() const {
  if (!attempt_ || attempt_->drained || attempt_->command.role != epoch::Role::kTarget) return {};
  const Epoch epoch = attempt_->command.epoch;
  const epoch::Member& member = attempt_->command.member;
  return control::Receiving{member, epoch,
                            services_->transfers.ProgressOf(epoch, member.id).bytes_done};
}

void Participant::Leave(Status why) {
  application_ = nullptr;
  WW_FAILPOINT("agent.before_a_rank_leaves");
  auto self = shared_from_this();
  End(why);
  Dispatch(epoch::LocalLost{std::move(why)});
}

void Participant::Dismiss(Status why) {
  auto self = shared_from_this();
  End(why);
  Dispatch(epoch::LocalLost{std::move(why)});
}

void Participant::Abandon() {
  application_ = nullptr;
  if (attempt_) attempt_->when_drained.clear();  // they hold this object
}

void Participant::Note(std::string text, bool bad) const {
  if (!attempt_) return;
  const epoch::PrepareCommand& command = attempt_->command;
  services_->options.notes(
      {command.epoch, command.version, command.trace_id, name_, bad, std::move(text)});
}

/// Fences the handle, stops what runs, and tells the application: at once, or, when a publisher
/// waits for its release, as soon as nothing reads its memory any more.
void Participant::End(const Status& why) {
  if (ended_) return;
  ended_ = true;
  services_->strand.Cancel(overdue_timer_);
  if (hasher_) hasher_->stop = true;
  services_->fenced(handle_);
  const std::optional<Version> owed = publication_->End(why);
  if (!attempt_) return TellEnd(owed, why);
  if (!owed) TellEnd(owed, why);
  Drain(attempt_, [self = shared_from_this(), owed, why] {
    if (owed) self->TellEnd(owed, why);
  });
}

void Participant::TellEnd(const std::optional<Version>& owed, const Status& why) {
  Application* application = std::exchange(application_, nullptr);
  if (application == nullptr) return;
  if (owed) application->OnReleased(*owed, Epoch{}, why);
  application->OnEvicted(why);
}

void Participant::GoneWhenIdle() {
  if (!ended_ || gone_ || drains_ > 0 || stepping_) return;
  gone_ = true;
  services_->gone(handle_);
}

}  // namespace weightwire::agent
