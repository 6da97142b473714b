#include <utility>

#include "server/agent/participant.h"
#include "server/agent/plan_bounds.h"
#include "server/base/failpoint.h"

// What is served is summed where it lies, in the live buffer, and no epoch waits for it. An epoch
// writes the spare one; the live one is written only after a swap has made it the spare one, and
// the strand marks it so before it starts that transfer (StartTarget), or when what is served is
// given up (MakeRoom). Both come back here: sums are reported only if the mark is not there yet
// once the last byte has been read. So an answer is of bytes that did not change, or it says
// superseded.
//
// An engine that serves from copies (vLLM's parameters) is asked to look at those at the same time;
// it is not waited for here: whoever verifies has a deadline, and a newer question replaces this
// one.
namespace weightwire::agent {
namespace {

Status NotServed(Epoch wanted, Epoch served) {
  return Status(Code::kAborted, Reason::kStaleEpoch,
                served.value == 0 ? "nothing is served"
                                  : "epoch " + std::to_string(served.value) + " is served by now")
      .AtEpoch(wanted);
}

}  // namespace

void Participant::OnCommand(epoch::Command command) {
  if (const auto* attest = std::get_if<epoch::HashCommand>(&command)) return HashContent(*attest);
  const auto* abort = std::get_if<epoch::AbortCommand>(&command);
  if (abort != nullptr && attempt_ && attempt_->command.epoch == abort->epoch) {
    attempt_->aborted = true;
  }
  const auto* commit = std::get_if<epoch::CommitCommand>(&command);
  if (commit != nullptr && commit->epoch == refused_.first && commit->member == member()) {
    return TellRefused();
  }
  Dispatch(std::move(command));
}

void Participant::HashContent(const epoch::HashCommand& command) {
  const auto refuse = [&](Status why) { Attested(command, std::move(why), {}); };
  if (ended_ || command.member != member()) return refuse(StaleHandle());
  if (!is_engine() || !memory_->layout() || !memory_->stage()) {
    return refuse(Status(Code::kFailedPrecondition, Reason::kNotReady, "there is no stage here"));
  }
  const Epoch served = memory_->stage()->live_epoch();
  if (served != command.content) return refuse(NotServed(command.content, served));
  SupersedeAttestation(memory_->stage()->live());  // one at a time: a newer question replaces it
  auto job = std::make_shared<ContentHasher>();
  job->command = command;
  job->started = services_->clock.Now();
  job->buffer = memory_->stage()->live();
  job->bytes = memory_->StageBinding(job->buffer);
  hasher_ = job;
  if (request_.checks_copies && application_ != nullptr) {
    job->copies_awaited = true;
    application_->OnCopyCheck(command.verification, command.content);
  }
  services_->slices.Get(
      command.reading, plan::Side::kSource, command.rank,
      [weak = weak_from_this(), command, job](const Result<SliceCache::Slice>& slice) {
        auto self = weak.lock();
        if (!self) return;
        if (!slice) return self->Attested(command, slice.error(), {});
        job->slice = *slice;
        job->check = [slice = *slice, command, layout = self->memory_->layout()] {
          return CheckSlice(*slice, command.reading, plan::Side::kSource, command.rank, *layout);
        };
        SumOnWorkers(job, self->services_->workers, self->services_->strand, [weak, job] {
          job->summed = true;
          if (auto there = weak.lock()) there->AttestedWhenWhole(job);
        });
      });
}

void Participant::SupersedeAttestation(int buffer) {
  if (!hasher_ || hasher_->buffer != buffer) return;
  hasher_->stop = true;
  AttestedWhenWhole(std::shared_ptr(hasher_));
}

Status Participant::CopyChecked(uint64_t verification, Status why) {
  const auto job = hasher_;
  if (job && job->command.verification == verification && job->copies_awaited) {
    job->copies_awaited = false;
    job->copies = std::move(why);
    AttestedWhenWhole(job);
  }
  return OkStatus();
}

void Participant::AttestedWhenWhole(const std::shared_ptr<ContentHasher>& job) {
  if (!job->summed || job->told) return;
  if (job->copies_awaited && !job->stop && job->why.ok()) return;
  job->told = true;
  Attested(job->command, {}, job);
}

void Participant::Attested(const epoch::HashCommand& command, Status why,
                           const std::shared_ptr<ContentHasher>& job) {
  epoch::HashedReport report{
      command.content, command.member, command.verification, std::move(why), {}, 0};
  if (job && report.why.ok()) report.why = job->why;
  if (job && report.why.ok()) report.why = job->copies;
  if (job && job->stop) {
    report.why =
        Status(Code::kAborted, Reason::kStaleEpoch,
               "superseded: what was served began to be overwritten, or was asked for again");
  } else if (job && report.why.ok()) {
    report.seconds = std::chrono::duration<double>(services_->clock.Now() - job->started).count();
    report.sums.reserve(job->sums.size());
    for (const kernels::KeyedSum& sum : job->sums) {
      report.sums.push_back({sum.lane[0], sum.lane[1]});
    }
  }
  if (job && hasher_ == job) hasher_.reset();
  if (!report.why.ok() && report.why.rank().empty()) report.why = Status(report.why).AtRank(name_);
  WW_FAILPOINT("agent.before_sums_sent");
  services_->report(std::move(report));
}

}  // namespace weightwire::agent
