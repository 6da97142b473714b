#include "server/coordinator/publish_queue.h"

#include <algorithm>
#include <set>
#include <utility>

#include "server/base/failpoint.h"
#include "server/coordinator/retry.h"
#include "server/coordinator/waiting.h"

namespace weightwire::coordinator {
namespace {

/// Attempts of one version that end for a loss before all engines read from the trainer, so that a
/// further one is only excluded, and before fewer engines are asked.
constexpr uint32_t kLossesToStar = 2;
constexpr uint32_t kLossesMax = 3;

Status MemberLost(const std::string& message, const std::string& rank) {
  return Status(Code::kAborted, Reason::kMemberLost, message)
      .AtRank(rank)
      .Remedy("publish a higher version when the trainer is complete again");
}

}  // namespace

PublishQueue::PublishQueue(Shared& shared, EpochPlanner& planner, EpochRunner& runner,
                           FillScheduler& fills)
    : shared_(shared),
      s_(shared.s),
      planner_(planner),
      runner_(runner),
      fills_(fills),
      queue_(shared.s.options.waiting_versions_max) {
  queue_.SetFloor(shared.decisions.Floor());
}

// ---- what publishers ask ----

Status PublishQueue::CheckPublish(const Membership::Place& place) const {
  const Group& group = *place.group;
  if (group.role != control::GroupRole::kTrainer) {
    return Status(Code::kInvalidArgument, Reason::kInvalidRequest, "only a trainer publishes");
  }
  WW_RETURN_IF_ERROR(shared_.decisions.Check());
  if (place.live->presence != Presence::kConnected ||
      (place.live->resumed && place.live->layout == nullptr)) {
    return Status(Code::kUnavailable, Reason::kNotReady,
                  "the rank's connection was lost, and it is not all back yet")
        .Remedy("the agent publishes again when it has resumed");
  }
  if (place.live->layout == nullptr) {
    return Status(Code::kFailedPrecondition, Reason::kNotReady,
                  "the rank has not agreed on a layout");
  }
  if (!group.was_complete) return OkStatus();
  for (uint32_t rank = 0; rank < group.world_size(); ++rank) {
    if (group.slots[rank].live) continue;
    return Status(Code::kFailedPrecondition, Reason::kMissingRank,
                  "the trainer lost " + group.RankName(rank) + ", which has not registered again")
        .Remedy("publish when the trainer is complete again");
  }
  return OkStatus();
}

Status PublishQueue::Publish(const control::PublishRequest& request) {
  auto place = s_.membership.Find(request.member);
  if (!place) return place.error();
  const auto& told = place->live->last_release;
  if (told && told->version == request.version && place->live->resumed &&
      place->live->published_number == request.number) {
    s_.membership.Send(request.member, *told);  // it was cut off when it was told
    return OkStatus();
  }
  auto accepted = [&]() -> Status {
    WW_RETURN_IF_ERROR(CheckPublish(*place));
    WW_RETURN_IF_ERROR(shared_.decisions.CheckLineage(request));
    control::PublishRequest bounded = request;
    if (bounded.deadline <= Nanos(0)) {
      bounded.deadline =
          s_.options.prepare_deadline + s_.options.transfer_deadline + s_.options.commit_deadline;
    }
    return queue_.Add(bounded, place->rank, place->live->published, place->group->generation,
                      s_.clock.Now());
  }();
  if (!accepted.ok()) return Status(std::move(accepted).AtRank(place->name()));
  WW_FAILPOINT("coordinator.after_publish_accepted");
  place->live->published = std::max(place->live->published, request.version);
  place->live->published_number = request.number;
  shared_.decisions.published = true;
  ArmTimer();
  shared_.try_start();
  shared_.changed();
  return OkStatus();
}

/// A rank takes a version back that it published: its caller timed out, say, and may write over the
/// bytes. Its agent serves none of them any more, so an attempt can only fail; here it is ended at
/// once, and counts as none. The other ranks go on holding the version: it is complete again when
/// the one that left has published it anew.
Status PublishQueue::Withdraw(const control::WithdrawRequest& request) {
  auto place = s_.membership.Find(request.member);
  if (!place) return place.error();
  const EpochRun* run = runner_.fleet();
  if (run != nullptr && (run->state.spec.kind != epoch::Kind::kPublish ||
                         run->state.spec.version != request.version)) {
    run = nullptr;
  }
  if (run != nullptr && (run->state.released || run->state.phase == epoch::Phase::kCommitting)) {
    return Status(Code::kFailedPrecondition, Reason::kStaleEpoch,
                  "too late: the epoch is " + std::string(epoch::PhaseName(run->state.phase)))
        .AtRank(place->name())
        .AtEpoch(run->state.spec.epoch);
  }
  if (!queue_.Withdraw(request, place->rank)) return OkStatus();
  Version& published = place->live->published;
  published = std::min(published, Version(request.version.value - 1));
  const PendingEpoch* pending = planner_.publish();
  if (pending != nullptr && pending->spec.version == request.version) {
    planner_.DropPublish();
    PendingVersion& planned = *queue_.Find(request.version);
    planned.running = false;
    --planned.attempts;
  } else if (run != nullptr && run->CanAbort()) {
    --queue_.Find(request.version)->attempts;
    runner_.Dispatch(
        run->state.spec.epoch,
        epoch::AbortAskedEvent{Status(Code::kAborted, Reason::kAbortRequested,
                                      "version " + std::to_string(request.version.value) +
                                          " was withdrawn by its publisher")
                                   .AtRank(place->name()),
                               epoch::AbortCause::kGaveWay});
  }
  ArmTimer();
  shared_.try_start();
  shared_.changed();
  return OkStatus();
}

// ---- attempts ----

bool PublishQueue::Start() {
  const Group* trainer = s_.membership.Trainer();
  if (trainer == nullptr) return false;
  GiveUpWhatWasLetGo();
  PendingVersion* head = queue_.Head(trainer->world_size());
  if (head == nullptr) return false;
  GiveUpAll(queue_.TakeBelow(head->id()), Status(Code::kAborted, Reason::kStaleVersion,
                                                 ToString(head->id()) + " superseded this one"));
  std::vector<const Group*> engines = shared_.PartakingEngines();
  if (!trainer->Complete()) return false;
  if (engines.size() < EnginesWanted()) return false;
  if (s_.clock.Now() < head->not_before) return false;
  const bool every_model = head->losses < kLossesMax;
  if (every_model && shared_.AwaitsAModel(engines, head->awaited)) return false;
  if (!fills_.GaveWay()) return true;
  const auto number = shared_.numbers.Take();
  if (!number) return true;
  head->running = true;
  head->last_epoch = *number;
  ++head->attempts;
  epoch::Spec spec;
  spec.epoch = spec.content = *number;
  spec.kind = epoch::Kind::kPublish;
  spec.version = head->version;
  spec.lineage = head->lineage;
  spec.manual_commit = head->manual_commit;
  spec.quorum = s_.options.commit_policy.Enough(s_.options.min_engines);
  spec.engines_min = static_cast<uint32_t>(EnginesWanted());
  spec.every_model = every_model;
  std::vector<std::string> left_out = LeaveOut(*head, engines);
  spec.sources = trainer->Members();
  spec.source_group = trainer->name;
  const auto pending = planner_.NewPending(std::move(spec));
  pending->attempt = head->attempts;
  // Of all its attempts, also where nobody gave one.
  if (head->trace_id == std::array<uint8_t, 16>{}) head->trace_id = pending->trace_id;
  pending->trace_id = head->trace_id;
  ToldToPublish(*pending, *head, *trainer);
  pending->direct = head->direct;
  pending->star = head->losses >= kLossesToStar;
  pending->left_out = std::move(left_out);
  ArmTimer();
  planner_.Plan(pending, *trainer, engines);
  return true;
}

/// Takes the engines out that an earlier attempt found late, as long as enough are left. Where the
/// policy lets a version do with some of them and engines leave faster than an attempt takes, each
/// further loss halves who is asked: the others are filled from them.
std::vector<std::string> PublishQueue::LeaveOut(PendingVersion& head,
                                                std::vector<const Group*>& engines) const {
  std::vector<std::string> names;
  const auto late = [&](const Group* engine) { return head.without.contains(engine->name); };
  std::set<std::vector<std::string>> all, left_of;
  size_t left = 0;
  for (const Group* engine : engines) {
    all.insert(engine->agreed->models);
    if (late(engine)) continue;
    left_of.insert(engine->agreed->models);
    ++left;
  }
  if (left < EnginesWanted() || left_of != all) {
    head.without.clear();
    ++head.pauses;  // to leave them out did not help
  }
  for (const Group* engine : engines) {
    if (late(engine)) names.push_back(engine->name);
  }
  std::erase_if(engines, late);
  if (s_.options.commit_policy.kind == CommitPolicy::Kind::kAll || head.losses < kLossesMax) {
    return names;
  }
  const size_t asked = std::max(
      {EnginesWanted(), all.size(), engines.size() >> std::min(head.losses - kLossesMax + 1, 31U)});
  if (engines.size() <= asked) return names;
  // Who serves has been here for longer. One of each model comes before all others.
  std::ranges::stable_partition(engines, [](const Group* e) { return e->serving != Epoch{}; });
  std::vector<const Group*> others;
  std::erase_if(engines, [&](const Group* engine) {
    if (all.erase(engine->agreed->models) > 0) return false;
    others.push_back(engine);
    return true;
  });
  engines.insert(engines.end(), others.begin(), others.end());
  for (size_t i = asked; i < engines.size(); ++i) names.push_back(engines[i]->name);
  engines.resize(asked);
  return names;
}

size_t PublishQueue::EnginesWanted() const {
  return std::max(
      {1u, s_.options.min_engines, s_.options.commit_policy.Enough(s_.options.min_engines)});
}

void PublishQueue::ToldToPublish(PendingEpoch& planned, const PendingVersion& pending,
                                 const Group& trainer) const {
  if (pending.attempts > 1 || pending.published.empty()) return;
  Nanos first = pending.published.begin()->second, last = first;
  for (const auto& [rank, at] : pending.published) {
    first = std::min(first, at);
    last = std::max(last, at);
    planned.trace.Happened(at, trainer.RankName(rank), "published", {});
  }
  planned.trace.Step("publish", ToString(pending.id()), first, last);
}

bool PublishQueue::End(const EpochRun& run) {
  PendingVersion* pending = queue_.Find(run.state.spec.version);
  if (pending == nullptr) return false;
  if (run.state.phase == epoch::Phase::kCommitted) {
    queue_.Take(pending->version);
    return true;
  }
  pending->last_error = run.state.why;
  for (const std::string& engine : run.state.stragglers) {
    pending->without.insert(engine);
    s_.metrics.Add("engines_left_behind_total", 1);
    if (Group* group = s_.membership.FindGroup(engine)) {
      group->last_error = run.state.why.ToString();
    }
  }
  if (!IsPassing(run.state)) ++pending->failures;
  if (MayRetry(run.state, *pending, TrainerHolds(*pending), shared_)) {
    pending->running = false;
    PauseAfter(run.state, *pending, shared_);
    // A relay that cannot pass the version on should not stop its reader again.
    const std::string& rank = run.state.why.rank();
    pending->direct.insert(rank.substr(0, rank.rfind('/')));
    ArmTimer();
    return false;
  }
  auto taken = queue_.Take(pending->version);
  if (run.state.released) {
    AllowAgain(*taken);
  } else {
    GiveUp(std::move(*taken), run.state.why);
  }
  return false;
}

void PublishQueue::OnVoid(const PendingEpoch& planned) {
  if (PendingVersion* pending = queue_.Find(planned.spec.version)) {
    pending->running = false;
    --pending->attempts;
    if (!TrainerHolds(*pending)) {
      GiveUp(*queue_.Take(planned.spec.version),
             MemberLost("a rank of the trainer was lost", planned.spec.source_group));
    }
  }
  ArmTimer();
}

void PublishQueue::OnPlanFailed(const PendingEpoch& planned) {
  if (auto pending = queue_.Take(planned.spec.version))
    GiveUp(std::move(*pending), planned.failure);
}

void PublishQueue::OnLost(const Group& trainer, uint32_t rank, const Status& why) {
  GiveUpWaiting(
      MemberLost("a rank of the trainer was lost: " + why.message(), trainer.RankName(rank)));
  if (trainer.taken() == 0) queue_.SetFloor(shared_.decisions.Floor());
  ArmTimer();
}

bool PublishQueue::TrainerHolds(const PendingVersion& pending) const {
  return std::all_of(pending.ranks.begin(), pending.ranks.end(),
                     [this](const auto& holder) { return s_.membership.HasPlace(holder.second); });
}

// ---- ends ----

void PublishQueue::GiveUp(PendingVersion pending, const Status& why) {
  for (const auto& [rank, member] : pending.ranks) {
    s_.membership.Release({pending.last_epoch, pending.version, member, why});
  }
  s_.metrics.Add("publishes_given_up_total", 1,
                 {{"reason", std::string(ReasonName(why.reason()))}});
  RememberGivenUp(pending, why);
  AllowAgain(pending);
}

/// The number of a version that ended uncommitted is the next trainer's to take, when the one that
/// published it is gone.
void PublishQueue::AllowAgain(const PendingVersion& pending) {
  const Group* trainer = s_.membership.Trainer();
  if (trainer != nullptr && trainer->generation != pending.generation) {
    queue_.SetFloor(shared_.decisions.Floor());
  }
}

void PublishQueue::GiveUpAll(std::vector<PendingVersion> versions, const Status& why) {
  for (PendingVersion& pending : versions) GiveUp(std::move(pending), why);
}

void PublishQueue::GiveUpTo(const VersionId& id, const Status& why) {
  GiveUpAll(queue_.TakeUpTo(id), why);
}

void PublishQueue::GiveUpWaiting(const Status& why) { GiveUpAll(queue_.TakeWaiting(), why); }

void PublishQueue::Abandon(const Status& why) {
  if (planner_.publish() == nullptr) return;
  const Version version = planner_.publish()->spec.version;
  planner_.DropPublish();
  if (auto pending = queue_.Take(version)) GiveUp(std::move(*pending), why);
}

/// A version of which some rank was released before its coordinator was lost is never complete
/// again: the others must not wait for it.
void PublishQueue::GiveUpWhatWasLetGo() {
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

void PublishQueue::ArmTimer() {
  s_.strand.Cancel(timer_);
  timer_ = 0;
  const auto next = queue_.NextDeadline();
  if (!next) return;
  timer_ = s_.strand.PostAfter(std::max(Nanos(0), *next - s_.clock.Now()),
                               cancel_.Bind([this] { OnTimer(); }));
}

void PublishQueue::OnTimer() {
  timer_ = 0;
  const Nanos now = s_.clock.Now();
  for (PendingVersion& pending : queue_.TakeExpired(now)) {
    const Status why = ExpiryOf(pending);
    GiveUp(std::move(pending), why);
  }
  if (PendingVersion* running = queue_.RunningExpired(now)) {
    running->expired = true;
    const Status why = ExpiryOf(*running);
    if (const EpochRun* run = runner_.fleet()) {
      runner_.Dispatch(run->state.spec.epoch,
                       epoch::AbortAskedEvent{why, epoch::AbortCause::kGaveWay});
    } else {
      Abandon(why);
    }
  }
  ArmTimer();
  shared_.try_start();
  shared_.changed();
}

Status PublishQueue::ExpiryOf(const PendingVersion& pending) const {
  const std::string version = "version " + std::to_string(pending.version.value);
  const Group* trainer = s_.membership.Trainer();
  for (uint32_t rank = 0; trainer != nullptr && rank < trainer->world_size(); ++rank) {
    if (pending.ranks.contains(rank)) continue;
    return Status(Code::kDeadlineExceeded, Reason::kMissingRank,
                  version + " was not published by every rank before its deadline")
        .AtRank(trainer->RankName(rank));
  }
  if (!pending.running && shared_.PartakingEngines().size() < EnginesWanted()) {
    return Status(Code::kDeadlineExceeded, Reason::kNotReady,
                  version + " found too few engines before its deadline: " +
                      WaitingEnginesLine(shared_, EnginesWanted()));
  }
  if (!pending.running && pending.awaited.IsAwaited(s_.clock.Now())) {
    return Status(Code::kDeadlineExceeded, Reason::kNotReady,
                  version + " found no engine of " + pending.awaited.name +
                      " before its deadline: " + WaitingEnginesLine(shared_, EnginesWanted()));
  }
  return Status(
      Code::kDeadlineExceeded, Reason::kDeadlineExceeded,
      "the deadline of " + version + " passed" +
          (pending.last_error.ok() ? ""
                                   : " after " + std::to_string(pending.attempts) +
                                         " attempts; last: " + pending.last_error.ToString()));
}

void PublishQueue::RememberGivenUp(const PendingVersion& pending, const Status& why) {
  const Group* trainer = s_.membership.Trainer();
  if (pending.attempts > 0 || pending.published.empty() || shared_.decisions.stopping) return;
  const auto number = shared_.numbers.Take();
  if (!number) return;  // the log and the metric have it
  Nanos first = pending.published.begin()->second;
  for (const auto& [rank, at] : pending.published) first = std::min(first, at);
  const Nanos now = s_.clock.Now();
  EpochStatus status;
  status.epoch = *number;
  status.version = pending.version;
  status.phase = epoch::Phase::kAborted;
  status.attempt = 0;
  status.why = Status(Status(why).AtEpoch(*number));
  status.total_seconds = std::chrono::duration<double>(now - first).count();
  status.started_wall = s_.clock.WallSeconds() - status.total_seconds;
  status.trace_id = pending.trace_id;
  Trace trace(first);
  for (const auto& [rank, at] : pending.published) {
    const bool known = trainer != nullptr && rank < trainer->world_size();
    trace.Happened(at, known ? trainer->RankName(rank) : "trainer/" + std::to_string(rank),
                   "published", {});
  }
  trace.Happened(now, "coordinator", "gives up", why);
  shared_.history.Keep(*number, {std::move(trace), {}, {}});
  shared_.history.Remember(status);
  s_.options.notes({*number, pending.version, pending.trace_id, "", true,
                    "given up before any epoch began: " + why.ToString()});
}

}  // namespace weightwire::coordinator
