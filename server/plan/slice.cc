#include "server/plan/plan.h"

namespace weightwire::plan {

RankSlice SliceOf(const TransferPlan& plan, Side side, uint32_t rank) {
  RankSlice slice;
  slice.plan = plan.id;
  slice.side = side;
  slice.rank = rank;
  slice.tensor_names = plan.tensor_names;
  for (const Stream& stream : plan.streams) {
    const uint32_t own = side == Side::kSource ? stream.source_rank : stream.target_rank;
    if (own == rank) slice.streams.push_back(stream);
  }
  const auto gathered = plan.gathered.find(rank);
  if (side == Side::kTarget && gathered != plan.gathered.end()) slice.gathered = gathered->second;
  return slice;
}

}  // namespace weightwire::plan
