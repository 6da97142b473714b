#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "server/device/bytes.h"
#include "server/transfer/segment_copy.h"

/// The wire's bytes of one segment, made from the source's elements: copied, cast or quantized.
/// `source` and `target` are the segment's first elements, of the host or of a GPU. Equal inputs
/// give equal bytes, on every machine and whoever makes them. Errors: device/bytes.h.
namespace weightwire::transfer {

/// Sum of the bytes that would be made.
Result<uint64_t> SumMade(device::ConstBytes source, const SegmentCopy& copy);
/// Makes them in packed order at `packed` and returns their sum. The sum of what is copied or
/// cast is of the source's elements, never of `packed`; what is quantized is made once only and
/// summed where it was made, before anybody else can have touched it.
Result<uint64_t> MakePacked(device::Bytes packed, device::ConstBytes source,
                            const SegmentCopy& copy);
/// Makes them where they belong and returns the sum of what was written.
Result<uint64_t> MakeInPlace(device::Bytes target, device::ConstBytes source,
                             const SegmentCopy& copy);

/// Makes a slot of what a rank makes of what it gathered (plan::GatherBuffer), all of it within
/// `binding`. Gives up between segments when `stop` is set.
Status MakeSlotWithin(const plan::Stream& made, const plan::StreamSchedule& schedule, uint32_t slot,
                      const Binding& binding, const std::atomic<bool>& stop);

}  // namespace weightwire::transfer
