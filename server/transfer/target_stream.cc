#include "server/transfer/target_stream.h"

#include <algorithm>

#include "kernels/kernels.h"
#include "server/base/failpoint.h"
#include "server/transfer/segment_copy.h"
#include "server/transfer/target_run.h"

// Mapped: a slot is one task that copies and compares. Fetched: target_fetches.cc.
namespace weightwire::transfer {

TargetStream::TargetStream(TargetRun& run, const plan::Stream& stream, const Peer& peer,
                           ParticipantId source, transport::Transport* transport)
    : run_(run),
      stream_(stream),
      peer_(peer),
      source_(source),
      transport_(transport),
      maps_(transport->capabilities().map),
      same_host_(run.context().IsOnOurHost(peer)),
      device_(DeviceOf(stream, plan::Side::kTarget, run.job().binding)),
      read_ahead_(ReadAheadOf(run.context().tuning(), same_host_)),
      pace_(run.context().strand, run.context().clock) {
  const uint64_t most = transport->capabilities().chunk_bytes_max;
  int64_t& chunk_bytes = read_ahead_.chunk_bytes;
  if (most > 0) chunk_bytes = std::min(chunk_bytes, static_cast<int64_t>(most));
  const auto pools = GpuDirectPools(run.context().gpu_pools, device_, {transport});
  if (pools) {
    gpu_ = *pools;
  } else {
    not_gpu_direct_ = pools.error();
  }
  Touch();
}

Context& TargetStream::context() const { return run_.context(); }
void TargetStream::Touch() { last_progress_ = context().clock.Now(); }
std::string TargetStream::TransportName() const { return transport_->name(); }

StreamKey TargetStream::Key() const {
  const TargetJob& job = run_.job();
  return {job.epoch, job.slice->plan.low, stream_.id, source_, job.participant};
}

void TargetStream::OnPlanned(plan::StreamSchedule schedule) {
  schedule_ = std::move(schedule);
  sums_.resize(schedule_.segments.size());
  planned_ = true;
  MaybeOpen();
}

void TargetStream::OnConnected(std::shared_ptr<transport::Endpoint> endpoint) {
  endpoint_ = std::move(endpoint);
  Touch();
  MaybeOpen();
}

void TargetStream::MaybeOpen() {
  if (!planned_ || !endpoint_ || stopped_) return;
  Notify open;
  open.type = NotifyType::kOpen;
  open.key = Key();
  open.maps = maps_;
  open.plan_high = run_.job().slice->plan.high;
  open.segment_bytes_max = static_cast<uint64_t>(context().tuning().segment_bytes_max);
  open.slot_bytes = static_cast<uint64_t>(context().tuning().slot_bytes);
  opened_ = true;
  reading_.Begin(context().clock.Now());
  context().Send(endpoint_, open);
}

StreamDigest TargetStream::digest() const {
  return {run_.job().slice->plan, stream_.id,
          kernels::SumContiguous(sums_.data(), sums_.size() * sizeof(uint64_t))};
}

void TargetStream::FailStream(Code code, Reason reason, const std::string& what) {
  run_.FailJob(Status(code, reason,
                      "stream " + std::to_string(stream_.id) + " from source rank " +
                          std::to_string(stream_.source_rank) + " (participant " +
                          std::to_string(source_.value) + ") over " + TransportName() + ": " +
                          what));
}

void TargetStream::FailSegment(uint32_t segment) {
  const plan::CopyOp& op = stream_.ops[schedule_.segments[segment].op_index];
  const std::string tensor = TensorName(*run_.job().slice, op);
  run_.FailJob(Status(Code::kDataLoss, Reason::kDigestMismatch,
                      "bytes of " + tensor + " that source rank " +
                          std::to_string(stream_.source_rank) + " (participant " +
                          std::to_string(source_.value) + ") sent to " + run_.job().name +
                          " over " + TransportName() + " differ from its sums after " +
                          std::to_string(context().tuning().rereads_max) + " more reads")
                   .AtTensor(tensor));
}

// Whoever maps GPU memory copies within it.
Status TargetStream::CheckGpuDirect() const {
  const bool maps_device =
      maps_ && transport_->capabilities().maps_device_memory && device_ != nullptr;
  if (!context().options.gpu_direct_required || gpu_ != nullptr || maps_device) return OkStatus();
  return GpuDirectRefusal("stream " + std::to_string(stream_.id) + " from source rank " +
                              std::to_string(stream_.source_rank) + " over " + TransportName(),
                          not_gpu_direct_);
}

void TargetStream::FailDevice(const Status& why) {
  FailStream(why.code(), why.reason(), why.message());
}

// ---- announced slots ---------------------------------------------------------------------------

void TargetStream::OnReady(const Notify& ready) {
  if (stopped_ || complete_) return;
  if (ready.slot != next_ready_ || ready.slot >= schedule_.slots.size()) {
    return FailStream(Code::kInternal, Reason::kInvalidRequest,
                      "slots were announced out of order");
  }
  WW_FAILPOINT("transfer.before_a_slot_is_read");
  ++next_ready_;
  Slot& slot = slots_[ready.slot];
  slot.memory = ready.memory;
  slot.sums_offset = ready.offset;
  slot.changed = ready.changed;
  if (next_delta_) {
    slot.delta_memory = next_delta_->memory;
    slot.delta.newest_bytes = next_delta_->delta_newest_bytes;
    slot.delta.bytes = next_delta_->delta_bytes;
    next_delta_.reset();
  }
  Touch();
  // A source that lies on a GPU which this transport cannot map has answered without a binding, and
  // announces packed slots as to a reader that does not map.
  if (maps_ && !mapped_ && maps_pending_ == 0 && ready.memory.id != 0) {
    maps_ = false;
    if (Status status = CheckGpuDirect(); !status.ok()) return run_.FailJob(std::move(status));
  }
  if (!maps_) return OrderSlot(ready.slot);
  if (mapped_) CopySlot(ready.slot);
}

// Time runs for what we have to do ourselves, whatever the source waits for.
void TargetStream::OnWaiting(const Notify& waiting) {
  if (waiting.slot == next_ready_ && slots_.empty()) Touch();
}

// Its source makes none that is as long as the slot.
void TargetStream::OnDelta(const Notify& delta) {
  if (stopped_ || complete_ || maps_) return;
  const bool fits = delta.slot == next_ready_ && delta.slot < schedule_.slots.size() &&
                    delta.delta_newest_bytes <= schedule_.slots[delta.slot].bytes &&
                    delta.delta_bytes <= SlotDeltaBytesMax(schedule_.slots[delta.slot]);
  if (!fits) {
    return FailStream(Code::kInternal, Reason::kInvalidRequest,
                      "what changed in a slot was announced out of order or is longer than it");
  }
  next_delta_ = delta;
}

void TargetStream::CountMoved(int64_t bytes) {
  reading_.End(context().clock.Now());
  context().metrics.Add("transfer_bytes_total", static_cast<double>(bytes),
                        {{"transport", TransportName()}, {"direction", "in"}});
  if (device_ != nullptr && !maps_) {
    context().CountGpuBytes(bytes, TransportName(), "in", gpu_ != nullptr);
  }
}

void TargetStream::CountDelta(const DeltaFigures& made) {
  const auto add = [this](const char* name, const char* kind, int64_t count) {
    context().metrics.Add(name, static_cast<double>(count), {{"kind", kind}});
  };
  add("transfer_bytes_delta_total", "made", made.bytes);
  add("transfer_bytes_delta_total", "code", made.code_bytes);
  add("delta_elements_total", "all", made.elements);
  add("delta_elements_total", "changed", made.changed);
}

void TargetStream::OnSlotVerified(uint32_t index) {
  WW_FAILPOINT("transfer.after_a_slot_is_verified_before_its_credit");
  Slot& slot = slots_.at(index);
  const int64_t kept = slot.kept_bytes;
  const DeltaFigures made = slot.made;
  SlotDelta passed_on;
  if (run_.job().received && slot.delta.region && made.bytes > 0) {
    passed_on = std::move(slot.delta);
    passed_on.bytes = slot.delta_read;
  }
  slots_.erase(index);
  ++slots_done_;
  const int64_t bytes = schedule_.slots[index].payload_bytes;
  bytes_done_ += bytes;
  bytes_kept_ += kept;
  delta_ += made;
  if (kept > 0) context().metrics.Add("transfer_bytes_kept_total", static_cast<double>(kept), {});
  if (made.code_bytes > 0) CountDelta(made);
  Touch();
  verifying_.End(last_progress_);
  Notify credit;
  credit.type = NotifyType::kCredit;
  credit.key = Key();
  credit.slot = index;
  credit.bytes_kept =
      static_cast<uint64_t>(kept + std::max<int64_t>(made.bytes - made.code_bytes, 0));
  context().Send(endpoint_, credit);
  if (run_.job().received) run_.job().received->Add(stream_.id, index, std::move(passed_on));
  if (slots_done_ < schedule_.slots.size()) return;
  complete_ = true;
  MaybeClose();
  run_.Changed();
}

std::vector<uint64_t> TargetStream::KnownSums(const Kept& kept, uint32_t index) const {
  const plan::SlotSpan& span = schedule_.slots[index];
  return kept.Of(run_.job().slice->plan, stream_.id, span.first_segment, span.segment_count);
}

// Also of a stream that was stopped, and of what is not verified yet: the next attempt's sums
// decide.
void TargetStream::NoteSums(uint32_t first_segment, uint32_t segment_count) {
  for (uint32_t segment = first_segment; segment < first_segment + segment_count; ++segment) {
    run_.job().kept->Note(stream_.id, segment, sums_[segment]);
  }
}

// ---- mapped ------------------------------------------------------------------------------------

void TargetStream::OnBinding(const Notify& binding) {
  if (stopped_ || complete_ || !maps_ || mapped_ || maps_pending_ > 0) return;
  Touch();
  maps_pending_ = 2;
  Map(binding.binding, &binding_);
  Map(binding.sums, &mapped_sums_);
}

void TargetStream::Map(transport::RegionKey key, transport::MappedList* into) {
  endpoint_->Map(
      key, context().tuning().get_timeout,
      [this, keep = run_.shared_from_this(), into](auto mapped) {
        keep->context().strand.Post([this, keep, into, mapped = std::move(mapped)]() mutable {
          OnMapped(into, std::move(mapped));
        });
      });
}

void TargetStream::OnMapped(transport::MappedList* into, Result<transport::MappedList> mapped) {
  --maps_pending_;
  if (stopped_) {
    MaybeClose();
    return run_.Changed();
  }
  if (!mapped.has_value()) return FailMap(mapped.error());
  *into = std::move(*mapped);
  if (maps_pending_ > 0) return;
  if (Status status = CheckMapped(); !status.ok()) {
    return FailStream(status.code(), status.reason(), status.message());
  }
  mapped_ = true;
  Touch();
  for (uint32_t index = 0; index < next_ready_ && !stopped_; ++index) CopySlot(index);
}

// What cannot be mapped today cannot be tomorrow: the next attempt takes another transport, unless
// the source has only withdrawn its memory.
void TargetStream::FailMap(const Status& why) {
  const bool withdrawn = why.code() == Code::kNotFound || why.code() == Code::kCancelled;
  if (!withdrawn) run_.Avoid(*this);
  FailStream(why.code(), why.reason(), "its memory could not be mapped: " + why.message());
}

Status TargetStream::CheckMapped() const {
  std::vector<uint64_t> tensor_bytes;
  for (const auto& piece : binding_.pieces) tensor_bytes.push_back(piece.bytes);
  if (mapped_sums_.pieces.size() != 1 || mapped_sums_.pieces[0].at.device != nullptr) {
    return Status(Code::kInternal, Reason::kInvalidRequest,
                  "its sums are not one piece of the host's memory");
  }
  return ValidateSourceSide(stream_, tensor_bytes);
}

void TargetStream::CopySlot(uint32_t index) {
  const std::span<const std::byte> sums(mapped_sums_.pieces[0].at.at, mapped_sums_.pieces[0].bytes);
  const uint64_t offset = slots_.at(index).sums_offset;
  const uint64_t bytes = sizeof(uint64_t) * schedule_.slots[index].segment_count;
  if (offset > sums.size() || bytes > sums.size() - offset) {
    return FailStream(Code::kInternal, Reason::kInvalidRequest, "a slot's sums leave their memory");
  }
  ++tasks_;
  verifying_.Begin(context().clock.Now());
  std::shared_ptr<SourceSums> source_sums = context().SumsAtReader(Key());
  if (!source_sums) source_sums = SumsIn(sums.subspan(offset, bytes), schedule_.slots[index]);
  context().workers.Post([this, keep = run_.shared_from_this(), index,
                          source_sums = std::move(source_sums),
                          kept = KnownSums(*run_.job().kept, index)] {
    MappedCopy copied = CopyMapped(stream_, schedule_, index, binding_.pieces, *source_sums, kept,
                                   run_.job().binding, keep->context().tuning().rereads_max, stop_);
    keep->context().strand.Post([this, keep, index, copied = std::move(copied)]() mutable {
      OnCopied(index, std::move(copied));
    });
  });
}

void TargetStream::OnCopied(uint32_t index, MappedCopy copied) {
  --tasks_;
  if (copied.mismatches > 0) {
    context().metrics.Add("digest_failures_total", copied.mismatches,
                          {{"transport", TransportName()}});
  }
  if (copied.rereads > 0) {
    rereads_ += copied.rereads;
    context().metrics.Add("transfer_retries_total", copied.rereads, {{"cause", "digest_mismatch"}});
  }
  const uint32_t first = schedule_.slots[index].first_segment;
  std::ranges::copy(copied.sums, sums_.begin() + first);
  NoteSums(first, static_cast<uint32_t>(copied.sums.size()));
  if (stopped_) {
    MaybeClose();
    return run_.Changed();
  }
  if (!copied.status.ok()) return FailDevice(copied.status);
  if (copied.broken) return FailSegment(*copied.broken);
  slots_.at(index).kept_bytes = copied.kept_bytes;
  CountMoved(schedule_.slots[index].payload_bytes - copied.kept_bytes);
  OnSlotVerified(index);
}

// ---- the end -----------------------------------------------------------------------------------

void TargetStream::Stop(const Status& why) {
  if (stopped_ || complete_) return;
  stopped_ = true;
  stop_ = true;
  why_ = why;
  orders_.clear();
  const Asking asked = std::exchange(asking_, Asking::kNothing);
  if (asked == Asking::kGet) run_.gets(same_host_).Cancel(ticket_);
  if (asked == Asking::kScratch) {
    scratch().CancelWait(ticket_);
    run_.gets(same_host_).Leave();
  }
  if (asked == Asking::kPace) {
    pace_.Cancel();
    const memory::RegionSpan scratch = std::exchange(paced_scratch_, {});
    if (scratch.region) this->scratch().Release(scratch);
    run_.gets(same_host_).Leave();
  }
  MaybeClose();
}

void TargetStream::OnSessionLost() { closed_ = true; }

void TargetStream::CloseSession() {
  if (endpoint_) endpoint_->Close();
}

void TargetStream::MaybeClose() {
  if (!quiet() || !(stopped_ || complete_)) return;
  binding_ = {};
  mapped_sums_ = {};
  if (closed_ || !opened_) return;
  closed_ = true;
  Notify close;
  close.type = NotifyType::kClose;
  close.key = Key();
  close.code = complete_ ? Code::kOk : why_.code();
  close.reason = complete_ ? Reason::kNone : why_.reason();
  context().Send(endpoint_, close);
}

}  // namespace weightwire::transfer
