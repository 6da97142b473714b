#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "server/transfer/context.h"
#include "server/transfer/fair_semaphore.h"
#include "server/transfer/leaving_sums.h"
#include "server/transfer/pack.h"
#include "server/transfer/source_sums.h"
#include "server/transfer/time_range.h"

namespace weightwire::transfer {

class SourceRun;

/// One stream of a source job: its readers and the slots on their way to them. Strand-only; lives
/// inside its SourceRun, which every callback keeps alive.
///
/// Nothing is packed before every planned reader has opened or was excluded: only then is it known
/// whether anyone needs bytes, and no slot could be reused earlier anyhow. What depends on there
/// being one reader only depends on how many were planned: it does not change on the way.
///
/// Where the only reader maps the tensors and belongs to the same agent, slots are announced
/// without sums: each of the reader's tasks has `own_sums_` make the source's sum while it copies
/// the segment, or just before. The source's memory is then read once and not twice.
///
/// Where the only reader's transport tells what leaves, a slot of which no segment is as in the
/// version before is announced as such and without sums: they are made of what is sent just before
/// it is (leaving_sums.h), so that the kernel's copy finds it in the cache.
///
/// Sums that an earlier job made of bytes that are still the same (SourceJob::served) are there
/// from the start and not made again.
///
/// Where the slots lie, in host memory or on the tensors' GPU, is decided when the first one is
/// packed: one reader whose transport does not reach GPU memory has all of them in host memory.
class SourceStream {
 public:
  SourceStream(SourceRun& run, const plan::Stream& stream, PlanId plan, uint32_t readers_planned);

  /// `sums_offset`: where this stream's sums begin in the job's sums region.
  void OnPlanned(plan::StreamSchedule schedule, uint64_t sums_offset);
  /// A slot of a relay's stream is there now.
  void OnReceived();
  /// A relay: says so to readers that have all that came, and lets no time run while its own sender
  /// has to act.
  void TellWaiting();
  void OnOpen(const std::shared_ptr<transport::Endpoint>& endpoint, const Notify& open);
  void OnCredit(uint64_t endpoint, const Notify& credit);
  void OnClose(uint64_t endpoint, const Notify& close);
  void OnSessionLost(uint64_t endpoint, const Status& why);

  /// Detaches readers that keep a slot which another one has given back before `before`, while
  /// there is more to read.
  void DetachStalled(Nanos before);
  /// It is no reader of this stream any more, whether it has opened, is gone or never came.
  void Exclude(ParticipantId participant);
  /// Nothing is packed or announced any more; open readers are told. The first reason stays.
  void Stop(const Status& why);
  /// Closes the sessions of readers that have not closed the stream.
  void CloseSessions();

  /// Nothing more will be read: all readers have everything or are gone, or the stream stopped.
  bool finished() const;
  /// Nothing touches the source's memory or a slot any more.
  bool quiet() const;
  /// The last call, when it is quiet.
  void End();
  /// Why it stopped, else why a reader that was not excluded is gone without having everything.
  Status status() const;
  bool stopped() const { return stopped_; }
  /// Some planned reader was not excluded.
  bool has_readers() const { return excluded_.size() < readers_planned_; }
  StreamDigest digest() const;
  Nanos last_progress() const { return last_progress_; }
  /// Who has to act that it goes on.
  std::string WaitsFor() const;
  int64_t bytes_packed() const { return bytes_packed_; }
  /// From the first slot that was packed or summed here to the last one.
  const TimeRange& packing() const { return packing_; }
  int64_t bytes_done() const { return bytes_done_; }
  const plan::Stream& stream() const { return stream_; }
  const plan::StreamSchedule& schedule() const { return schedule_; }
  const PlanId& plan() const { return plan_; }

 private:
  struct Reader {
    std::shared_ptr<transport::Endpoint> endpoint;
    bool maps = false;
    bool open = true;   ///< has neither closed nor lost its session
    bool gone = false;  ///< will not read the rest
    Status why;         ///< of `gone`
    uint32_t credits = 0;
  };
  enum class Phase { kPacking, kPacked, kAnnounced, kRevoking };
  struct Slot {
    Phase phase = Phase::kPacking;
    memory::RegionSpan memory;  ///< of the pool; without a region when nothing is packed
    transport::GatherList pieces;
    std::set<ParticipantId> waiting;  ///< readers that have not credited it
    std::optional<Nanos> first_credit;
    std::map<transport::Transport*, transport::RegionKey> keys;
    size_t revokes_left = 0;
    FairSemaphore* gate = nullptr;  ///< that it came through
    /// Has its sums, where its bytes are sent before all are made.
    std::shared_ptr<LeavingSums> leaving;
    std::optional<SlotDelta> delta;
    std::map<transport::Transport*, transport::RegionKey> delta_keys;
    uint64_t paced_bytes = 0;  ///< for each reader that does not map
  };
  using SlotEntry = std::map<uint32_t, Slot>::iterator;

