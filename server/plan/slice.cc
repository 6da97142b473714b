#include "server/plan/plan.h"

#include <algorithm>

namespace weightwire::plan {

RankSlice SliceOf(const TransferPlan& plan, Side side, uint32_t rank) {
  RankSlice slice;
  slice.plan = plan.id;
  slice.side = side;
  slice.rank = rank;
  for (const Stream& stream : plan.streams) {
    const uint32_t own = side == Side::kSource ? stream.source_rank : stream.target_rank;
    if (own == rank) slice.streams.push_back(stream);
  }
  const auto gathered = plan.gathered.find(rank);
  if (side == Side::kTarget && gathered != plan.gathered.end()) slice.gathered = gathered->second;
  TakeNames(slice,
            [&](uint32_t tensor) -> const std::string& { return plan.tensor_names[tensor]; });
  return slice;
}

void TakeNames(RankSlice& slice, const std::function<const std::string&(uint32_t)>& name_of) {
  const auto for_each_op = [&](auto visit) {
    for (Stream& stream : slice.streams) std::ranges::for_each(stream.ops, visit);
    std::ranges::for_each(slice.gathered.made, visit);
  };
  std::vector<uint32_t> named;
  for_each_op([&](const CopyOp& op) { named.push_back(op.canonical); });
  std::ranges::sort(named);
  named.erase(std::unique(named.begin(), named.end()), named.end());
  slice.tensor_names.clear();
  slice.tensor_names.reserve(named.size());
  for (uint32_t tensor : named) slice.tensor_names.push_back(name_of(tensor));
  for_each_op([&](CopyOp& op) {
    op.canonical =
        static_cast<uint32_t>(std::ranges::lower_bound(named, op.canonical) - named.begin());
  });
}

}  // namespace weightwire::plan
