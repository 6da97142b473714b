#include "server/coordinator/driver.h"

#include <algorithm>
#include <functional>
#include <utility>

#include "server/base/failpoint.h"
#include "server/coordinator/prepare.h"

// TryStart is the one place where something begins; everything that may have made a beginning
// possible (a publish, a complete group, the end of an epoch, reserved numbers) calls it, and it
// asks the whole question anew. A draft is not binding: if a member is gone when its plans are
// there, it is thrown away without counting as an attempt.
namespace weightwire::coordinator {
namespace {

Status MemberLost(const std::string& message, const std::string& rank) {
  return Status(Code::kAborted, Reason::kMemberLost, message)
      .AtRank(rank)
      .Remedy("publish a higher version when the trainer is complete again");
}

}  // namespace

Driver::Driver(Services services, CommitRecord committed, Epoch first, History history,
               std::function<void()> changed)
    : s_(services),
      committed_(std::move(committed)),
      changed_(std::move(changed)),
      history_number_(history),
      numbers_(
          first, history, s_.journal, [this] { TryStart(); },
          [this](const Status& why) { StopDeciding(why); }),
      queue_(s_.options.waiting_versions_max) {
  queue_.SetFloor(committed_.version);
  s_.metrics.Set("epoch_committed", static_cast<double>(committed_.epoch.value));
}

Driver::~Driver() {
  s_.strand.Cancel(version_timer_);
  for (const EpochRun* run : {publish_.get(), fill_.get()}) {
    if (run != nullptr) s_.strand.Cancel(run->timer);
  }
}

// ---- versions ----

Status Driver::CheckDecides() const {
  if (stopping_) {
    return Status(Code::kUnavailable, Reason::kShuttingDown, "the coordinator is shutting down");
  }
  if (deciding_) return OkStatus();
  return Status(Code::kUnavailable, Reason::kJournalFailed,
                "the coordinator stopped deciding: " + stopped_why_.message())
      .Remedy("repair the journal's storage and restart the coordinator");
}

Status Driver::CheckPublish(const Membership::Place& place) const {
  const Group& group = *place.group;
  if (group.role != control::GroupRole::kTrainer) {
    return Status(Code::kInvalidArgument, Reason::kInvalidRequest, "only a trainer publishes");
  }
  WW_RETURN_IF_ERROR(CheckDecides());
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

Status Driver::Publish(const control::PublishRequest& request) {
  auto place = s_.membership.Find(request.member);
  if (!place) return place.error();
  auto accepted = [&]() -> Status {
    WW_RETURN_IF_ERROR(CheckPublish(*place));
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
  published_ = true;
  ArmVersionTimer();
  TryStart();
  changed_();
  return OkStatus();
}

void Driver::GiveUp(PendingVersion pending, const Status& why) {
  for (const auto& [rank, member] : pending.ranks) {
    s_.membership.Send(member,
                       epoch::ReleaseCommand{pending.last_epoch, pending.version, member, why});
  }
  s_.metrics.Add("publishes_given_up_total", 1,
                 {{"reason", std::string(ReasonName(why.reason()))}});
  RememberGivenUp(pending, why);
  const Group* trainer = s_.membership.Trainer();
  if (trainer != nullptr && trainer->generation != pending.generation) {
    queue_.SetFloor(committed_.version);
  }
}

void Driver::GiveUpAll(std::vector<PendingVersion> versions, const Status& why) {
  for (PendingVersion& pending : versions) GiveUp(std::move(pending), why);
}

void Driver::ArmVersionTimer() {
  s_.strand.Cancel(version_timer_);
  version_timer_ = 0;
  const auto next = queue_.NextDeadline();
  if (!next) return;
  version_timer_ = s_.strand.PostAfter(std::max(Nanos(0), *next - s_.clock.Now()),
                                       lifeline_.Bind([this] { OnVersionTimer(); }));
}

void Driver::OnVersionTimer() {
  version_timer_ = 0;
  const Nanos now = s_.clock.Now();
  for (PendingVersion& pending : queue_.TakeExpired(now)) {
    const Status why = ExpiryOf(pending);
    GiveUp(std::move(pending), why);
  }
  if (PendingVersion* running = queue_.RunningExpired(now)) {
    running->expired = true;
    const Status why(
        Code::kDeadlineExceeded, Reason::kDeadlineExceeded,
        "the deadline of version " + std::to_string(running->version.value) + " passed");
    if (publish_ != nullptr) {
      Feed(publish_->state.spec.epoch, epoch::AbortAskedEvent{why});
    } else {
      AbandonDrafts(why);
    }
  }
  ArmVersionTimer();
  TryStart();
  changed_();
}

Status Driver::ExpiryOf(const PendingVersion& pending) const {
  const std::string version = "version " + std::to_string(pending.version.value);
  const Group* trainer = s_.membership.Trainer();
  for (uint32_t rank = 0; trainer != nullptr && rank < trainer->world_size(); ++rank) {
    if (pending.ranks.contains(rank)) continue;
    return Status(Code::kDeadlineExceeded, Reason::kMissingRank,
                  version + " was not published by every rank before its deadline")
        .AtRank(trainer->RankName(rank));
  }
  if (PartakingEngines().size() < EnginesWanted()) {
    return Status(Code::kDeadlineExceeded, Reason::kNotReady,
                  version + " found too few engines before its deadline: " + WaitingEnginesLine());
  }
  return Status(Code::kDeadlineExceeded, Reason::kDeadlineExceeded,
                "the deadline of " + version + " passed" +
                    (pending.last_error.ok() ? "" : "; last: " + pending.last_error.message()));
}

// ---- starting ----

std::vector<const Group*> Driver::CompleteEngines() const {
  std::vector<const Group*> engines;
  for (const auto& [name, group] : s_.membership.groups()) {
    if (group.role == control::GroupRole::kEngine && group.Complete()) engines.push_back(&group);
  }
  return engines;
}

std::vector<const Group*> Driver::PartakingEngines() const {
  std::vector<const Group*> engines = CompleteEngines();
  std::erase_if(engines, [](const Group* engine) { return engine->drained; });
  return engines;
}

void Driver::TryStart() {
  if (!deciding_ || stopping_ || publish_ != nullptr || publish_draft_ != nullptr) return;
  if (!StartUnfinished() && !StartRollback() && !StartPublish()) StartFill();
}

/// True when an epoch is about to run: no fill may begin.
bool Driver::StartPublish() {
  const Group* trainer = s_.membership.Trainer();
  if (trainer == nullptr) return false;
  GiveUpWhatWasLetGo();
  PendingVersion* head = queue_.Head(trainer->world_size());
  if (head == nullptr) return false;
  GiveUpAll(queue_.TakeBelow(head->version),
            Status(Code::kAborted, Reason::kStaleVersion,
                   "version " + std::to_string(head->version.value) + " superseded this one"));
  std::vector<const Group*> engines = PartakingEngines();
  if (!trainer->Complete() || engines.size() < EnginesWanted()) return false;
  if (!FillGaveWay()) return true;
  const auto number = numbers_.Take();
  if (!number) return true;
  head->running = true;
  head->last_epoch = *number;
  ++head->attempts;
  epoch::Spec spec;
  spec.epoch = spec.content = *number;
  spec.kind = epoch::Kind::kPublish;
  spec.version = head->version;
  spec.manual_commit = head->manual_commit;
  spec.quorum = s_.options.commit_policy.Enough(s_.options.min_engines);
  std::vector<std::string> left_out = LeaveOut(*head, engines);
  spec.sources = trainer->Members();
  spec.source_group = trainer->name;
  publish_draft_ = NewDraft(std::move(spec));
  publish_draft_->attempt = head->attempts;
  // Of all its attempts, also where nobody gave one.
  if (head->trace_id == std::array<uint8_t, 16>{}) head->trace_id = publish_draft_->trace_id;
  publish_draft_->trace_id = head->trace_id;
  ToldToPublish(*publish_draft_, *head, *trainer);
  publish_draft_->direct = head->direct;
  publish_draft_->left_out = std::move(left_out);
  ArmVersionTimer();
  Plan(publish_draft_, *trainer, engines);
  return true;
}

/// Takes the engines out that an earlier attempt found late, as long as enough are left.
std::vector<std::string> Driver::LeaveOut(PendingVersion& head,
                                          std::vector<const Group*>& engines) const {
  const auto late = [&](const Group* engine) { return head.without.contains(engine->name); };
  const auto left = static_cast<size_t>(std::ranges::count_if(engines, std::not_fn(late)));
  if (left < EnginesWanted()) head.without.clear();
  std::vector<std::string> names;
  for (const Group* engine : engines) {
    if (late(engine)) names.push_back(engine->name);
  }
  std::erase_if(engines, late);
  return names;
}

size_t Driver::EnginesWanted() const {
  return std::max(
      {1u, s_.options.min_engines, s_.options.commit_policy.Enough(s_.options.min_engines)});
}

/// False while a fill still runs: it is told to stop, unless it is decided.
bool Driver::FillGaveWay() {
  fill_draft_.reset();
  if (fill_ == nullptr) return true;
  if (fill_->CanAbort()) {
    fill_->dropped = true;
    Feed(fill_->state.spec.epoch,
         epoch::AbortAskedEvent{
             Status(Code::kAborted, Reason::kAbortRequested, "the fill gives way to a new epoch")});
  }
  return false;
}

std::shared_ptr<Draft> Driver::NewDraft(epoch::Spec spec) {
  auto draft = std::make_shared<Draft>();
  draft->spec = std::move(spec);
  draft->started = s_.clock.Now();
  draft->started_wall = s_.clock.WallSeconds();
  draft->trace_id = OwnTraceId(draft->spec.epoch);
  draft->story = Story(draft->started);
  return draft;
}

void Driver::Plan(const std::shared_ptr<Draft>& draft, const Group& source,
                  const std::vector<const Group*>& engines) {
  draft->awaited = engines.size();
  for (const Group* engine : engines) {
    draft->spec.engines.push_back({engine->name, engine->Members()});
    s_.plans.Get(
        source.agreed, engine->agreed,
        lifeline_.Bind([this, draft, name = engine->name](const Result<PlannedPairPtr>& pair) {
          Planned(draft, name, pair);
        }));
  }
  changed_();
}

void Driver::Planned(const std::shared_ptr<Draft>& draft, const std::string& engine,
                     const Result<PlannedPairPtr>& pair) {
  if (draft != publish_draft_ && draft != fill_draft_) return;
  WW_FAILPOINT("coordinator.after_plan_made");
  const Status status = pair ? CheckQuantizes(draft->spec, engine, **pair) : pair.error();
  if (status.ok()) {
    draft->plans[engine] = *pair;
  } else if (draft->failure.ok()) {
    draft->failed_engine = engine;
    const std::string rank = status.rank().empty() ? engine : engine + ", " + status.rank();
    draft->failure = Status(status).AtRank(rank).AtEpoch(draft->spec.epoch);
  }
  if (--draft->awaited == 0) Launch(draft);
}

void Driver::Launch(const std::shared_ptr<Draft>& draft) {
  const bool publish = draft == publish_draft_;
  draft->story.Step("plan", "", draft->started, s_.clock.Now());
  (publish ? publish_draft_ : fill_draft_).reset();
  if (!StillLive(draft->spec)) {
    if (PendingVersion* pending = publish ? queue_.Find(draft->spec.version) : nullptr) {
      pending->running = false;
      --pending->attempts;
      if (!TrainerHolds(*pending)) {
        GiveUp(*queue_.Take(draft->spec.version),
               MemberLost("a rank of the trainer was lost", draft->spec.source_group));
      }
    }
    ArmVersionTimer();
    return TryStart();
  }
  if (!draft->failure.ok()) return PlanFailed(*draft);
  if (publish) newest_plans_ = draft->plans;
  Begin(RunFrom(*draft));
}

bool Driver::StillLive(const epoch::Spec& spec) const {
  auto live = [this](const epoch::Member& member) { return s_.membership.IsLive(member); };
  if (!std::all_of(spec.sources.begin(), spec.sources.end(), live)) return false;
  return std::all_of(spec.engines.begin(), spec.engines.end(), [&](const auto& engine) {
    return std::all_of(engine.ranks.begin(), engine.ranks.end(), live);
  });
}

bool Driver::TrainerHolds(const PendingVersion& pending) const {
  return std::all_of(pending.ranks.begin(), pending.ranks.end(),
                     [this](const auto& holder) { return s_.membership.IsLive(holder.second); });
}

/// Layouts that do not fit together fit no better at the next attempt.
void Driver::PlanFailed(const Draft& draft) {
  EpochStatus status = StatusOf(draft, s_.clock.Now());
  status.phase = epoch::Phase::kAborted;
  status.waiting_for.clear();
  Remember(status);
  Story story = draft.story;
  story.Happened(s_.clock.Now(), draft.failed_engine, "no plan", draft.failure);
  stories_.Keep(draft.spec.epoch, {std::move(story), {}, {}});
  if (Group* engine = s_.membership.FindGroup(draft.failed_engine)) {
    engine->last_error = draft.failure.ToString();
    engine->fills_failed = s_.options.attempts_max;
  }
  const bool publish = draft.spec.kind == epoch::Kind::kPublish;
  s_.metrics.Add("epochs_total", 1, {{"outcome", publish ? "aborted" : "fill_aborted"}});
  s_.metrics.Add("epoch_aborts_total", 1,
                 {{"reason", std::string(ReasonName(draft.failure.reason()))}});
  if (auto pending = publish ? queue_.Take(draft.spec.version) : std::nullopt) {
    GiveUp(std::move(*pending), draft.failure);
  }
  TryStart();
  changed_();
}

std::unique_ptr<EpochRun> Driver::RunFrom(const Draft& draft) const {
  auto run = std::make_unique<EpochRun>();
  const epoch::Spec& spec = draft.spec;
  const bool spares = spec.quorum > 0 && spec.quorum < spec.engines.size();
  PrepareInput input{spec,
                     draft.plans,
                     {},
                     draft.trace_id,
                     s_.options.fanout,
                     spares ? s_.options.commit_policy.Patience() : Nanos(0),
                     s_.options.slot_bytes,
                     draft.direct};
  auto add = [&](const epoch::Member& member, const std::string& name) {
    const Session& session = *s_.membership.SessionOf(member);
    input.addresses[member] = {
        session.id, session.hello.incarnation, session.hello.host, session.hello.addresses, {}};
    run->names[member] = name;
  };
  for (size_t rank = 0; rank < draft.spec.sources.size(); ++rank) {
    add(draft.spec.sources[rank], draft.spec.source_group + "/" + std::to_string(rank));
  }
  for (const epoch::EngineMembers& engine : draft.spec.engines) {
    for (size_t rank = 0; rank < engine.ranks.size(); ++rank) {
      add(engine.ranks[rank], engine.name + "/" + std::to_string(rank));
    }
  }
  run->prepares = MakePrepares(input, s_.options.random_ticket);
  run->plans = draft.plans;
  run->trace_id = draft.trace_id;
  run->story = draft.story;
  run->left_out = draft.left_out;
  run->attempt = draft.attempt;
  run->started = draft.started;
  run->phase_since = draft.started;
  run->started_wall = draft.started_wall;
  run->state.spec = draft.spec;
  return run;
}

// ---- ending ----

void Driver::EndPublish(const EpochRun& run) {
  PendingVersion* pending = queue_.Find(run.state.spec.version);
  if (pending == nullptr) return;
  if (run.state.phase == epoch::Phase::kCommitted) {
    served_ = run.state.spec.epoch;
    queue_.Take(pending->version);
    if (run.refused) GoBackFrom(run);
    return;
  }
  pending->last_error = run.state.why;
  for (const std::string& engine : run.state.laggards) {
    pending->without.insert(engine);
    s_.metrics.Add("engines_left_behind_total", 1);
    if (Group* group = s_.membership.FindGroup(engine)) {
      group->last_error = run.state.why.ToString();
    }
  }
  if (MayRetry(run, *pending)) {
    pending->running = false;
    // A relay that cannot pass the version on should not stop its reader again.
    const std::string& rank = run.state.why.rank();
    pending->direct.insert(rank.substr(0, rank.rfind('/')));
    ArmVersionTimer();
    return;
  }
  const bool held = !run.released;
  auto taken = queue_.Take(pending->version);
  if (held) GiveUp(std::move(*taken), run.state.why);
}

bool Driver::MayRetry(const EpochRun& run, const PendingVersion& pending) const {
  return deciding_ && !stopping_ && !run.released && !run.abort_asked && !pending.expired &&
         pending.attempts < s_.options.attempts_max + pending.without.size() &&
         pending.deadline > s_.clock.Now() && TrainerHolds(pending);
}

void Driver::EndFill(const EpochRun& run) {
  if (run.state.phase == epoch::Phase::kCommitted || run.dropped) return;
  for (const epoch::EngineMembers& engine : run.state.spec.engines) {
    Group* group = s_.membership.FindGroup(engine.name);
    if (group == nullptr || group->Members() != engine.ranks) continue;
    ++group->fills_failed;
    group->last_error = run.state.why.ToString();
  }
}

void Driver::Remember(const EpochStatus& status) {
  history_.push_front(status);
  if (history_.size() > s_.options.epochs_remembered) history_.pop_back();
}

void Driver::AbandonDrafts(const Status& why) {
  fill_draft_.reset();
  if (publish_draft_ == nullptr) return;
  const Version version = publish_draft_->spec.version;
  publish_draft_.reset();
  if (auto pending = queue_.Take(version)) GiveUp(std::move(*pending), why);
}

void Driver::AbortRuns(const Status& why) {
  if (fill_ != nullptr) fill_->dropped = true;
  for (const EpochRun* run : {fill_.get(), publish_.get()}) {
    if (run != nullptr) events_.emplace_back(run->state.spec.epoch, epoch::AbortAskedEvent{why});
  }
  Pump();
}

void Driver::StopDeciding(const Status& why) {
  if (!deciding_) return;
  deciding_ = false;
  stopped_why_ = why;
  const Status told = Status(Code::kUnavailable, Reason::kJournalFailed,
                             "the coordinator stopped deciding: " + why.message())
                          .Remedy("repair the journal's storage and restart the coordinator");
  AbandonDrafts(told);
  GiveUpAll(queue_.TakeWaiting(), told);
  AnswerRollback(Fail(told));
  AbortRuns(told);
  ArmVersionTimer();
  FinishShutdownWhenIdle();
  changed_();
}

void Driver::OnLost(const Group& group, uint32_t rank, const epoch::Member& member,
                    const Status& why) {
  const Status named = Status(Status(why).AtRank(group.RankName(rank)));
  for (EpochRun* run : {publish_.get(), fill_.get()}) {
    if (run != nullptr) {
      NoteLoss(*run, member, named);
      events_.emplace_back(run->state.spec.epoch, epoch::LostEvent{member, named});
    }
  }
  s_.strand.Post(lifeline_.Bind([this] { Pump(); }));
  if (group.role != control::GroupRole::kTrainer) return;
  GiveUpAll(queue_.TakeWaiting(),
            MemberLost("a rank of the trainer was lost: " + why.message(), group.RankName(rank)));
  if (group.present() == 0) queue_.SetFloor(committed_.version);
  ArmVersionTimer();
}

Status Driver::Commit(Epoch epoch) {
  EpochRun* run = RunOf(epoch);
  if (run == nullptr || run->state.spec.kind != epoch::Kind::kPublish) {
    return Status(Code::kNotFound, Reason::kNotRegistered, "no such epoch is in progress")
        .AtEpoch(epoch);
  }
  if (run->state.phase != epoch::Phase::kStaged) {
    return Status(Code::kFailedPrecondition, Reason::kStaleEpoch,
                  "the epoch is " + std::string(epoch::PhaseName(run->state.phase)) +
                      "; only a staged one can be committed")
        .AtEpoch(epoch);
  }
  Feed(epoch, epoch::CommitAskedEvent{});
  return OkStatus();
}

Status Driver::Abort(Epoch epoch, const std::string& why) {
  const Status asked =
      Status(Code::kAborted, Reason::kAbortRequested, "aborted by request: " + why).AtEpoch(epoch);
  if (publish_draft_ != nullptr && publish_draft_->spec.epoch == epoch) {
    AbandonDrafts(asked);
    TryStart();
    return OkStatus();
  }
  EpochRun* run = RunOf(epoch);
  if (run == nullptr) {
    return Status(Code::kNotFound, Reason::kNotRegistered, "no such epoch is in progress")
        .AtEpoch(epoch);
  }
  if (!run->CanAbort()) {
    return Status(Code::kFailedPrecondition, Reason::kStaleEpoch,
                  "too late: the epoch is " + std::string(epoch::PhaseName(run->state.phase)))
        .AtEpoch(epoch);
  }
  run->abort_asked = true;
  Feed(epoch, epoch::AbortAskedEvent{asked});
  return OkStatus();
}

void Driver::Shutdown(std::function<void()> done) {
  stopping_ = true;
  stopped_ = std::move(done);
  const Status why(Code::kUnavailable, Reason::kShuttingDown, "the coordinator is shutting down");
  AbandonDrafts(why);
  GiveUpAll(queue_.TakeWaiting(), why);
  AnswerRollback(Fail(why));
  AbortRuns(why);
  FinishShutdownWhenIdle();
}

/// An epoch whose decision has an unknown fate never ends: it is not waited for.
void Driver::FinishShutdownWhenIdle() {
  if (!stopping_ || !stopped_ || fill_ != nullptr) return;
  const bool undecidable = publish_ != nullptr && !deciding_ && !publish_->CanAbort() &&
                           publish_->state.phase == epoch::Phase::kCommitting;
  if (publish_ != nullptr && !undecidable) return;
  std::exchange(stopped_, {})();
}

}  // namespace weightwire::coordinator
