#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "server/transfer/arrival_sums.h"
#include "server/transfer/context.h"
#include "server/transfer/delta_slot.h"
#include "server/transfer/fair_semaphore.h"
#include "server/transfer/fetch.h"
#include "server/transfer/flow_control.h"
#include "server/transfer/time_range.h"

namespace weightwire::transfer {

class TargetRun;

/// One stream of a target job: reads slots as they are announced, verifies and credits them.
/// Strand-only; lives inside its TargetRun, which every callback keeps alive.
class TargetStream {
 public:
  TargetStream(TargetRun& run, const plan::Stream& stream, const Peer& peer, ParticipantId source,
               transport::Transport* transport);

  void OnPlanned(plan::StreamSchedule schedule);
  void OnConnected(std::shared_ptr<transport::Endpoint> endpoint);
  void OnBinding(const Notify& binding);
  void OnReady(const Notify& ready);
  void OnWaiting(const Notify& waiting);
  void OnDelta(const Notify& delta);
  void OnSessionLost();

  /// Nothing is fetched or copied any more; the source learns `why` once the stream is quiet.
  void Stop(const Status& why);
  void CloseSession();

  bool complete() const { return complete_; }
  /// Nothing writes the destination or reads the source's memory any more.
  bool quiet() const { return tasks_ == 0 && gets_ == 0 && maps_pending_ == 0; }
  StreamDigest digest() const;
  Nanos last_progress() const { return last_progress_; }
  int64_t bytes_done() const { return bytes_done_; }
  int64_t bytes_kept() const { return bytes_kept_; }  ///< of bytes_done
  const DeltaFigures& delta() const { return delta_; }
  /// That were read of `bytes_done`, or instead of some of them.
  int64_t bytes_moved() const {
    return bytes_done_ - bytes_kept_ - delta_.bytes + delta_.code_bytes;
  }
  uint32_t rereads() const { return rereads_; }
  const TimeRange& reading() const { return reading_; }
  const TimeRange& verifying() const { return verifying_; }
  const plan::Stream& stream() const { return stream_; }
  const Peer& peer() const { return peer_; }
  ParticipantId source() const { return source_; }
  transport::Transport* transport() const { return transport_; }
  /// "tcp", or "ucx-gpu" where that reads straight into GPU memory: as reports have it.
  std::string path() const { return TransportName() + (gpu_ != nullptr && !maps_ ? "-gpu" : ""); }
  /// OK, or that its payload passes host memory although that is forbidden.
  Status CheckGpuDirect() const;
  uint64_t endpoint_id() const { return endpoint_ ? endpoint_->id() : 0; }

 private:
  enum class SegmentState : uint8_t { kFetching, kSummed, kVerified };
  struct Slot {
    transport::RegionKey memory;
    uint64_t sums_offset = 0;  ///< in the mapped sums
    bool changed = false;      ///< says its source
    bool sums_here = false;
    std::vector<uint64_t> expected;  ///< Gets write here
    std::vector<SegmentState> state;
    std::map<uint32_t, int> rereads;  ///< by segment in the slot
    uint32_t verified = 0;
    KeptSums kept;  ///< until its sums are here
    int64_t kept_bytes = 0;
    SlotDelta delta;          ///< that its source offers, or without bytes
    uint32_t delta_read = 0;  ///< bytes of it that are in `delta.region`, or on their way there
    transport::RegionKey delta_memory;
    DeltaTaken taken;
    DeltaFigures made;
  };
  enum class Wanted : uint8_t {
    kBytes,
    kSums,        ///< all sums of the chunk's slot
    kSum,         ///< only the sum of the chunk's one segment
    kDelta,       ///< what changed in the chunk's slot, as far as the newest codes go
    kOlderDelta,  ///< the rest of it
  };
  struct Order {
    Chunk chunk;
    Wanted wanted = Wanted::kBytes;
    bool reads_delta() const { return wanted == Wanted::kDelta || wanted == Wanted::kOlderDelta; }
  };
  // One Get. Shared with the transport, which holds it until the Get has ended.
  struct Fetch {
    std::shared_ptr<TargetRun> keep;
    Order order;
    Scatter scatter;
    memory::RegionSpan scratch;
    std::optional<ArrivalSums> sums;  ///< of a Get for bytes that come through us
    bool summed() const { return sums && sums->complete(); }
    /// As UnpackAndSum takes it.
    std::span<const std::optional<uint64_t>> known() const {
      return sums ? sums->so_far() : std::span<const std::optional<uint64_t>>();
    }
  };

