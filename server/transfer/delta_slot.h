#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "server/plan/segments.h"
#include "server/transfer/delta_base.h"
#include "server/transfer/fetch.h"
#include "server/transfer/transfer.h"

/// What changed in one slot since earlier versions, as it goes over the wire beside the slot
/// itself.
///
/// Little-endian:
///   0   u32  version, 1
///   4   u32  segments of the slot
///   8   u32  links
///   12  u32  0
///   16       u64 for each segment: the sum of its bytes now
///   then for each link, newest first:
///            u64 for each segment: the sum of the bytes that its code leads from
///            u32 for each segment: bytes of the code (server/delta/coder.h); 0: there is none.
///            Padded to 8 bytes.
///   then the codes: those of the newest link in the order of the segments, then those of the next
///
/// The code of a segment in the newest link leads to its bytes now, that in each other link to the
/// bytes that the link before it leads from. A reader may read only the beginning, as far as the
/// codes of the newest link go, and the rest when it needs older ones.
namespace weightwire::transfer {

/// No SlotDelta is longer, and its newest codes end within the slot's own size.
inline uint64_t SlotDeltaBytesMax(const plan::SlotSpan& slot) {
  return std::min<uint64_t>(2 * static_cast<uint64_t>(slot.bytes), UINT32_MAX);
}

/// Collects the codes of one slot while it is packed. One thread.
class SlotDeltaMaker {
 public:
  SlotDeltaMaker(const plan::Stream& stream, const plan::StreamSchedule& schedule, uint32_t slot,
                 StreamBase& base, DeltaCoders& coders)
      : stream_(stream),
        schedule_(schedule),
        span_(schedule.slots[slot]),
        base_(base),
        coders_(coders),
        coder_(coders.Take()) {}

  /// Segment `i` of the slot has this sum and is as before: Add need not see its bytes.
  bool Has(uint32_t i, uint64_t sum) const { return base_.Has(span_.first_segment + i, sum); }
  /// Its packed bytes, of its wire dtype, and their sum where it is known. Returns it.
  uint64_t Add(uint32_t i, std::span<const std::byte> packed, std::optional<uint64_t> sum);
  /// Memory for a segment's packed bytes, where they do not lie together at the source.
  std::span<std::byte> Scratch(uint64_t bytes);
  /// nullopt where no segment has a code, or all are longer than the slot.
  std::optional<SlotDelta> Finish(std::span<const uint64_t> sums) const;

 private:
  const plan::Stream& stream_;
  const plan::StreamSchedule& schedule_;
  const plan::SlotSpan& span_;
  StreamBase& base_;
  DeltaCoders& coders_;
  const DeltaCoders::Lease coder_;
  std::vector<std::byte> scratch_;
};

/// What became of the segments of a slot of which a SlotDelta was read.
struct DeltaTaken {
  enum class Segment : uint8_t {
    kUnread,  ///< has to be read as it is
    kOlder,   ///< can be made with codes that were not read yet
    kKept,    ///< its bytes were here
    kMade,    ///< of what was here and codes
  };
  Status status;                   ///< not OK: what was read is no SlotDelta of the slot
  std::vector<uint64_t> expected;  ///< sums, one for each segment
  std::vector<Segment> segments;
  uint32_t mismatches = 0;            ///< that came out with another sum, in this call
  int64_t elements = 0, changes = 0;  ///< of those that were made
  bool wants_older() const;
};

/// Makes what it can of the slot's segments in `binding`: of those that are there already, that
/// `served` has, and by `read`, the first bytes of a SlotDelta. All that it says was made or kept
/// has been summed where it lies. `kept`, where it is empty, gets the sums of what is served.
/// `taken` of an earlier call for the same slot: only what is kOlder there is looked at. Total;
/// gives up between segments when `stop` is set.
DeltaTaken TakeDelta(const plan::Stream& stream, const plan::StreamSchedule& schedule,
                     uint32_t slot, std::span<const std::byte> read, KeptSums& kept,
                     const Binding& served, const Binding& binding, DeltaCoders& coders,
                     const std::atomic<bool>& stop, DeltaTaken taken = {});

}  // namespace weightwire::transfer
