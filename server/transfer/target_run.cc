#include "server/transfer/target_run.h"

#include <algorithm>

#include "server/transfer/flow_control.h"
#include "server/transfer/make.h"
#include "server/transfer/segment_copy.h"

// What is gathered is made into codes and scales at the end, slot by slot of a schedule, like what
// is copied from mapped memory: a few tasks at a time, so that other jobs have workers, too.
namespace weightwire::transfer {
namespace {

constexpr uint32_t kMakingMax = 4;

std::string NameOf(const TargetStream& stream) {
  return "stream " + std::to_string(stream.stream().id) + " from source rank " +
         std::to_string(stream.stream().source_rank) + " (participant " +
         std::to_string(stream.source().value) + ")";
}

}  // namespace

TargetRun::TargetRun(std::shared_ptr<Context> context, std::shared_ptr<SessionTable> sessions,
                     TargetJob job, Engine::TargetDone done, std::function<void()> forget)
    : context_(std::move(context)),
      sessions_(std::move(sessions)),
      job_(std::move(job)),
      done_(std::move(done)),
      forget_(std::move(forget)),
      gets_(ReadAheadOf(context_->tuning(), /*same_host=*/false).gets),
      near_gets_(ReadAheadOf(context_->tuning(), /*same_host=*/true).gets) {}

void TargetRun::Start() {
  started_ = context_->clock.Now();
  context_->metrics.Add("transfers_started_total", 1);
  if (Status status = Prepare(); !status.ok()) return FailJob(std::move(status));
  ArmProgressTimer();
  context_->workers.Post([self = shared_from_this()] {
    const Tuning& tuning = self->context_->tuning();
    std::vector<plan::StreamSchedule> schedules;
    for (const auto& stream : self->streams_) {
      schedules.push_back(
          plan::ScheduleOf(stream->stream(), tuning.segment_bytes_max, tuning.slot_bytes));
    }
    auto made = plan::ScheduleOf(self->made_, tuning.segment_bytes_max, tuning.slot_bytes);
    self->context_->strand.Post(
        [self, schedules = std::move(schedules), made = std::move(made)]() mutable {
          self->made_schedule_ = std::move(made);
          self->OnPlanned(std::move(schedules));
        });
  });
  ConnectAll();
}

Status TargetRun::Prepare() {
  WW_RETURN_IF_ERROR(ValidateSlice(*job_.slice, job_.binding));
  WW_RETURN_IF_ERROR(CheckBlocksFit(*job_.slice, context_->tuning().segment_bytes_max));
  if (!job_.served.empty()) WW_RETURN_IF_ERROR(ValidateSlice(*job_.slice, job_.served));
  job_.kept->Follow(job_.slice->plan);
  resumes_ = !job_.kept->Unsettle();
  made_.ops = job_.slice->gathered.made;
  for (const plan::Stream& stream : job_.slice->streams) WW_RETURN_IF_ERROR(AddStream(stream));
  bytes_total_ = progress().bytes_total;
  return OkStatus();
}

Status TargetRun::AddStream(const plan::Stream& stream) {
  auto peer = job_.sources.find(stream.source_rank);
  auto participant = job_.source_participants.find(stream.source_rank);
  if (peer == job_.sources.end() || participant == job_.source_participants.end()) {
    return Status(Code::kInvalidArgument, Reason::kMissingRank,
                  "nobody was named as source rank " + std::to_string(stream.source_rank));
  }
  WW_ASSIGN_OR_STATUS(transport::Transport * transport, sessions_->Choose(peer->second));
  streams_.push_back(
      std::make_unique<TargetStream>(*this, stream, peer->second, participant->second, transport));
  by_id_.emplace(stream.id, streams_.back().get());
  return streams_.back()->CheckGpuDirect();
}

void TargetRun::ConnectAll() {
  for (const auto& stream : streams_) {
    sessions_->Connect(stream->peer(), stream->transport(),
                       [self = shared_from_this(), stream = stream.get()](auto result) {
                         self->OnConnected(stream, std::move(result));
                       });
  }
}

void TargetRun::OnPlanned(std::vector<plan::StreamSchedule> schedules) {
  if (finished_) return;
  for (size_t i = 0; i < streams_.size(); ++i) streams_[i]->OnPlanned(std::move(schedules[i]));
  Changed();
}

void TargetRun::OnConnected(TargetStream* stream,
                            Result<std::shared_ptr<transport::Endpoint>> result) {
  if (finished_) return;
  if (result.has_value()) return stream->OnConnected(std::move(*result));
  const Status& why = result.error();
  Avoid(*stream);
  FailJob(Status(
      why.code(), why.reason(),
      NameOf(*stream) + ": no session over " + stream->transport()->name() + ": " + why.message()));
}

void TargetRun::OnNotify(const std::shared_ptr<transport::Endpoint>& endpoint,
                         const Notify& notify) {
  if (notify.key.plan_low != job_.slice->plan.low) return;
  auto entry = by_id_.find(notify.key.stream);
  if (entry == by_id_.end()) return;
  TargetStream& stream = *entry->second;
  if (stream.source() != notify.key.source || stream.endpoint_id() != endpoint->id()) return;
  if (notify.type == NotifyType::kBinding) return stream.OnBinding(notify);
  if (notify.type == NotifyType::kReady) return stream.OnReady(notify);
  if (notify.type == NotifyType::kWaiting) return stream.OnWaiting(notify);
  if (notify.type == NotifyType::kDelta) return stream.OnDelta(notify);
  OnFail(stream, notify);
}

void TargetRun::OnFail(const TargetStream& stream, const Notify& fail) {
  if (stream.complete()) return;
  const Code code = fail.code == Code::kOk ? Code::kAborted : fail.code;
  std::string what = "the source gave up";
  if (IsLeftBehind(Status(code, fail.reason, ""))) {
    what = "its other readers go on without this one, which was too slow";
  } else if (fail.reason == Reason::kTicketRejected) {
    what = "the source refused the stream: for epoch " + std::to_string(job_.epoch.value) +
           " the coordinator named other readers than " + job_.name;
  } else if (fail.reason == Reason::kConfigInvalid) {
    const Tuning& tuning = context_->tuning();
    what = "its agent cuts what is sent otherwise: segment_bytes_max is " +
           std::to_string(tuning.segment_bytes_max) + " and slot_bytes " +
           std::to_string(tuning.slot_bytes) + " at the agent of " + job_.name +
           ", and one of the two differs there. Give both agents the same";
  }
  FailJob(Status(code, fail.reason, NameOf(stream) + ": " + what));
}

void TargetRun::OnSessionLost(uint64_t endpoint, const Status& why) {
  const TargetStream* lost = nullptr;
  for (const auto& stream : streams_) {
    if (stream->endpoint_id() != endpoint) continue;
    stream->OnSessionLost();
    if (!stream->complete()) lost = stream.get();
  }
  if (lost == nullptr) return;
  Avoid(*lost);
  FailJob(Status(Code::kUnavailable, Reason::kTransportFailed,
                 NameOf(*lost) + ": the session over " + lost->transport()->name() +
                     " was lost: " + why.message()));
}

void TargetRun::Avoid(const TargetStream& stream) {
  sessions_->Avoid(stream.peer(), stream.transport()->name());
}

Engine::Progress TargetRun::progress() const {
  Engine::Progress progress;
  for (const auto& stream : streams_) {
    progress.bytes_done += stream->bytes_done();
    progress.bytes_total += stream->stream().bytes;
  }
  return progress;
}

// ---- the end -----------------------------------------------------------------------------------

void TargetRun::FailJob(Status why) {
  if (finished_) return;
  if (job_.received) job_.received->Abandon();
  Status status = std::move(why).AtEpoch(job_.epoch).AtRank(job_.name);
  for (const auto& stream : streams_) stream->Stop(status);
  Finish(Fail(std::move(status)));
  Changed();
}

void TargetRun::Finish(Result<TargetReport> result) {
  finished_ = true;
  stop_ = true;
  context_->strand.Cancel(progress_timer_);
  const std::string label =
      result.has_value() ? "ok" : std::string(ReasonName(result.error().reason()));
  context_->metrics.Add("transfers_finished_total", 1, {{"result", label}});
  context_->strand.Post(
      [done = std::move(done_), result = std::move(result)]() mutable { done(std::move(result)); });
}

void TargetRun::MakeGathered() {
  const auto slots = static_cast<uint32_t>(made_schedule_.slots.size());
  while (making_ < kMakingMax && made_slots_ + making_ < slots) MakeSlot(made_slots_ + making_);
  if (made_slots_ == slots) FinishFromStreams();
}

void TargetRun::MakeSlot(uint32_t slot) {
  ++making_;
  quantizing_.Begin(context_->clock.Now());
  context_->workers.Post([self = shared_from_this(), slot] {
    Status status =
        MakeSlotWithin(self->made_, self->made_schedule_, slot, self->job_.binding, self->stop_);
    self->context_->strand.Post([self, status = std::move(status)] { self->OnMade(status); });
  });
}

void TargetRun::OnMade(const Status& status) {
  --making_;
  ++made_slots_;
  quantizing_.End(context_->clock.Now());
  if (!status.ok()) FailJob(status);
  Changed();
}

void TargetRun::FinishFromStreams() {
  TargetReport report;
  std::map<std::string, Nanos> last_by_transport;
  for (const auto& stream : streams_) {
    const std::string& name = stream->transport()->name();
    report.digests.push_back(stream->digest());
    report.bytes += stream->bytes_done();
    report.bytes_by_transport[stream->path()] += stream->bytes_moved();
    report.bytes_kept += stream->bytes_kept();
    report.delta += stream->delta();
    report.rereads += stream->rereads();
    Nanos& last = last_by_transport[name];
    last = std::max(last, stream->last_progress());
  }
  for (const auto& [name, last] : last_by_transport) {
    context_->metrics.Observe("transfer_seconds",
                              std::chrono::duration<double>(last - started_).count(),
                              {{"transport", name}});
  }
  report.spans = Spans();
  Finish(std::move(report));
}

std::vector<WorkSpan> TargetRun::Spans() const {
  struct Read {
    TimeRange range;
    int64_t bytes = 0;
  };
  std::map<std::pair<ParticipantId, std::string>, Read> reads;
  TimeRange verifying;
  int64_t verified = 0;
  for (const auto& stream : streams_) {
    Read& read = reads[{stream->source(), stream->path()}];
    read.range.Add(stream->reading());
    read.bytes += stream->bytes_moved();
    verifying.Add(stream->verifying());
    verified += stream->bytes_done();
  }
  std::vector<WorkSpan> out;
  for (const auto& [from, read] : reads) {
    if (!read.range.begun()) continue;
    out.push_back(
        {"read", read.range.begin(), read.range.end(), read.bytes, from.first, from.second});
  }
  if (verifying.begun()) {
    out.push_back({"verify", verifying.begin(), verifying.end(), verified, {}, {}});
  }
  if (quantizing_.begun()) {
    out.push_back({"quantize",
                   quantizing_.begin(),
                   quantizing_.end(),
                   plan::GatherBufferBytes(job_.slice->gathered),
                   {},
                   {}});
  }
  return out;
}

void TargetRun::Changed() {
  if (!finished_ &&
      std::ranges::all_of(streams_, [](const auto& stream) { return stream->complete(); })) {
    MakeGathered();
  }
  const bool quiet = making_ == 0 && std::ranges::all_of(streams_, [](const auto& stream) {
                       return stream->quiet();
                     });
  if (!finished_ || !quiet || forgotten_) return;
  forgotten_ = true;
  context_->strand.Cancel(grace_timer_);
  forget_();
  for (auto& drained : drained_) context_->strand.Post(std::move(drained));
}

void TargetRun::Drain(std::function<void()> drained) {
  drained_.push_back(std::move(drained));
  if (grace_timer_ == 0) {
    grace_timer_ =
        context_->strand.PostAfter(context_->tuning().drain_grace, [self = shared_from_this()] {
          for (const auto& stream : self->streams_) {
            if (!stream->quiet()) stream->CloseSession();
          }
        });
  }
  FailJob(Status(Code::kAborted, Reason::kAbortRequested, "the target was drained"));
}

// ---- progress ----------------------------------------------------------------------------------

void TargetRun::ArmProgressTimer() {
  const Nanos now = context_->clock.Now();
  Nanos oldest = now;
  for (const auto& stream : streams_) {
    if (!stream->complete()) oldest = std::min(oldest, stream->last_progress());
  }
  progress_timer_ =
      context_->strand.PostAfter(oldest + context_->tuning().progress_timeout - now,
                                 [self = shared_from_this()] { self->CheckProgress(); });
}

void TargetRun::CheckProgress() {
  const Nanos limit = context_->clock.Now() - context_->tuning().progress_timeout;
  for (const auto& stream : streams_) {
    if (stream->complete() || stream->last_progress() > limit) continue;
    return FailJob(
        Status(Code::kDeadlineExceeded, Reason::kDeadlineExceeded,
               NameOf(*stream) + " made no progress over " + stream->transport()->name()));
  }
  ArmProgressTimer();
}

}  // namespace weightwire::transfer
