#include "server/coordinator/epoch_runner.h"

#include <algorithm>
#include <utility>

#include "server/base/failpoint.h"

// Events of runs are queued and stepped one after another, so that an action which leads to the
// next event (an eviction that loses members) never enters the machine while it is being stepped.
namespace weightwire::coordinator {
namespace {

/// Who passes the bytes on to the engine, or has them. Nobody: it was excluded together with that
/// one.
std::vector<epoch::Member> ReadFrom(const epoch::State& state, const std::string& engine) {
  const auto parent = state.spec.parents.find(engine);
  if (parent == state.spec.parents.end()) return state.spec.sources;
  const epoch::EngineMembers* relay = epoch::EngineNamed(state, parent->second);
  return relay == nullptr ? std::vector<epoch::Member>{} : relay->ranks;
}

Epoch EpochOf(const epoch::Report& report) {
  return std::visit(
      [](const auto& r) {
        if constexpr (requires { r.epoch; }) return r.epoch;
        return Epoch{};
      },
      report);
}

/// A report has had its effect; its sender does not know.
struct Taken {
  void operator()(const epoch::PreparedReport&) const {
    WW_FAILPOINT("coordinator.after_prepared_taken");
  }
  void operator()(const epoch::SourceDoneReport&) const {
    WW_FAILPOINT("coordinator.after_sourced_taken");
  }
  void operator()(const epoch::StagedReport&) const {
    WW_FAILPOINT("coordinator.after_staged_taken");
  }
  void operator()(const epoch::SwappedReport&) const {
    WW_FAILPOINT("coordinator.after_applied_taken");
  }
  void operator()(const epoch::DrainedReport&) const {
    WW_FAILPOINT("coordinator.after_drained_taken");
  }
  template <typename Other>
  void operator()(const Other&) const {}
};

struct EventOf {
  epoch::Event operator()(const epoch::PreparedReport& r) const {
    return epoch::PreparedEvent{r.member};
  }
  epoch::Event operator()(const epoch::SourceDoneReport& r) const {
    return epoch::SourceDoneEvent{r.member, r.digests};
  }
  epoch::Event operator()(const epoch::StagedReport& r) const {
    return epoch::StagedEvent{r.member, r.digests};
  }
  epoch::Event operator()(const epoch::SwappedReport& r) const {
    return epoch::SwappedEvent{r.member};
  }
  epoch::Event operator()(const epoch::DrainedReport& r) const {
    return epoch::DrainedEvent{r.member};
  }
  epoch::Event operator()(const epoch::FailedReport& r) const {
    return epoch::FailedEvent{r.member, r.why, r.refused};
  }
  epoch::Event operator()(const epoch::LostReport& r) const {
    return epoch::LostEvent{r.member, r.why};
  }
  epoch::Event operator()(const epoch::HashedReport&) const {
    WW_CHECK(false);  // the verifier's: OnReport
    return {};
  }
};

void AddFigures(EpochRun& run, const epoch::Report& report) {
  if (const auto* prepared = std::get_if<epoch::PreparedReport>(&report)) {
    run.holds[prepared->member] = prepared->holds;
  }
  if (const auto* staged = std::get_if<epoch::StagedReport>(&report)) {
    const bool first = run.state.phase == epoch::Phase::kTransferring &&
                       !run.state.staged.contains(staged->member) &&
                       run.state.roster.Has(staged->member);
    if (!first) return;
    run.keeps[staged->member] = staged->keeps;
    run.staged[staged->member] = {staged->bytes, staged->bytes_by_transport, staged->bytes_kept,
                                  staged->delta};
  }
  if (const auto* applied = std::get_if<epoch::SwappedReport>(&report)) {
    run.flip_seconds_max = std::max(run.flip_seconds_max, applied->flip_seconds);
  }
}

}  // namespace

EpochRunner::~EpochRunner() {
  for (const EpochRun* run : Runs()) s_.strand.Cancel(run->timer);
}

std::vector<EpochRun*> EpochRunner::Runs() const {
  std::vector<EpochRun*> runs;
  if (fleet_ != nullptr) runs.push_back(fleet_.get());
  for (const auto& fill : fills_) runs.push_back(fill.get());
  return runs;
}

EpochRun* EpochRunner::RunOf(Epoch epoch) const {
  const auto is = [epoch](const auto& run) { return run->state.spec.epoch == epoch; };
  if (fleet_ != nullptr && is(fleet_)) return fleet_.get();
  const auto fill = std::ranges::find_if(fills_, is);
  return fill == fills_.end() ? nullptr : fill->get();
}

EpochRun& EpochRunner::Add(std::unique_ptr<EpochRun> run) {
  if (!run->IsFill()) return *(fleet_ = std::move(run));
  return *fills_.emplace_back(std::move(run));
}

bool EpochRunner::OnReport(const epoch::Report& report) {
  if (std::holds_alternative<epoch::HashedReport>(report)) return false;
  if (shared_.stragglers.OnReport(report)) {
    shared_.try_start();
    shared_.changed();
    return true;
  }
  EpochRun* run = RunOf(EpochOf(report));
  if (run == nullptr) return false;
  AddFigures(*run, report);
  NoteReport(*run, report);
  Dispatch(run->state.spec.epoch, std::visit(EventOf{}, report));
  std::visit(Taken{}, report);
  return true;
}

void EpochRunner::Begin(std::unique_ptr<EpochRun> run) {
  epoch::Outcome outcome = epoch::Begin(run->state.spec);
  run->state = std::move(outcome.state);
  EpochRun& started = Add(std::move(run));
  NoteBeginning(started);
  Perform(started, outcome.actions);
  shared_.changed();
}

void EpochRunner::Dispatch(Epoch epoch, epoch::Event event) {
  events_.emplace_back(epoch, std::move(event));
  Advance();
}

void EpochRunner::FeedLater(Epoch epoch, epoch::Event event) {
  events_.emplace_back(epoch, std::move(event));
  s_.strand.Post(cancel_.Bind([this] { Advance(); }));
}

void EpochRunner::GiveWay(const std::vector<Epoch>& epochs, const Status& why) {
  for (const Epoch epoch : epochs) {
    events_.emplace_back(epoch, epoch::AbortAskedEvent{why, epoch::AbortCause::kGaveWay});
  }
  if (!epochs.empty()) Advance();
}

void EpochRunner::OnLost(const epoch::Member& member, const Status& why) {
  for (EpochRun* run : Runs()) {
    const auto name = run->names.find(member);
    if (name != run->names.end()) run->trace.Happened(s_.clock.Now(), name->second, "lost", why);
    events_.emplace_back(run->state.spec.epoch, epoch::LostEvent{member, why});
  }
  s_.strand.Post(cancel_.Bind([this] { Advance(); }));
}

void EpochRunner::Advance() {
  if (stepping_) return;
  stepping_ = true;
  while (!events_.empty()) {
    const auto [epoch, event] = std::move(events_.front());
    events_.pop_front();
    EpochRun* run = RunOf(epoch);
    if (run == nullptr) continue;
    StepRun(*run, event);
    if (run->finished) EndRun(epoch);
  }
  stepping_ = false;
  shared_.try_start();
  shared_.changed();
}

void EpochRunner::StepRun(EpochRun& run, const epoch::Event& event) {
  const epoch::Phase before = run.state.phase;
  epoch::Outcome outcome = epoch::Step(std::move(run.state), event);
  run.state = std::move(outcome.state);
  if (run.state.phase != before) {
    const Nanos since = run.phase_since;
    const double seconds = run.LeavePhase(before, s_.clock.Now());
    s_.metrics.Observe("epoch_phase_seconds", seconds,
                       {{"phase", std::string(epoch::PhaseName(before))}});
    run.trace.Step("phase", std::string(epoch::PhaseName(before)), since, run.phase_since);
    NotePhase(run, before, seconds);
  }
  Perform(run, outcome.actions);
}

void EpochRunner::Perform(EpochRun& run, const std::vector<epoch::Action>& actions) {
  for (const epoch::Action& action : actions) {
    std::visit([&](const auto& a) { Do(run, a); }, action);
  }
}

void EpochRunner::Do(EpochRun& run, const epoch::SendPrepare&) {
  WW_FAILPOINT("coordinator.before_prepares");
  run.trace.CommandSent("prepare", s_.clock.Now());
  for (const epoch::PrepareCommand& command : run.prepares) {
    s_.membership.Send(command.member, command);
  }
}

void EpochRunner::Do(EpochRun& run, const epoch::SendTransfer&) {
  WW_FAILPOINT("coordinator.before_transfers");
  run.trace.CommandSent("serve", s_.clock.Now());
  run.trace.CommandSent("stage", s_.clock.Now());
  if (run.state.spec.kind != epoch::Kind::kRollback) {
    // What is written from now on is nothing that could be served again.
    for (const auto& engine : run.state.spec.engines) {
      for (const epoch::Member& member : engine.ranks)
        s_.membership.Hold(member, run.holds[member]);
    }
  }
  for (const epoch::Member& member : epoch::AllMembers(run.state.spec)) {
    s_.membership.Send(member, epoch::TransferCommand{run.state.spec.epoch, member});
  }
}

void EpochRunner::Do(EpochRun& run, const epoch::SendRelease&) {
  WW_FAILPOINT("coordinator.before_releases");
  const epoch::Spec& spec = run.state.spec;
  for (const epoch::Member& member : spec.sources) {
    s_.membership.Release({spec.epoch, spec.version, member, {}});
  }
}

void EpochRunner::Do(EpochRun& run, const epoch::AppendCommit&) {
  const epoch::Spec& spec = run.state.spec;
  run.appended = s_.clock.Now();
  const uint64_t newest = std::max(shared_.decisions.committed.newest, spec.lineage);
  CommitRecord record{spec.epoch, spec.version, {}, spec.held, spec.lineage, newest};
  for (const auto& engine : spec.engines) record.engines.Add(engine.name);
  record.runs = shared_.decisions.RunsWith(record);
  WW_FAILPOINT("coordinator.before_commit_appended");
  s_.journal.Append(
      record, cancel_.Bind([this, record](const Status& status) { Appended(record, status); }));
  WW_FAILPOINT("coordinator.after_commit_submitted");
}

void EpochRunner::Appended(const CommitRecord& record, const Status& status) {
  WW_FAILPOINT("coordinator.after_journal_before_send");
  if (EpochRun* run = RunOf(record.epoch)) {
    run->trace.Step("journal", "", run->appended, s_.clock.Now());
  }
  if (status.ok()) {
    if (record.newest > shared_.decisions.committed.newest) {
      const std::string lineage = std::to_string(record.newest);
      s_.options.notes(
          {record.epoch, record.version, {}, "", false, "lineage " + lineage + " begins"});
    }
    shared_.decisions.Set(record);
    shared_.decisions.committed_wall = s_.clock.WallSeconds();
    if (const EpochRun* run = RunOf(record.epoch)) {
      shared_.decisions.excluded = {record.epoch, run->state.excluded};
      owner_.OnDurable(*run);
    }
  }
  Dispatch(record.epoch, epoch::JournalEvent{status});
}

void EpochRunner::Do(EpochRun& run, const epoch::SendCommit& action) {
  const epoch::Spec& spec = run.state.spec;
  if (spec.content != shared_.decisions.committed.epoch) {
    s_.metrics.Add("invariant_violations_total", 1, {{"id", "I2"}});
    return;
  }
  const epoch::EngineMembers& engine = *epoch::EngineNamed(run.state, action.engine);
  run.trace.CommandSent("swap", s_.clock.Now());
  shared_.stragglers.SendCommits(engine.ranks, spec.epoch, {spec.content, spec.version});
}

void EpochRunner::Do(EpochRun& run, const epoch::SendCommittedEverywhere& action) {
  WW_FAILPOINT("coordinator.before_installeds");
  const epoch::Spec& spec = run.state.spec;
  shared_.stragglers.Install(*epoch::EngineNamed(run.state, action.engine), spec.epoch,
                             {spec.content, spec.version}, run.keeps);
}

void EpochRunner::Do(EpochRun& run, const epoch::SendAbort& action) {
  WW_FAILPOINT("coordinator.before_an_abort_sent");
  run.trace.CommandSent("drain", s_.clock.Now());
  s_.membership.Send(action.member,
                     epoch::AbortCommand{run.state.spec.epoch, action.member, action.why});
}

void EpochRunner::Do(EpochRun& run, const epoch::EvictEngine& action) {
  for (const epoch::Member& member : epoch::EngineNamed(run.state, action.engine)->ranks) {
    s_.membership.Evict(member, action.why);
  }
}

/// It serves on; the versions after this one do not wait for it before it has answered.
void EpochRunner::Do(EpochRun& run, const epoch::MarkStale& action) {
  const epoch::Spec& spec = run.state.spec;
  const epoch::EngineMembers& engine = *epoch::EngineNamed(run.state, action.engine);
  Group* group = s_.membership.FindGroup(engine.name);
  if (group == nullptr || group->Members() != engine.ranks) return;
  group->last_error = action.why.ToString();
  shared_.stragglers.Put(engine.name,
                         {engine.ranks, spec.epoch, {spec.content, spec.version}, run.keeps, {}});
  s_.metrics.Add("engines_left_behind_total", 1);
  shared_.SendStale(*group);
}

/// It is not fenced: as soon as it is complete it is filled.
void EpochRunner::Do(EpochRun& run, const epoch::ExcludeEngine& action) {
  const epoch::EngineMembers& engine = action.engine;
  run.left_out.push_back(engine.name);
  for (const epoch::Member& member : engine.ranks) run.staged.erase(member);
  if (action.why.reason() != Reason::kMemberLost) s_.metrics.Add("engines_left_behind_total", 1);
  if (Group* group = s_.membership.FindGroup(engine.name)) {
    group->last_error = action.why.ToString();
  }
  Log(run, "goes on without " + engine.name + ": " + action.why.ToString(), true);
  const auto pair = run.plans.find(engine.name);
  if (run.state.released || pair == run.plans.end()) return;
  std::vector<ParticipantId> readers;
  for (const epoch::Member& member : engine.ranks) readers.push_back(member.id);
  for (const epoch::Member& member : ReadFrom(run.state, engine.name)) {
    s_.membership.Send(member, epoch::ExcludeCommand{run.state.spec.epoch, member,
                                                     pair->second->plan->id, readers});
  }
}

void EpochRunner::Do(EpochRun&, const epoch::EvictSource& action) {
  s_.membership.Evict(action.member, action.why);
}

void EpochRunner::Do(EpochRun& run, const epoch::Finish& action) { run.finished = action; }

void EpochRunner::Do(EpochRun&, const epoch::Halt& action) { owner_.OnUndecidable(action.why); }

/// Under `deadline` the phase's deadline is the grace.
void EpochRunner::Do(EpochRun& run, const epoch::ArmGrace&) {
  if (s_.options.commit_policy.kind != CommitPolicy::Kind::kQuorum) return;
  s_.strand.PostAfter(
      s_.options.commit_policy.grace,
      cancel_.Bind([this, epoch = run.state.spec.epoch] { Dispatch(epoch, epoch::GraceEvent{}); }));
}

void EpochRunner::Do(EpochRun& run, const epoch::ArmDeadline& action) {
  s_.strand.Cancel(run.timer);
  run.timer =
      s_.strand.PostAfter(DeadlineOf(action.phase),
                          cancel_.Bind([this, epoch = run.state.spec.epoch, phase = action.phase] {
                            Dispatch(epoch, epoch::DeadlineEvent{phase});
                          }));
}

Nanos EpochRunner::DeadlineOf(epoch::Phase phase) const {
  switch (phase) {
    case epoch::Phase::kPreparing:
      return s_.options.prepare_deadline;
    case epoch::Phase::kTransferring:
      return s_.options.transfer_deadline;
    case epoch::Phase::kStaged:
      return s_.options.staged_deadline;
    case epoch::Phase::kCommitting:
      return s_.options.commit_deadline;
    default:
      return s_.options.abort_deadline;
  }
}

void EpochRunner::EndRun(Epoch epoch) {
  const auto fill = std::ranges::find(fills_, RunOf(epoch), &std::unique_ptr<EpochRun>::get);
  const std::unique_ptr<EpochRun> run = std::move(fill == fills_.end() ? fleet_ : *fill);
  if (fill != fills_.end()) fills_.erase(fill);
  s_.strand.Cancel(run->timer);
  CountEnd(*run);
  NoteEnd(*run);
  KeepTrace(*run);
  shared_.history.Remember(run->ToStatus(run->phase_since));  // when its last phase ended
  owner_.OnEnded(*run);
}

void EpochRunner::CountEnd(const EpochRun& run) {
  const bool committed = run.state.phase == epoch::Phase::kCommitted;
  const char* kinds[] = {"", "fill_", "rollback_"};
  const std::string outcome = kinds[static_cast<int>(run.state.spec.kind) - 1] +
                              std::string(committed ? "committed" : "aborted");
  s_.metrics.Add("epochs_total", 1, {{"outcome", outcome}});
  s_.metrics.Observe("epoch_duration_seconds",
                     std::chrono::duration<double>(s_.clock.Now() - run.started).count());
  if (committed) return;
  s_.metrics.Add("epoch_aborts_total", 1,
                 {{"reason", std::string(ReasonName(run.state.why.reason()))}});
}

}  // namespace weightwire::coordinator
