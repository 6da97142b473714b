#include <algorithm>
#include <string>
#include <utility>

#include "server/coordinator/driver.h"

// A trainer's rank takes a version back that it published: its caller timed out, say, and may write
// over the bytes. The rank's agent serves none of them any more, so an attempt can only fail; here
// it is ended at once, and counts as none. The other ranks go on holding the version: it is
// complete again when the one that left has published it anew.
namespace weightwire::coordinator {

Status Driver::Withdraw(const control::WithdrawRequest& request) {
  auto place = s_.membership.Find(request.member);
  if (!place) return place.error();
  EpochRun* run = publish_ != nullptr && publish_->state.spec.kind == epoch::Kind::kPublish &&
                          publish_->state.spec.version == request.version
                      ? publish_.get()
                      : nullptr;
  if (run != nullptr && (run->released || run->state.phase == epoch::Phase::kCommitting)) {
    return Status(Code::kFailedPrecondition, Reason::kStaleEpoch,
                  "too late: the epoch is " + std::string(epoch::PhaseName(run->state.phase)))
        .AtRank(place->name())
        .AtEpoch(run->state.spec.epoch);
  }
  if (!queue_.Withdraw(request, place->rank)) return OkStatus();
  Version& published = place->live->published;
  published = std::min(published, Version(request.version.value - 1));
  if (publish_draft_ != nullptr && publish_draft_->spec.version == request.version) {
    publish_draft_.reset();
    PendingVersion& planned = *queue_.Find(request.version);
    planned.running = false;
    --planned.attempts;
  } else if (run != nullptr && run->CanAbort()) {
    --queue_.Find(request.version)->attempts;
    Feed(run->state.spec.epoch,
         epoch::AbortAskedEvent{Status(Code::kAborted, Reason::kAbortRequested,
                                       "version " + std::to_string(request.version.value) +
                                           " was withdrawn by its publisher")
                                    .AtRank(place->name())});
  }
  ArmVersionTimer();
  TryStart();
  changed_();
  return OkStatus();
}

}  // namespace weightwire::coordinator
