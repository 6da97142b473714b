#include <utility>

#include "server/agent/participant.h"
#include "server/agent/plan_bounds.h"
#include "server/agent/spans.h"
#include "server/base/failpoint.h"
#include "server/plan/relayed.h"

// Events are queued and stepped one after another: an action may lead to the next event at once (an
// application that acknowledges inside OnCommitted, a transfer that fails in its start), and the
// actions of one step are carried out before the next step is taken.
//
// Prepare waits for an answer to the rank's layout that it has overtaken. Then it passes gates: the
// slice of every assignment is here, the version is held (trainer), the stage exists (engine) and
// has room. Then the slices are checked against the layout on the workers, tickets are admitted,
// and the machine is told. The first gate that fails is the answer. Room for what a plan gathers is
// made last, when the slice has been checked.
//
// Every attempt is drained once, whoever asks; its memory and tickets are let go only then.
//
// A rollback passes the same gates without a slice, and is staged as soon as it is asked to move:
// nothing has written its buffer since it was served.
namespace weightwire::agent {

void Participant::Dispatch(epoch::MemberEvent event) {
  events_.push_back(std::move(event));
  if (stepping_) return;
  auto self = shared_from_this();
  stepping_ = true;
  while (!events_.empty()) {
    epoch::MemberOutcome outcome = epoch::MemberStep(std::move(machine_), events_.front());
    events_.pop_front();
    machine_ = std::move(outcome.state);
    for (const auto& action : outcome.actions) {
      std::visit([this](const auto& a) { Do(a); }, action);
    }
  }
  stepping_ = false;
  RegisterWhenQuiet();
  GoneWhenIdle();
}

void Participant::Do(const epoch::DoPrepare&) {
  auto attempt = std::make_shared<Attempt>();
  attempt->command = *machine_.current;
  attempt->began = services_->clock.Now();
  attempt_ = attempt;
  attempt->awaits_layout = !memory_->layout() && submitting_ > 0;
  if (!attempt->awaits_layout) BeginPrepare(attempt);
}

void Participant::BeginPrepare(const std::shared_ptr<Attempt>& attempt) {
  WW_FAILPOINT("agent.before_prepare");
  if (Status status = CheckPrepare(attempt->command); !status.ok()) {
    return Prepared(attempt, std::move(status));
  }
  attempt->gates = attempt->command.assignments.size() + 1;
  auto pass = [weak = weak_from_this(), attempt](const Status& status) {
    if (auto self = weak.lock()) self->PassGate(attempt, status);
  };
  if (!is_engine()) {
    publication_->WhenHeld(attempt->command.version, pass);
  } else {
    memory_->MakeStage([weak = weak_from_this(), attempt](const Status& status) {
      auto self = weak.lock();
      if (!self) return;
      const bool target = attempt->command.role == epoch::Role::kTarget;
      status.ok() && target ? self->WantRoom(attempt) : self->PassGate(attempt, status);
    });
  }
  FetchSlices(attempt);
}

Status Participant::CheckPrepare(const epoch::PrepareCommand& command) const {
  const bool target = command.role == epoch::Role::kTarget;
  if (ended_) return StaleHandle();
  const size_t assignments = command.kind == epoch::Kind::kRollback ? 0 : 1;
  if (target && (!is_engine() || command.assignments.size() != assignments)) {
    return Status(Code::kInvalidArgument, Reason::kInvalidRequest,
                  "the command does not suit this rank's role");
  }
  if (!memory_->layout()) {
    return Status(Code::kFailedPrecondition, Reason::kNotReady, "no layout has been agreed");
  }
  if (is_engine() && !target &&
      (!memory_->stage() || memory_->stage()->live_epoch() != command.content)) {
    return Status(Code::kFailedPrecondition, Reason::kStaleEpoch,
                  "the stage does not hold epoch " + std::to_string(command.content.value));
  }
  if (command.kind == epoch::Kind::kRollback) return CheckHeld(command.held);
  return OkStatus();
}

Status Participant::CheckHeld(Epoch held) const {
  const memory::StageBuffers* stage = memory_->stage();
  if (stage != nullptr && stage->HolderOf(held) >= 0) return OkStatus();
  std::string holds;
  for (const epoch::Content& content : memory_->held()) {
    holds += (holds.empty() ? " but " : ", ") + std::to_string(content.epoch.value);
  }
  return Status(Code::kFailedPrecondition, Reason::kStaleEpoch,
                "no buffer holds epoch " + std::to_string(held.value) + holds);
}

void Participant::FetchSlices(const std::shared_ptr<Attempt>& attempt) {
  const bool source = attempt->command.role == epoch::Role::kSource;
  attempt->slices.resize(attempt->command.assignments.size());
  for (size_t assignment = 0; assignment < attempt->slices.size(); ++assignment) {
    const epoch::PlanAssignment& wanted = attempt->command.assignments[assignment];
    services_->slices.Get(
        wanted.plan, source ? plan::Side::kSource : plan::Side::kTarget, wanted.rank,
        [weak = weak_from_this(), attempt, assignment](const Result<SliceCache::Slice>& got) {
          auto self = weak.lock();
          if (!self) return;
          if (got) attempt->slices[assignment] = *got;
          self->PassGate(attempt, got ? OkStatus() : got.error());
        });
  }
}

void Participant::PassGate(const std::shared_ptr<Attempt>& attempt, const Status& status) {
  if (!Runs(attempt) || attempt->refused) return;
  if (!status.ok()) return Prepared(attempt, status);
  if (--attempt->gates == 0) CheckSlices(attempt);
}

void Participant::CheckSlices(const std::shared_ptr<Attempt>& attempt) {
  if (attempt->command.kind == epoch::Kind::kRollback) return Prepared(attempt, OkStatus());
  if (Status status = CheckSenders(*attempt); !status.ok()) {
    return Prepared(attempt, std::move(status));
  }
  const plan::Side side =
      attempt->command.role == epoch::Role::kSource ? plan::Side::kSource : plan::Side::kTarget;
  services_->workers.Post([weak = weak_from_this(), attempt = std::weak_ptr(attempt),
                           slices = attempt->slices, assignments = attempt->command.assignments,
                           side, relayed = attempt->command.relayed,
                           relays = attempt->command.relay_readers > 0, layout = memory_->layout(),
                           &strand = services_->strand]() mutable {
    Status status;
    for (size_t assignment = 0; assignment < assignments.size() && status.ok(); ++assignment) {
      status = CheckSlice(*slices[assignment], assignments[assignment].plan, side,
                          assignments[assignment].rank, *layout);
    }
    const auto as_relayed = [&](plan::Side as) {
      return std::make_shared<const plan::RankSlice>(plan::RelayedSlice(*slices.front(), as));
    };
    std::shared_ptr<const plan::RankSlice> passed_on;
    if (status.ok() && relays) passed_on = as_relayed(plan::Side::kSource);
    if (status.ok() && relayed) slices.front() = as_relayed(plan::Side::kTarget);
    strand.Post([weak, attempt, status, slices = std::move(slices),
                 passed_on = std::move(passed_on)]() mutable {
      auto self = weak.lock();
      auto checked = attempt.lock();
      if (!self || !checked || !self->Runs(checked)) return;
      checked->slices = std::move(slices);
      checked->passed_on = std::move(passed_on);
      status.ok() ? self->MakeGather(checked) : self->Prepared(checked, status);
    });
  });
}

void Participant::MakeGather(const std::shared_ptr<Attempt>& attempt) {
  if (attempt->command.role != epoch::Role::kTarget) return Prepared(attempt, OkStatus());
  memory_->MakeGather(attempt->slices.front()->gathered,
                      [weak = weak_from_this(), attempt](const Status& status) {
                        auto self = weak.lock();
                        if (self && self->Runs(attempt)) self->Prepared(attempt, status);
                      });
}

void Participant::Prepared(const std::shared_ptr<Attempt>& attempt, Status status) {
  const epoch::PrepareCommand& command = attempt->command;
  if (!status.ok()) {
    attempt->refused = true;
    if (!status.rank().empty())
      return Dispatch(epoch::LocalPrepared{command.epoch, std::move(status)});
    return Dispatch(epoch::LocalPrepared{command.epoch, std::move(status).AtRank(name_)});
  }
  for (const auto& [ticket, caller] : command.admitted) {
    services_->transfers.AdmitTicket(ticket, caller);
  }
  attempt->admitted = true;
  Dispatch(epoch::LocalPrepared{command.epoch, OkStatus()});
}

void Participant::Do(const epoch::DoTransfer&) {
  if (ended_) return Dispatch(epoch::LocalTransferred{attempt_->command.epoch, StaleHandle()});
  if (attempt_->draining) {  // its version was withdrawn after it was prepared
    return Dispatch(epoch::LocalTransferred{attempt_->command.epoch,
                                            Withdrawn(attempt_->command.version).AtRank(name_)});
  }
  attempt_->started = services_->clock.Now();
  if (attempt_->command.role == epoch::Role::kSource) return StartSource(attempt_);
  if (attempt_->command.kind == epoch::Kind::kRollback) return StageHeld(attempt_);
  StartTarget(attempt_);
}

void Participant::Do(const epoch::DoExclude& action) {
  WW_FAILPOINT("agent.before_a_reader_is_excluded");
  const epoch::PrepareCommand& command = attempt_->command;
  Note("goes on without a reader", true);
  services_->transfers.Exclude(command.epoch, command.member.id, action.plan, action.readers);
}

void Participant::StartSource(const std::shared_ptr<Attempt>& attempt) {
  WW_FAILPOINT("agent.before_source_serves");
  transfer::Binding bytes =
      is_engine() ? memory_->StageBinding(memory_->stage()->live()) : publication_->Bytes();
  transfer::SourceJob job = SourceJobOf(*attempt, name_, std::move(bytes));
  if (!is_engine()) {
    job.heads = memory_->heads();
    job.generations = memory_->generations();
    job.served = memory_->served();
    job.delta = memory_->delta();
  }
  services_->transfers.StartSource(
      std::move(job), [self = shared_from_this(), attempt](Result<transfer::SourceReport> result) {
        if (!self->Runs(attempt)) return;
        attempt->ended = self->services_->clock.Now();
        WW_FAILPOINT("agent.after_all_read_before_sourced");
        if (!self->is_engine()) self->NoteMissingBase();
        if (result) attempt->sourced = std::move(*result);
        self->Dispatch(epoch::LocalTransferred{attempt->command.epoch,
                                               attempt->sourced ? OkStatus() : result.error()});
      });
}

void Participant::NoteMissingBase() {
  const std::shared_ptr<transfer::DeltaBases>& bases = memory_->delta();
  const bool missing = bases && !bases->why_not().ok();
  if (missing && !noted_missing_base_) {
    Note("sends everything, not what changed: " + bases->why_not().message(), true);
  }
  noted_missing_base_ = missing;
}

void Participant::StageHeld(const std::shared_ptr<Attempt>& attempt) {
  WW_FAILPOINT("agent.before_held_version_staged");
  attempt->buffer = memory_->stage()->HolderOf(attempt->command.held);
  attempt->staged = transfer::TargetReport{};
  attempt->ended = services_->clock.Now();
  Dispatch(epoch::LocalTransferred{attempt->command.epoch, CheckHeld(attempt->command.held)});
}

void Participant::StartTarget(const std::shared_ptr<Attempt>& attempt) {
  memory::StageBuffers& stage = *memory_->stage();
  attempt->buffer = stage.next();
  stage.Overwrite(attempt->buffer);
  SupersedeAttestation(attempt->buffer);
  WW_FAILPOINT("agent.before_spare_buffer_written");
  const plan::GatherBuffer& gathered = attempt->slices.front()->gathered;
  transfer::TargetJob job =
      TargetJobOf(*attempt, name_, memory_->TargetBinding(attempt->buffer, gathered));
  job.kept = memory_->kept(attempt->buffer);
  if (stage.live() >= 0 && stage.has_room()) {
    job.served_kept = memory_->kept(stage.live());
    job.served = memory_->TargetBinding(stage.live(), gathered);
  }
  if (attempt->passed_on) {
    // Its readers say themselves when they have everything, or when they do not get it.
    job.received = std::make_shared<transfer::SlotBitmap>();
    services_->transfers.StartSource(
        RelayJobOf(*attempt, name_, job.binding, job.received),
        [self = shared_from_this()](const Result<transfer::SourceReport>&) {});
  }
  services_->transfers.StartTarget(
      std::move(job), [self = shared_from_this(), attempt](Result<transfer::TargetReport> result) {
        if (!self->Runs(attempt)) return;
        attempt->ended = self->services_->clock.Now();
        WW_FAILPOINT("agent.after_unpack_before_staged");
        if (result) attempt->staged = std::move(*result);
        self->Dispatch(epoch::LocalTransferred{attempt->command.epoch,
                                               attempt->staged ? OkStatus() : result.error()});
      });
}

void Participant::Fails(const std::shared_ptr<Attempt>& attempt, const Status& why) {
  if (!Runs(attempt)) return;
  if (machine_.phase == epoch::MemberPhase::kPreparing && !attempt->refused) {
    return Prepared(attempt, why);
  }
  Dispatch(epoch::LocalTransferred{attempt->command.epoch, why});  // counts while it moves
}

void Participant::Do(const epoch::DoDrain& action) {
  drain_began_ = {action.epoch, services_->clock.Now()};
  auto drained = [self = shared_from_this(), epoch = action.epoch] {
    self->Dispatch(epoch::LocalDrained{epoch});
  };
  Drain(attempt_, std::move(drained));
}

void Participant::Drain(const std::shared_ptr<Attempt>& attempt, std::function<void()> then) {
  if (attempt->drained) return then();
  attempt->when_drained.push_back(std::move(then));
  if (attempt->draining) return;
  attempt->draining = true;
  ++drains_;
  services_->transfers.Drain(attempt->command.epoch, attempt->command.member.id,
                             [self = shared_from_this(), attempt] {
                               attempt->drained = true;
                               --self->drains_;
                               if (attempt->admitted) {
                                 for (const auto& [ticket, caller] : attempt->command.admitted) {
                                   self->services_->transfers.WithdrawTicket(ticket, caller);
                                 }
                               }
                               for (auto& told : std::exchange(attempt->when_drained, {})) told();
                               self->FenceWhenEmptyTooLong();
                               self->GoneWhenIdle();
                             });
}

void Participant::Do(const epoch::OfferSwap& action) {
  // I2: a swap is offered only for bytes that were staged and verified here.
  WW_CHECK(attempt_->staged && attempt_->buffer != memory_->stage()->live());
  const epoch::PrepareCommand& command = attempt_->command;
  attempt_->offered = services_->clock.Now();
  Note("offers it to the engine", false);
  if (application_ == nullptr) return;
  WW_FAILPOINT("agent.after_commit_before_offer");
  application_->OnCommitted(command.epoch, command.content, command.version, attempt_->buffer,
                            action.leader, command.trace_id, command.lineage);
  WW_FAILPOINT("agent.after_offer");
}

void Participant::Do(const epoch::DoInstall&) {
  const auto attempt = attempt_;
  WW_FAILPOINT("agent.before_installed");
  memory_->stage()->Flip(attempt->buffer, {attempt->command.content, attempt->command.version});
  memory_->kept(attempt->buffer)->Settle();
  emptied_for_ = {};
  Drain(attempt, [] {});
  if (application_ != nullptr) {
    application_->OnInstalled(attempt->command.epoch, attempt->command.content);
  }
}

void Participant::Do(const epoch::TellReleased& action) {
  if (is_engine()) return;
  auto release = [self = shared_from_this(), action] {
    WW_FAILPOINT("agent.after_drain_before_release");
    self->publication_->Release(action.version, action.epoch, action.why);
  };
  if (!attempt_) return release();
  Drain(attempt_, std::move(release));
}

void Participant::Do(const epoch::TellEvicted& action) { End(action.why); }

void Participant::Do(const epoch::SendPrepared&) {
  WW_FAILPOINT("agent.before_prepared_sent");
  epoch::PreparedReport report{attempt_->command.epoch, member()};
  if (attempt_->command.role == epoch::Role::kTarget) {
    report.holds = memory_->held_beyond();
  }
  report.spans = {SpanOf("prepare", attempt_->began, services_->clock.Now())};
  services_->report(std::move(report));
}
void Participant::Do(const epoch::SendTransferred&) {
  epoch::Report report = TransferReportOf(*attempt_);
  if (auto* staged = std::get_if<epoch::StagedReport>(&report)) {
    const memory::StageBuffers::Content serves = memory_->stage()->served();
    if (serves.epoch.value != 0) staged->keeps = {{serves.epoch, serves.version}};
    for (const epoch::Content& held : memory_->held()) {
      if (held.epoch != attempt_->command.held) staged->keeps.push_back(held);
    }
  }
  Note(attempt_->command.role == epoch::Role::kSource ? "all bytes read"
                                                      : "staged, every byte verified",
       false);
  services_->report(std::move(report));
  WW_FAILPOINT("agent.after_staged_before_commit");
}
void Participant::Do(const epoch::SendSwapped&) {
  Note("swapped", false);
  services_->report(
      epoch::SwappedReport{acknowledged_,
                           member(),
                           flip_seconds_,
                           {SpanOf("swap", attempt_->offered, services_->clock.Now())}});
}
void Participant::Do(const epoch::SendDrained& action) {
  WW_FAILPOINT("agent.before_drained_sent");
  std::vector<epoch::Span> spans;
  if (drain_began_.first == action.epoch) {
    spans.push_back(SpanOf("drain", drain_began_.second, services_->clock.Now()));
  }
  services_->report(epoch::DrainedReport{action.epoch, member(), std::move(spans)});
}
void Participant::Do(const epoch::SendFailed& action) {
  if (attempt_ && attempt_->command.epoch == action.epoch) {
    Note("fails: " + action.why.ToString(), true);
  }
  services_->report(epoch::FailedReport{action.epoch, member(), action.why});
}
void Participant::Do(const epoch::SendLost& action) {
  services_->report(epoch::LostReport{member(), action.why});
}

}  // namespace weightwire::agent
