#include "server/agent/participant.h"
#include "server/base/failpoint.h"

// A rank with one buffer: a version can be written only after what is served there was given up.
// From then on nothing is served until a version is installed. When an epoch fails meanwhile the
// next attempt finds room; when none comes the rank is fenced, and is filled like a new one.
namespace weightwire::agent {
namespace {

std::string Millis(Nanos span) {
  return std::to_string(std::chrono::duration_cast<std::chrono::milliseconds>(span).count()) +
         " ms";
}

}  // namespace

void Participant::WantRoom(const std::shared_ptr<Attempt>& attempt) {
  if (!Runs(attempt) || attempt->refused) return;
  if (memory_->stage()->has_room()) return PassGate(attempt, OkStatus());
  attempt->wants_room = true;
  services_->strand.Cancel(room_timer_);
  room_timer_ = services_->strand.PostAfter(
      services_->options.room_deadline, [weak = weak_from_this(), attempt] {
        auto self = weak.lock();
        if (!self || !std::exchange(attempt->wants_room, false)) return;
        self->PassGate(attempt, Status(Code::kDeadlineExceeded, Reason::kDeadlineExceeded,
                                       "the engine did not give up what it serves within " +
                                           Millis(self->services_->options.room_deadline))
                                    .Remedy("raise room_deadline_ms of the agent, or install with "
                                            "two buffers"));
      });
  if (application_ == nullptr) return;
  application_->OnRoomWanted(attempt->command.epoch, attempt->command.version);
}

Status Participant::MakeRoom(Epoch epoch) {
  WW_RETURN_IF_ERROR(RequireRole(control::GroupRole::kEngine));
  if (epoch == emptied_for_ && epoch.value != 0) return OkStatus();
  const auto attempt = attempt_;
  if (!attempt || attempt->command.epoch != epoch || !Runs(attempt) ||
      !std::exchange(attempt->wants_room, false)) {
    return Status(Code::kFailedPrecondition, Reason::kStaleEpoch,
                  "no room is wanted for epoch " + std::to_string(epoch.value))
        .AtRank(name_)
        .AtEpoch(epoch);
  }
  services_->strand.Cancel(room_timer_);
  emptied_for_ = epoch;
  SupersedeAttestation(memory_->stage()->live());
  WW_FAILPOINT("agent.before_served_buffer_given_up");
  memory_->stage()->Forget();
  Dispatch(epoch::LocalEmptied{});
  PassGate(attempt, OkStatus());
  return OkStatus();
}

void Participant::FenceWhenEmptyTooLong() {
  if (ended_ || emptied_for_.value == 0) return;
  services_->strand.Cancel(room_timer_);
  room_timer_ = services_->strand.PostAfter(
      services_->options.room_deadline, [weak = weak_from_this(), emptied = emptied_for_] {
        auto self = weak.lock();
        if (!self || self->ended_ || self->emptied_for_ != emptied) return;
        if (!self->attempt_->drained) return;  // another attempt runs
        self->Dismiss(Status(Code::kAborted, Reason::kDeadlineExceeded,
                             "what was served was given up for an epoch that failed, and none "
                             "followed within " +
                                 Millis(self->services_->options.room_deadline))
                          .AtRank(self->name_)
                          .AtEpoch(emptied));
      });
}

}  // namespace weightwire::agent
