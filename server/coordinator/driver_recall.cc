#include <algorithm>
#include <map>
#include <utility>

#include "server/base/failpoint.h"
#include "server/coordinator/driver.h"
#include "server/coordinator/recall.h"

// What a coordinator leaves behind, and what a cut leaves of one that lives: engines that serve on,
// engines that have staged an epoch whose end they do not know, trainer ranks that hold a version.
// Nobody is asked: every rank says what it holds when it registers again, and once an engine is
// complete the journal decides.
namespace weightwire::coordinator {
namespace {

/// What a rank holds after a swap away from `served`.
epoch::Contents Beside(const epoch::Content& served, epoch::Contents held) {
  if (served.epoch != Epoch{}) held.insert(held.begin(), served);
  return held;
}

}  // namespace

control::Claim Driver::KnownOf(const Group& engine, uint32_t rank) const {
  control::Claim known;
  known.serving = {engine.serving, engine.version};
  known.holds = engine.slots[rank].live->held;
  if (const Straggler* late = stragglers_.Find(engine.name)) {
    known.staged = late->epoch;
    known.content = late->content.epoch;
    known.version = late->content.version;
    known.told = known.content <= committed_.epoch;
  }
  return known;
}

void Driver::OnComplete(Group& group) {
  if (group.role != control::GroupRole::kEngine) return;
  std::vector<control::Claim> claims;
  for (uint32_t rank = 0; rank < group.world_size(); ++rank) {
    const auto claim = std::exchange(group.slots[rank].live->claim, std::nullopt);
    claims.push_back(claim ? *claim : KnownOf(group, rank));
  }
  const bool nothing = claims == std::vector<control::Claim>(claims.size());
  if (nothing && group.serving == Epoch{}) return;
  WW_FAILPOINT("coordinator.before_recall_decided");
  const auto recalled = Recall(claims, committed_);
  s_.metrics.Add("engines_recalled_total", 1, {{"outcome", recalled ? "kept" : "refused"}});
  if (!recalled) {
    return s_.membership.EvictGroup(std::string(group.name),
                                    Status(recalled.error()).AtRank(group.name));
  }
  group.serving = recalled->serving.epoch;
  group.version = recalled->serving.version;
  const std::vector<epoch::Member> members = group.Members();
  Straggler awaited{members, recalled->unfinished, recalled->decided, {}, {}};
  // By a rollback that goes on, the buffer that held its content is served from.
  const bool swaps = recalled->unfinished != Epoch{} || !recalled->behind_the_swap.empty();
  for (size_t rank = 0; rank < members.size(); ++rank) {
    epoch::Contents held = claims[rank].holds;
    std::erase_if(held, [&](const epoch::Content& content) {
      return !(content.epoch < committed_.epoch) || content.epoch == recalled->decided.epoch ||
             (swaps && content.epoch == committed_.held);
    });
    s_.membership.Hold(members[rank], std::move(held));
  }
  for (const uint32_t rank : recalled->behind_the_swap) {
    const epoch::Member& member = members[rank];
    const Epoch epoch = claims[rank].staged;
    s_.membership.Send(member, epoch::CommitCommand{epoch, recalled->decided.version,
                                                    recalled->decided.epoch, member, rank == 0});
    s_.membership.Send(member, epoch::InstalledCommand{epoch, member});
    s_.membership.Hold(member, Beside(claims[rank].serving, group.slots[rank].live->held));
  }
  for (const uint32_t rank : recalled->undecided) {
    const EpochRun* run = RunOf(claims[rank].staged);
    if (run != nullptr && run->state.phase == epoch::Phase::kCommitting) {
      // Its COMMIT is on its way to the journal: it goes on when that has answered.
      awaited.epoch = run->state.spec.epoch;
      awaited.content = {run->state.spec.content, run->state.spec.version};
      continue;
    }
    const Status why(Code::kAborted, Reason::kMemberLost,
                     "the engine was cut off before it was decided");
    s_.membership.Send(members[rank], epoch::AbortCommand{claims[rank].staged, members[rank], why});
  }
  const Straggler* before = stragglers_.Find(group.name);
  awaited.patience = before != nullptr && before->epoch == awaited.epoch
                         ? before->patience
                         : s_.clock.Now() + s_.options.commit_deadline;
  stragglers_.Erase(group.name);
  if (awaited.epoch != Epoch{}) {
    for (uint32_t rank = 0; rank < members.size(); ++rank) {
      awaited.keeps[members[rank]] =
          Beside({group.serving, group.version}, group.slots[rank].live->held);
    }
    WW_FAILPOINT("coordinator.before_an_unfinished_epoch_goes_on");
    AwaitSwap(group.name, std::move(awaited));
  } else if (group.serving != committed_.epoch) {
    TellBehind(group);
  }
  WW_FAILPOINT("coordinator.after_recall_decided");
}

void Driver::OnClaim(const std::string& rank, const control::Claim& claim) {
  constexpr Epoch kAbsurd(uint64_t{1} << 62);
  Epoch newest = std::max({claim.serving.epoch, claim.staged, claim.content});
  for (const epoch::Content& held : claim.holds) newest = std::max(newest, held.epoch);
  if (newest < kAbsurd) numbers_.Raise(Epoch(newest.value + 1));
  if (!Forgotten(claim.serving)) return;
  const auto name = [](const epoch::Content& content) {
    return "version " + std::to_string(content.version.value) + " of epoch " +
           std::to_string(content.epoch.value);
  };
  journal_lost_ = "has lost decisions: " + rank + " serves " + name(claim.serving) +
                  ", and the journal ended with epoch " + std::to_string(read_.value) +
                  "; it was put back or records were deleted";
  s_.metrics.Set("journal_lost_decisions", 1);
  s_.options.notes(
      {claim.serving.epoch, claim.serving.version, {}, rank, true, "the journal " + journal_lost_});
  forgotten_ = claim.serving;
  Restore(forgotten_);
}

/// A member serves only what was committed, and a coordinator commits only what is durable.
bool Driver::Forgotten(const epoch::Content& served) const {
  return served.epoch > std::max(read_, forgotten_.epoch) &&
         (served.epoch < first_ || served.epoch > committed_.epoch);
}

/// What was decided is decided. A version that would take its number again is given up; a newer
/// decision of this coordinator stands.
void Driver::Restore(const epoch::Content& served) {
  const Status stale(Code::kAborted, Reason::kStaleVersion,
                     "version " + std::to_string(served.version.value) +
                         " is served already, and the journal had lost it");
  GiveUpAll(queue_.TakeBelow(Version(served.version.value + 1)), stale);
  queue_.SetFloor(std::max(queue_.floor(), served.version));
  if (publish_draft_ != nullptr && publish_draft_->spec.version <= served.version) {
    AbandonDrafts(stale);
  }
  if (publish_ != nullptr && publish_->CanAbort() &&
      publish_->state.spec.kind == epoch::Kind::kPublish &&
      publish_->state.spec.version <= served.version) {
    publish_->abort_asked = true;
    events_.emplace_back(publish_->state.spec.epoch, epoch::AbortAskedEvent{stale});
    s_.strand.Post(lifeline_.Bind([this] { Pump(); }));
  }
  if (served.epoch < committed_.epoch) return changed_();
  committed_ = {served.epoch, served.version, {}, {}};
  s_.metrics.Set("epoch_committed", static_cast<double>(committed_.epoch.value));
  for (const Group* engine : CompleteEngines()) TellBehind(*engine);
  if (deciding_) {
    s_.journal.Append(committed_, lifeline_.Bind([this](const Status& status) {
      if (!status.ok()) StopDeciding(status);
    }));
  }
  changed_();
}

/// A version of which some rank was released before its coordinator was lost is never complete
/// again: the others must not wait for it.
void Driver::GiveUpWhatWasLetGo() {
  if (queue_.versions().empty()) return;
  const Group* trainer = s_.membership.Trainer();
  std::map<uint32_t, Version> released;
  for (uint32_t rank = 0; trainer != nullptr && rank < trainer->world_size(); ++rank) {
    const auto& live = trainer->slots[rank].live;
    if (live && live->claim) released[rank] = live->claim->released;
  }
  GiveUpAll(queue_.TakeLetGo(released),
            Status(Code::kAborted, Reason::kStaleVersion,
                   "another rank of the trainer was released from it before the coordinator was "
                   "lost"));
}

}  // namespace weightwire::coordinator
