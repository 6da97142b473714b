#include "server/agent/publication.h"

#include <algorithm>
#include <utility>

#include "server/agent/snapshot.h"
#include "server/base/failpoint.h"

namespace weightwire::agent {
namespace {

/// For a version without a deadline, while no coordinator is there.
constexpr Nanos kHeldAtMost = std::chrono::seconds(120);
/// A caller of Publish gets an answer within this; clients give up after 30 s.
constexpr Nanos kAnswerWithin = std::chrono::seconds(20);

/// The call may succeed later, or has succeeded without an answer.
bool MayBeRepeated(const Status& status) {
  if (status.reason() == Reason::kJournalFailed) return false;
  return status.code() == Code::kUnavailable || status.code() == Code::kDeadlineExceeded;
}

Status NotHeld(Version version) {
  return Status(Code::kFailedPrecondition, Reason::kStaleVersion,
                "version " + std::to_string(version.value) + " is not held here");
}

}  // namespace

void Publication::Start(control::PublishRequest request, PublishMode mode, control::Done done) {
  if (!memory_->bound()) {
    return done(Status(Code::kFailedPrecondition, Reason::kNotReady, "no memory is bound")
                    .AtRank(name_)
                    .Remedy("bind every tensor first"));
  }
  if (held_) {
    return done(
        Status(Code::kFailedPrecondition, Reason::kNotReady,
               "version " + std::to_string(held_->request.version.value) +
                   (held_->told ? " still moves from its snapshot" : " has not been released yet"))
            .AtRank(name_)
            .Remedy("publish again when it has been released"));
  }
  if (request.version <= accepted_) {
    return done(Status(Code::kFailedPrecondition, Reason::kStaleVersion,
                       "version " + std::to_string(request.version.value) +
                           " is not newer than version " + std::to_string(accepted_.value) +
                           ", which this rank has published")
                    .AtRank(name_)
                    .Remedy("publish a higher version; going back is an explicit rollback"));
  }
  held_.emplace();
  held_->number = next_number_++;
  held_->request = request;
  held_->mode = mode;
  held_->done = std::move(done);
  held_->since = services_->clock.Now();
  held_->until = held_->since + (request.deadline > Nanos(0) ? request.deadline : kHeldAtMost);
  held_->before = accepted_;
  if (mode == PublishMode::kSnapshot && !snapshot_) return MakeSnapshotRegion();
  Submit();
}

void Publication::MakeSnapshotRegion() {
  const uint64_t bytes = memory_->arena().bytes_total;
  auto admitted = services_->budget->AdmitStaging("a snapshot of " + name_, bytes);
  if (!admitted) return Refused(std::move(admitted.error()).AtRank(name_));
  auto share = std::make_shared<Budget::Share>(std::move(*admitted));
  services_->workers.Post([weak = weak_from_this(), share = std::move(share), name = name_, bytes,
                           number = held_->number, &strand = services_->strand]() mutable {
    auto region = memory::MemoryRegion::Allocate("snapshot of " + name, bytes);
    strand.Post(
        [weak = std::move(weak), share = std::move(share), number, region = std::move(region)] {
          if (auto self = weak.lock()) self->SnapshotRegionMade(number, region, std::move(*share));
        });
  });
}

void Publication::SnapshotRegionMade(uint64_t number,
                                     Result<std::shared_ptr<memory::MemoryRegion>> region,
                                     Budget::Share share) {
  if (!Is(number)) return;
  if (!region) return Refused(std::move(region.error()).AtRank(name_));
  snapshot_ = ArenaBinding(memory_->arena(), *region);
  snapshot_share_ = std::move(share);
  Submit();
}

void Publication::Submit() {
  if (paused_) return;
  WW_FAILPOINT("agent.before_version_submitted");
  services_->coordinator.Publish(held_->request, [weak = weak_from_this(), number = held_->number,
                                                  session = session_](const Status& status) {
    auto self = weak.lock();
    if (!self || !self->Is(number)) return;
    if (status.ok() || session == self->session_) self->Submitted(number, status);
  });
}

void Publication::Submitted(uint64_t number, const Status& status) {
  // What was accepted once may be read: it is given up only by who can drain (GiveUp), or refused.
  const bool may_wait = !held_->done || services_->clock.Now() < *DueBy();
  if (MayBeRepeated(status) && may_wait) return SubmitAfterPause();
  if (!held_->done) {
    if (status.ok()) return;
    return Release(held_->request.version, Epoch{}, status);
  }
  if (!status.ok()) return Refused(status);
  accepted_ = held_->request.version;
  WW_FAILPOINT("agent.after_version_accepted_before_answer");
  std::exchange(held_->done, {})(OkStatus());
  if (!Is(number)) return;  // the caller left meanwhile
  if (held_->mode == PublishMode::kSnapshot) return Copy();
  SetHeld();
}

void Publication::SubmitAfterPause() {
  if (paused_) return;
  services_->strand.PostAfter(services_->options.reconnect,
                              [weak = weak_from_this(), number = held_->number] {
                                auto self = weak.lock();
                                if (self && self->Is(number)) self->Submit();
                              });
}

void Publication::Resume(const epoch::Member& member) {
  paused_ = false;
  if (!held_) return;
  held_->request.member = member;
  held_->again = true;
  if (held_->request.deadline > Nanos(0)) {
    held_->request.deadline =
        std::max(Nanos(std::chrono::milliseconds(1)), held_->until - services_->clock.Now());
  }
  if (held_->mode == PublishMode::kSnapshot && !snapshot_) return;  // its region is being made
  Submit();
}

std::optional<Nanos> Publication::DueBy() const {
  if (!held_) return std::nullopt;
  return held_->done ? std::min(held_->until, held_->since + kAnswerWithin) : held_->until;
}

void Publication::GiveUp(const Status& why) {
  if (!held_) return;
  if (held_->done) return Refused(why);
  accepted_ = held_->before;
  Release(held_->request.version, Epoch{}, why);
}

void Publication::Refused(const Status& why) {
  Held held = std::move(*held_);
  held_.reset();
  for (auto& waiter : held.waiters) waiter(why);
  held.done(why);
}

void Publication::Copy() {
  held_->step = Step::kCopying;
  CopyOnWorkers(memory_->binding(), *snapshot_, services_->workers, services_->strand,
                [weak = weak_from_this(), number = held_->number](const Status& copied) {
                  auto self = weak.lock();
                  if (!self || !self->Is(number)) return;
                  WW_FAILPOINT("agent.after_snapshot_copied");
                  self->held_->unreadable = Status(copied).AtRank(self->name_);
                  if (!self->held_->release && copied.ok()) {
                    self->held_->told = true;
                    self->tell_(self->held_->request.version, Epoch{}, OkStatus());
                  }
                  if (self->Is(number)) self->SetHeld();
                });
}

void Publication::SetHeld() {
  held_->step = Step::kHeld;
  const uint64_t number = held_->number;
  for (auto& waiter : std::exchange(held_->waiters, {})) waiter(held_->unreadable);
  if (!Is(number) || !held_->release) return;
  const auto [epoch, why] = *held_->release;
  Finish(epoch, why);
}

void Publication::WhenHeld(Version version, control::Done ready) {
  if (!held_ || held_->request.version != version) return ready(NotHeld(version).AtRank(name_));
  if (held_->step == Step::kHeld) return ready(held_->unreadable);
  held_->waiters.push_back(std::move(ready));
}

const transfer::Binding& Publication::Bytes() const {
  return held_->mode == PublishMode::kSnapshot ? *snapshot_ : memory_->binding();
}

void Publication::Release(Version version, Epoch epoch, const Status& why) {
  if (!held_ || held_->request.version != version) return;
  const bool stale = held_->again && why.reason() == Reason::kStaleVersion;
  const Status told = stale ? OkStatus() : why;
  if (held_->step == Step::kHeld) return Finish(epoch, told);
  held_->release.emplace(epoch, told);
}

void Publication::Finish(Epoch epoch, const Status& why) {
  Held held = std::move(*held_);
  held_.reset();
  if (!held.told) tell_(held.request.version, epoch, why);
}

std::optional<Version> Publication::End(const Status& why) {
  if (!held_) return std::nullopt;
  Held held = std::move(*held_);
  held_.reset();
  for (auto& waiter : held.waiters) waiter(why);
  if (held.done) {
    held.done(why);
    return std::nullopt;
  }
  if (held.told) return std::nullopt;
  return held.request.version;
}

}  // namespace weightwire::agent
