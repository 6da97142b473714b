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

/// Attempts of one version that end for a loss before fewer engines are asked.
constexpr uint32_t kLossesMax = 2;
constexpr Nanos kPauseFirst = std::chrono::milliseconds(100);
constexpr Nanos kPauseMost = std::chrono::seconds(5);

/// Somebody left, was left out or could not be reached: another attempt may well go through. One
/// that took the whole of a phase's deadline is a failure.
bool IsPassing(const EpochRun& run) {
  const epoch::State& aborted = run.state;
  if (!aborted.laggards.empty() || !aborted.lost.empty()) return true;
  if (run.timed_out) return false;
  switch (aborted.why.reason()) {
    case Reason::kMemberLost:
    case Reason::kLeaseExpired:
    case Reason::kTransportFailed:
    case Reason::kTicketRejected:
    case Reason::kDeadlineExceeded:
    case Reason::kAbortRequested:
    case Reason::kNotReady:
      return true;
    default:
      return false;
  }
}

/// The engine that an engine reads from, of those that do not read from the sources.
std::map<std::string, std::string> EnginesReadFrom(
    const std::vector<epoch::PrepareCommand>& prepares, const epoch::Spec& spec) {
  std::map<ParticipantId, std::string> names;
  for (const epoch::EngineMembers& engine : spec.engines) {
    for (const epoch::Member& member : engine.ranks) names[member.id] = engine.name;
  }
  std::map<std::string, std::string> parents;
  for (const epoch::PrepareCommand& command : prepares) {
    if (!command.relayed || command.source_participants.empty()) continue;
    parents[names.at(command.member.id)] = names.at(command.source_participants.begin()->second);
  }
  return parents;
}

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
      read_(committed_.epoch),
      first_(first),
      changed_(std::move(changed)),
      history_number_(history),
      numbers_(
          first, history, s_.journal, [this] { TryStart(); },
          [this](const Status& why) { StopDeciding(why); }),
      queue_(s_.options.waiting_versions_max) {
  for (const uint8_t byte : s_.options.random_ticket()) random_.seed(random_() ^ byte);
  queue_.SetFloor(committed_.version);
  s_.metrics.Set("epoch_committed", static_cast<double>(committed_.epoch.value));
  s_.metrics.Set("journal_failing", 0);
  s_.journal.OnHindered(lifeline_.Bind([this](const Status& why) { OnHindered(why); }));
}

