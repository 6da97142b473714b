#pragma once

#include <atomic>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "server/plan/segments.h"
#include "server/transfer/source_sums.h"
#include "server/transfer/transfer.h"
#include "server/transport/transport.h"

/// The target's work on bytes; runs on any thread. The slice must have passed ValidateSlice.
namespace weightwire::transfer {

/// What came of copying a slot from mapped memory.
struct MappedCopy {
  std::vector<uint64_t> sums;  ///< of the destination, one for each segment done
  uint32_t mismatches = 0;     ///< segments found different, counted each time
  uint32_t rereads = 0;
  int64_t kept_bytes = 0;          ///< of segments that were there already
  std::optional<uint32_t> broken;  ///< segment (index in the schedule) still different at the end
  Status status;                   ///< not OK: a GPU failed; the segments before were done
};
/// Copies every segment of the slot from the mapped tensors, compares the written bytes with the
/// source's sum, asked for just before or made with the copy, and copies again at most
/// `rereads_max` times. A segment whose `kept` sum (empty, or one for each segment) is the source's
/// is summed first and not copied when its bytes are there. Gives up between segments when `stop`
/// is set. `source_tensors` must have passed ValidateSourceSide.
MappedCopy CopyMapped(const plan::Stream& stream, const plan::StreamSchedule& schedule,
                      uint32_t slot, std::span<const transport::MappedPiece> source_tensors,
                      SourceSums& source_sums, std::span<const uint64_t> kept,
                      const Binding& binding, int rereads_max, const std::atomic<bool>& stop);

/// What is known of a slot's segments before they are read: each list is empty, or has one sum for
/// each segment.
struct KeptSums {
  std::vector<uint64_t> here;    ///< in the binding itself
  std::vector<uint64_t> served;  ///< in the buffer that the engine serves meanwhile
  bool empty() const { return here.empty() && served.empty(); }
  /// Some segment has, by one of the hints, the sum that is expected.
  bool MayHold(std::span<const uint64_t> expected) const;
};
/// Which segments of the slot need not be read because their bytes are here, or in `served` and
/// were copied from there: each was summed and agrees with `expected`. Gives up between segments
/// when `stop` is set.
std::vector<bool> TakeKept(const plan::Stream& stream, const plan::StreamSchedule& schedule,
                           uint32_t slot, const KeptSums& kept, std::span<const uint64_t> expected,
                           const Binding& served, const Binding& binding,
                           const std::atomic<bool>& stop);

/// Whole segments of one slot that one Get reads.
struct Chunk {
  uint32_t slot = 0;
  uint32_t first_segment = 0;  ///< index in the schedule
  uint32_t segment_count = 0;
  bool with_sums = false;  ///< begins at the slot's sums instead of the first segment
};
/// Cuts a slot into chunks of at most `bytes_max`, or of a single part where that is larger. With
/// `kept` (one for each segment) its sums are here already: chunks of the other segments.
std::vector<Chunk> ChunksOf(const plan::StreamSchedule& schedule, uint32_t slot, int64_t bytes_max,
                            const std::vector<bool>& kept = {});

/// Which destinations a Get may write to straight; what belongs elsewhere comes to scratch.
struct Straight {
  int64_t run_bytes_min = 0;   ///< shorter runs come to scratch
  bool device_memory = false;  ///< a GPU's too
};

/// Where the bytes of a chunk go.
struct Scatter {
  uint64_t offset = 0;  ///< in the slot
  std::vector<transport::MutableSpan> into;
  /// For each segment its place in scratch; nullopt when it goes straight to the destination.
  std::vector<std::optional<uint64_t>> scratch_offset;
  /// Takes what lies between segments, each gap in a place of its own; never read.
  std::vector<std::byte> pads;
};
/// Bytes of scratch that a chunk needs; 0 when every segment goes straight to the destination.
uint64_t ScratchBytes(const plan::Stream& stream, const plan::StreamSchedule& schedule,
                      const Chunk& chunk, const Binding& binding, const Straight& straight);
/// `scratch` must hold ScratchBytes, and needs no region for 0; `sums` all sums of the slot.
Scatter ScatterOf(const plan::Stream& stream, const plan::StreamSchedule& schedule,
                  const Chunk& chunk, const Binding& binding, const Straight& straight,
                  const memory::RegionSpan& scratch, std::span<uint64_t> sums);
/// Has every GPU that the scatter wrote to see it (Device::FlushWrites), once.
Status FlushWritten(const Scatter& scatter);

/// Unpacks what lies in scratch and sums the destination's bytes: one for each segment. `known`
/// (empty, or one for each segment): sums of what lies at the destination that are made already.
/// Errors: device/bytes.h.
Result<std::vector<uint64_t>> UnpackAndSum(const plan::Stream& stream,
                                           const plan::StreamSchedule& schedule, const Chunk& chunk,
                                           const Scatter& scatter,
                                           const memory::RegionSpan& scratch,
                                           const Binding& binding,
                                           std::span<const std::optional<uint64_t>> known = {});

}  // namespace weightwire::transfer
