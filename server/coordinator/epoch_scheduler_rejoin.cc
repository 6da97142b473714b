#include <algorithm>
#include <map>
#include <utility>

#include "server/base/failpoint.h"
#include "server/coordinator/epoch_scheduler.h"
#include "server/coordinator/rejoin.h"

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

control::RejoinState EpochScheduler::KnownOf(const Group& engine, uint32_t rank) const {
  control::RejoinState known;
  known.serving = {engine.serving, engine.version};
  known.holds = engine.slots[rank].live->held;
  if (const Straggler* late = shared_.stragglers.Find(engine.name)) {
    known.staged = late->epoch;
    known.content = late->content.epoch;
    known.version = late->content.version;
    known.told = known.content <= shared_.decisions.committed.epoch;
  }
  return known;
}

void EpochScheduler::OnComplete(Group& group) {
  if (group.role != control::GroupRole::kEngine) return;
  std::vector<control::RejoinState> claims;
  for (uint32_t rank = 0; rank < group.world_size(); ++rank) {
    const auto claim = std::exchange(group.slots[rank].live->claim, std::nullopt);
    claims.push_back(claim ? *claim : KnownOf(group, rank));
  }
  DropExcluded(group, claims);
  const bool nothing = std::ranges::all_of(
      claims, [](const control::RejoinState& claim) { return claim == control::RejoinState{}; });
  if (nothing && group.serving == Epoch{}) return;
  WW_FAILPOINT("coordinator.before_rejoin_decided");
  const auto rejoined = Rejoin(claims, shared_.decisions.committed);
  s_.metrics.Add("engines_recalled_total", 1, {{"outcome", rejoined ? "kept" : "refused"}});
  if (!rejoined) {
    return s_.membership.EvictGroup(std::string(group.name),
                                    Status(rejoined.error()).AtRank(group.name));
  }
  group.serving = rejoined->serving.epoch;
  group.version = rejoined->serving.version;
  const std::vector<epoch::Member> members = group.Members();
  Straggler awaited{members, rejoined->unfinished, rejoined->decided, {}, {}};
  // By a rollback that goes on, the buffer that held its content is served from.
  const bool swaps = rejoined->unfinished != Epoch{} || !rejoined->behind_the_swap.empty();
  for (size_t rank = 0; rank < members.size(); ++rank) {
    epoch::Contents held = claims[rank].holds;
    std::erase_if(held, [&](const epoch::Content& content) {
      return !(content.epoch < shared_.decisions.committed.epoch) ||
             content.epoch == rejoined->decided.epoch ||
             (swaps && content.epoch == shared_.decisions.committed.held);
    });
    s_.membership.Hold(members[rank], std::move(held));
  }
  for (const uint32_t rank : rejoined->behind_the_swap) {
    const epoch::Member& member = members[rank];
    const Epoch epoch = claims[rank].staged;
    s_.membership.Send(member, epoch::CommitCommand{epoch, rejoined->decided.version,
                                                    rejoined->decided.epoch, member, rank == 0});
    s_.membership.Send(member, epoch::CommittedEverywhereCommand{epoch, member});
    s_.membership.Hold(member, Beside(claims[rank].serving, group.slots[rank].live->held));
  }
  for (const uint32_t rank : rejoined->undecided) {
    const EpochRun* run = runner_.RunOf(claims[rank].staged);
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
  const Straggler* before = shared_.stragglers.Find(group.name);
  awaited.patience = before != nullptr && before->epoch == awaited.epoch
                         ? before->patience
                         : s_.clock.Now() + s_.options.commit_deadline;
  shared_.stragglers.Erase(group.name);
  if (awaited.epoch != Epoch{}) {
    for (uint32_t rank = 0; rank < members.size(); ++rank) {
      awaited.keeps[members[rank]] =
          Beside({group.serving, group.version}, group.slots[rank].live->held);
    }
    WW_FAILPOINT("coordinator.before_an_unfinished_epoch_goes_on");
    shared_.stragglers.AwaitSwap(group.name, std::move(awaited));
  } else if (group.serving != shared_.decisions.committed.epoch) {
    shared_.SendStale(group);
  }
  WW_FAILPOINT("coordinator.after_rejoin_decided");
}

/// The epoch went on without the engine, whatever that has staged since or before.
bool EpochScheduler::IsExcluded(const std::string& engine, Epoch epoch) const {
  const EpochRun* run = runner_.RunOf(epoch);
  return (run != nullptr && run->state.excluded.contains(engine)) ||
         (epoch == shared_.decisions.excluded.first &&
          shared_.decisions.excluded.second.contains(engine));
}

/// Its sums were never compared with the sources': it is filled.
void EpochScheduler::DropExcluded(const Group& engine, std::vector<control::RejoinState>& claims) {
  for (uint32_t rank = 0; rank < engine.world_size(); ++rank) {
    control::RejoinState& claim = claims[rank];
    const Epoch staged = claim.staged;
    if (staged == Epoch{} || claim.told || !IsExcluded(engine.name, staged)) continue;
    claim.staged = claim.content = {};
    claim.version = {};
    const Status why(Code::kAborted, Reason::kMemberLost, "the epoch went on without the engine");
    const epoch::Member& member = engine.slots[rank].live->member;
    s_.membership.Send(member, epoch::AbortCommand{staged, member, why});
  }
}

void EpochScheduler::OnRejoinState(const std::string& rank, const control::RejoinState& claim) {
  constexpr Epoch kAbsurd(uint64_t{1} << 62);
  Epoch newest = std::max({claim.serving.epoch, claim.staged, claim.content});
  for (const epoch::Content& held : claim.holds) newest = std::max(newest, held.epoch);
  if (newest < kAbsurd) shared_.numbers.Raise(Epoch(newest.value + 1));
  if (!Forgotten(claim.serving)) return;
  const auto name = [](const epoch::Content& content) {
    return "version " + std::to_string(content.version.value) + " of epoch " +
           std::to_string(content.epoch.value);
  };
  shared_.decisions.journal_lost = "has lost decisions: " + rank + " serves " +
                                   name(claim.serving) + ", and the journal ended with epoch " +
                                   std::to_string(shared_.decisions.read.value) +
                                   "; it was put back or records were deleted";
  s_.metrics.Set("journal_lost_decisions", 1);
  s_.options.notes({claim.serving.epoch,
                    claim.serving.version,
                    {},
                    rank,
                    true,
                    "the journal " + shared_.decisions.journal_lost});
  shared_.decisions.forgotten = claim.serving;
  Restore(shared_.decisions.forgotten);
}

/// A member serves only what was committed, and a coordinator commits only what is durable.
bool EpochScheduler::Forgotten(const epoch::Content& served) const {
  return served.epoch > std::max(shared_.decisions.read, shared_.decisions.forgotten.epoch) &&
         (served.epoch < shared_.decisions.first ||
          served.epoch > shared_.decisions.committed.epoch);
}

/// What was decided is decided. A version that would take its number again is given up; a newer
/// decision of this coordinator stands.
void EpochScheduler::Restore(const epoch::Content& served) {
  const Status stale(Code::kAborted, Reason::kStaleVersion,
                     "version " + std::to_string(served.version.value) +
                         " is served already, and the journal had lost it");
  // A lineage that the journal forgot with the decision nobody here knows: a trainer of it names
  // it.
  const uint64_t newest = shared_.decisions.committed.newest;
  const VersionId known{newest, served.version};
  const auto overtaken = [&](const epoch::Spec& spec) {
    return VersionId{spec.lineage, spec.version} <= known;
  };
  publishes_.GiveUpTo(known, stale);
  publishes_.SetFloor(std::max(publishes_.floor(), known));
  if (planner_.publish() != nullptr && overtaken(planner_.publish()->spec)) {
    publishes_.Abandon(stale);
  }
  if (runner_.fleet() != nullptr && runner_.fleet()->CanAbort() &&
      runner_.fleet()->state.spec.kind == epoch::Kind::kPublish &&
      overtaken(runner_.fleet()->state.spec)) {
    runner_.FeedLater(runner_.fleet()->state.spec.epoch, epoch::AbortAskedEvent{stale});
  }
  if (served.epoch < shared_.decisions.committed.epoch) return shared_.changed();
  shared_.decisions.Set({served.epoch, served.version, {}, {}, newest, newest});
  TellCommitted();
  for (const Group* engine : shared_.CompleteEngines()) shared_.SendStale(*engine);
  if (shared_.decisions.deciding) {
    s_.journal.Append(shared_.decisions.committed, cancel_.Bind([this](const Status& status) {
      if (!status.ok()) Halt(status);
    }));
  }
  shared_.changed();
}

}  // namespace weightwire::coordinator
