#include <algorithm>
#include <cstring>

#include "server/transfer/fetch.h"
#include "server/transfer/flow_control.h"
#include "server/transfer/target_run.h"
#include "server/transfer/target_stream.h"

// The part of a TargetStream that reads over a transport that cannot map memory. A slot becomes
// orders (chunks), each of them one Get and then one task that unpacks and sums; a segment is
// compared when both its sum and the slot's sums are here. A segment that differs is fetched again
// after its sum. Where something is known of the bytes that are here already, the sums come first.
namespace weightwire::transfer {

void TargetStream::OrderSlot(uint32_t index) {
  Slot& slot = slots_.at(index);
  const plan::SlotSpan& span = schedule_.slots[index];
  slot.expected.resize(span.segment_count);
  slot.state.resize(span.segment_count, SegmentState::kFetching);
  const TargetJob& job = run_.job();
  slot.kept.here = KnownSums(*job.kept, index);
  if (job.served_kept) slot.kept.served = KnownSums(*job.served_kept, index);
  // What is served is summed if need be: its sums are not known after a fill, whose segments are
  // others.
  if (!(slot.kept.empty() && job.served.empty()) && slot.delta.bytes > 0 &&
      MakeRoomForDelta(slot, slot.delta.newest_bytes)) {
    orders_.push_back({Chunk{index, span.first_segment, 0, false}, Wanted::kDelta});
    return AdvanceGets();
  }
  if (slot.kept.empty() || (slot.changed && !run_.resumes())) {
    auto chunks = ChunksOf(schedule_, index, read_ahead_.chunk_bytes);
    // The sums last: the source makes those of what it sends on the way, and of what is left now.
    if (slot.changed) std::rotate(chunks.begin(), chunks.begin() + 1, chunks.end());
    return OrderChunks(chunks);
  }
  // A few bytes, and what follows waits for them: they pass what waits for its turn.
  ++sums_gets_;
  PostGet({Chunk{index, span.first_segment, 0, true}, Wanted::kSums}, {});
}

void TargetStream::OrderChunks(const std::vector<Chunk>& chunks) {
  for (const Chunk& chunk : chunks) orders_.push_back({chunk, Wanted::kBytes});
  AdvanceGets();
}

// The sums are here: what is here too need not be read.
void TargetStream::OnSums(uint32_t index) {
  Slot& slot = slots_.at(index);
  ++tasks_;
  // Nothing to sum where every segment has changed, which is what most versions do.
  if (!slot.kept.MayHold(slot.expected)) {
    return OnKept(index, std::vector<bool>(slot.expected.size()));
  }
  verifying_.Begin(context().clock.Now());
  context().workers.Post([this, keep = run_.shared_from_this(), index, kept = std::move(slot.kept),
                          expected = slot.expected] {
    std::vector<bool> taken = TakeKept(stream_, schedule_, index, kept, expected, run_.job().served,
                                       run_.job().binding, stop_);
    keep->context().strand.Post(
        [this, keep, index, taken = std::move(taken)] { OnKept(index, taken); });
  });
}

void TargetStream::OnKept(uint32_t index, const std::vector<bool>& kept) {
  --tasks_;
  Slot& slot = slots_.at(index);
  const uint32_t first = schedule_.slots[index].first_segment;
  for (uint32_t i = 0; i < kept.size(); ++i) {
    if (!kept[i]) continue;
    sums_[first + i] = slot.expected[i];
    slot.state[i] = SegmentState::kVerified;
    ++slot.verified;
    slot.kept_bytes += schedule_.segments[first + i].bytes;
    NoteSums(first + i, 1);
  }
  if (stopped_) {
    MaybeClose();
    return run_.Changed();
  }
  Touch();
  if (slot.verified == kept.size()) return OnSlotVerified(index);
  OrderChunks(ChunksOf(schedule_, index, read_ahead_.chunk_bytes, kept));
}

// False: there is no memory for it. What was read stays at its beginning.
bool TargetStream::MakeRoomForDelta(Slot& slot, uint32_t bytes) {
  auto region = context().delta_coders.Region(bytes);
  if (!region) return false;
  if (slot.delta.region) {
    std::memcpy(region->data(), slot.delta.region->data(), slot.delta_read);
  }
  slot.delta.region = std::move(region);
  slot.delta_read = bytes;
  return true;
}

// Makes what can be made of it; reads older codes where they are needed, and as they are the
// segments for which there is none.
void TargetStream::OnDeltaRead(uint32_t index) {
  Slot& slot = slots_.at(index);
  ++tasks_;
  verifying_.Begin(context().clock.Now());
  context().workers.Post([this, keep = run_.shared_from_this(), index, region = slot.delta.region,
                          read = slot.delta_read, kept = std::move(slot.kept),
                          taken = std::move(slot.taken)]() mutable {
    taken = TakeDelta(stream_, schedule_, index, {region->data(), read}, kept, run_.job().served,
                      run_.job().binding, keep->context().delta_coders, stop_, std::move(taken));
    keep->context().strand.Post(
        [this, keep, index, kept = std::move(kept), taken = std::move(taken)]() mutable {
          OnDeltaTaken(index, std::move(kept), std::move(taken));
        });
  });
}

void TargetStream::OnDeltaTaken(uint32_t index, KeptSums kept, DeltaTaken taken) {
  --tasks_;
  Slot& slot = slots_.at(index);
  const uint32_t first = schedule_.slots[index].first_segment;
  slot.kept_bytes = 0;
  slot.made.bytes = 0;
  slot.made.elements = taken.elements;
  slot.made.changed = taken.changes;
  slot.verified = 0;
  std::vector<bool> done(taken.segments.size());
  for (uint32_t i = 0; i < taken.segments.size(); ++i) {
    const bool is_kept = taken.segments[i] == DeltaTaken::Segment::kKept;
    done[i] = is_kept || taken.segments[i] == DeltaTaken::Segment::kMade;
    slot.expected[i] = taken.expected[i];
    if (!done[i]) continue;
    sums_[first + i] = taken.expected[i];
    slot.state[i] = SegmentState::kVerified;
    ++slot.verified;
    (is_kept ? slot.kept_bytes : slot.made.bytes) += schedule_.segments[first + i].bytes;
    NoteSums(first + i, 1);
  }
  if (stopped_) {
    MaybeClose();
    return run_.Changed();
  }
  Touch();
  if (taken.mismatches > 0) {
    context().metrics.Add("delta_mismatches_total", taken.mismatches,
                          {{"transport", TransportName()}});
  }
  if (!taken.status.ok()) {  // as if none had been offered
    context().metrics.Add("delta_mismatches_total", 1, {{"transport", TransportName()}});
    slot.delta.region.reset();
    return OrderChunks(ChunksOf(schedule_, index, read_ahead_.chunk_bytes));
  }
  slot.sums_here = true;
  if (slot.verified == done.size()) return OnSlotVerified(index);
  if (taken.wants_older() && slot.delta_read < slot.delta.bytes &&
      MakeRoomForDelta(slot, slot.delta.bytes)) {
    slot.kept = std::move(kept);
    slot.taken = std::move(taken);
    orders_.push_front({Chunk{index, first, 0, false}, Wanted::kOlderDelta});
    return AdvanceGets();
  }
  OrderChunks(ChunksOf(schedule_, index, read_ahead_.chunk_bytes, done));
}

// Every Get costs a stream its part of the stream, so that all advance alike.
double TargetStream::CostOf(const Order& order) const {
  const uint32_t segments = order.wanted == Wanted::kDelta
                                ? schedule_.slots[order.chunk.slot].segment_count
                                : order.chunk.segment_count;
  return static_cast<double>(segments) / static_cast<double>(sums_.size());
}

uint64_t TargetStream::BytesOf(const Order& order) const {
  if (order.reads_delta()) {
    const SlotDelta& delta = slots_.at(order.chunk.slot).delta;
    return order.wanted == Wanted::kDelta ? delta.newest_bytes : delta.bytes - delta.newest_bytes;
  }
  if (order.wanted != Wanted::kBytes) return 0;
  int64_t bytes = 0;  // sums do not count
  for (uint32_t i = 0; i < order.chunk.segment_count; ++i) {
    bytes += schedule_.segments[order.chunk.first_segment + i].bytes;
  }
  return static_cast<uint64_t>(bytes);
}

// Each Get that is posted asks for the next one.
void TargetStream::AdvanceGets() {
  const uint32_t window = WindowOf(stream_.bytes, run_.bytes_total(), read_ahead_.gets);
  if (stopped_ || asking_ != Asking::kNothing || orders_.empty() || gets_ - sums_gets_ >= window)
    return;
  asking_ = Asking::kGet;
  const uint64_t ticket = run_.gets(same_host_)
                              .Enter(get_turn_, CostOf(orders_.front()),
                                     [this, keep = run_.shared_from_this()] { OnGetAdmitted(); });
  if (ticket != 0) ticket_ = ticket;
}

void TargetStream::OnGetAdmitted() {
  const Order order = orders_.front();
  const bool plain =
      order.wanted != Wanted::kBytes ||
      ScratchBytes(stream_, schedule_, order.chunk, run_.job().binding, straight()) == 0;
  if (plain) {
    orders_.pop_front();
    return Pace(order, {});
  }
  asking_ = Asking::kScratch;
  const uint64_t ticket =
      scratch().Acquire(scratch_turn_, CostOf(order),
                        [this, keep = run_.shared_from_this()](memory::RegionSpan scratch) {
                          // A re-read may have come first meanwhile; scratch is large enough for
                          // any chunk.
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
    AdvanceGets();
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
  fetch->order = order;
  fetch->scratch = std::move(scratch);
  if (order.wanted == Wanted::kSum) {
    const uint32_t i = order.chunk.first_segment - schedule_.slots[order.chunk.slot].first_segment;
    fetch->scatter.offset = sizeof(uint64_t) * i;
    fetch->scatter.into = {std::as_writable_bytes(std::span(&slot.expected[i], 1))};
  } else if (order.reads_delta()) {
    const std::span<std::byte> all(slot.delta.region->data(), slot.delta_read);
    fetch->scatter.offset = order.wanted == Wanted::kDelta ? 0 : slot.delta.newest_bytes;
    fetch->scatter.into = {all.subspan(fetch->scatter.offset)};
  } else {
    fetch->scatter = ScatterOf(stream_, schedule_, order.chunk, run_.job().binding, straight(),
                               fetch->scratch, slot.expected);
  }
  ++gets_;
  transport::Endpoint::Take take;
  if (order.wanted == Wanted::kBytes && gets_through()) {
    fetch->sums.emplace(schedule_, order.chunk, fetch->scatter);
    take = [fetch](std::span<const std::byte> piece) { fetch->sums->Take(piece); };
  }
  endpoint_->GetThrough(
      order.reads_delta() ? slot.delta_memory : slot.memory, fetch->scatter.offset,
      fetch->scatter.into, context().tuning().get_timeout, fetch, std::move(take),
      [this, fetch](Status status) {
        fetch->keep->context().strand.Post(
            [this, fetch, status = std::move(status)] { OnGetDone(fetch, status); });
      });
}

void TargetStream::ReleaseScratch(Fetch& fetch) {
  const memory::RegionSpan scratch = std::exchange(fetch.scratch, {});
  if (scratch.region) this->scratch().Release(scratch);
}

void TargetStream::OnGetDone(const std::shared_ptr<Fetch>& fetch, const Status& status) {
  --gets_;
  if (fetch->order.wanted == Wanted::kSums) {
    --sums_gets_;
  } else {
    run_.gets(same_host_).Leave();
  }
  const Chunk& chunk = fetch->order.chunk;
  const bool has_bytes = fetch->order.wanted == Wanted::kBytes && chunk.segment_count > 0;
  if (!status.ok() || !has_bytes) ReleaseScratch(*fetch);
  // Also when stopped: what has come is known to the next attempt only by its sums.
  if (status.ok() && has_bytes) {
    CountMoved(static_cast<int64_t>(BytesOf(fetch->order)));
    if (fetch->summed()) {
      ReleaseScratch(*fetch);  // another order may have brought it
      verifying_.Begin(context().clock.Now());
      NoteSummed(chunk, fetch->sums->TakeAll());
    } else {
      SumChunk(fetch);
    }
  }
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
  if (fetch->order.reads_delta()) {
    const auto bytes = static_cast<int64_t>(fetch->scatter.into.front().size());
    CountMoved(bytes);
    slots_.at(chunk.slot).made.code_bytes += bytes;
    OnDeltaRead(chunk.slot);
    return AdvanceGets();
  }
  if (fetch->order.wanted == Wanted::kSum) {
    orders_.push_front({chunk, Wanted::kBytes});
    return AdvanceGets();
  }
  if (fetch->order.wanted == Wanted::kSums) {
    slots_.at(chunk.slot).sums_here = true;
    OnSums(chunk.slot);
    return AdvanceGets();
  }
  if (chunk.with_sums) {
    const plan::SlotSpan& span = schedule_.slots[chunk.slot];
    slots_.at(chunk.slot).sums_here = true;
    Compare(chunk.slot, span.first_segment, span.segment_count);
  } else if (has_bytes && fetch->summed()) {
    Compare(chunk.slot, chunk.first_segment, chunk.segment_count);
  }
  AdvanceGets();
}

void TargetStream::SumChunk(const std::shared_ptr<Fetch>& fetch) {
  ++tasks_;
  verifying_.Begin(context().clock.Now());
  const bool flush = transport_->capabilities().flush_device_writes;
  context().workers.Post([this, fetch, flush] {
    const Status seen = flush ? FlushWritten(fetch->scatter) : OkStatus();
    auto sums = !seen.ok() ? Fail(seen)
                           : UnpackAndSum(stream_, schedule_, fetch->order.chunk, fetch->scatter,
                                          fetch->scratch, run_.job().binding, fetch->known());
    fetch->keep->context().strand.Post(
        [this, fetch, sums = std::move(sums)] { OnSummed(fetch, sums); });
  });
}

void TargetStream::OnSummed(const std::shared_ptr<Fetch>& fetch,
                            const Result<std::vector<uint64_t>>& summed) {
  --tasks_;
  ReleaseScratch(*fetch);
  if (!summed && !stopped_) return FailDevice(summed.error());
  const Chunk& chunk = fetch->order.chunk;
  NoteSummed(chunk, summed.value_or(std::vector<uint64_t>()));
  if (stopped_) {
    MaybeClose();
    return run_.Changed();
  }
  Touch();
  Compare(chunk.slot, chunk.first_segment, chunk.segment_count);
  AdvanceGets();
}

void TargetStream::NoteSummed(const Chunk& chunk, const std::vector<uint64_t>& sums) {
  Slot& slot = slots_.at(chunk.slot);
  const uint32_t first = schedule_.slots[chunk.slot].first_segment;
  for (uint32_t i = 0; i < sums.size(); ++i) {
    sums_[chunk.first_segment + i] = sums[i];
    slot.state[chunk.first_segment + i - first] = SegmentState::kSummed;
  }
  NoteSums(chunk.first_segment, static_cast<uint32_t>(sums.size()));
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
  orders_.push_front({Chunk{index, segment, 1, false}, Wanted::kSum});
}

}  // namespace weightwire::transfer
