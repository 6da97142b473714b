#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "server/plan/segments.h"
#include "server/transfer/delta_slot.h"
#include "server/transfer/leaving_sums.h"
#include "server/transfer/transfer.h"
#include "server/transport/transport.h"

namespace weightwire::transfer {

/// A slot of the source, ready to be exported.
struct PackedSlot {
  transport::GatherList pieces;  ///< of SlotSpan::bytes together; empty when only summed
  int64_t bytes_packed = 0;      ///< payload that was copied into SlotMemory::packed
  std::vector<uint64_t> heads;   ///< HeadsOf the slot; empty where nobody asked for them
  /// Has the sums, of which some are not made yet; null: all are.
  std::shared_ptr<LeavingSums> leaving;
  std::optional<SlotDelta> delta;
  Status status;  ///< not OK: a GPU failed, and the rest is worthless
};

/// Sums segments from `first` on, an index in `schedule.segments`, from the source's tensors, one
/// for each of `into`, but for those whose sum is there: `known`, by index, or empty where none is.
/// Errors: device/bytes.h.
Status SumSegments(const plan::Stream& stream, const plan::StreamSchedule& schedule, uint32_t first,
                   const Binding& binding, const std::vector<bool>& known,
                   std::span<uint64_t> into);

/// For each segment of the slot a number that changes only if the segment's bytes do, made of its
/// first few KiB; Kept::kUnknown where that would take too long.
std::vector<uint64_t> HeadsOf(const plan::Stream& stream, const plan::StreamSchedule& schedule,
                              uint32_t slot, const Binding& binding);

/// Of two HeadsOf: both have as many, of at least one, and no pair of equal or unknown ones
/// (Kept::kUnknown).
bool AllDiffer(std::span<const uint64_t> heads, std::span<const uint64_t> before);

/// Where a slot is packed.
struct SlotMemory {
  memory::RegionSpan packed;  ///< ≥ SlotSpan::bytes; without a region: the slot is only summed
  /// Host memory for the slot's sums, where `packed` is a GPU's; else they begin `packed`.
  memory::RegionSpan sums;
};

/// Sums every segment of slot `slot` from the source's tensors into `sums` (one each, in order)
/// and lays the slot out as plan/segments.h says: sums and what needs packing in `memory`, long
/// runs as pieces of the tensors themselves. Tensors in a GPU's memory are such pieces only where
/// `memory.packed` is a GPU's too: else the transport does not reach them, and they are packed.
///
/// With `leaving`, which must be of this slot, sums of long runs are left to it, and all others are
/// told to it: nothing is written to `sums` then, nor to the slot's. None of the slot's may be
/// `known` then.
///
/// Sums that are `known` (as in SumSegments) are not made: the bytes of such a segment are read
/// only where they have to be packed.
///
/// With `delta`, each segment is coded just after it was summed, and the result is in the packed
/// slot. Never together with `leaving`, nor where tensors lie in a GPU's memory.
///
/// Pure but for the memory it is given; runs on any thread. Gives up between segments when `stop`
/// is set; the result is then worthless. The slice must have passed ValidateSlice.
PackedSlot PackSlot(const plan::Stream& stream, const plan::StreamSchedule& schedule, uint32_t slot,
                    const Binding& binding, int64_t direct_run_bytes_min, const SlotMemory& memory,
                    const std::vector<bool>& known, std::span<uint64_t> sums, LeavingSums* leaving,
                    const std::atomic<bool>& stop, SlotDeltaMaker* delta = nullptr);

}  // namespace weightwire::transfer
