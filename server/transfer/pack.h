#pragma once

#include <atomic>
#include <cstdint>
#include <span>

#include "server/plan/segments.h"
#include "server/transfer/transfer.h"
#include "server/transport/transport.h"

namespace weightwire::transfer {

/// A slot of the source, ready to be exported.
struct PackedSlot {
  transport::GatherList pieces;  ///< of SlotSpan::bytes together; empty when only summed
  int64_t bytes_packed = 0;      ///< payload that was copied into `memory`
  Status status;                 ///< not OK: a GPU failed, and the rest is worthless
};

/// Sums segments from `first` on, an index in `schedule.segments`, from the source's tensors, one
/// for each of `into`. Errors: device/bytes.h.
Status SumSegments(const plan::Stream& stream, const plan::StreamSchedule& schedule, uint32_t first,
                   const Binding& binding, std::span<uint64_t> into);

/// Sums every segment of slot `slot` from the source's tensors into `sums` (one each, in order)
/// and, where `memory` is not null (≥ SlotSpan::bytes), lays the slot out as plan/segments.h says:
/// sums and what needs packing in `memory`, long runs as pieces of the tensors themselves, but for
/// tensors in a GPU's memory, which are packed.
///
/// Pure but for the memory it is given; runs on any thread. Gives up between segments when `stop`
/// is set; the result is then worthless. The slice must have passed ValidateSlice.
PackedSlot PackSlot(const plan::Stream& stream, const plan::StreamSchedule& schedule, uint32_t slot,
                    const Binding& binding, int64_t direct_run_bytes_min,
                    const memory::RegionSpan* memory, std::span<uint64_t> sums,
                    const std::atomic<bool>& stop);

}  // namespace weightwire::transfer
