#include "server/transfer/fetch.h"

#include <algorithm>
#include <cstring>

#include "server/base/checked.h"
#include "server/transfer/make.h"

namespace weightwire::transfer {
namespace {

constexpr uint64_t kAlignment = 64;

struct Parts {
  const plan::CopyOp& op;
  const plan::Segment& segment;
  SegmentCopy copy;
};
Parts PartsOf(const plan::Stream& stream, const plan::StreamSchedule& schedule, uint32_t index) {
  const plan::Segment& segment = schedule.segments[index];
  const plan::CopyOp& op = stream.ops[segment.op_index];
  return {op, segment, CopyOf(op, segment)};
}

uint64_t EndInSlot(const plan::StreamSchedule& schedule, uint32_t index) {
  return static_cast<uint64_t>(schedule.offset_in_slot[index] + schedule.segments[index].bytes);
}

// Of the slot from `cursor` to the chunk's end, what is of no segment.
uint64_t GapBytes(const plan::StreamSchedule& schedule, const Chunk& chunk, uint64_t cursor) {
  uint64_t bytes = 0;
  for (uint32_t i = chunk.first_segment; i < chunk.first_segment + chunk.segment_count; ++i) {
    bytes += static_cast<uint64_t>(schedule.offset_in_slot[i]) - cursor;
    cursor = EndInSlot(schedule, i);
  }
  return bytes;
}

// Appends to the spans of a scatter, joining what is adjacent in memory.
void Append(std::vector<transport::MutableSpan>* into, std::byte* data, uint64_t bytes) {
  if (bytes == 0) return;
  if (!into->empty() && into->back().data() + into->back().size() == data) {
    into->back() = transport::MutableSpan(into->back().data(), into->back().size() + bytes);
    return;
  }
  into->emplace_back(data, bytes);
}

// The hint is the sum that is wanted, and the bytes still have it. Bytes that cannot be summed are
// not here: who reads them anew is told why.
bool IsHere(std::span<const uint64_t> kept, uint32_t i, uint64_t wanted, device::Bytes target,
            const SegmentCopy& copy) {
  return !kept.empty() && kept[i] == wanted &&
         device::SumTarget(target, copy.box, copy.to) == Result<uint64_t>(wanted);
}

bool IsDirect(const SegmentCopy& copy, const memory::RegionSpan& tensor,
              int64_t direct_run_bytes_min) {
  return !tensor.region->on_device() && TargetIsDirect(copy, direct_run_bytes_min);
}

}  // namespace

SegmentSums SumsIn(std::span<const std::byte> memory, const plan::SlotSpan& slot) {
  return [memory, first = slot.first_segment](uint32_t segment) -> Result<uint64_t> {
    uint64_t sum;
    std::memcpy(&sum, memory.data() + sizeof(sum) * (segment - first), sizeof(sum));
    return sum;
  };
}

MappedCopy CopyMapped(const plan::Stream& stream, const plan::StreamSchedule& schedule,
                      uint32_t slot, std::span<const std::span<const std::byte>> source_tensors,
                      const SegmentSums& source_sums, std::span<const uint64_t> kept,
                      const Binding& binding, int rereads_max, const std::atomic<bool>& stop) {
  const plan::SlotSpan& span = schedule.slots[slot];
  MappedCopy result;
  result.sums.reserve(span.segment_count);
  for (uint32_t i = 0; i < span.segment_count; ++i) {
    const auto [op, segment, copy] = PartsOf(stream, schedule, span.first_segment + i);
    const std::byte* source = source_tensors[op.source_tensor].data() + copy.source_offset;
    const device::Bytes target = binding[op.target_tensor].at() + copy.target_offset;
    const auto wanted = source_sums(span.first_segment + i);
    if (!wanted) {
      result.status = wanted.error();
      return result;
    }
    if (!stop.load(std::memory_order_relaxed) && IsHere(kept, i, *wanted, target, copy)) {
      result.kept_bytes += segment.bytes;
      result.sums.push_back(*wanted);
      continue;
    }
    for (int attempt = 0;; ++attempt) {
      if (stop.load(std::memory_order_relaxed)) return result;
      const auto sum = MakeInPlace(target, source, copy);
      if (!sum) {
        result.status = sum.error();
        return result;
      }
      if (*sum == *wanted) break;
      ++result.mismatches;
      if (attempt == rereads_max) {
        result.broken = span.first_segment + i;
        return result;
      }
      ++result.rereads;
    }
    result.sums.push_back(*wanted);
  }
  return result;
}

std::vector<bool> TakeKept(const plan::Stream& stream, const plan::StreamSchedule& schedule,
                           uint32_t slot, const KeptSums& kept, std::span<const uint64_t> expected,
                           const Binding& served, const Binding& binding,
                           const std::atomic<bool>& stop) {
  const plan::SlotSpan& span = schedule.slots[slot];
  std::vector<bool> taken(span.segment_count);
  for (uint32_t i = 0; i < span.segment_count; ++i) {
    if (stop.load(std::memory_order_relaxed)) return taken;
    const auto [op, segment, copy] = PartsOf(stream, schedule, span.first_segment + i);
    const device::Bytes target = binding[op.target_tensor].at() + copy.target_offset;
    taken[i] = IsHere(kept.here, i, expected[i], target, copy);
    if (!taken[i] && !kept.served.empty() && kept.served[i] == expected[i]) {
      const device::Bytes from = served[op.target_tensor].at() + copy.target_offset;
      if (from.at == target.at) {  // what is gathered lies in one place for all buffers
        taken[i] = IsHere(kept.served, i, expected[i], target, copy);
        continue;
      }
      taken[i] = device::CopyAndSumTarget(target, from, WithTargetOnBothSides(copy.box), copy.to,
                                          copy.to) == Result<uint64_t>(expected[i]);
    }
  }
  return taken;
}

std::vector<Chunk> ChunksOf(const plan::StreamSchedule& schedule, uint32_t slot, int64_t bytes_max,
                            const std::vector<bool>& kept) {
  const plan::SlotSpan& span = schedule.slots[slot];
  std::vector<Chunk> chunks;
  if (kept.empty()) chunks.push_back({slot, span.first_segment, 0, true});
  bool joins = kept.empty();  // what lies before the segment is in the last chunk
  uint64_t begin = 0;
  for (uint32_t i = 0; i < span.segment_count; ++i) {
    const uint32_t segment = span.first_segment + i;
    if (!kept.empty() && kept[i]) {
      joins = false;
      continue;
    }
    if (!joins || EndInSlot(schedule, segment) - begin > static_cast<uint64_t>(bytes_max)) {
      begin = static_cast<uint64_t>(schedule.offset_in_slot[segment]);
      chunks.push_back({slot, segment, 0, false});
    }
    joins = true;
    ++chunks.back().segment_count;
  }
  return chunks;
}

uint64_t ScratchBytes(const plan::Stream& stream, const plan::StreamSchedule& schedule,
                      const Chunk& chunk, const Binding& binding, int64_t direct_run_bytes_min) {
  uint64_t bytes = 0;
  for (uint32_t i = chunk.first_segment; i < chunk.first_segment + chunk.segment_count; ++i) {
    const Parts parts = PartsOf(stream, schedule, i);
    if (IsDirect(parts.copy, binding[parts.op.target_tensor], direct_run_bytes_min)) continue;
    bytes += RoundUp(static_cast<uint64_t>(parts.segment.bytes), kAlignment);
  }
  return bytes;
}

Scatter ScatterOf(const plan::Stream& stream, const plan::StreamSchedule& schedule,
                  const Chunk& chunk, const Binding& binding, int64_t direct_run_bytes_min,
                  std::byte* scratch, std::span<uint64_t> sums) {
  Scatter scatter;
  uint64_t cursor = 0;
  uint64_t scratch_used = 0;
  if (chunk.with_sums) {
    Append(&scatter.into, reinterpret_cast<std::byte*>(sums.data()), sums.size_bytes());
    cursor = sums.size_bytes();
  } else {
    cursor = static_cast<uint64_t>(schedule.offset_in_slot[chunk.first_segment]);
    scatter.offset = cursor;
  }
  scatter.pads.resize(GapBytes(schedule, chunk, cursor));
  std::byte* pad = scatter.pads.data();
  for (uint32_t i = chunk.first_segment; i < chunk.first_segment + chunk.segment_count; ++i) {
    const auto [op, segment, copy] = PartsOf(stream, schedule, i);
    const auto bytes = static_cast<uint64_t>(segment.bytes);
    const uint64_t gap = static_cast<uint64_t>(schedule.offset_in_slot[i]) - cursor;
    Append(&scatter.into, pad, gap);
    pad += gap;
    cursor = EndInSlot(schedule, i);
    if (IsDirect(copy, binding[op.target_tensor], direct_run_bytes_min)) {
      scatter.scratch_offset.emplace_back(std::nullopt);
      std::byte* tensor = binding[op.target_tensor].data();
      for (const Run& run : TargetRuns(copy)) Append(&scatter.into, tensor + run.offset, run.bytes);
      continue;
    }
    scatter.scratch_offset.emplace_back(scratch_used);
    Append(&scatter.into, scratch + scratch_used, bytes);
    scratch_used += RoundUp(bytes, kAlignment);
  }
  return scatter;
}

Result<std::vector<uint64_t>> UnpackAndSum(const plan::Stream& stream,
                                           const plan::StreamSchedule& schedule, const Chunk& chunk,
                                           const Scatter& scatter, const std::byte* scratch,
                                           const Binding& binding) {
  std::vector<uint64_t> sums;
  sums.reserve(chunk.segment_count);
  for (uint32_t i = 0; i < chunk.segment_count; ++i) {
    const auto [op, segment, copy] = PartsOf(stream, schedule, chunk.first_segment + i);
    const device::Bytes target = binding[op.target_tensor].at() + copy.target_offset;
    const auto& from_scratch = scatter.scratch_offset[i];
    WW_ASSIGN(const uint64_t sum,
              from_scratch ? device::CopyAndSumTarget(target, scratch + *from_scratch,
                                                      WithPackedSource(copy.box), copy.to, copy.to)
                           : device::SumTarget(target, copy.box, copy.to));
    sums.push_back(sum);
  }
  return sums;
}

}  // namespace weightwire::transfer
