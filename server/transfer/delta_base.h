#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "kernels/delta.h"
#include "server/base/ids.h"
#include "server/base/status.h"
#include "server/delta/coder.h"
#include "server/memory/region.h"
#include "server/plan/segments.h"
#include "server/transfer/delta_policy.h"

/// What a sender keeps of what it sent last, so that it can send only what changed since.
///
/// There is no version in it: a base is known by the sum of its bytes, segment by segment. A code
/// leads from bytes of one sum to bytes of another; a reader that holds bytes of the first sum may
/// apply it, whichever version, attempt or buffer they are of, and compares the sum of what comes
/// out. So an attempt that came to nothing, a retry, a rollback and a restarted engine need no rule
/// of their own: where no sum fits, the segment is read as it is.
namespace weightwire::transfer {

/// The last bytes of one stream's segments, as they go over the wire, and the codes that lead to
/// them. A segment belongs to one thread at a time; the rest to the strand.
class StreamBase {
 public:
  /// A step from bytes of the sum `from` to what came next.
  struct Link {
    uint64_t from = 0;
    std::shared_ptr<const std::vector<std::byte>> code;
  };

  ///   kResourceExhausted / kLimitExceeded  no memory, or no room in the folder
  static Result<std::shared_ptr<StreamBase>> Make(const plan::StreamSchedule& schedule,
                                                  const DeltaPolicy& policy);
  ~StreamBase();
  static uint64_t BytesFor(const plan::StreamSchedule& schedule);

  /// The segment has become `now`. `sum`: that of `now` where it is known. Returns it.
  uint64_t Update(uint32_t segment, kernels::DeltaOrder order, std::span<const std::byte> now,
                  std::optional<uint64_t> sum, delta::Coder& coder);
  /// Its last bytes have this sum: Update would change nothing.
  bool Has(uint32_t segment, uint64_t sum) const {
    return segments_[segment].filled && segments_[segment].sum == sum;
  }
  /// Newest first; the newest leads to the segment's last bytes, each other to the one before it.
  const std::deque<Link>& links(uint32_t segment) const { return segments_[segment].links; }

  /// A job begins. False: another one still has it. `adaptive`: a segment of which too little gets
  /// shorter is left alone for some versions.
  bool Begin(bool adaptive);
  /// The job that began is over, and no thread of it works on the base.
  void End() { in_use_ = false; }
  bool in_use() const { return in_use_; }

 private:
  struct Segment {
    uint64_t offset = 0;
    uint64_t sum = 0;
    bool filled = false;
    bool steady = false;  ///< it was as before the last time
    std::deque<Link> links;
    size_t link_bytes = 0;
    uint8_t rest = 0;  ///< versions in which it is left alone yet
    uint8_t next_rest = 1;
    void DropLinks() {
      links.clear();
      link_bytes = 0;
    }
  };
  StreamBase(std::byte* memory, uint64_t bytes, uint32_t chain_max)
      : memory_(memory), bytes_(bytes), chain_max_(chain_max) {}

  std::byte* const memory_;
  const uint64_t bytes_;
  const uint32_t chain_max_;
  std::vector<Segment> segments_;
  bool in_use_ = false;
  bool adaptive_ = false;
};

/// What changed in a slot since earlier versions (delta_slot.h), for readers that hold one of them.
struct SlotDelta {
  std::shared_ptr<memory::MemoryRegion> region;  ///< begins with it, and may be longer
  uint32_t newest_bytes = 0;                     ///< to the end of the newest codes
  uint32_t bytes = 0;
};

/// The bases of one rank, by plan and stream. Strand-only.
class DeltaBases {
 public:
  /// What the memory is counted with; gives it back when it is destroyed.
  using Share = std::shared_ptr<void>;
  using Admit = std::function<Result<Share>(uint64_t bytes)>;
  DeltaBases(DeltaPolicy policy, Admit admit)
      : policy_(std::move(policy)), admit_(std::move(admit)) {}

  const DeltaPolicy& policy() const { return policy_; }
  /// Made when first asked for. Null where there is no memory for it: `why_not` says why.
  std::shared_ptr<StreamBase> Of(const PlanId& plan, uint32_t stream,
                                 const plan::StreamSchedule& schedule);
  /// Bases of other plans are forgotten.
  void Follow(const std::function<bool(const PlanId&)>& is_served);
  /// Something else needs their memory: bases that no job has are gone, and are not made again
  /// before other plans are served.
  void GiveUp();
  /// Of all bases, without codes.
  uint64_t bytes() const;
  /// The first refusal since the bases changed; OK: none.
  const Status& why_not() const { return why_not_; }

 private:
  struct Entry {
    Share share;
    std::shared_ptr<StreamBase> base;
    uint64_t bytes = 0;
  };
  const DeltaPolicy policy_;
  const Admit admit_;
  std::map<PlanId, std::map<uint32_t, Entry>> plans_;
  Status why_not_;
};

/// Coders for whoever works on a slot, and memory for SlotDeltas, made as they are needed and used
/// again. Any thread.
class DeltaCoders {
 public:
  explicit DeltaCoders(size_t segment_bytes_max) : segment_bytes_max_(segment_bytes_max) {}
  /// At least so many bytes, in which anything may lie. Null: there is no memory.
  std::shared_ptr<memory::MemoryRegion> Region(uint64_t bytes);
  class Lease {
   public:
    Lease(DeltaCoders& from, std::unique_ptr<delta::Coder> coder)
        : from_(from), coder_(std::move(coder)) {}
    ~Lease() { from_.Return(std::move(coder_)); }
    Lease(const Lease&) = delete;
    Lease& operator=(const Lease&) = delete;
    delta::Coder& operator*() const { return *coder_; }

   private:
    DeltaCoders& from_;
    std::unique_ptr<delta::Coder> coder_;
  };
  Lease Take();

 private:
  /// Regions that nobody has, by size. To make one takes longer than to fill it.
  struct Idle {
    std::mutex mutex;
    std::multimap<uint64_t, std::shared_ptr<memory::MemoryRegion>> regions;
    uint64_t bytes = 0;
  };
  void Return(std::unique_ptr<delta::Coder> coder);
  const size_t segment_bytes_max_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<delta::Coder>> free_;
  const std::shared_ptr<Idle> idle_ = std::make_shared<Idle>();
};

}  // namespace weightwire::transfer