  Context& context() const;
  memory::SlotPool& scratch() const {
    return gpu_ != nullptr ? *gpu_->scratch : *context().scratch;
  }
  bool gets_through() const { return transport_->capabilities().gets_through; }
  Straight straight() const {
    const Tuning& tuning = context().tuning();
    return {gets_through() ? tuning.through_run_bytes_min : tuning.direct_run_bytes_min,
            gpu_ != nullptr};
  }
  StreamKey Key() const;
  std::string TransportName() const;
  void MaybeOpen();
  void Touch();
  void FailStream(Code code, Reason reason, const std::string& what);
  void FailSegment(uint32_t segment);
  void FailDevice(const Status& why);

  /// What `kept` knows of the slot's segments.
  std::vector<uint64_t> KnownSums(const Kept& kept, uint32_t index) const;
  void NoteSums(uint32_t first_segment, uint32_t segment_count);

  // Mapped.
  void Map(transport::RegionKey key, transport::MappedList* into);
  void OnMapped(transport::MappedList* into, Result<transport::MappedList> mapped);
  void FailMap(const Status& why);
  Status CheckMapped() const;
  void CopySlot(uint32_t index);
  void OnCopied(uint32_t index, MappedCopy copied);

  // Fetched.
  void OrderSlot(uint32_t index);
  void OrderChunks(const std::vector<Chunk>& chunks);
  void OnSums(uint32_t index);
  void OnKept(uint32_t index, const std::vector<bool>& kept);
  bool MakeRoomForDelta(Slot& slot, uint32_t bytes);
  void OnDeltaRead(uint32_t index);
  void OnDeltaTaken(uint32_t index, KeptSums kept, DeltaTaken taken);
  double CostOf(const Order& order) const;
  uint64_t BytesOf(const Order& order) const;
  void AdvanceGets();
  void OnGetAdmitted();
  void Pace(const Order& order, memory::RegionSpan scratch);
  void PostGet(const Order& order, memory::RegionSpan scratch);
  void OnGetDone(const std::shared_ptr<Fetch>& fetch, const Status& status);
  void SumChunk(const std::shared_ptr<Fetch>& fetch);
  void OnSummed(const std::shared_ptr<Fetch>& fetch, const Result<std::vector<uint64_t>>& summed);
  void NoteSummed(const Chunk& chunk, const std::vector<uint64_t>& sums);
  void Compare(uint32_t index, uint32_t first_segment, uint32_t segment_count);
  void Reread(uint32_t index, uint32_t segment);
  void ReleaseScratch(Fetch& fetch);

  void CountMoved(int64_t bytes);
  void CountDelta(const DeltaFigures& made);
  void OnSlotVerified(uint32_t index);
  void MaybeClose();

  TargetRun& run_;
  const plan::Stream& stream_;
  const Peer& peer_;
  const ParticipantId source_;
  transport::Transport* const transport_;
  bool maps_;  ///< unless the source says that its memory cannot be mapped over this transport
  const bool same_host_;
  device::Device* const device_;  ///< where its tensors lie; null: in host memory
  const GpuPools* gpu_ =
      nullptr;             ///< of `device_`, where Gets write to it; else they write to host
  Status not_gpu_direct_;  ///< why there is no `gpu_`
  ReadAhead read_ahead_;
  bool planned_ = false;
  plan::StreamSchedule schedule_;
  std::shared_ptr<transport::Endpoint> endpoint_;
  bool opened_ = false;
  bool closed_ = false;  ///< CLOSE was sent, or the session is gone
  uint32_t next_ready_ = 0;
  std::optional<Notify> next_delta_;  ///< of slot `next_ready_`
  std::map<uint32_t, Slot> slots_;    ///< announced and not verified
  std::vector<uint64_t> sums_;        ///< of the destination, by segment
  uint32_t slots_done_ = 0;

  transport::MappedList binding_;
  transport::MappedList mapped_sums_;
  uint32_t maps_pending_ = 0;
  bool mapped_ = false;

  std::deque<Order> orders_;
  enum class Asking { kNothing, kGet, kScratch, kPace };
  Asking asking_ = Asking::kNothing;  ///< for the first of `orders_`
  uint64_t ticket_ = 0;
  FairSemaphore::Turn get_turn_;
  memory::SlotPool::Turn scratch_turn_;
  RateLimitedTurn pace_;
  memory::RegionSpan paced_scratch_;  ///< of the Get that waits for its turn
  uint32_t gets_ = 0;                 ///< posted
  uint32_t sums_gets_ = 0;            ///< of these, for the sums of a whole slot

  uint32_t tasks_ = 0;  ///< on workers
  std::atomic<bool> stop_ = false;
  bool stopped_ = false;
  Status why_;
  bool complete_ = false;
  Nanos last_progress_{0};
  TimeRange reading_;    ///< from OPEN to the last bytes
  TimeRange verifying_;  ///< from the first task that sums to the last slot
  int64_t bytes_done_ = 0;
  int64_t bytes_kept_ = 0;
  DeltaFigures delta_;
  uint32_t rereads_ = 0;
};

}  // namespace weightwire::transfer
