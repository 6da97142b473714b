#include "server/transfer/fetch.h"

#include <algorithm>
#include <cstring>
#include <set>

#include "server/base/checked.h"
#include "server/transfer/make.h"

namespace weightwire::transfer {
namespace {

constexpr uint64_t kAlignment = 64;

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
void Append(std::vector<transport::MutableSpan>* into, transport::MutableSpan span) {
  if (span.empty()) return;
  if (!into->empty() && into->back().MeetsWith(span)) return into->back().Extend(span.size());
  into->push_back(span);
}

// The hint is the sum that is wanted, and the bytes still have it. Bytes that cannot be summed are
// not here: who reads them anew is told why.
bool IsHere(std::span<const uint64_t> kept, uint32_t i, uint64_t wanted, device::Bytes target,
            const SegmentCopy& copy) {
  return !kept.empty() && kept[i] == wanted &&
         device::SumTarget(target, copy.box, copy.to) == Result<uint64_t>(wanted);
}

/// One segment of a mapped source.
struct BothSides {
  device::Bytes target;
  device::ConstBytes source;
  SegmentCopy copy;
  int64_t bytes = 0;
};

bool OnOneGpu(const BothSides& one) {
  return one.target.device != nullptr && one.target.device == one.source.device &&
         one.copy.transform == plan::Transform::kElements;
}

// Which of them are here (IsHere), of several on one GPU at once.
Result<std::vector<bool>> AreHere(std::span<const BothSides> some, std::span<const uint64_t> wanted,
                                  std::span<const uint64_t> kept) {
  std::vector<bool> here(some.size());
  std::vector<device::CopyJob> hinted;
  std::vector<size_t> index;
  for (size_t k = 0; k < some.size() && !kept.empty(); ++k) {
    if (kept[k] != wanted[k]) continue;
    const BothSides& one = some[k];
    hinted.push_back(
        {{}, one.target, WithTargetOnBothSides(one.copy.box), one.copy.to, one.copy.to});
    index.push_back(k);
  }
  std::vector<uint64_t> sums(hinted.size());
  WW_FAIL_IF_ERROR(device::SumSources(hinted, sums));
  for (size_t j = 0; j < index.size(); ++j) here[index[j]] = sums[j] == wanted[index[j]];
  return here;
}

// Copies what is not `here` once, and gives the sums of what was written.
Status CopyOnce(std::span<const BothSides> some, const std::vector<bool>& here,
                std::span<uint64_t> written) {
  if (some.size() == 1) {
    if (here[0]) return OkStatus();
    WW_ASSIGN_OR_STATUS(written[0], MakeInPlace(some[0].target, some[0].source, some[0].copy));
    return OkStatus();
  }
  std::vector<device::CopyJob> jobs;
  std::vector<size_t> index;
  for (size_t k = 0; k < some.size(); ++k) {
    if (here[k]) continue;
    const SegmentCopy& copy = some[k].copy;
    jobs.push_back({some[k].target, some[k].source, copy.box, copy.from, copy.to});
    index.push_back(k);
  }
  std::vector<uint64_t> sums(jobs.size());
  WW_RETURN_IF_ERROR(device::CopyAndSumTargets(jobs, sums));
  for (size_t j = 0; j < index.size(); ++j) written[index[j]] = sums[j];
  return OkStatus();
}

// Of segments that are here already, or were just copied: nothing is compared yet.
struct Copied {
  std::vector<bool> here;
  std::vector<uint64_t> wanted;   ///< the source's sums
  std::vector<uint64_t> written;  ///< of the others
};

// Whether it is worth knowing the source's sum before anything is copied: there is a hint, and the
// first bytes, where they can be compared, do not say already that the segment has changed.
bool MayBeHere(const BothSides& one, std::span<const uint64_t> kept) {
  if (kept.empty() || kept[0] == Kept::kUnknown) return false;
  const SegmentCopy& copy = one.copy;
  if (one.target.device || one.source.device || copy.transform != plan::Transform::kElements ||
      copy.from != copy.to) {
    return true;
  }
  const kernels::StridedBox box = kernels::Normalize(copy.box);
  const int element_bytes = kernels::ElementBytes(copy.to);
  const int64_t run = std::min(kernels::SourceRunBytes(box, element_bytes),
                               kernels::TargetRunBytes(box, element_bytes));
  return std::memcmp(one.target.at, one.source.at,
                     static_cast<size_t>(std::min(run, kHeadBytes))) == 0;
}

// Segments from `first` on, which must be one or all of one GPU.
Result<Copied> CopySome(std::span<const BothSides> some, SourceSums& source_sums,
                        std::span<const uint64_t> kept, uint32_t first) {
  Copied copied;
  copied.here.resize(some.size());
  copied.wanted.resize(some.size());
  copied.written.resize(some.size());
  if (some.size() == 1 && !source_sums.Has(first) && !MayBeHere(some[0], kept)) {
    const BothSides& one = some[0];
    if (const auto both = source_sums.CopyAndSum(first, one.target, one.source, one.copy)) {
      copied.wanted[0] = both->source;
      copied.written[0] = both->target;
      return copied;
    }
  }
  WW_FAIL_IF_ERROR(source_sums.Sum(first, copied.wanted));
  WW_ASSIGN(copied.here, AreHere(some, copied.wanted, kept));
  WW_FAIL_IF_ERROR(CopyOnce(some, copied.here, copied.written));
  return copied;
}

// Copies again what differs. False: `result` is at its end.
bool Compare(std::span<const BothSides> some, Copied copied, int rereads_max,
             const std::atomic<bool>& stop, uint32_t first, MappedCopy* result) {
  for (size_t k = 0; k < some.size(); ++k) {
    const uint64_t wanted = copied.wanted[k];
    if (copied.here[k]) {
      result->kept_bytes += some[k].bytes;
      result->sums.push_back(wanted);
      continue;
    }
    for (int attempt = 0; copied.written[k] != wanted; ++attempt) {
      ++result->mismatches;
      if (attempt == rereads_max) {
        result->broken = first + static_cast<uint32_t>(k);
        return false;
      }
      if (stop.load(std::memory_order_relaxed)) return false;
      ++result->rereads;
      const auto again = MakeInPlace(some[k].target, some[k].source, some[k].copy);
      if (!again) {
        result->status = again.error();
        return false;
      }
      copied.written[k] = *again;
    }
    result->sums.push_back(wanted);
  }
  return true;
}

bool IsDirect(const SegmentCopy& copy, const memory::RegionSpan& tensor, const Straight& straight) {
  return (straight.device_memory || !tensor.region->on_device()) &&
         TargetIsDirect(copy, straight.run_bytes_min);
}

}  // namespace

MappedCopy CopyMapped(const plan::Stream& stream, const plan::StreamSchedule& schedule,
                      uint32_t slot, std::span<const transport::MappedPiece> source_tensors,
                      SourceSums& source_sums, std::span<const uint64_t> kept,
                      const Binding& binding, int rereads_max, const std::atomic<bool>& stop) {
  const plan::SlotSpan& span = schedule.slots[slot];
  MappedCopy result;
  result.sums.reserve(span.segment_count);
  const auto both = [&](uint32_t i) {
    const SegmentParts parts = PartsOf(stream, schedule, span.first_segment + i);
    return BothSides{
        binding[parts.op.target_tensor].at() + parts.copy.target_offset,
        source_tensors[parts.op.source_tensor].at + parts.copy.source_offset,
        parts.copy,
        parts.segment.bytes,
    };
  };
  for (uint32_t i = 0; i < span.segment_count;) {
    // Those that lie together on a GPU are copied together. Others one by one, so that the host
    // finds in its caches what it has just summed.
    std::vector<BothSides> some = {both(i)};
    while (OnOneGpu(some.back()) && i + some.size() < span.segment_count) {
      some.push_back(both(i + static_cast<uint32_t>(some.size())));
      if (OnOneGpu(some.back())) continue;
      some.pop_back();
      break;
    }
    if (stop.load(std::memory_order_relaxed)) return result;
    const uint32_t first = span.first_segment + i;
    auto copied =
        CopySome(some, source_sums, kept.empty() ? kept : kept.subspan(i, some.size()), first);
    if (!copied) {
      result.status = copied.error();
      return result;
    }
    if (!Compare(some, *std::move(copied), rereads_max, stop, first, &result)) return result;
    i += static_cast<uint32_t>(some.size());
  }
  return result;
}

bool KeptSums::MayHold(std::span<const uint64_t> expected) const {
  for (size_t i = 0; i < expected.size(); ++i) {
    if (!here.empty() && here[i] == expected[i]) return true;
    if (!served.empty() && served[i] == expected[i]) return true;
  }
  return false;
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
                      const Chunk& chunk, const Binding& binding, const Straight& straight) {
  uint64_t bytes = 0;
  for (uint32_t i = chunk.first_segment; i < chunk.first_segment + chunk.segment_count; ++i) {
    const SegmentParts parts = PartsOf(stream, schedule, i);
    if (IsDirect(parts.copy, binding[parts.op.target_tensor], straight)) continue;
    bytes += RoundUp(static_cast<uint64_t>(parts.segment.bytes), kAlignment);
  }
  return bytes;
}

Scatter ScatterOf(const plan::Stream& stream, const plan::StreamSchedule& schedule,
                  const Chunk& chunk, const Binding& binding, const Straight& straight,
                  const memory::RegionSpan& scratch, std::span<uint64_t> sums) {
  Scatter scatter;
  uint64_t cursor = 0;
  uint64_t scratch_used = 0;
  if (chunk.with_sums) {
    Append(&scatter.into, {reinterpret_cast<std::byte*>(sums.data()), sums.size_bytes()});
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
    Append(&scatter.into, {pad, gap});
    pad += gap;
    cursor = EndInSlot(schedule, i);
    const memory::RegionSpan& tensor = binding[op.target_tensor];
    if (IsDirect(copy, tensor, straight)) {
      scatter.scratch_offset.emplace_back(std::nullopt);
      for (const Run& run : TargetRuns(copy)) {
        Append(&scatter.into, {*tensor.region, tensor.offset + run.offset, run.bytes});
      }
      continue;
    }
    scatter.scratch_offset.emplace_back(scratch_used);
    Append(&scatter.into, {*scratch.region, scratch.offset + scratch_used, bytes});
    scratch_used += RoundUp(bytes, kAlignment);
  }
  return scatter;
}

Status FlushWritten(const Scatter& scatter) {
  std::set<device::Device*> devices;
  for (const transport::MutableSpan& span : scatter.into) devices.insert(span.at().device);
  devices.erase(nullptr);
  for (device::Device* device : devices) WW_RETURN_IF_ERROR(device->FlushWrites());
  return OkStatus();
}

Result<std::vector<uint64_t>> UnpackAndSum(const plan::Stream& stream,
                                           const plan::StreamSchedule& schedule, const Chunk& chunk,
                                           const Scatter& scatter,
                                           const memory::RegionSpan& scratch,
                                           const Binding& binding,
                                           std::span<const std::optional<uint64_t>> known) {
  std::vector<uint64_t> sums;
  sums.reserve(chunk.segment_count);
  for (uint32_t i = 0; i < chunk.segment_count; ++i) {
    if (!known.empty() && known[i]) {
      sums.push_back(*known[i]);
      continue;
    }
    const auto [op, segment, copy] = PartsOf(stream, schedule, chunk.first_segment + i);
    const device::Bytes target = binding[op.target_tensor].at() + copy.target_offset;
    const auto& from_scratch = scatter.scratch_offset[i];
    WW_ASSIGN(const uint64_t sum,
              from_scratch ? device::CopyAndSumTarget(target, scratch.at() + *from_scratch,
                                                      WithPackedSource(copy.box), copy.to, copy.to)
                           : device::SumTarget(target, copy.box, copy.to));
    sums.push_back(sum);
  }
  return sums;
}

}  // namespace weightwire::transfer
