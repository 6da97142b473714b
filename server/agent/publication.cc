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

void Answer(const std::vector<control::Done>& calls, const Status& why) {
  for (const auto& done : calls) done(why);
}

}  // namespace

Status Withdrawn(Version version) {
  return Status(Code::kAborted, Reason::kAbortRequested,
                "version " + std::to_string(version.value) + " was withdrawn by its publisher");
}

Status Publication::CheckStart(const PublishCall& call) const {
  if (!memory_->bound()) {
    return Status(Code::kFailedPrecondition, Reason::kNotReady, "no memory is bound")
        .Remedy("bind every tensor first");
  }
  if (call.number != 0 && call.number <= withdrawn_) return Withdrawn(call.version);
  if (held_ && (held_->told || !Holds(call.version))) {
    return Status(
               Code::kFailedPrecondition, Reason::kNotReady,
               "version " + std::to_string(held_->request.version.value) +
                   (held_->told ? " still moves from its snapshot" : " has not been released yet"))
        .Remedy("publish again when it has been released");
  }
  // What the rank was released from counts by its number alone, here and in its claims.
  if (accepted_ != Version{} && call.lineage != lineage_) {
    return Status(Code::kInvalidArgument, Reason::kInvalidRequest,
                  "the rank publishes in lineage " + std::to_string(lineage_) +
                      " and asks for lineage " + std::to_string(call.lineage))
        .Remedy("attach anew: a rank has one lineage from its first version on");
  }
  if (!held_ && call.version <= accepted_) {
    return Status(Code::kFailedPrecondition, Reason::kStaleVersion,
                  "version " + std::to_string(call.version.value) + " is not newer than version " +
                      std::to_string(accepted_.value) + ", which this rank has published")
        .Remedy(
            "publish a higher version; to go on from an earlier step attach anew and publish in "
            "the next lineage");
  }
  return OkStatus();
}

void Publication::Start(const epoch::Member& member, const PublishCall& call, control::Done done) {
  if (Status status = CheckStart(call); !status.ok()) return done(std::move(status).AtRank(name_));
  // Also of a call that is refused later, or of a repeat: what was written may not be written
  // again.
  if (Status status = memory_->MarkChanged(call.unchanged); !status.ok()) {
    return done(std::move(status).AtRank(name_));
  }
  member_ = member;
  if (held_) return Repeat(call, std::move(done));
  held_.emplace();
  held_->request = {member,        call.version,   call.manual_commit, call.deadline,
                    call.trace_id, next_number_++, call.lineage};
  held_->call = call.number;
  held_->mode = call.mode;
  held_->calls.push_back(std::move(done));
  held_->since = services_->clock.Now();
  held_->until = held_->since + (call.deadline > Nanos(0) ? call.deadline : kHeldAtMost);
  held_->before = accepted_;
  if (call.mode == PublishMode::kSnapshot && !snapshot_) return MakeSnapshotRegion();
  Submit();
}

void Publication::Repeat(const PublishCall& call, control::Done done) {
  if (!held_->unreadable.ok()) {
    return done(Status(held_->unreadable).Remedy("wait for its release, then publish a newer one"));
  }
  if (call.mode != held_->mode || call.manual_commit != held_->request.manual_commit ||
      call.lineage != held_->request.lineage) {
    return done(
        Status(Code::kInvalidArgument, Reason::kInvalidRequest,
               "version " + std::to_string(call.version.value) +
                   " is held already, published with another mode, manual_commit or lineage")
            .AtRank(name_)
            .Remedy("repeat a call as it was, or withdraw the version first"));
  }
  held_->call = std::max(held_->call, call.number);
  if (held_->accepted) return done(OkStatus());
  held_->calls.push_back(std::move(done));
}

Withdrawal Publication::Withdraw(const WithdrawCall& call, bool read) {
  withdrawn_ = std::max(withdrawn_, call.number);
  if (!Holds(call.version)) {
    return call.version <= accepted_ ? Withdrawal::kReleased : Withdrawal::kRevoked;
  }
  if (held_->told) return Withdrawal::kReleased;
  const bool later = call.number != 0 && held_->call > call.number;
  if (later || (held_->accepted && !call.if_accepted)) return Withdrawal::kAccepted;
  if (!read) {
    Revoke();
    return Withdrawal::kRevoked;
  }
  held_->unreadable = Withdrawn(call.version).AtRank(name_);
  return Withdrawal::kRead;
}

void Publication::Revoke() {
  Held held = std::move(*held_);
  held_.reset();
  accepted_ = held.before;
  const Version version = held.request.version;
  const Status why = Withdrawn(version).AtRank(name_);
  if (held.submitted) TellRevoked(version, untold_[version] = held.request.number);
  for (auto& waiter : held.waiters) waiter(why);
  Answer(held.calls, why);
}

