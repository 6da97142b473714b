#include "server/transfer/pack.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <vector>

#include "server/transfer/make.h"

// A cursor moves through the slot. What lies between two runs of tensor memory (sums, padding,
// packed segments) comes from `packed` at the same offset as in the slot, so that the pieces need
// no table; but sums always come from the host.
namespace weightwire::transfer {
namespace {

static_assert(std::endian::native == std::endian::little, "sums are written as they are in memory");

class GatherBuilder {
 public:
  GatherBuilder(const memory::RegionSpan& memory, transport::GatherList* pieces)
      : memory_(memory), pieces_(pieces) {}

  // Everything from the cursor to `end` comes from the slot's own memory.
  void FromSlot(uint64_t end) {
    if (end <= cursor_) return;
    Append({memory_.region, memory_.offset + cursor_, end - cursor_});
    cursor_ = end;
  }
  void FromSums(const memory::RegionSpan& sums) {
    Append(sums);
    cursor_ += sums.bytes;
  }
  void FromTensor(const memory::RegionSpan& tensor, const Run& run) {
    Append({tensor.region, tensor.offset + run.offset, run.bytes});
    cursor_ += run.bytes;
  }

 private:
  void Append(memory::RegionSpan piece) {
    if (!pieces_->empty()) {
      memory::RegionSpan& last = pieces_->back();
      if (last.region == piece.region && last.offset + last.bytes == piece.offset) {
        last.bytes += piece.bytes;
        return;
      }
    }
    pieces_->push_back(std::move(piece));
  }

