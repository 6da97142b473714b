#include "server/plan/relayed.h"

namespace weightwire::plan {

RankSlice RelayedSlice(const RankSlice& target, Side side) {
  RankSlice relayed = target;
  relayed.side = side;
  if (side == Side::kSource) relayed.gathered = {};
  for (Stream& stream : relayed.streams) {
    for (CopyOp& op : stream.ops) {
      op.source_tensor = op.target_tensor;
      op.source_dtype = op.target_dtype;
      op.source_offset = op.target_offset;
      op.source_stride = op.target_stride;
      if (op.transform == Transform::kScales)
        op.block.clear();  // that of codes says how they are cut
      op.transform = Transform::kElements;
      op.rule = layout::ScaleRule::kQuotient;
      op.source_extent.clear();
    }
  }
  return relayed;
}

}  // namespace weightwire::plan