  Context& context() const;
  Kept& heads() const;
  /// Of the segment's tensor; 0: not known.
  uint64_t GenerationOf(uint32_t segment) const;
  bool KnowsSomeOf(const plan::SlotSpan& span) const;
  void NoteServed(const plan::SlotSpan& span);
  Reader* FindReader(uint64_t endpoint, ParticipantId participant);
  bool Complete(const Reader& reader) const { return reader.credits == schedule_.slots.size(); }
  /// Every planned reader has opened or was excluded.
  bool AllCame() const { return readers_.size() + excluded_unseen_ == readers_planned_; }
  bool NeedsBytes() const;
  bool AnyMaps() const;
  bool SumsAtReader() const;
  bool MaySumLater() const;
  bool TakesDelta(const Reader& reader) const;
  /// Once, and for all slots, when all readers are known.
  void ChooseDelta();
  StreamKey KeyOf(ParticipantId reader) const;
  Status CheckOpen(const transport::Endpoint& endpoint, const Notify& open) const;
  void Refuse(const std::shared_ptr<transport::Endpoint>& endpoint, ParticipantId reader,
              const Status& why);
  void Detach(ParticipantId participant, const Status& why);

  void Advance();
  bool MayStartSlot() const;
  Status ChoosePool();
  memory::RegionSpan SumsOf(uint32_t slot) const;
  bool IsHere(uint32_t slot) const;
  bool IsDry() const;
  bool ReadersHaveAll() const;
  uint32_t window() const;
  double NextCost() const;
  void OnSlotAdmitted();
  void StartSlot(memory::RegionSpan memory, FairSemaphore* gate);
  void StopAsking();
  void OnPacked(uint32_t slot, PackedSlot packed);
  /// False: its reader has not asked for all of them.
  bool TakeSums(const Slot& slot, uint32_t index);
  void AnnounceInOrder();
  RateLimitedBytes PacedBytesOf(uint32_t index, Slot& slot);
  void PayLater(const Reader& reader, uint64_t bytes_read, uint64_t paced_bytes);
  void AnnounceNext();
  transport::RegionKey ExportOver(transport::Transport& transport, const Slot& slot);
  void AnnounceDelta(uint32_t index, Slot& slot, ParticipantId participant, const Reader& reader);
  void Announce(uint32_t index, Slot& slot);
  void ReleaseIfUnread(SlotEntry entry);
  void Release(SlotEntry entry);
  void OnRevoked(uint32_t slot);
  void Forget(SlotEntry entry);
  void Touch();

  SourceRun& run_;
  const plan::Stream& stream_;
  const PlanId plan_;
  const uint32_t readers_planned_;
  plan::StreamSchedule schedule_;
  uint64_t sums_offset_ = 0;
  /// By segment; each written by the one task that has its slot, or when its slot is credited.
  std::vector<uint64_t> sums_;
  std::vector<bool> known_;           ///< by segment: its sum was there from the start
  OwnSums own_sums_;                  ///< into `sums_`
  device::Device* const device_;      ///< where its tensors lie; null: in host memory
  memory::SlotPool* pool_ = nullptr;  ///< of its slots; null before the first one is packed
  bool delta_chosen_ = false;
  std::shared_ptr<StreamBase> base_;  ///< null: nothing is coded
  std::map<ParticipantId, Reader> readers_;
  std::set<ParticipantId> excluded_;
  size_t excluded_unseen_ = 0;  ///< of them: that are not in `readers_` and never will be
  std::map<uint32_t, Slot> slots_;
  uint32_t next_slot_ = 0;
  uint32_t next_announced_ = 0;
  enum class Asking { kNothing, kGate, kMappedGate, kPool };
  Asking asking_ = Asking::kNothing;  ///< for slot `next_slot_`
  uint64_t ticket_ = 0;
  FairSemaphore::Turn gate_turn_;
  FairSemaphore::Turn mapped_gate_turn_;
  memory::SlotPool::Turn pool_turn_;
  RateLimitedTurn pace_;  ///< of slot `next_announced_`
  uint32_t tasks_ = 0;    ///< on workers
  std::atomic<bool> stop_ = false;
  bool stopped_ = false;
  Status status_;  ///< why it stopped
  Nanos last_progress_{0};
  int64_t bytes_packed_ = 0;
  TimeRange packing_;
  int64_t bytes_done_ = 0;
};

}  // namespace weightwire::transfer