  const memory::RegionSpan& memory_;
  transport::GatherList* pieces_;
  uint64_t cursor_ = 0;
};

}  // namespace

Status SumSegments(const plan::Stream& stream, const plan::StreamSchedule& schedule, uint32_t first,
                   const Binding& binding, const std::vector<bool>& known,
                   std::span<uint64_t> into) {
  std::vector<device::CopyJob> on_gpus;  // summed together
  std::vector<size_t> index;
  for (size_t i = 0; i < into.size(); ++i) {
    if (!known.empty() && known[first + i]) continue;
    const plan::Segment& segment = schedule.segments[first + i];
    const plan::CopyOp& op = stream.ops[segment.op_index];
    const SegmentCopy copy = CopyOf(op, segment);
    const device::Bytes source = binding[op.source_tensor].at() + copy.source_offset;
    if (source.device != nullptr && copy.transform == plan::Transform::kElements) {
      on_gpus.push_back({{}, source, copy.box, copy.from, copy.to});
      index.push_back(i);
      continue;
    }
    WW_ASSIGN_OR_STATUS(into[i], SumMade(source, copy));
  }
  std::vector<uint64_t> sums(on_gpus.size());
  WW_RETURN_IF_ERROR(device::SumSources(on_gpus, sums));
  for (size_t k = 0; k < index.size(); ++k) into[index[k]] = sums[k];
  return OkStatus();
}

std::vector<uint64_t> HeadsOf(const plan::Stream& stream, const plan::StreamSchedule& schedule,
                              uint32_t slot, const Binding& binding) {
  const plan::SlotSpan& span = schedule.slots[slot];
  std::vector<uint64_t> heads(span.segment_count, Kept::kUnknown);
  for (uint32_t i = 0; i < span.segment_count; ++i) {
    const plan::Segment& segment = schedule.segments[span.first_segment + i];
    const plan::CopyOp& op = stream.ops[segment.op_index];
    const SegmentCopy copy = CopyOf(op, segment);
    const device::Bytes source = binding[op.source_tensor].at() + copy.source_offset;
    if (source.device != nullptr || copy.transform != plan::Transform::kElements) continue;
    const kernels::StridedBox box = kernels::Normalize(copy.box);
    const int64_t run = kernels::SourceRunBytes(box, kernels::ElementBytes(copy.from));
    heads[i] = kernels::SumContiguous(source.at, static_cast<size_t>(std::min(run, kHeadBytes)));
  }
  return heads;
}

bool AllDiffer(std::span<const uint64_t> heads, std::span<const uint64_t> before) {
  if (heads.empty() || heads.size() != before.size()) return false;
  for (size_t i = 0; i < heads.size(); ++i) {
    if (heads[i] == before[i] || heads[i] == Kept::kUnknown || before[i] == Kept::kUnknown) {
      return false;
    }
  }
  return true;
}

PackedSlot PackSlot(const plan::Stream& stream, const plan::StreamSchedule& schedule, uint32_t slot,
                    const Binding& binding, int64_t direct_run_bytes_min, const SlotMemory& memory,
                    const std::vector<bool>& known, std::span<uint64_t> sums, LeavingSums* leaving,
                    const std::atomic<bool>& stop, SlotDeltaMaker* delta) {
  const plan::SlotSpan& span = schedule.slots[slot];
  const bool packs = memory.packed.region != nullptr;
  const bool on_device = packs && memory.packed.region->on_device();
  PackedSlot packed;
  if (!packs) {
    if (stop.load(std::memory_order_relaxed)) return packed;
    packed.status = SumSegments(stream, schedule, span.first_segment, binding, known, sums);
    return packed;
  }
  GatherBuilder builder(memory.packed, &packed.pieces);
  if (on_device) builder.FromSums(memory.sums);
  for (uint32_t i = 0; i < span.segment_count; ++i) {
    if (stop.load(std::memory_order_relaxed)) return packed;
    const uint32_t index = span.first_segment + i;
    const plan::Segment& segment = schedule.segments[index];
    const plan::CopyOp& op = stream.ops[segment.op_index];
    const memory::RegionSpan& tensor = binding[op.source_tensor];
    const SegmentCopy copy = CopyOf(op, segment);
    const auto offset = static_cast<uint64_t>(schedule.offset_in_slot[index]);
    builder.FromSlot(offset);
    const device::Bytes source = tensor.at() + copy.source_offset;
    const bool direct =
        (on_device || !tensor.region->on_device()) && SourceIsDirect(copy, direct_run_bytes_min);
    if (direct) {
      for (const Run& run : SourceRuns(copy)) builder.FromTensor(tensor, run);
      const bool has_sum = !known.empty() && known[index];
      if (leaving != nullptr || (has_sum && (delta == nullptr || delta->Has(i, sums[i])))) continue;
      // Its bytes lie together: one pass sums them and finds what changed.
      if (delta != nullptr && source.device == nullptr && SourceRuns(copy).size() == 1) {
        sums[i] = delta->Add(i, {source.at, static_cast<size_t>(segment.bytes)}, std::nullopt);
        continue;
      }
    } else {
      builder.FromSlot(offset + static_cast<uint64_t>(segment.bytes));
      packed.bytes_packed += segment.bytes;
    }
    const auto sum =
        direct ? SumMade(source, copy) : MakePacked(memory.packed.at() + offset, source, copy);
    if (!sum) {
      packed.status = sum.error();
      return packed;
    }
    if (leaving != nullptr) {
      leaving->Made(i, *sum);
    } else {
      sums[i] = *sum;
    }
    if (delta == nullptr || delta->Has(i, *sum)) continue;
    const auto bytes = static_cast<uint64_t>(segment.bytes);
    if (!direct && !on_device) {
      delta->Add(i, {memory.packed.data() + offset, bytes}, *sum);
      continue;
    }
    const std::span<std::byte> scratch = delta->Scratch(bytes);
    packed.status = direct ? device::Copy({scratch.data()}, source,
                                          kernels::WithPackedTarget(copy.box), copy.from, copy.to)
                           : device::CopyRun({scratch.data()}, memory.packed.at() + offset, bytes);
    if (!packed.status.ok()) return packed;
    delta->Add(i, scratch, *sum);
  }
  if (delta != nullptr) packed.delta = delta->Finish(sums);
  builder.FromSlot(static_cast<uint64_t>(span.bytes));
  if (leaving != nullptr) return packed;
  std::byte* sums_at = on_device ? memory.sums.data() : memory.packed.data();
  std::memcpy(sums_at, sums.data(), sums.size_bytes());
  return packed;
}

}  // namespace weightwire::transfer
