// An op that is too long is cut along the outermost dimension whose inner block still fits a
// segment; dimensions further out advance one index at a time. Every segment is then a box whose
// elements follow each other in packed order. Codes are cut into bands of rows of blocks, and bands
// that are too long into runs of blocks. Slots are filled greedily in that order.
#include "server/plan/segments.h"

#include <algorithm>

namespace weightwire::plan {
namespace {

constexpr int64_t kAlignment = 64;

int64_t AlignUp(int64_t value) { return (value + kAlignment - 1) / kAlignment * kAlignment; }

class OpCutter {
 public:
  OpCutter(const CopyOp& op, uint32_t op_index, int64_t segment_bytes_max,
           std::vector<Segment>& out)
      : op_(op), op_index_(op_index), segment_bytes_max_(segment_bytes_max), out_(out) {
    inner_bytes_ = layout::ElementBytes(op.target_dtype);
    cut_dim_ = op.extent.size();
    while (cut_dim_ > 0 && inner_bytes_ * op.extent[cut_dim_ - 1] <= segment_bytes_max) {
      inner_bytes_ *= op.extent[--cut_dim_];
    }
    per_segment_ = segment_bytes_max / inner_bytes_;
  }

  void Run() {
    if (LargestBlockBytes(op_) > 0) return CutBlocks();
    if (cut_dim_ == 0) {
      out_.push_back(
          {op_index_, std::vector<int64_t>(op_.extent.size(), 0), op_.extent, inner_bytes_});
      return;
    }
    const size_t d = cut_dim_ - 1;
    std::vector<int64_t> begin(op_.extent.size(), 0);
    do {
      for (begin[d] = 0; begin[d] < op_.extent[d]; begin[d] += per_segment_) Add(begin);
      begin[d] = 0;
    } while (NextOuterIndex(begin));
  }

 private:
  void Add(const std::vector<int64_t>& begin) {
    const size_t d = cut_dim_ - 1;
    std::vector<int64_t> extent = op_.extent;
    std::fill_n(extent.begin(), d, 1);
    extent[d] = std::min(per_segment_, op_.extent[d] - begin[d]);
    const int64_t bytes = extent[d] * inner_bytes_;
    out_.push_back({op_index_, begin, std::move(extent), bytes});
  }

  void CutBlocks() {
    const int64_t rows = op_.extent[0], columns = op_.extent[1];
    const int64_t element_bytes = layout::ElementBytes(op_.target_dtype);
    const int64_t most = segment_bytes_max_ / element_bytes;
    int64_t band = most / columns / op_.block[0] * op_.block[0];
    int64_t run = columns;
    if (band == 0) {
      band = op_.block[0];
      run = most / std::min(band, rows) / op_.block[1] * op_.block[1];
      if (run == 0) run = columns;  // a block that is wider than the matrix
    }
    for (int64_t row = 0; row < rows; row += band) {
      for (int64_t column = 0; column < columns; column += run) {
        std::vector<int64_t> extent = {std::min(band, rows - row), std::min(run, columns - column)};
        const int64_t bytes = extent[0] * extent[1] * element_bytes;
        out_.push_back({op_index_, {row, column}, std::move(extent), bytes});
      }
    }
  }

  /// Advances the dimensions outside the cut one, in row-major order; false after the last.
  bool NextOuterIndex(std::vector<int64_t>& begin) const {
    for (size_t d = cut_dim_ - 1; d-- > 0;) {
      if (++begin[d] < op_.extent[d]) return true;
      begin[d] = 0;
    }
    return false;
  }

  const CopyOp& op_;
  const uint32_t op_index_;
  const int64_t segment_bytes_max_;
  std::vector<Segment>& out_;
  size_t cut_dim_ = 0;       ///< dimensions from here on stay whole; the one before it is cut
  int64_t inner_bytes_ = 0;  ///< of the block that stays whole
  int64_t per_segment_ = 0;  ///< such blocks in one segment
};

}  // namespace

int64_t LargestBlockBytes(const CopyOp& op) {
  if (op.block.empty() || op.transform == Transform::kScales) return 0;
  return layout::ElementBytes(op.target_dtype) * std::min(op.extent[0], op.block[0]) *
         std::min(op.extent[1], op.block[1]);
}

StreamSchedule ScheduleOf(const Stream& stream, int64_t segment_bytes_max, int64_t slot_bytes_max) {
  WW_CHECK(segment_bytes_max >= int64_t{sizeof(uint64_t)});
  WW_CHECK(slot_bytes_max >= segment_bytes_max + 2 * kAlignment);
  StreamSchedule schedule;
  for (uint32_t i = 0; i < stream.ops.size(); ++i) {
    WW_CHECK(LargestBlockBytes(stream.ops[i]) <= segment_bytes_max);
    OpCutter(stream.ops[i], i, segment_bytes_max, schedule.segments).Run();
  }
  uint32_t first = 0;
  const auto total = static_cast<uint32_t>(schedule.segments.size());
  while (first < total) {
    SlotSpan slot{.first_segment = first};
    int64_t aligned_payload = 0;  // of the segments taken so far, each begun at its alignment
    for (uint32_t i = first; i < total; ++i) {
      const int64_t bytes = schedule.segments[i].bytes;
      const int64_t end = SlotPayloadOffset(slot.segment_count + 1) + aligned_payload + bytes;
      if (end > slot_bytes_max) break;
      ++slot.segment_count;
      slot.payload_bytes += bytes;
      slot.bytes = end;
      aligned_payload += AlignUp(bytes);
    }
    int64_t offset = SlotPayloadOffset(slot.segment_count);
    for (uint32_t i = first; i < first + slot.segment_count; ++i) {
      schedule.offset_in_slot.push_back(offset);
      offset += AlignUp(schedule.segments[i].bytes);
    }
    first += slot.segment_count;
    schedule.slots.push_back(slot);
  }
  return schedule;
}

}  // namespace weightwire::plan
