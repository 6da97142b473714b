#pragma once

#include <cstdint>
#include <vector>

#include "server/plan/plan.h"

namespace weightwire::plan {

/// A part of one CopyOp that is summed, sent and re-read as a whole. `op_index` and the element
/// sub-box [begin, begin+extent) of the op, which is contiguous in packed order or, of codes, whole
/// blocks.
struct Segment {
  uint32_t op_index = 0;
  std::vector<int64_t> begin;  ///< within the op's extent
  std::vector<int64_t> extent;
  int64_t bytes = 0;  ///< on the wire
};

/// A run of whole segments that travels through one slot.
///
/// Layout of a slot, agreed on by both sides: `segment_count` little-endian uint64 sums, padding to
/// 64 bytes, then each segment's packed bytes, each begun at a multiple of 64.
struct SlotSpan {
  uint32_t first_segment = 0;
  uint32_t segment_count = 0;
  int64_t bytes = 0;          ///< whole slot: sums, padding and payload
  int64_t payload_bytes = 0;  ///< Σ Segment::bytes
};

struct StreamSchedule {
  std::vector<Segment> segments;
  std::vector<SlotSpan> slots;
  std::vector<int64_t> offset_in_slot;  ///< of each segment's packed bytes
};

/// Cuts a stream into segments of at most `segment_bytes_max` and these into slots of at most
/// `slot_bytes_max` (≥ segment_bytes_max + 128). An op is cut along its outermost dimension with
/// extent > 1 first, so that inner runs stay whole; codes are cut at blocks only, none of which may
/// have more than `segment_bytes_max` (LargestBlockBytes). Pure; equal on both sides.
StreamSchedule ScheduleOf(const Stream& stream, int64_t segment_bytes_max, int64_t slot_bytes_max);

/// Bytes of the largest block that a segment of the copy must take whole; 0 when there is none.
int64_t LargestBlockBytes(const CopyOp& op);

/// Start of the payload in a slot with `segment_count` sums.
constexpr int64_t SlotPayloadOffset(uint32_t segment_count) {
  return (int64_t{8} * segment_count + 63) / 64 * 64;
}

}  // namespace weightwire::plan
