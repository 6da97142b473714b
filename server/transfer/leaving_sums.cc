#include "server/transfer/leaving_sums.h"

#include <algorithm>
#include <cstring>

#include "kernels/kernels.h"
#include "server/transfer/segment_copy.h"

namespace weightwire::transfer {

LeavingSums::LeavingSums(const plan::Stream& stream, const plan::StreamSchedule& schedule,
                         uint32_t slot, const Binding& binding, std::byte* sums_at)
    : stream_(stream),
      schedule_(schedule),
      span_(schedule.slots[slot]),
      binding_(binding),
      sums_at_(sums_at),
      sums_(new Sum[span_.segment_count]) {}

void LeavingSums::Made(uint32_t i, uint64_t sum) {
  sums_[i].value.store(sum, std::memory_order_relaxed);
  sums_[i].made.store(true, std::memory_order_release);
}

// Of the tensors, as the plan has the segment, not of what the slot makes of it.
void LeavingSums::Make(uint32_t i) {
  if (sums_[i].made.load(std::memory_order_acquire)) return;
  const plan::Segment& segment = schedule_.segments[span_.first_segment + i];
  const plan::CopyOp& op = stream_.ops[segment.op_index];
  const SegmentCopy copy = CopyOf(op, segment);
  const std::byte* source = binding_[op.source_tensor].data() + copy.source_offset;
  Made(i, kernels::SumSource(source, copy.box, copy.from, copy.to));
}

void LeavingSums::MakeAll() {
  for (uint32_t i = 0; i < span_.segment_count; ++i) {
    Make(i);
    const uint64_t sum = sums_[i].value.load(std::memory_order_relaxed);
    std::memcpy(sums_at_ + sizeof(sum) * i, &sum, sizeof(sum));
  }
  complete_.store(true, std::memory_order_release);
}

void LeavingSums::Leave(uint64_t offset, uint64_t bytes) {
  if (offset < sizeof(uint64_t) * span_.segment_count) {
    std::call_once(all_, [this] { MakeAll(); });
  }
  const auto offsets =
      std::span(schedule_.offset_in_slot).subspan(span_.first_segment, span_.segment_count);
  const auto after = std::ranges::upper_bound(offsets, static_cast<int64_t>(offset));
  // Also the segment in whose middle `offset` is.
  auto i = static_cast<uint32_t>(std::max<std::ptrdiff_t>(after - offsets.begin() - 1, 0));
  for (; i < span_.segment_count && offsets[i] < static_cast<int64_t>(offset + bytes); ++i) Make(i);
}

bool LeavingSums::Take(std::span<uint64_t> into) const {
  if (!complete_.load(std::memory_order_acquire)) return false;
  for (size_t i = 0; i < into.size(); ++i) {
    into[i] = sums_[i].value.load(std::memory_order_relaxed);
  }
  return true;
}

}  // namespace weightwire::transfer