void Publication::TellRevoked(Version version, uint64_t number) {
  if (paused_) return;
  services_->coordinator.Withdraw(
      {member_, version, number},
      [weak = weak_from_this(), version, number, member = member_](const Status& status) {
        auto self = weak.lock();
        if (!self || self->member_ != member) return;
        const auto untold = self->untold_.find(version);
        if (untold == self->untold_.end() || untold->second != number) return;
        if (!MayBeRepeated(status)) return void(self->untold_.erase(untold));
        self->services_->strand.PostAfter(
            self->services_->options.reconnect, [weak, version, number] {
              auto again = weak.lock();
              if (!again) return;
              const auto still = again->untold_.find(version);
              if (still == again->untold_.end() || still->second != number) return;
              again->TellRevoked(version, number);
            });
      });
}

void Publication::MakeSnapshotRegion() {
  const uint64_t bytes = memory_->arena().bytes_total;
  auto admitted = services_->budget->AdmitStaging("a snapshot of " + name_, bytes);
  if (!admitted) return Refused(std::move(admitted.error()).AtRank(name_));
  auto share = std::make_shared<Budget::Share>(std::move(*admitted));
  services_->workers.Post([weak = weak_from_this(), share = std::move(share), name = name_, bytes,
                           number = held_->request.number, &strand = services_->strand]() mutable {
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
  held_->submitted = true;
  services_->coordinator.Publish(held_->request,
                                 [weak = weak_from_this(), number = held_->request.number,
                                  session = session_](const Status& status) {
                                   auto self = weak.lock();
                                   if (!self || !self->Is(number)) return;
                                   if (status.ok() || session == self->session_)
                                     self->Submitted(number, status);
                                 });
}

void Publication::Submitted(uint64_t number, const Status& status) {
  // What was accepted once may be read: it is given up only by who can drain (GiveUp), or refused.
  const bool may_wait = held_->accepted || services_->clock.Now() < *DueBy();
  if (MayBeRepeated(status) && may_wait) return SubmitAfterPause();
  if (held_->accepted) {
    if (status.ok()) return;
    return Release(held_->request.version, Epoch{}, status);
  }
  // Stale is also what was accepted without an answer that came, and is over meanwhile.
  const bool over = held_->release && status.reason() == Reason::kStaleVersion;
  if (!status.ok() && !over) return Refused(status);
  accepted_ = held_->request.version;
  lineage_ = held_->request.lineage;
  held_->accepted = true;
  WW_FAILPOINT("agent.after_version_accepted_before_answer");
  Answer(std::exchange(held_->calls, {}), OkStatus());
  if (!Is(number)) return;  // the caller left meanwhile
  if (held_->mode == PublishMode::kSnapshot) return Copy();
  SetHeld();
}

void Publication::SubmitAfterPause() {
  if (paused_) return;
  services_->strand.PostAfter(services_->options.reconnect,
                              [weak = weak_from_this(), number = held_->request.number] {
                                auto self = weak.lock();
                                if (self && self->Is(number)) self->Submit();
                              });
}

void Publication::Resume(const epoch::Member& member) {
  paused_ = false;
  member_ = member;
  for (const auto& [version, number] : std::map(untold_)) TellRevoked(version, number);
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
  return held_->accepted ? held_->until : std::min(held_->until, held_->since + kAnswerWithin);
}

void Publication::GiveUp(const Status& why) {
  if (!held_) return;
  if (!held_->accepted) return Refused(why);
  accepted_ = held_->before;
  untold_[held_->request.version] = held_->request.number;
  Release(held_->request.version, Epoch{}, why);
}

void Publication::Refused(const Status& why) {
  Held held = std::move(*held_);
  held_.reset();
  // It may have been accepted all the same.
  if (held.submitted && MayBeRepeated(why)) {
    TellRevoked(held.request.version, untold_[held.request.version] = held.request.number);
  }
  for (auto& waiter : held.waiters) waiter(why);
  Answer(held.calls, why);
}

void Publication::Copy() {
  held_->step = Step::kCopying;
  const std::vector<uint64_t> now = memory_->generations();
  copied_.resize(now.size());
  transfer::Binding from, to;
  for (size_t i = 0; i < now.size(); ++i) {
    if (copied_[i] == now[i]) continue;
    from.push_back(memory_->binding()[i]);
    to.push_back((*snapshot_)[i]);
    copied_[i] = 0;  // half of it is new, if copying fails
  }
  CopyOnWorkers(
      std::move(from), std::move(to), services_->workers, services_->strand,
      [weak = weak_from_this(), number = held_->request.number, now](const Status& copied) {
        auto self = weak.lock();
        if (!self || !self->Is(number)) return;
        WW_FAILPOINT("agent.after_snapshot_copied");
        if (copied.ok()) self->copied_ = now;
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
  const uint64_t number = held_->request.number;
  const Status readable = held_->unreadable;
  for (auto& waiter : std::exchange(held_->waiters, {})) waiter(readable);
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
  if (!held.accepted) {
    Answer(held.calls, why);
    return std::nullopt;
  }
  if (held.told) return std::nullopt;
  return held.request.version;
}

}  // namespace weightwire::agent