Driver::~Driver() {
  s_.strand.Cancel(version_timer_);
  for (const EpochRun* run : Runs()) s_.strand.Cancel(run->timer);
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

Status Driver::Publish(const control::PublishRequest& request) {
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
  published_ = true;
  ArmVersionTimer();
  TryStart();
  changed_();
  return OkStatus();
}

void Driver::GiveUp(PendingVersion pending, const Status& why) {
  for (const auto& [rank, member] : pending.ranks) {
    TellReleased({pending.last_epoch, pending.version, member, why});
  }
  s_.metrics.Add("publishes_given_up_total", 1,
                 {{"reason", std::string(ReasonName(why.reason()))}});
  RememberGivenUp(pending, why);
  AllowAgain(pending);
}

/// The number of a version that ended uncommitted is the next trainer's to take, when the one that
/// published it is gone.
void Driver::AllowAgain(const PendingVersion& pending) {
  const Group* trainer = s_.membership.Trainer();
  if (trainer != nullptr && trainer->generation != pending.generation) {
    queue_.SetFloor(committed_.version);
  }
}

/// Who cannot be reached now is told when it publishes the version again.
void Driver::TellReleased(const epoch::ReleaseCommand& release) {
  if (auto place = s_.membership.Find(release.member)) place->live->last_release = release;
  s_.membership.Send(release.member, release);
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
    const Status why = ExpiryOf(*running);
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
  if (!pending.running && PartakingEngines().size() < EnginesWanted()) {
    return Status(Code::kDeadlineExceeded, Reason::kNotReady,
                  version + " found too few engines before its deadline: " + WaitingEnginesLine());
  }
  return Status(
      Code::kDeadlineExceeded, Reason::kDeadlineExceeded,
      "the deadline of " + version + " passed" +
          (pending.last_error.ok() ? ""
                                   : " after " + std::to_string(pending.attempts) +
                                         " attempts; last: " + pending.last_error.ToString()));
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
  std::erase_if(engines, [this](const Group* e) { return e->drained || stragglers_.Has(*e); });
  return engines;
}

void Driver::TryStart() {
  if (!deciding_ || stopping_ || publish_ != nullptr || publish_draft_ != nullptr) return;
  if (AwaitsSwaps() || (!StartRollback() && !StartPublish())) StartFills();
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
  if (!trainer->Complete()) return false;
  if (engines.size() < EnginesWanted()) return false;
  if (s_.clock.Now() < head->not_before) return false;
  if (!FillsGaveWay()) return true;
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
  spec.engines_min = static_cast<uint32_t>(EnginesWanted());
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

/// Takes the engines out that an earlier attempt found late, as long as
/// enough are left. Where the policy lets a version do with some of them and engines leave faster
/// than an attempt takes, each further loss halves who is asked: the others are filled from them.
std::vector<std::string> Driver::LeaveOut(PendingVersion& head,
                                          std::vector<const Group*>& engines) const {
  std::vector<std::string> names;
  const auto late = [&](const Group* engine) { return head.without.contains(engine->name); };
  const auto left = static_cast<size_t>(std::ranges::count_if(engines, std::not_fn(late)));
  if (left < EnginesWanted()) {
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
  const size_t asked =
      std::max(EnginesWanted(), engines.size() >> std::min(head.losses - kLossesMax + 1, 31U));
  if (engines.size() <= asked) return names;
  // Who serves has been here for longer.
  std::ranges::stable_partition(engines, [](const Group* e) { return e->serving != Epoch{}; });
  for (size_t i = asked; i < engines.size(); ++i) names.push_back(engines[i]->name);
  engines.resize(asked);
  return names;
}

size_t Driver::EnginesWanted() const {
  return std::max(
      {1u, s_.options.min_engines, s_.options.commit_policy.Enough(s_.options.min_engines)});
}

/// False while a fill still runs: it is told to stop, unless it is decided.
bool Driver::FillsGaveWay() {
  fill_drafts_.clear();
  if (fills_.empty()) return true;
  const Status why(Code::kAborted, Reason::kAbortRequested, "the fill gives way to a new epoch");
  bool any = false;
  for (const auto& fill : fills_) {
    const epoch::State& state = fill->state;
    if (!fill->CanAbort() || std::exchange(fill->dropped, true)) continue;
    events_.emplace_back(state.spec.epoch, epoch::AbortAskedEvent{why});
    any = true;
  }
  if (any) Pump();
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
  const bool filling = std::ranges::find(fill_drafts_, draft) != fill_drafts_.end();
  if (draft != publish_draft_ && !filling) return;
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
  if (publish) publish_draft_.reset();
  std::erase(fill_drafts_, draft);
  LeaveOutTheLost(*draft);
  if (!StillComplete(draft->spec)) {
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

bool Driver::IsStill(const std::string& name, const std::vector<epoch::Member>& ranks) const {
  const Group* group = s_.membership.FindGroup(name);
  return group != nullptr && group->Complete() && group->Members() == ranks &&
         !stragglers_.Has(*group);
}

/// Of a draft whose plans were made meanwhile, as long as enough are left.
void Driver::LeaveOutTheLost(Draft& draft) const {
  auto& engines = draft.spec.engines;
  const auto lost = [&](const epoch::EngineMembers& e) { return !IsStill(e.name, e.ranks); };
  const auto gone = static_cast<size_t>(std::ranges::count_if(engines, lost));
  if (engines.size() < gone + std::max(1U, draft.spec.engines_min)) return;
  for (const epoch::EngineMembers& engine : engines) {
    // Another plan that cannot be made may hide behind its one.
    if (lost(engine) && engine.name == draft.failed_engine) return;
  }
  for (const epoch::EngineMembers& engine : engines) {
    if (!lost(engine)) continue;
    draft.plans.erase(engine.name);
    draft.left_out.push_back(engine.name);
  }
  std::erase_if(engines, lost);
}

bool Driver::StillComplete(const epoch::Spec& spec) const {
  return IsStill(spec.source_group, spec.sources) &&
         std::ranges::all_of(spec.engines, [this](const epoch::EngineMembers& engine) {
           return IsStill(engine.name, engine.ranks);
         });
}

bool Driver::TrainerHolds(const PendingVersion& pending) const {
  return std::all_of(pending.ranks.begin(), pending.ranks.end(),
                     [this](const auto& holder) { return s_.membership.HasPlace(holder.second); });
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
    fill_troubles_[engine->name] = {engine->Members(), 1, {}, true};
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
  run->state.spec.parents = EnginesReadFrom(run->prepares, draft.spec);
  run->state.spec.drops_readers = draft.spec.sources.empty();
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
  if (!IsPassing(run)) ++pending->failures;
  if (MayRetry(run, *pending)) {
    pending->running = false;
    PauseAfter(run, *pending);
    // A relay that cannot pass the version on should not stop its reader again.
    const std::string& rank = run.state.why.rank();
    pending->direct.insert(rank.substr(0, rank.rfind('/')));
    ArmVersionTimer();
    return;
  }
  auto taken = queue_.Take(pending->version);
  if (run.released) return AllowAgain(*taken);
  GiveUp(std::move(*taken), run.state.why);
}

bool Driver::MayRetry(const EpochRun& run, const PendingVersion& pending) const {
  return deciding_ && !stopping_ && !run.released && !run.abort_asked && !pending.expired &&
         pending.failures < s_.options.attempts_max && pending.deadline > s_.clock.Now() &&
         TrainerHolds(pending);
}

/// Who is lost or left out is not in the way of the next attempt, which follows at once.
void Driver::PauseAfter(const EpochRun& run, PendingVersion& pending) {
  if (!run.state.lost.empty()) {
    ++pending.losses;
    return;
  }
  if (!run.state.laggards.empty() && pending.pauses == 0) return;
  pending.not_before = s_.clock.Now() + Pause(pending.pauses++, kPauseFirst, kPauseMost);
}

Nanos Driver::Pause(uint32_t pauses, Nanos first, Nanos most) {
  const Nanos limit = std::min(most, first * (int64_t{1} << std::min(pauses, 20U)));
  const Nanos pause(static_cast<int64_t>(random_() % (static_cast<uint64_t>(limit.count()) + 1)));
  s_.strand.PostAfter(pause, lifeline_.Bind([this] { TryStart(); }));
  return pause;
}

void Driver::Remember(const EpochStatus& status) {
  history_.push_front(status);
  if (history_.size() > s_.options.epochs_remembered) history_.pop_back();
}

void Driver::AbandonDrafts(const Status& why) {
  fill_drafts_.clear();
  if (publish_draft_ == nullptr) return;
  const Version version = publish_draft_->spec.version;
  publish_draft_.reset();
  if (auto pending = queue_.Take(version)) GiveUp(std::move(*pending), why);
}

void Driver::AbortRuns(const Status& why) {
  for (const auto& fill : fills_) fill->dropped = true;
  for (const EpochRun* run : Runs()) {
    events_.emplace_back(run->state.spec.epoch, epoch::AbortAskedEvent{why});
  }
  Pump();
}

void Driver::StopDeciding(const Status& why) {
  if (!deciding_) return;
  deciding_ = false;
  stopped_why_ = why;
  s_.metrics.Set("journal_failing", 1);
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

/// Nothing is lost and nothing is given up: what waits for the journal waits on.
void Driver::OnHindered(const Status& why) {
  hindered_ = why;
  s_.metrics.Set("journal_failing", why.ok() && deciding_ ? 0 : 1);
  s_.options.notes({Epoch{},
                    Version{},
                    {},
                    "",
                    !why.ok(),
                    why.ok() ? "the journal takes records again"
                             : "the journal takes no record for now: " + why.ToString()});
  FinishShutdownWhenIdle();
  changed_();
}

void Driver::OnLost(const Group& group, uint32_t rank, const epoch::Member& member,
                    const Status& why) {
  stragglers_.Erase(group.name);
  LeaveRuns(group, rank, member, why);
  if (group.role != control::GroupRole::kTrainer) return;
  GiveUpAll(queue_.TakeWaiting(),
            MemberLost("a rank of the trainer was lost: " + why.message(), group.RankName(rank)));
  if (group.taken() == 0) queue_.SetFloor(committed_.version);
  ArmVersionTimer();
}

void Driver::OnCutOff(Group& group, uint32_t rank, const epoch::Member& member, const Status& why) {
  LeaveRuns(group, rank, member, why);
  // A version that is decided and that it has staged, it serves when it is back.
  for (const EpochRun* run : Runs()) {
    if (run->state.phase != epoch::Phase::kCommitting) continue;
    const epoch::Spec& spec = run->state.spec;
    const auto engine = std::ranges::find(spec.engines, group.name, &epoch::EngineMembers::name);
    if (engine == spec.engines.end() || run->state.applied.contains(group.name)) continue;
    if (std::ranges::find(engine->ranks, member) == engine->ranks.end()) continue;
    stragglers_.Put(group.name, {engine->ranks,
                                 spec.epoch,
                                 {spec.content, spec.version},
                                 run->keeps,
                                 run->phase_since + s_.options.commit_deadline});
  }
}

void Driver::LeaveRuns(const Group& group, uint32_t rank, const epoch::Member& member,
                       const Status& why) {
  const Status named = Status(Status(why).AtRank(group.RankName(rank)));
  fill_troubles_.erase(group.name);
  for (EpochRun* run : Runs()) {
    NoteLoss(*run, member, named);
    events_.emplace_back(run->state.spec.epoch, epoch::LostEvent{member, named});
  }
  s_.strand.Post(lifeline_.Bind([this] { Pump(); }));
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
  if (!stopping_ || !stopped_ || !fills_.empty()) return;
  const bool undecidable = publish_ != nullptr && !(deciding_ && hindered_.ok()) &&
                           !publish_->CanAbort() &&
                           publish_->state.phase == epoch::Phase::kCommitting;
  if (publish_ != nullptr && !undecidable) return;
  std::exchange(stopped_, {})();
}

}  // namespace weightwire::coordinator
