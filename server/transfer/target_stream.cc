#include "server/transfer/target_stream.h"

#include <algorithm>

#include "kernels/kernels.h"
#include "server/transfer/segment_copy.h"
#include "server/transfer/target_run.h"
#include "server/transfer/windows.h"

// Mapped: a slot is one task that copies and compares. Fetched: a slot becomes orders (chunks),
// each of them one Get and then one task that unpacks and sums; a segment is compared when both its
// sum and the slot's sums are here. A segment that differs is fetched again after its sum.
namespace weightwire::transfer {

TargetStream::TargetStream(TargetRun& run, const plan::Stream& stream, const Peer& peer,
                           ParticipantId source, transport::Transport* transport)
    : run_(run),
      stream_(stream),
      peer_(peer),
      source_(source),
      transport_(transport),
      maps_(transport->capabilities().map),
      chunk_bytes_(run.context().tuning().chunk_bytes),
      pace_(run.context().strand, run.context().clock) {
  const uint64_t most = transport->capabilities().chunk_bytes_max;
  if (most > 0) chunk_bytes_ = std::min(chunk_bytes_, static_cast<int64_t>(most));
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

// ---- announced slots ---------------------------------------------------------------------------

void TargetStream::OnReady(const Notify& ready) {
  if (stopped_ || complete_) return;
  if (ready.slot != next_ready_ || ready.slot >= schedule_.slots.size()) {
    return FailStream(Code::kInternal, Reason::kInvalidRequest,
                      "slots were announced out of order");
  }
  ++next_ready_;
  Slot& slot = slots_[ready.slot];
  slot.memory = ready.memory;
  slot.sums_offset = ready.offset;
  Touch();
  if (!maps_) return OrderSlot(ready.slot);
  if (mapped_) CopySlot(ready.slot);
}

void TargetStream::OnSlotVerified(uint32_t index) {
  slots_.erase(index);
  ++slots_done_;
  const int64_t bytes = schedule_.slots[index].payload_bytes;
  bytes_done_ += bytes;
  context().metrics.Add("transfer_bytes_total", static_cast<double>(bytes),
                        {{"transport", TransportName()}, {"direction", "in"}});
  Touch();
  Notify credit;
  credit.type = NotifyType::kCredit;
  credit.key = Key();
  credit.slot = index;
  context().Send(endpoint_, credit);
  if (run_.job().received) run_.job().received->Add(stream_.id, index);
  if (slots_done_ < schedule_.slots.size()) return;
  complete_ = true;
  MaybeClose();
  run_.Changed();
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
  if (!mapped.has_value()) {
    return FailStream(mapped.error().code(), mapped.error().reason(),
                      "its memory could not be mapped: " + mapped.error().message());
  }
  *into = std::move(*mapped);
  if (maps_pending_ > 0) return;
  if (Status status = CheckMapped(); !status.ok()) {
    return FailStream(status.code(), status.reason(), status.message());
  }
  mapped_ = true;
  Touch();
  for (uint32_t index = 0; index < next_ready_ && !stopped_; ++index) CopySlot(index);
}

Status TargetStream::CheckMapped() const {
  std::vector<uint64_t> tensor_bytes;
  for (const auto& piece : binding_.pieces) tensor_bytes.push_back(piece.size());
  if (mapped_sums_.pieces.size() != 1) {
    return Status(Code::kInternal, Reason::kInvalidRequest, "its sums are not one piece");
  }
  return ValidateSourceSide(stream_, tensor_bytes);
}

void TargetStream::CopySlot(uint32_t index) {
  const auto sums = mapped_sums_.pieces[0];
  const uint64_t offset = slots_.at(index).sums_offset;
  const uint64_t bytes = sizeof(uint64_t) * schedule_.slots[index].segment_count;
  if (offset > sums.size() || bytes > sums.size() - offset) {
    return FailStream(Code::kInternal, Reason::kInvalidRequest, "a slot's sums leave their memory");
  }
  ++tasks_;
  SegmentSums source_sums = context().SumsAtReader(Key());
  if (!source_sums) source_sums = SumsIn(sums.subspan(offset, bytes), schedule_.slots[index]);
  context().workers.Post([this, keep = run_.shared_from_this(), index,
                          source_sums = std::move(source_sums)] {
    MappedCopy copied = CopyMapped(stream_, schedule_, index, binding_.pieces, source_sums,
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
  if (stopped_) {
    MaybeClose();
    return run_.Changed();
  }
  if (copied.broken) return FailSegment(*copied.broken);
  std::ranges::copy(copied.sums, sums_.begin() + schedule_.slots[index].first_segment);
  OnSlotVerified(index);
}

// ---- fetched -----------------------------------------------------------------------------------

void TargetStream::OrderSlot(uint32_t index) {
  Slot& slot = slots_.at(index);
  slot.expected.resize(schedule_.slots[index].segment_count);
  slot.state.resize(schedule_.slots[index].segment_count, SegmentState::kFetching);
  for (const Chunk& chunk : ChunksOf(schedule_, index, chunk_bytes_)) {
    orders_.push_back({chunk, false});
  }
  PumpGets();
}

// Every Get costs a stream its part of the stream, so that all advance alike.
double TargetStream::CostOf(const Order& order) const {
  return static_cast<double>(order.chunk.segment_count) / static_cast<double>(sums_.size());
}

uint64_t TargetStream::BytesOf(const Order& order) const {
  if (order.sum_only) return sizeof(uint64_t);
  int64_t bytes = 0;
  for (uint32_t i = 0; i < order.chunk.segment_count; ++i) {
    bytes += schedule_.segments[order.chunk.first_segment + i].bytes;
  }
  return static_cast<uint64_t>(bytes);
}

// Each Get that is posted asks for the next one.
void TargetStream::PumpGets() {
  const uint32_t window =
      WindowOf(stream_.bytes, run_.bytes_total(), context().tuning().gets_in_flight);
  if (stopped_ || asking_ != Asking::kNothing || orders_.empty() || gets_ >= window) return;
  asking_ = Asking::kGet;
  const uint64_t ticket =
      run_.gets().Enter(get_turn_, CostOf(orders_.front()),
                        [this, keep = run_.shared_from_this()] { OnGetAdmitted(); });
  if (ticket != 0) ticket_ = ticket;
}

void TargetStream::OnGetAdmitted() {
  const Order order = orders_.front();
  const bool plain = order.sum_only || ScratchBytes(stream_, schedule_, order.chunk,
                                                    context().tuning().direct_run_bytes_min) == 0;
  if (plain) {
    orders_.pop_front();
    return Pace(order, {});
  }
  asking_ = Asking::kScratch;
  const uint64_t ticket = context().scratch->Acquire(
      scratch_turn_, CostOf(order),
      [this, keep = run_.shared_from_this()](memory::RegionSpan scratch) {
        // A re-read may have come first meanwhile; scratch is large enough for any chunk.
        const Order next = orders_.front();
        orders_.pop_front();
        Pace(next, std::move(scratch));
      });
  if (ticket != 0) ticket_ = ticket;
}

void TargetStream::Pace(const Order& order, memory::RegionSpan scratch) {
  asking_ = Asking::kPace;
  paced_scratch_ = std::move(scratch);
  const auto post = [this, order, keep = run_.shared_from_this()] {
    asking_ = Asking::kNothing;
    PostGet(order, std::exchange(paced_scratch_, {}));
    PumpGets();
  };
  const bool now = pace_.Enter(context().ingress.For({peer_.incarnation}, BytesOf(order)),
                               [this, post](Nanos waited) {
                                 context().CountRateLimited("in", waited);
                                 Touch();
                                 post();
                               });
  if (now) post();
}

void TargetStream::PostGet(const Order& order, memory::RegionSpan scratch) {
  Slot& slot = slots_.at(order.chunk.slot);
  auto fetch = std::make_shared<Fetch>();
  fetch->keep = run_.shared_from_this();
  fetch->chunk = order.chunk;
  fetch->sum_only = order.sum_only;
  fetch->scratch = std::move(scratch);
  if (order.sum_only) {
    const uint32_t i = order.chunk.first_segment - schedule_.slots[order.chunk.slot].first_segment;
    fetch->scatter.offset = sizeof(uint64_t) * i;
    fetch->scatter.into = {std::as_writable_bytes(std::span(&slot.expected[i], 1))};
  } else {
    fetch->scatter = ScatterOf(stream_, schedule_, order.chunk, run_.job().binding,
                               context().tuning().direct_run_bytes_min,
                               fetch->scratch.region ? fetch->scratch.data() : nullptr,
                               slot.expected, fetch->pad);
  }
  ++gets_;
  endpoint_->Get(slot.memory, fetch->scatter.offset, fetch->scatter.into,
                 context().tuning().get_timeout, fetch, [this, fetch](Status status) {
                   fetch->keep->context().strand.Post(
                       [this, fetch, status = std::move(status)] { OnGetDone(fetch, status); });
                 });
}

void TargetStream::ReleaseScratch(Fetch& fetch) {
  const memory::RegionSpan scratch = std::exchange(fetch.scratch, {});
  if (scratch.region) context().scratch->Release(scratch);
}

void TargetStream::OnGetDone(const std::shared_ptr<Fetch>& fetch, const Status& status) {
  --gets_;
  run_.gets().Leave();
  if (stopped_ || !status.ok()) ReleaseScratch(*fetch);
  if (stopped_) {
    MaybeClose();
    return run_.Changed();
  }
  if (!status.ok()) {
    // A slot disappears only when its source gives up; its FAIL may still be on the way.
    const bool revoked = status.code() == Code::kNotFound || status.code() == Code::kCancelled;
    return revoked ? FailStream(Code::kAborted, Reason::kAbortRequested,
                                "the source withdrew a slot: " + status.message())
                   : FailStream(status.code(), status.reason(), status.message());
  }
  Touch();
  const Chunk& chunk = fetch->chunk;
  if (fetch->sum_only) {
    ReleaseScratch(*fetch);
    orders_.push_front({chunk, false});
    return PumpGets();
  }
  if (chunk.segment_count > 0) {
    ++tasks_;
    context().workers.Post([this, fetch] {
      auto sums = UnpackAndSum(stream_, schedule_, fetch->chunk, fetch->scatter,
                               fetch->scratch.region ? fetch->scratch.data() : nullptr,
                               run_.job().binding, stop_);
      fetch->keep->context().strand.Post(
          [this, fetch, sums = std::move(sums)] { OnSummed(fetch, sums); });
    });
  }
  if (chunk.with_sums) {
    const plan::SlotSpan& span = schedule_.slots[chunk.slot];
    slots_.at(chunk.slot).sums_here = true;
    Compare(chunk.slot, span.first_segment, span.segment_count);
  }
  PumpGets();
}

void TargetStream::OnSummed(const std::shared_ptr<Fetch>& fetch,
                            const std::vector<uint64_t>& sums) {
  --tasks_;
  ReleaseScratch(*fetch);
  if (stopped_) {
    MaybeClose();
    return run_.Changed();
  }
  Touch();
  const Chunk& chunk = fetch->chunk;
  Slot& slot = slots_.at(chunk.slot);
  const uint32_t first = schedule_.slots[chunk.slot].first_segment;
  for (uint32_t i = 0; i < chunk.segment_count; ++i) {
    sums_[chunk.first_segment + i] = sums[i];
    slot.state[chunk.first_segment + i - first] = SegmentState::kSummed;
  }
  Compare(chunk.slot, chunk.first_segment, chunk.segment_count);
  PumpGets();
}

void TargetStream::Compare(uint32_t index, uint32_t first_segment, uint32_t segment_count) {
  Slot& slot = slots_.at(index);
  if (!slot.sums_here) return;
  const plan::SlotSpan& span = schedule_.slots[index];
  for (uint32_t segment = first_segment; segment < first_segment + segment_count; ++segment) {
    const uint32_t i = segment - span.first_segment;
    if (slot.state[i] != SegmentState::kSummed) continue;
    if (sums_[segment] == slot.expected[i]) {
      slot.state[i] = SegmentState::kVerified;
      ++slot.verified;
      continue;
    }
    context().metrics.Add("digest_failures_total", 1, {{"transport", TransportName()}});
    if (slot.rereads[i]++ == context().tuning().rereads_max) return FailSegment(segment);
    Reread(index, segment);
  }
  if (slot.verified == span.segment_count) OnSlotVerified(index);
}

// The sum first: it may be what was damaged.
void TargetStream::Reread(uint32_t index, uint32_t segment) {
  const uint32_t i = segment - schedule_.slots[index].first_segment;
  slots_.at(index).state[i] = SegmentState::kFetching;
  ++rereads_;
  context().metrics.Add("transfer_retries_total", 1, {{"cause", "digest_mismatch"}});
  orders_.push_front({Chunk{index, segment, 1, false}, true});
}

// ---- the end -----------------------------------------------------------------------------------

void TargetStream::Stop(const Status& why) {
  if (stopped_ || complete_) return;
  stopped_ = true;
  stop_ = true;
  why_ = why;
  orders_.clear();
  const Asking asked = std::exchange(asking_, Asking::kNothing);
  if (asked == Asking::kGet) run_.gets().Cancel(ticket_);
  if (asked == Asking::kScratch) {
    context().scratch->CancelWait(ticket_);
    run_.gets().Leave();
  }
  if (asked == Asking::kPace) {
    pace_.Cancel();
    const memory::RegionSpan scratch = std::exchange(paced_scratch_, {});
    if (scratch.region) context().scratch->Release(scratch);
    run_.gets().Leave();
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
