#include "server/transfer/source_run.h"

#include <algorithm>

#include "server/base/checked.h"
#include "server/base/failpoint.h"
#include "server/transfer/segment_copy.h"

// Life: planning (schedules are cut on a worker) → serving → finished (`done` has run) → quiet →
// exports revoked → forgotten. Drain stops the streams and shortens what is left of that way.
namespace weightwire::transfer {
namespace {

constexpr uint64_t kPageBytes = 4096;
/// A relay tells its readers at least so often that it waits, and oftener where its own patience is
/// short: theirs is set alike.
constexpr Nanos kTellWaiting = std::chrono::seconds(2);

Status Drained(Epoch epoch) {
  return Status(Code::kAborted, Reason::kAbortRequested, "the source was drained").AtEpoch(epoch);
}

}  // namespace

SourceRun::SourceRun(std::shared_ptr<Context> context, SourceJob job, Engine::SourceDone done,
                     std::function<void()> forget)
    : context_(std::move(context)),
      job_(std::move(job)),
      done_(std::move(done)),
      forget_(std::move(forget)),
      slots_(context_->tuning().window),
      mapped_slots_(context_->tuning().mapped_window) {}

Status SourceRun::CheckLeg(const SourceAssignment& assignment) const {
  WW_RETURN_IF_ERROR(ValidateSlice(*assignment.slice, job_.binding));
  WW_RETURN_IF_ERROR(CheckBlocksFit(*assignment.slice, context_->tuning().segment_bytes_max));
  if (!context_->options.gpu_direct_required) return OkStatus();
  for (const plan::Stream& stream : assignment.slice->streams) {
    const auto no_peers = GpuDirectPools(context_->gpu_pools,
                                         DeviceOf(stream, plan::Side::kSource, job_.binding), {});
    if (!no_peers) {
      return GpuDirectRefusal("stream " + std::to_string(stream.id), no_peers.error());
    }
  }
  return OkStatus();
}

void SourceRun::FollowPlans() {
  const auto of_no_leg = [this](const auto& entry) {
    return std::ranges::none_of(job_.assignments, [&](const SourceAssignment& assignment) {
      return assignment.slice->plan == entry.first;
    });
  };
  if (job_.served) std::erase_if(*job_.served, of_no_leg);
  if (job_.delta) {
    job_.delta->Follow([&](const PlanId& plan) { return !of_no_leg(std::pair(plan, 0)); });
  }
  if (!job_.heads) return;
  std::erase_if(*job_.heads, of_no_leg);
  for (const SourceAssignment& assignment : job_.assignments)
    (*job_.heads)[assignment.slice->plan].Follow(assignment.slice->plan);
}

void SourceRun::Start() {
  FollowPlans();
  for (const SourceAssignment& assignment : job_.assignments) {
    if (Status status = CheckLeg(assignment); !status.ok()) {
      Finish(Fail(std::move(status).AtRank(job_.name).AtEpoch(job_.epoch)));
      return Changed();
    }
    for (const plan::Stream& stream : assignment.slice->streams) {
      streams_.push_back(std::make_unique<SourceStream>(*this, stream, assignment.slice->plan,
                                                        assignment.readers));
      by_key_.emplace(std::pair(assignment.slice->plan.low, stream.id), streams_.back().get());
    }
  }
  bytes_total_ = progress().bytes_total;
  ArmProgressTimer();
  ArmStallTimer();
  ArmWaitingTimer();
  if (job_.received) {
    job_.received->Listen([weak = weak_from_this()](uint32_t stream) {
      if (auto self = weak.lock()) self->OnReceived(stream);
    });
  }
  context_->workers.Post([self = shared_from_this()] {
    const Tuning& tuning = self->context_->tuning();
    std::vector<plan::StreamSchedule> schedules;
    for (const auto& stream : self->streams_) {
      schedules.push_back(
          plan::ScheduleOf(stream->stream(), tuning.segment_bytes_max, tuning.slot_bytes));
    }
    self->context_->strand.Post([self, schedules = std::move(schedules)]() mutable {
      self->OnPlanned(std::move(schedules));
    });
  });
}

void SourceRun::OnPlanned(std::vector<plan::StreamSchedule> schedules) {
  planned_ = true;
  for (size_t i = 0; i < streams_.size(); ++i) {
    const uint64_t offset = sums_bytes_;
    sums_bytes_ += sizeof(uint64_t) * schedules[i].segments.size();
    streams_[i]->OnPlanned(std::move(schedules[i]), offset);
  }
  for (auto& [endpoint, open] : std::exchange(early_opens_, {})) OnOpen(endpoint, open);
  Changed();
}

void SourceRun::OnReceived(uint32_t stream) {
  for (const auto& one : streams_) {
    if (one->stream().id == stream) one->OnReceived();
  }
}

SourceStream* SourceRun::FindStream(const StreamKey& key) {
  auto entry = by_key_.find({key.plan_low, key.stream});
  return entry == by_key_.end() ? nullptr : entry->second;
}

// A session says whose agent it is (transport/proof.h), and outlives the ticket that opened it.
Status SourceRun::CheckReader(const transport::Endpoint& endpoint, const Notify& open,
                              const SourceStream& stream) const {
  if (!job_.readers) return OkStatus();
  const Incarnation caller = endpoint.hello().caller;
  bool may = job_.readers->callers.contains(caller);
  if (may && !job_.readers->ranks.empty()) {
    const auto reader = job_.readers->ranks.find(open.key.reader);
    may = reader != job_.readers->ranks.end() && reader->second.caller == caller &&
          reader->second.rank == stream.stream().target_rank;
  }
  if (may) return OkStatus();
  context_->metrics.Add("auth_failures_total", 1, {{"reason", "stream"}});
  return Status(Code::kUnauthenticated, Reason::kTicketRejected, "a reader of another job");
}

void SourceRun::OnOpen(const std::shared_ptr<transport::Endpoint>& endpoint, const Notify& open) {
  SourceStream* stream = FindStream(open.key);
  const Status may = stream == nullptr
                         ? Status(Code::kNotFound, Reason::kNotRegistered, "no such stream")
                         : CheckReader(*endpoint, open, *stream);
  if (!may.ok()) {
    Notify fail;
    fail.type = NotifyType::kFail;
    fail.key = open.key;
    fail.code = may.code();
    fail.reason = may.reason();
    return context_->Send(endpoint, fail);
  }
  if (!planned_ && !stop_reason_) {
    early_opens_.emplace_back(endpoint, open);
    return;
  }
  stream->OnOpen(endpoint, open);
}

void SourceRun::OnCredit(const std::shared_ptr<transport::Endpoint>& endpoint,
                         const Notify& credit) {
  if (SourceStream* stream = FindStream(credit.key)) stream->OnCredit(endpoint->id(), credit);
}

void SourceRun::OnClose(const std::shared_ptr<transport::Endpoint>& endpoint, const Notify& close) {
  std::erase_if(early_opens_, [&](const auto& early) {
    return early.first == endpoint && early.second.key == close.key;
  });
  if (SourceStream* stream = FindStream(close.key)) stream->OnClose(endpoint->id(), close);
}

void SourceRun::OnSessionLost(uint64_t endpoint, const Status& why) {
  std::erase_if(early_opens_, [&](const auto& early) { return early.first->id() == endpoint; });
  for (const auto& stream : streams_) stream->OnSessionLost(endpoint, why);
}

bool SourceRun::CanBeMapped(const transport::Transport& transport) const {
  return transport.capabilities().maps_device_memory ||
         std::ranges::none_of(job_.binding, [](const memory::RegionSpan& tensor) {
           return tensor.region->on_device();
         });
}

Status SourceRun::MakeSumsRegion() {
  if (sums_region_) return OkStatus();
  WW_ASSIGN_OR_STATUS(sums_region_,
                      memory::MemoryRegion::Allocate(
                          "sums", RoundUp(std::max<uint64_t>(sums_bytes_, 1), kPageBytes)));
  return OkStatus();
}

Result<SourceRun::MappedKeys> SourceRun::ExportForMapping(transport::Transport* transport) {
  if (auto known = exports_.find(transport); known != exports_.end()) return known->second;
  WW_FAIL_IF_ERROR(MakeSumsRegion());
  MappedKeys keys;
  keys.binding = transport->Export(job_.binding);
  WW_FAILPOINT("transfer.after_memory_exported");
  keys.sums = transport->Export({{sums_region_, 0, sums_region_->size()}});
  exports_.emplace(transport, keys);
  return keys;
}

Engine::Progress SourceRun::progress() const {
  Engine::Progress progress;
  for (const auto& stream : streams_) {
    progress.bytes_done += stream->bytes_done();
    progress.bytes_total += stream->stream().bytes;
  }
  return progress;
}

// ---- the end -----------------------------------------------------------------------------------

void SourceRun::Finish(Result<SourceReport> result) {
  if (finished_) return;
  finished_ = true;
  context_->strand.Cancel(progress_timer_);
  context_->strand.Cancel(stall_timer_);
  context_->strand.Cancel(word_timer_);
  context_->strand.Cancel(waiting_timer_);
  context_->strand.Post(
      [done = std::move(done_), result = std::move(result)]() mutable { done(std::move(result)); });
}

// Whether the version goes on without a reader that was left behind is not for a source to say: it
// fails by itself, or is not staged when the others are. Nor is it where readers may be excluded.
bool SourceRun::AwaitsWord() {
  const auto left_behind = [](const auto& stream) { return IsLeftBehind(stream->status()); };
  if (job_.stall_limit > Nanos(0) && std::ranges::any_of(streams_, left_behind)) return true;
  const auto lacks_a_reader = [](const auto& stream) {
    return !stream->stopped() && !stream->status().ok();
  };
  if (!job_.drops_readers || word_overdue_ || std::ranges::none_of(streams_, lacks_a_reader)) {
    return false;
  }
  if (word_timer_ == 0) {
    word_timer_ = context_->strand.PostAfter(context_->tuning().progress_timeout,
                                             [self = shared_from_this()] {
                                               self->word_overdue_ = true;
                                               self->Changed();
                                             });
  }
  return true;
}

void SourceRun::FinishFromStreams() {
  if (AwaitsWord()) return;
  SourceReport report;
  TimeRange packing;
  for (const auto& stream : streams_) {
    if (Status status = stream->status(); !status.ok()) {
      return Finish(Fail(std::move(status).AtRank(job_.name).AtEpoch(job_.epoch)));
    }
    if (!stream->has_readers()) continue;
    report.digests.push_back(stream->digest());
    report.bytes_packed += stream->bytes_packed();
    packing.Add(stream->packing());
  }
  if (packing.begun()) {
    report.spans.push_back({"pack", packing.begin(), packing.end(), report.bytes_packed, {}, {}});
  }
  Finish(std::move(report));
}

void SourceRun::Exclude(const PlanId& plan, const std::vector<ParticipantId>& readers) {
  for (const auto& stream : streams_) {
    const uint32_t rank = stream->stream().target_rank;
    if (stream->plan() == plan && rank < readers.size()) stream->Exclude(readers[rank]);
  }
  Changed();
}

bool SourceRun::Quiet() const {
  return std::ranges::all_of(streams_, [](const auto& stream) { return stream->quiet(); });
}

void SourceRun::Changed() {
  if (!finished_ && planned_ &&
      std::ranges::all_of(streams_, [](const auto& stream) { return stream->finished(); })) {
    FinishFromStreams();
  }
  if (!finished_ || !Quiet() || forgotten_) return;
  if (!revoking_) return RevokeExports();
  if (revokes_left_ > 0) return;
  forgotten_ = true;
  context_->strand.Cancel(grace_timer_);
  for (const auto& stream : streams_) stream->End();
  forget_();
  for (auto& drained : drained_) context_->strand.Post(std::move(drained));
}

void SourceRun::RevokeExports() {
  revoking_ = true;
  revokes_left_ = 2 * exports_.size();
  if (exports_.empty()) return Changed();
  const auto revoked = [self = shared_from_this()] {
    self->context_->strand.Post([self] {
      --self->revokes_left_;
      self->Changed();
    });
  };
  for (const auto& [transport, keys] : exports_) {
    transport->Revoke(keys.binding, revoked);
    transport->Revoke(keys.sums, revoked);
  }
}

void SourceRun::Drain(std::function<void()> drained) {
  drained_.push_back(std::move(drained));
  if (!stop_reason_) {
    stop_reason_ = Drained(job_.epoch);
    for (const auto& stream : streams_) stream->Stop(*stop_reason_);
    for (auto& [endpoint, open] : std::exchange(early_opens_, {})) OnOpen(endpoint, open);
    grace_timer_ =
        context_->strand.PostAfter(context_->tuning().drain_grace, [self = shared_from_this()] {
          for (const auto& stream : self->streams_) {
            stream->CloseSessions();
          }
        });
  }
  Finish(Fail(Drained(job_.epoch).AtRank(job_.name)));
  Changed();
}

// ---- progress ----------------------------------------------------------------------------------

void SourceRun::ArmProgressTimer() {
  Nanos oldest = context_->clock.Now();
  for (const auto& stream : streams_) {
    if (!stream->finished()) oldest = std::min(oldest, stream->last_progress());
  }
  const Nanos due = oldest + context_->tuning().progress_timeout;
  progress_timer_ = context_->strand.PostAfter(
      due - context_->clock.Now(), [self = shared_from_this()] { self->CheckProgress(); });
}

void SourceRun::CheckProgress() {
  const Nanos limit = context_->clock.Now() - context_->tuning().progress_timeout;
  for (const auto& stream : streams_) {
    if (stream->finished() || stream->last_progress() > limit) continue;
    stream->Stop(Status(Code::kDeadlineExceeded, Reason::kDeadlineExceeded,
                        "stream " + std::to_string(stream->stream().id) +
                            " made no progress: " + stream->WaitsFor()));
  }
  Changed();
  if (!finished_) ArmProgressTimer();
}

void SourceRun::ArmStallTimer() {
  const Nanos limit = job_.stall_limit;
  if (limit == Nanos(0)) return;
  stall_timer_ = context_->strand.PostAfter(limit / 4, [self = shared_from_this(), limit] {
    for (const auto& stream : self->streams_) {
      stream->DetachStalled(self->context_->clock.Now() - limit);
    }
    self->Changed();
    if (!self->finished_) self->ArmStallTimer();
  });
}

void SourceRun::ArmWaitingTimer() {
  if (!job_.received) return;
  waiting_timer_ = context_->strand.PostAfter(
      std::min(kTellWaiting, context_->tuning().progress_timeout / 4), [self = shared_from_this()] {
        for (const auto& stream : self->streams_) stream->TellWaiting();
        if (!self->finished_) self->ArmWaitingTimer();
      });
}

}  // namespace weightwire::transfer
