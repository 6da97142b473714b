// What each owner holds whole is taken out of what is left of the box. Owners come in their order
// along one dimension, so that what ends before one of them is met by none that follows; the boxes
// at hand are few, however many owners there are.
#include "server/plan/block_split.h"

#include <utility>

#include "server/plan/quantization.h"

namespace weightwire::plan {

using layout::Box;

std::vector<Box> SplitBlocks(const layout::TensorSpec& weight, const Box& box,
                             const OwnerIndex& index) {
  std::vector<Box> straddling;
  std::vector<Box> left = {box};
  const size_t d = index.dim().value_or(0);
  for (const Owner& owner : index.Candidates(box)) {
    const auto part = layout::Intersect(box, owner.box);
    const auto whole = part ? WholeBlocksIn(weight, *part) : std::nullopt;
    if (!whole) continue;
    std::vector<Box> next;
    for (Box& rest : left) {
      if (rest.begin[d] + rest.extent[d] <= owner.box.begin[d]) {
        straddling.push_back(std::move(rest));
      } else if (const auto taken = layout::Intersect(rest, *whole)) {
        AppendRest(rest, *taken, next);
      } else {
        next.push_back(std::move(rest));
      }
    }
    left = std::move(next);
  }
  straddling.insert(straddling.end(), std::make_move_iterator(left.begin()),
                    std::make_move_iterator(left.end()));
  return straddling;
}

}  // namespace weightwire::plan
