#include "server/transfer/source_stream.h"

#include <algorithm>
#include <cstring>

#include "kernels/kernels.h"
#include "server/base/failpoint.h"
#include "server/transfer/flow_control.h"
#include "server/transfer/source_run.h"

// A slot goes kPacking → kPacked → kAnnounced → kRevoking → gone. It is announced in order, waits
// for the credits of all readers that are still there, and is revoked before its memory is used for
// anything else. A detached reader is removed from every slot; a stopped stream gives up all slots.
namespace weightwire::transfer {

SourceStream::SourceStream(SourceRun& run, const plan::Stream& stream, PlanId plan,
                           uint32_t readers_planned)
    : run_(run),
      stream_(stream),
      plan_(plan),
      readers_planned_(readers_planned),
      own_sums_(stream_, schedule_, run.job().binding, sums_, known_),
      device_(DeviceOf(stream, plan::Side::kSource, run.job().binding)),
      pace_(run.context().strand, run.context().clock) {
  Touch();
}

Context& SourceStream::context() const { return run_.context(); }
Kept& SourceStream::heads() const { return run_.job().heads->at(plan_); }
void SourceStream::Touch() { last_progress_ = context().clock.Now(); }

StreamKey SourceStream::KeyOf(ParticipantId reader) const {
  return {run_.job().epoch, plan_.low, stream_.id, run_.job().participant, reader};
}

void SourceStream::OnPlanned(plan::StreamSchedule schedule, uint64_t sums_offset) {
  schedule_ = std::move(schedule);
  sums_offset_ = sums_offset;
  sums_.resize(schedule_.segments.size());
  known_.resize(sums_.size());
  if (!run_.job().served) return;
  const ServedSums& served = (*run_.job().served)[plan_];
  for (uint32_t segment = 0; segment < known_.size(); ++segment) {
    const auto sum = served.Of(stream_.id, segment, GenerationOf(segment));
    known_[segment] = sum.has_value();
    if (sum) sums_[segment] = *sum;
  }
}

uint64_t SourceStream::GenerationOf(uint32_t segment) const {
  const plan::CopyOp& op = stream_.ops[schedule_.segments[segment].op_index];
  return run_.job().generations[op.source_tensor];
}

bool SourceStream::KnowsSomeOf(const plan::SlotSpan& span) const {
  const auto begin = known_.begin() + span.first_segment;
  return std::find(begin, begin + span.segment_count, true) != begin + span.segment_count;
}

void SourceStream::NoteServed(const plan::SlotSpan& span) {
  if (!run_.job().served) return;
  ServedSums& served = (*run_.job().served)[plan_];
  for (uint32_t i = span.first_segment; i < span.first_segment + span.segment_count; ++i) {
    served.Note(stream_.id, i, GenerationOf(i), sums_[i]);
  }
}

// ---- readers ---------------------------------------------------------------------------------

SourceStream::Reader* SourceStream::FindReader(uint64_t endpoint, ParticipantId participant) {
  auto entry = readers_.find(participant);
  const bool known = entry != readers_.end() && entry->second.endpoint->id() == endpoint;
  return known ? &entry->second : nullptr;
}

bool SourceStream::NeedsBytes() const {
  return std::ranges::any_of(
      readers_, [](const auto& entry) { return !entry.second.gone && !entry.second.maps; });
}
bool SourceStream::AnyMaps() const {
  return std::ranges::any_of(
      readers_, [](const auto& entry) { return !entry.second.gone && entry.second.maps; });
}

bool SourceStream::SumsAtReader() const {
  if (readers_planned_ != 1 || readers_.empty()) return false;
  const Reader& reader = readers_.begin()->second;
  return reader.maps && reader.endpoint->hello().caller == context().options.self;
}

// Of what a GPU packs the sums are made there.
bool SourceStream::MaySumLater() const {
  if (readers_planned_ != 1 || device_ != nullptr) return false;
  const Reader& reader = readers_.begin()->second;
  const std::string& name = reader.endpoint->transport_name();
  return !reader.maps && context().TransportOf(name)->capabilities().tells_leaving;
}

bool SourceStream::TakesDelta(const Reader& reader) const {
  return !reader.maps && (reader.endpoint->hello().features & transport::kFeatureTakesDelta) != 0;
}

void SourceStream::ChooseDelta() {
  if (std::exchange(delta_chosen_, true)) return;
  DeltaBases* bases = run_.job().delta.get();
  if (bases == nullptr || bases->policy().mode == DeltaPolicy::Mode::kOff) return;
  // Codes are made, and read, in host memory.
  if (device_ != nullptr && context().options.gpu_direct_required) return;
  const Tuning& tuning = context().tuning();
  const bool adaptive = bases->policy().mode == DeltaPolicy::Mode::kAuto;
  const bool limited = tuning.rate_limit > 0 || tuning.peer_rate_limit > 0;
  const bool wanted = std::ranges::any_of(readers_, [&](const auto& entry) {
    const Reader& reader = entry.second;
    const bool narrow =
        limited || (reader.endpoint->hello().features & transport::kFeatureNarrowRoad) != 0;
    return !reader.gone && TakesDelta(reader) && (narrow || !adaptive);
  });
  if (!wanted) return;
  std::shared_ptr<StreamBase> base = bases->Of(plan_, stream_.id, schedule_);
  if (base && base->Begin(adaptive)) base_ = std::move(base);
}

void SourceStream::End() {
  if (base_) base_->End();
  base_.reset();
}

Status SourceStream::CheckOpen(const transport::Endpoint& endpoint, const Notify& open) const {
  const Tuning& tuning = context().tuning();
  if (stopped_) return status_;
  if (open.plan_high != plan_.high) {
    return Status(Code::kNotFound, Reason::kNotRegistered, "the reader means another plan");
  }
  if (open.segment_bytes_max != static_cast<uint64_t>(tuning.segment_bytes_max) ||
      open.slot_bytes != static_cast<uint64_t>(tuning.slot_bytes)) {
    return Status(Code::kFailedPrecondition, Reason::kConfigInvalid,
                  "the reader cuts slots of another size");
  }
  if (excluded_.contains(open.key.reader)) {
    return Status(Code::kAborted, Reason::kAbortRequested,
                  "the version goes on without the reader");
  }
  if (readers_.contains(open.key.reader)) {
    return Status(Code::kAlreadyExists, Reason::kDuplicateRank, "the reader has opened it before");
  }
  if (AllCame()) {
    return Status(Code::kFailedPrecondition, Reason::kLimitExceeded,
                  "all planned readers are here");
  }
  transport::Transport* transport = context().TransportOf(endpoint.transport_name());
  if (transport == nullptr || (open.maps && !transport->capabilities().map)) {
    return Status(Code::kUnimplemented, Reason::kTransportFailed,
                  "this session cannot do what the reader asks for");
  }
  return OkStatus();
}

void SourceStream::Refuse(const std::shared_ptr<transport::Endpoint>& endpoint,
                          ParticipantId reader, const Status& why) {
  Notify fail;
  fail.type = NotifyType::kFail;
  fail.key = KeyOf(reader);
  fail.code = why.code();
  fail.reason = why.reason();
  context().Send(endpoint, fail);
}

void SourceStream::OnOpen(const std::shared_ptr<transport::Endpoint>& endpoint,
                          const Notify& open) {
  if (Status status = CheckOpen(*endpoint, open); !status.ok()) {
    return Refuse(endpoint, open.key.reader, status);
  }
  transport::Transport* transport = context().TransportOf(endpoint->transport_name());
  const bool maps = open.maps && run_.CanBeMapped(*transport);
  if (maps) {
    auto keys = run_.ExportForMapping(transport);
    if (!keys.has_value()) return Refuse(endpoint, open.key.reader, keys.error());
    Notify binding;
    binding.type = NotifyType::kBinding;
    binding.key = KeyOf(open.key.reader);
    binding.binding = keys->binding;
    binding.sums = keys->sums;
    context().Send(endpoint, binding);
  }
  Reader reader;
  reader.endpoint = endpoint;
  reader.maps = maps;
  readers_.emplace(open.key.reader, std::move(reader));
  WW_FAILPOINT("transfer.after_a_reader_opened");
  if (SumsAtReader()) {
    auto& at_reader = context().sums_at_reader;
    std::erase_if(at_reader, [](const auto& entry) { return entry.second.expired(); });
    // Lives as long as the run: what holds the one holds the other.
    at_reader[KeyOf(open.key.reader)] =
        std::shared_ptr<SourceSums>(run_.shared_from_this(), &own_sums_);
  }
  Touch();
  Advance();
}

bool SourceStream::TakeSums(const Slot& slot, uint32_t index) {
  const plan::SlotSpan& span = schedule_.slots[index];
  return !slot.leaving ||
         slot.leaving->Take(std::span(sums_).subspan(span.first_segment, span.segment_count));
}

void SourceStream::OnCredit(uint64_t endpoint, const Notify& credit) {
  Reader* reader = FindReader(endpoint, credit.key.reader);
  if (reader == nullptr || reader->gone || stopped_) return;
  auto slot = slots_.find(credit.slot);
  const bool announced = slot != slots_.end() && slot->second.phase == Phase::kAnnounced;
  const uint64_t bytes =
      announced ? static_cast<uint64_t>(schedule_.slots[credit.slot].payload_bytes) : 0;
  const bool expected = announced && credit.bytes_kept <= bytes &&
                        TakeSums(slot->second, credit.slot) &&
                        slot->second.waiting.erase(credit.key.reader) > 0;
  if (!expected) {
    const Status why(Code::kInvalidArgument, Reason::kInvalidRequest,
                     "a reader credited a slot that it does not hold or whose sums it has not "
                     "read, or more than is in it");
    Refuse(reader->endpoint, credit.key.reader, why);
    return Detach(credit.key.reader, why);
  }
  ++reader->credits;
  if (!slot->second.first_credit) {
    slot->second.first_credit = context().clock.Now();
    NoteServed(schedule_.slots[credit.slot]);  // all of the slot's sums are there by now
  }
  if (!reader->maps) PayLater(*reader, bytes - credit.bytes_kept, slot->second.paced_bytes);
  context().metrics.Add("transfer_bytes_total", static_cast<double>(bytes - credit.bytes_kept),
                        {{"transport", reader->endpoint->transport_name()}, {"direction", "out"}});
  if (device_ != nullptr && !reader->maps) {
    context().CountGpuBytes(static_cast<int64_t>(bytes - credit.bytes_kept),
                            reader->endpoint->transport_name(), "out",
                            pool_ != context().slots.get());
  }
  Touch();
  WW_FAILPOINT("transfer.after_a_slot_is_credited");
  ReleaseIfUnread(slot);
  Advance();
  run_.Changed();
}

void SourceStream::OnClose(uint64_t endpoint, const Notify& close) {
  Reader* reader = FindReader(endpoint, close.key.reader);
  if (reader == nullptr) return;
  reader->open = false;
  const std::string name = "reader " + std::to_string(close.key.reader.value);
  Detach(close.key.reader,
         close.code == Code::kOk
             ? Status(Code::kAborted, Reason::kAbortRequested, name + " closed the stream early")
             : Status(close.code, close.reason, name + " gave up"));
}

void SourceStream::OnSessionLost(uint64_t endpoint, const Status& why) {
  // Detach may pump, but readers stay in the map, so that the iteration is safe.
  for (auto& [participant, reader] : readers_) {
    if (reader.endpoint->id() != endpoint || !reader.open) continue;
    reader.open = false;
    Detach(participant, Status(Code::kUnavailable, Reason::kTransportFailed,
                               "the session with reader " + std::to_string(participant.value) +
                                   " was lost: " + why.message()));
  }
}

void SourceStream::Detach(ParticipantId participant, const Status& why) {
  Reader& reader = readers_.at(participant);
  if (!Complete(reader) && !reader.gone) {
    reader.gone = true;
    reader.why = why;
    for (auto entry = slots_.begin(); entry != slots_.end();) {
      auto next = std::next(entry);
      entry->second.waiting.erase(participant);
      ReleaseIfUnread(entry);
      entry = next;
    }
    Advance();
  }
  run_.Changed();
}

void SourceStream::Exclude(ParticipantId participant) {
  if (stopped_ || !has_readers() || !excluded_.insert(participant).second) return;
  Touch();
  const auto entry = readers_.find(participant);
  if (entry == readers_.end()) {
    ++excluded_unseen_;  // perhaps all the others were waiting for it
    return Advance();
  }
  const Status why(Code::kAborted, Reason::kAbortRequested,
                   "the version goes on without reader " + std::to_string(participant.value));
  Reader& reader = entry->second;
  if (reader.open && !Complete(reader)) Refuse(reader.endpoint, participant, why);
  Detach(participant, why);
}

Status SourceStream::status() const {
  if (!status_.ok()) return status_;
  for (const auto& [participant, reader] : readers_) {
    if (reader.gone && !excluded_.contains(participant)) return reader.why;
  }
  return OkStatus();
}

void SourceStream::DetachStalled(Nanos before) {
  if (stopped_ || next_slot_ == schedule_.slots.size()) return;
  std::map<ParticipantId, uint32_t> stalled;
  for (const auto& [index, slot] : slots_) {
    if (slot.phase != Phase::kAnnounced || !slot.first_credit || *slot.first_credit > before)
      continue;
    for (ParticipantId participant : slot.waiting) stalled.try_emplace(participant, index);
  }
  for (const auto& [participant, index] : stalled) {
    const Status why = LeftBehind("reader " + std::to_string(participant.value) +
                                  " holds up others: it keeps slot " + std::to_string(index) +
                                  " of stream " + std::to_string(stream_.id));
    Refuse(readers_.at(participant).endpoint, participant, why);
    context().metrics.Add("readers_detached_total", 1, {});
    Detach(participant, why);
  }
}

bool SourceStream::finished() const {
  if (stopped_) return true;
  return AllCame() && std::ranges::all_of(readers_, [this](const auto& entry) {
           return entry.second.gone || Complete(entry.second);
         });
}

bool SourceStream::quiet() const {
  return tasks_ == 0 && slots_.empty() && asking_ == Asking::kNothing &&
         std::ranges::none_of(
             readers_, [](const auto& entry) { return entry.second.maps && entry.second.open; });
}

StreamDigest SourceStream::digest() const {
  return {plan_, stream_.id, kernels::SumContiguous(sums_.data(), sums_.size() * sizeof(uint64_t))};
}

void SourceStream::Stop(const Status& why) {
  if (stopped_) return;
  stopped_ = true;
  stop_ = true;
  status_ = status();
  if (status_.ok()) status_ = why;
  StopAsking();
  pace_.Cancel();
  for (auto& [participant, reader] : readers_) {
    if (reader.open && !Complete(reader)) Refuse(reader.endpoint, participant, why);
  }
  for (auto entry = slots_.begin(); entry != slots_.end();) {
    auto next = std::next(entry);
    const Phase phase = entry->second.phase;
    if (phase == Phase::kPacked || phase == Phase::kAnnounced) Release(entry);
    entry = next;
  }
}

void SourceStream::StopAsking() {
  switch (std::exchange(asking_, Asking::kNothing)) {
    case Asking::kNothing:
      return;
    case Asking::kGate:
      return run_.slots().Cancel(ticket_);
    case Asking::kMappedGate:
      return run_.mapped_slots().Cancel(ticket_);
    case Asking::kPool:
      pool_->CancelWait(ticket_);
      return run_.slots().Leave();
  }
}

void SourceStream::CloseSessions() {
  for (auto& entry : readers_) {
    if (entry.second.open) entry.second.endpoint->Close();
  }
}

// ---- slots -----------------------------------------------------------------------------------

bool SourceStream::MayStartSlot() const {
  const bool anyone =
      std::ranges::any_of(readers_, [](const auto& entry) { return !entry.second.gone; });
  return !stopped_ && asking_ == Asking::kNothing && anyone && AllCame() &&
         next_slot_ < schedule_.slots.size() && slots_.size() < window() && IsHere(next_slot_);
}

bool SourceStream::IsHere(uint32_t slot) const {
  const SlotBitmap* received = run_.job().received.get();
  return received == nullptr || received->Has(stream_.id, slot);
}

// The slot that is due may still come.
bool SourceStream::IsDry() const {
  const SlotBitmap* received = run_.job().received.get();
  return received != nullptr && !received->abandoned() && !stopped_ &&
         next_slot_ < schedule_.slots.size() && !IsHere(next_slot_);
}

bool SourceStream::ReadersHaveAll() const {
  return AllCame() && slots_.empty() && asking_ == Asking::kNothing;
}

void SourceStream::OnReceived() {
  if (ReadersHaveAll()) Touch();
  Advance();
}

void SourceStream::TellWaiting() {
  if (!IsDry()) return;
  if (ReadersHaveAll()) Touch();
  for (const auto& [participant, reader] : readers_) {
    const bool hears = (reader.endpoint->hello().features & transport::kFeatureHearsWaiting) != 0;
    const bool holds = std::ranges::any_of(
        slots_, [&](const auto& entry) { return entry.second.waiting.contains(participant); });
    if (!reader.open || reader.gone || !hears || holds) continue;
    Notify waiting;
    waiting.type = NotifyType::kWaiting;
    waiting.key = KeyOf(participant);
    waiting.slot = next_slot_;
    context().Send(reader.endpoint, waiting);
  }
}

std::string SourceStream::WaitsFor() const {
  if (!AllCame()) {
    return std::to_string(readers_planned_ - readers_.size() - excluded_unseen_) + " of " +
           std::to_string(readers_planned_) + " readers have not opened it";
  }
  for (const auto& [index, slot] : slots_) {
    if (slot.phase != Phase::kAnnounced || slot.waiting.empty()) continue;
    return "reader " + std::to_string(slot.waiting.begin()->value) + " has not credited slot " +
           std::to_string(index);
  }
  return "slot " + std::to_string(next_slot_) + " has not been made";
}

uint32_t SourceStream::window() const {
  const Tuning& tuning = context().tuning();
  return WindowOf(stream_.bytes, run_.bytes_total(),
                  NeedsBytes() ? tuning.window : tuning.mapped_window);
}

// Every slot costs a stream its part of the stream, so that all advance alike.
double SourceStream::NextCost() const {
  return static_cast<double>(schedule_.slots[next_slot_].payload_bytes) /
         static_cast<double>(stream_.bytes);
}

// Once, and for all slots: a reader that leaves later changes nothing.
Status SourceStream::ChoosePool() {
  std::vector<const transport::Transport*> transports;
  for (const auto& [participant, reader] : readers_) {
    if (reader.gone || reader.maps) continue;
    transports.push_back(context().TransportOf(reader.endpoint->transport_name()));
  }
  const auto pools = GpuDirectPools(context().gpu_pools, device_, transports);
  if (!pools) {
    pool_ = context().slots.get();
    if (!context().options.gpu_direct_required) return OkStatus();
    return GpuDirectRefusal("stream " + std::to_string(stream_.id), pools.error());
  }
  pool_ = (*pools)->slots.get();
  return run_.MakeSumsRegion();
}

memory::RegionSpan SourceStream::SumsOf(uint32_t slot) const {
  const plan::SlotSpan& span = schedule_.slots[slot];
  return {run_.sums_region(), sums_offset_ + sizeof(uint64_t) * span.first_segment,
          sizeof(uint64_t) * span.segment_count};
}

// Each slot that is started asks for the next one.
void SourceStream::Advance() {
  if (!MayStartSlot()) return;
  const bool packs = NeedsBytes();
  if (packs) ChooseDelta();
  if (packs && pool_ == nullptr) {
    if (Status status = ChoosePool(); !status.ok()) {
      Stop(status);
      return run_.Changed();
    }
  }
  FairSemaphore& gate = packs ? run_.slots() : run_.mapped_slots();
  FairSemaphore::Turn& turn = packs ? gate_turn_ : mapped_gate_turn_;
  asking_ = packs ? Asking::kGate : Asking::kMappedGate;
  const uint64_t ticket =
      gate.Enter(turn, NextCost(), [this, keep = run_.shared_from_this()] { OnSlotAdmitted(); });
  if (ticket != 0) ticket_ = ticket;
}

void SourceStream::OnSlotAdmitted() {
  if (asking_ == Asking::kMappedGate) return StartSlot({}, &run_.mapped_slots());
  asking_ = Asking::kPool;
  const uint64_t ticket = pool_->Acquire(
      pool_turn_, NextCost(), [this, keep = run_.shared_from_this()](memory::RegionSpan slot) {
        StartSlot(std::move(slot), &run_.slots());
      });
  if (ticket != 0) ticket_ = ticket;
}

void SourceStream::StartSlot(memory::RegionSpan memory, FairSemaphore* gate) {
  asking_ = Asking::kNothing;
  const uint32_t index = next_slot_++;
  Slot& slot = slots_[index];
  slot.memory = memory;
  slot.gate = gate;
  for (const auto& [participant, reader] : readers_) {
    if (!reader.gone) slot.waiting.insert(participant);
  }
  const plan::SlotSpan& span = schedule_.slots[index];
  const std::span<uint64_t> sums(sums_.data() + span.first_segment, span.segment_count);
  std::byte* mapped_sums = AnyMaps() ? SumsOf(index).data() : nullptr;
  ++tasks_;
  if (SumsAtReader()) {
    context().strand.Post([this, keep = run_.shared_from_this(), index] { OnPacked(index, {}); });
    return Advance();
  }
  packing_.Begin(context().clock.Now());
  // What is known not to have changed has no head that differs.
  StreamBase* const base = slot.memory.region ? base_.get() : nullptr;
  const bool with_heads =
      slot.memory.region && run_.job().heads && base == nullptr && !KnowsSomeOf(span);
  const bool may_sum_later = with_heads && MaySumLater();
  std::vector<uint64_t> heads_before;
  if (may_sum_later) {
    heads_before = heads().Of(plan_, stream_.id, span.first_segment, span.segment_count);
  }
  context().workers.Post([this, keep = run_.shared_from_this(), index, sums, mapped_sums, base,
                          with_heads, heads_before = std::move(heads_before),
                          memory = SlotMemory{std::move(memory), SumsOf(index)}] {
    const Binding& binding = run_.job().binding;
    std::vector<uint64_t> heads;
    if (with_heads) heads = HeadsOf(stream_, schedule_, index, binding);
    std::shared_ptr<LeavingSums> leaving;
    if (AllDiffer(heads, heads_before)) {
      leaving =
          std::make_shared<LeavingSums>(stream_, schedule_, index, binding, memory.packed.data());
    }
    std::optional<SlotDeltaMaker> delta;
    if (base != nullptr) {
      delta.emplace(stream_, schedule_, index, *base, run_.context().delta_coders);
    }
    PackedSlot packed =
        PackSlot(stream_, schedule_, index, binding, run_.context().tuning().direct_run_bytes_min,
                 memory, known_, sums, leaving.get(), stop_, delta ? &*delta : nullptr);
    packed.heads = std::move(heads);
    packed.leaving = std::move(leaving);
    if (mapped_sums != nullptr) std::memcpy(mapped_sums, sums.data(), sums.size_bytes());
    run_.context().strand.Post([this, keep, index, packed = std::move(packed)]() mutable {
      OnPacked(index, std::move(packed));
    });
  });
  Advance();
}

void SourceStream::OnPacked(uint32_t index, PackedSlot packed) {
  --tasks_;
  auto entry = slots_.find(index);
  if (stopped_) {
    Release(entry);
    return run_.Changed();
  }
  if (!packed.status.ok()) {
    entry->second.phase = Phase::kPacked;
    Stop(packed.status);
    return run_.Changed();
  }
  for (uint32_t i = 0; i < packed.heads.size(); ++i) {
    heads().Note(stream_.id, schedule_.slots[index].first_segment + i, packed.heads[i]);
  }
  bytes_packed_ += packed.bytes_packed;
  if (base_) {
    entry->second.delta = std::move(packed.delta);
  } else if (run_.job().received) {
    entry->second.delta = run_.job().received->TakeDelta(stream_.id, index);
  }
  if (packing_.begun()) packing_.End(context().clock.Now());
  entry->second.phase = Phase::kPacked;
  entry->second.pieces = std::move(packed.pieces);
  entry->second.leaving = std::move(packed.leaving);
  Touch();
  AnnounceInOrder();
  Advance();
  run_.Changed();
}

void SourceStream::AnnounceInOrder() {
  while (!pace_.waiting()) {
    auto entry = slots_.find(next_announced_);
    if (entry == slots_.end() || entry->second.phase != Phase::kPacked) return;
    const bool now = pace_.Enter(PacedBytesOf(entry->first, entry->second),
                                 [this, keep = run_.shared_from_this()](Nanos waited) {
                                   context().CountRateLimited("out", waited);
                                   Touch();
                                   AnnounceNext();
                                   AnnounceInOrder();
                                   Advance();
                                   run_.Changed();
                                 });
    if (!now) return;
    AnnounceNext();
  }
}

// Who maps takes the bytes from memory, not from the link.
RateLimitedBytes SourceStream::PacedBytesOf(uint32_t index, Slot& slot) {
  std::vector<Incarnation> peers;
  bool all_take_delta = slot.delta.has_value();
  for (ParticipantId participant : slot.waiting) {
    const Reader& reader = readers_.at(participant);
    if (reader.maps) continue;
    peers.push_back(reader.endpoint->hello().caller);
    all_take_delta = all_take_delta && TakesDelta(reader);
  }
  slot.paced_bytes = all_take_delta ? slot.delta->newest_bytes
                                    : static_cast<uint64_t>(schedule_.slots[index].payload_bytes);
  return context().egress.For(peers, slot.paced_bytes);
}

// It has read more than was foreseen: what goes next waits for it.
void SourceStream::PayLater(const Reader& reader, uint64_t bytes_read, uint64_t paced_bytes) {
  if (bytes_read <= paced_bytes) return;
  const Nanos now = context().clock.Now();
  for (const auto& [limiter, bytes] :
       context().egress.For({reader.endpoint->hello().caller}, bytes_read - paced_bytes)) {
    limiter->Reserve(now, bytes);
  }
}

void SourceStream::AnnounceNext() {
  auto entry = slots_.find(next_announced_);
  Announce(next_announced_++, entry->second);
  ReleaseIfUnread(entry);
}

transport::RegionKey SourceStream::ExportOver(transport::Transport& transport, const Slot& slot) {
  if (!slot.leaving) return transport.Export(slot.pieces);
  return transport.ExportTold(
      slot.pieces, [keep = run_.shared_from_this(), leaving = slot.leaving](
                       uint64_t offset, uint64_t bytes) { leaving->Leave(offset, bytes); });
}

void SourceStream::Announce(uint32_t index, Slot& slot) {
  WW_FAILPOINT("transfer.before_a_slot_is_announced");
  slot.phase = Phase::kAnnounced;
  for (ParticipantId participant : slot.waiting) {
    const Reader& reader = readers_.at(participant);
    Notify ready;
    ready.type = NotifyType::kReady;
    ready.key = KeyOf(participant);
    ready.slot = index;
    if (reader.maps) {
      ready.offset = sums_offset_ + sizeof(uint64_t) * schedule_.slots[index].first_segment;
    } else {
      transport::Transport* transport = context().TransportOf(reader.endpoint->transport_name());
      if (slot.delta && TakesDelta(reader)) AnnounceDelta(index, slot, participant, reader);
      auto [key, first] = slot.keys.try_emplace(transport);
      if (first) key->second = ExportOver(*transport, slot);
      ready.memory = key->second;
      ready.changed = slot.leaving != nullptr;
    }
    context().Send(reader.endpoint, ready);
  }
  slot.pieces.clear();
}

void SourceStream::AnnounceDelta(uint32_t index, Slot& slot, ParticipantId participant,
                                 const Reader& reader) {
  transport::Transport* transport = context().TransportOf(reader.endpoint->transport_name());
  auto [key, first] = slot.delta_keys.try_emplace(transport);
  if (first) key->second = transport->Export({{slot.delta->region, 0, slot.delta->bytes}});
  Notify delta;
  delta.type = NotifyType::kDelta;
  delta.key = KeyOf(participant);
  delta.slot = index;
  delta.memory = key->second;
  delta.delta_newest_bytes = slot.delta->newest_bytes;
  delta.delta_bytes = slot.delta->bytes;
  context().Send(reader.endpoint, delta);
}

void SourceStream::ReleaseIfUnread(SlotEntry entry) {
  if (entry->second.phase != Phase::kAnnounced || !entry->second.waiting.empty()) return;
  bytes_done_ += schedule_.slots[entry->first].payload_bytes;
  Release(entry);
}

void SourceStream::Release(SlotEntry entry) {
  Slot& slot = entry->second;
  slot.phase = Phase::kRevoking;
  slot.revokes_left = slot.keys.size() + slot.delta_keys.size();
  if (slot.revokes_left == 0) return Forget(entry);
  for (const auto* keys : {&slot.keys, &slot.delta_keys}) {
    for (const auto& [transport, key] : *keys) {
      transport->Revoke(key, [this, keep = run_.shared_from_this(), index = entry->first] {
        run_.context().strand.Post([this, keep, index] { OnRevoked(index); });
      });
    }
  }
}

void SourceStream::OnRevoked(uint32_t index) {
  auto entry = slots_.find(index);
  if (--entry->second.revokes_left > 0) return;
  Forget(entry);
  Advance();
  run_.Changed();
}

void SourceStream::Forget(SlotEntry entry) {
  const memory::RegionSpan memory = std::move(entry->second.memory);
  FairSemaphore* gate = entry->second.gate;
  slots_.erase(entry);
  if (memory.region) pool_->Release(memory);
  gate->Leave();
}

}  // namespace weightwire::transfer
