#include "server/transfer/arrival_sums.h"

#include <algorithm>
#include <cstring>

// Bytes between two ranges (the slot's sums, gaps, what goes to scratch) are not summed.
namespace weightwire::transfer {

ArrivalSums::ArrivalSums(const plan::StreamSchedule& schedule, const Chunk& chunk,
                         const Scatter& scatter)
    : place_(scatter.into), sums_(chunk.segment_count) {
  for (uint32_t i = 0; i < chunk.segment_count; ++i) {
    if (scatter.scratch_offset[i]) continue;
    const uint32_t segment = chunk.first_segment + i;
    const uint64_t begin = static_cast<uint64_t>(schedule.offset_in_slot[segment]) - scatter.offset;
    const auto bytes = static_cast<uint64_t>(schedule.segments[segment].bytes);
    ranges_.push_back({begin, begin + bytes, i});
  }
}

void ArrivalSums::Take(std::span<const std::byte> piece) {
  place_.Write(piece, [this](std::byte* to, std::span<const std::byte> from) {
    while (!from.empty()) {
      size_t some = from.size();
      if (next_ < ranges_.size()) {
        const SegmentRange& range = ranges_[next_];
        const uint64_t edge = position_ < range.begin ? range.begin : range.end;
        some = std::min<uint64_t>(some, edge - position_);
      }
      Put(to, from.first(some));
      to += some;
      from = from.subspan(some);
    }
  });
  kernels::RunningSum::CopiesEnd();
}

// All of it in one range, or all of it outside.
void ArrivalSums::Put(std::byte* to, std::span<const std::byte> some) {
  const bool summed = next_ < ranges_.size() && position_ >= ranges_[next_].begin;
  position_ += some.size();
  if (!summed) {
    std::memcpy(to, some.data(), some.size());
    return;
  }
  sum_.CopyAndAdd(to, some.data(), some.size());
  const SegmentRange& range = ranges_[next_];
  if (position_ < range.end) return;
  sums_[range.segment] = sum_.End();
  sum_ = {};
  ++next_;
}

std::vector<uint64_t> ArrivalSums::TakeAll() const {
  std::vector<uint64_t> sums;
  sums.reserve(sums_.size());
  for (const auto& sum : sums_) sums.push_back(*sum);
  return sums;
}

}  // namespace weightwire::transfer
