#include <algorithm>
#include <set>
#include <string_view>
#include <utility>

#include "server/base/failpoint.h"
#include "server/coordinator/driver.h"

// Events of runs are queued and stepped one after another, so that an action which leads to the
// next event (an eviction that loses members) never enters the machine while it is being stepped.
namespace weightwire::coordinator {
namespace {

std::vector<epoch::Member> AllMembers(const epoch::Spec& spec) {
  std::vector<epoch::Member> all = spec.sources;
  for (const auto& engine : spec.engines) {
    all.insert(all.end(), engine.ranks.begin(), engine.ranks.end());
  }
  return all;
}

const epoch::EngineMembers& EngineNamed(const epoch::Spec& spec, const std::string& name) {
  return *std::find_if(spec.engines.begin(), spec.engines.end(),
                       [&](const epoch::EngineMembers& e) { return e.name == name; });
}

Epoch EpochOf(const epoch::Report& report) {
  return std::visit(
      [](const auto& r) {
        if constexpr (requires { r.epoch; }) return r.epoch;
        return Epoch{};
      },
      report);
}

/// The engine's leader, which has been asked to swap and has not answered.
bool IsAwaitedLeader(const epoch::State& state, const epoch::Member& member) {
  const std::vector<epoch::Member> awaited = epoch::WaitingFor(state);
  return std::ranges::find(awaited, member) != awaited.end();
}

/// A report has had its effect; its sender does not know.
struct Taken {
  void operator()(const epoch::PreparedReport&) const {
    WW_FAILPOINT("coordinator.after_prepared_taken");
  }
  void operator()(const epoch::SourcedReport&) const {
    WW_FAILPOINT("coordinator.after_sourced_taken");
  }
  void operator()(const epoch::StagedReport&) const {
    WW_FAILPOINT("coordinator.after_staged_taken");
  }
  void operator()(const epoch::AppliedReport&) const {
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
  epoch::Event operator()(const epoch::SourcedReport& r) const {
    return epoch::SourcedEvent{r.member, r.digests};
  }
  epoch::Event operator()(const epoch::StagedReport& r) const {
    return epoch::StagedEvent{r.member, r.digests};
  }
  epoch::Event operator()(const epoch::AppliedReport& r) const {
    return epoch::AppliedEvent{r.member};
  }
  epoch::Event operator()(const epoch::DrainedReport& r) const {
    return epoch::DrainedEvent{r.member};
  }
  epoch::Event operator()(const epoch::FailedReport& r) const {
    return epoch::FailedEvent{r.member, r.why};
  }
  epoch::Event operator()(const epoch::LostReport& r) const {
    return epoch::LostEvent{r.member, r.why};
  }
  epoch::Event operator()(const epoch::AttestedReport&) const {
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
                       !run.state.staged.contains(staged->member);
    if (!first) return;
    run.keeps[staged->member] = staged->keeps;
    run.bytes += staged->bytes;
    run.bytes_kept += staged->bytes_kept;
    for (const auto& [transport, bytes] : staged->bytes_by_transport) {
      run.bytes_by_transport[transport] += bytes;
    }
  }
  if (const auto* applied = std::get_if<epoch::AppliedReport>(&report)) {
    run.flip_seconds_max = std::max(run.flip_seconds_max, applied->flip_seconds);
  }
}

}  // namespace

std::vector<EpochRun*> Driver::Runs() const {
  std::vector<EpochRun*> runs;
  if (publish_ != nullptr) runs.push_back(publish_.get());
  for (const auto& fill : fills_) runs.push_back(fill.get());
  return runs;
}

EpochRun* Driver::RunOf(Epoch epoch) const {
  const std::vector<EpochRun*> runs = Runs();
  const auto run = std::ranges::find(runs, epoch, [](auto* r) { return r->state.spec.epoch; });
  return run == runs.end() ? nullptr : *run;
}

EpochRun& Driver::Add(std::unique_ptr<EpochRun> run) {
  if (!run->IsFill()) return *(publish_ = std::move(run));
  return *fills_.emplace_back(std::move(run));
}

bool Driver::OnReport(const epoch::Report& report) {
  if (std::holds_alternative<epoch::AttestedReport>(report)) return false;
  if (OnStraggler(report)) return true;
  EpochRun* run = RunOf(EpochOf(report));
  if (run == nullptr) return false;
  AddFigures(*run, report);
  NoteReport(*run, report);
  if (const auto* failed = std::get_if<epoch::FailedReport>(&report)) {
    if (failed->refused && run->state.phase == epoch::Phase::kCommitting) {
      // Whether an engine wants what was committed is for its leader to say.
      if (!IsAwaitedLeader(run->state, failed->member)) return true;
      run->refused = true;
    }
  }
  Feed(run->state.spec.epoch, std::visit(EventOf{}, report));
  std::visit(Taken{}, report);
  return true;
}

void Driver::Begin(std::unique_ptr<EpochRun> run) {
  epoch::Outcome outcome = epoch::Begin(run->state.spec);
  run->state = std::move(outcome.state);
  EpochRun& started = Add(std::move(run));
  NoteBeginning(started);
  Perform(started, outcome.actions);
  changed_();
}

void Driver::Feed(Epoch epoch, epoch::Event event) {
  events_.emplace_back(epoch, std::move(event));
  Pump();
}

void Driver::Pump() {
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
  TryStart();
  changed_();
}

void Driver::StepRun(EpochRun& run, const epoch::Event& event) {
  const epoch::Phase before = run.state.phase;
  epoch::Outcome outcome = epoch::Step(std::move(run.state), event);
  run.state = std::move(outcome.state);
  if (run.state.phase != before) {
    const Nanos since = run.phase_since;
    const double seconds = run.LeavePhase(before, s_.clock.Now());
    s_.metrics.Observe("epoch_phase_seconds", seconds,
                       {{"phase", std::string(epoch::PhaseName(before))}});
    run.story.Step("phase", std::string(epoch::PhaseName(before)), since, run.phase_since);
    NotePhase(run, before, seconds);
  }
  Perform(run, outcome.actions);
}

void Driver::Perform(EpochRun& run, const std::vector<epoch::Action>& actions) {
  for (const epoch::Action& action : actions) {
    std::visit([&](const auto& a) { Do(run, a); }, action);
  }
}

void Driver::Do(EpochRun& run, const epoch::SendPrepare&) {
  WW_FAILPOINT("coordinator.before_prepares");
  run.story.Told("prepare", s_.clock.Now());
  for (const epoch::PrepareCommand& command : run.prepares) {
    s_.membership.Send(command.member, command);
  }
}

void Driver::Do(EpochRun& run, const epoch::SendTransfer&) {
  WW_FAILPOINT("coordinator.before_transfers");
  run.story.Told("serve", s_.clock.Now());
  run.story.Told("stage", s_.clock.Now());
  if (run.state.spec.kind != epoch::Kind::kRollback) {
    // What is written from now on is nothing that could be served again.
    for (const auto& engine : run.state.spec.engines) {
      for (const epoch::Member& member : engine.ranks)
        s_.membership.Hold(member, run.holds[member]);
    }
  }
  for (const epoch::Member& member : AllMembers(run.state.spec)) {
    s_.membership.Send(member, epoch::TransferCommand{run.state.spec.epoch, member});
  }
}

void Driver::Do(EpochRun& run, const epoch::SendRelease&) {
  WW_FAILPOINT("coordinator.before_releases");
  const epoch::Spec& spec = run.state.spec;
  run.released = true;
  for (const epoch::Member& member : spec.sources) {
    TellReleased({spec.epoch, spec.version, member, {}});
  }
}

void Driver::Do(EpochRun& run, const epoch::AppendCommit&) {
  const epoch::Spec& spec = run.state.spec;
  run.appended = s_.clock.Now();
  CommitRecord record{spec.epoch, spec.version, {}, spec.held};
  for (const auto& engine : spec.engines) record.engines.Add(engine.name);
  WW_FAILPOINT("coordinator.before_commit_appended");
  s_.journal.Append(
      record, lifeline_.Bind([this, record](const Status& status) { Appended(record, status); }));
  WW_FAILPOINT("coordinator.after_commit_submitted");
}

void Driver::Appended(const CommitRecord& record, const Status& status) {
  WW_FAILPOINT("coordinator.after_journal_before_send");
  if (EpochRun* run = RunOf(record.epoch)) {
    run->story.Step("journal", "", run->appended, s_.clock.Now());
  }
  if (status.ok()) {
    committed_ = record;
    committed_wall_ = s_.clock.WallSeconds();
    fill_troubles_.clear();
    s_.metrics.Set("epoch_committed", static_cast<double>(record.epoch.value));
    if (record.held != Epoch{}) WentBack();
    if (const EpochRun* run = RunOf(record.epoch)) TellWhoIsBehind(run->state.spec);
    for (const auto& [name, straggler] : stragglers_.all()) {
      if (straggler.content.epoch == record.epoch) AskToSwap(straggler);
    }
  }
  Feed(record.epoch, epoch::JournalEvent{status});
}

void Driver::TellWhoIsBehind(const epoch::Spec& committed) {
  std::set<std::string_view> required;
  for (const epoch::EngineMembers& engine : committed.engines) required.insert(engine.name);
  for (const auto& [name, group] : s_.membership.groups()) {
    if (group.role == control::GroupRole::kEngine && !required.contains(name)) TellBehind(group);
  }
}

void Driver::TellBehind(const Group& engine) {
  for (const epoch::Member& member : engine.Members()) {
    const Session* session = s_.membership.SessionOf(member);
    if (session == nullptr || (session->hello.features & control::kFeatureBehind) == 0) continue;
    s_.membership.Send(member, epoch::BehindCommand{committed_.epoch, member});
  }
}

void Driver::Do(EpochRun& run, const epoch::SendCommit& action) {
  const epoch::Spec& spec = run.state.spec;
  if (spec.content != committed_.epoch) {
    s_.metrics.Add("invariant_violations_total", 1, {{"id", "I2"}});
    return;
  }
  const epoch::EngineMembers& engine = EngineNamed(spec, action.engine);
  run.story.Told("swap", s_.clock.Now());
  SendCommits(engine.ranks, spec.epoch, {spec.content, spec.version});
}

void Driver::Do(EpochRun& run, const epoch::SendInstalled& action) {
  WW_FAILPOINT("coordinator.before_installeds");
  const epoch::Spec& spec = run.state.spec;
  Install(EngineNamed(spec, action.engine), spec.epoch, {spec.content, spec.version}, run.keeps);
}

void Driver::Install(const epoch::EngineMembers& engine, Epoch epoch, const epoch::Content& content,
                     const std::map<epoch::Member, epoch::Contents>& keeps) {
  for (const epoch::Member& member : engine.ranks) {
    s_.membership.Send(member, epoch::InstalledCommand{epoch, member});
  }
  Group* group = s_.membership.FindGroup(engine.name);
  if (group == nullptr || group->Members() != engine.ranks) return;
  stragglers_.Erase(engine.name);
  for (const epoch::Member& member : engine.ranks) {
    const auto kept = keeps.find(member);
    s_.membership.Hold(member, kept == keeps.end() ? epoch::Contents{} : kept->second);
  }
  if (content.epoch < group->serving) {
    s_.metrics.Add("invariant_violations_total", 1, {{"id", "I4"}});
  }
  group->serving = content.epoch;
  group->version = content.version;
}

/// The engine answers at last: it has what the others had then, and is filled with what is newer.
bool Driver::OnStraggler(const epoch::Report& report) {
  const auto* applied = std::get_if<epoch::AppliedReport>(&report);
  const auto* failed = std::get_if<epoch::FailedReport>(&report);
  if (applied == nullptr && failed == nullptr) return false;
  const auto place = s_.membership.Find(applied != nullptr ? applied->member : failed->member);
  if (!place || place->rank != 0 || !stragglers_.Has(*place->group)) return false;
  const std::string name = place->group->name;
  const Straggler straggler = *stragglers_.Find(name);
  if (straggler.epoch != EpochOf(report)) return false;
  stragglers_.Erase(name);
  if (failed != nullptr) {
    s_.membership.Evict(failed->member, failed->why);
  } else {
    Install({name, straggler.ranks}, straggler.epoch, straggler.content, straggler.keeps);
  }
  TryStart();
  changed_();
  return true;
}

void Driver::Do(EpochRun& run, const epoch::SendAbort& action) {
  WW_FAILPOINT("coordinator.before_an_abort_sent");
  run.story.Told("drain", s_.clock.Now());
  s_.membership.Send(action.member,
                     epoch::AbortCommand{run.state.spec.epoch, action.member, action.why});
}

void Driver::Do(EpochRun& run, const epoch::EvictEngine& action) {
  for (const epoch::Member& member : EngineNamed(run.state.spec, action.engine).ranks) {
    s_.membership.Evict(member, action.why);
  }
}

/// It serves on; the versions after this one do not wait for it before it has answered.
void Driver::Do(EpochRun& run, const epoch::LeaveBehind& action) {
  const epoch::Spec& spec = run.state.spec;
  const epoch::EngineMembers& engine = EngineNamed(spec, action.engine);
  Group* group = s_.membership.FindGroup(engine.name);
  if (group == nullptr || group->Members() != engine.ranks) return;
  group->last_error = action.why.ToString();
  const Straggler& late = stragglers_.Put(
      engine.name, {engine.ranks, spec.epoch, {spec.content, spec.version}, run.keeps, {}});
  s_.metrics.Add("engines_left_behind_total", 1);
  TellBehind(*group);
  RemindLater(engine.name, late.turn);
}

void Driver::AwaitSwap(const std::string& engine, Straggler straggler) {
  const Straggler& awaited = stragglers_.Put(engine, std::move(straggler));
  AskToSwap(awaited);
  RemindLater(engine, awaited.turn);
  s_.strand.PostAfter(std::max(Nanos(0), awaited.patience - s_.clock.Now()),
                      lifeline_.Bind([this] { TryStart(); }));
}

bool Driver::IsAwaited(const Group& engine) const {
  return stragglers_.Has(engine) && s_.clock.Now() < stragglers_.Find(engine.name)->patience;
}

bool Driver::AwaitsSwaps() const {
  return std::ranges::any_of(stragglers_.all(), [&](const auto& entry) {
    const Group* engine = s_.membership.FindGroup(entry.first);
    return engine != nullptr && IsAwaited(*engine);
  });
}

void Driver::AskToSwap(const Straggler& straggler) {
  if (straggler.content.epoch > committed_.epoch) return;  // it is when that is durable
  SendCommits(straggler.ranks, straggler.epoch, straggler.content);
}

/// Asked again, a leader that has swapped or refused says so again.
void Driver::RemindLater(const std::string& engine, uint64_t turn) {
  s_.strand.PostAfter(s_.options.commit_deadline, lifeline_.Bind([this, engine, turn] {
    const Straggler* still = stragglers_.Find(engine);
    if (still == nullptr || still->turn != turn) return;
    AskToSwap(*still);
    RemindLater(engine, turn);
  }));
}

void Driver::SendCommits(const std::vector<epoch::Member>& ranks, Epoch epoch,
                         const epoch::Content& content) {
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    s_.membership.Send(ranks[rank], epoch::CommitCommand{epoch, content.version, content.epoch,
                                                         ranks[rank], rank == 0});
  }
}

void Driver::Do(EpochRun& run, const epoch::ExcludeEngine& action) {
  run.left_out.push_back(action.engine.name);
  Log(run, "goes on without " + action.engine.name + ": " + action.why.ToString(), true);
}

void Driver::Do(EpochRun&, const epoch::EvictSource& action) {
  s_.membership.Evict(action.member, action.why);
}

void Driver::Do(EpochRun& run, const epoch::Finish& action) { run.finished = action; }

void Driver::Do(EpochRun&, const epoch::StopDeciding& action) { StopDeciding(action.why); }

/// Under `deadline` the phase's deadline is the grace.
void Driver::Do(EpochRun& run, const epoch::ArmGrace&) {
  if (s_.options.commit_policy.kind != CommitPolicy::Kind::kQuorum) return;
  s_.strand.PostAfter(
      s_.options.commit_policy.grace,
      lifeline_.Bind([this, epoch = run.state.spec.epoch] { Feed(epoch, epoch::GraceEvent{}); }));
}

void Driver::Do(EpochRun& run, const epoch::ArmDeadline& action) {
  s_.strand.Cancel(run.timer);
  run.timer = s_.strand.PostAfter(
      DeadlineOf(action.phase),
      lifeline_.Bind([this, epoch = run.state.spec.epoch, phase = action.phase] {
        EpochRun* late = RunOf(epoch);
        if (late != nullptr && late->state.phase == phase) late->timed_out |= late->CanAbort();
        Feed(epoch, epoch::DeadlineEvent{phase});
      }));
}

Nanos Driver::DeadlineOf(epoch::Phase phase) const {
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

void Driver::EndRun(Epoch epoch) {
  const auto fill = std::ranges::find(fills_, RunOf(epoch), &std::unique_ptr<EpochRun>::get);
  const std::unique_ptr<EpochRun> run = std::move(fill == fills_.end() ? publish_ : *fill);
  if (fill != fills_.end()) fills_.erase(fill);
  s_.strand.Cancel(run->timer);
  CountEnd(*run);
  NoteEnd(*run);
  KeepStory(*run);
  Remember(run->ToStatus(run->phase_since));  // when its last phase ended
  switch (run->state.spec.kind) {
    case epoch::Kind::kPublish:
      EndPublish(*run);
      break;
    case epoch::Kind::kFill:
      EndFill(*run);
      break;
    case epoch::Kind::kRollback:
      EndRollback(*run);
      break;
  }
  FinishShutdownWhenIdle();
}

void Driver::CountEnd(const EpochRun& run) {
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
