#pragma once

#include <vector>

#include "server/plan/owners.h"

namespace weightwire::plan {

/// The blocks of `box`, which is made of whole ones, that no owner of `index` holds all of: boxes
/// of whole blocks that are disjoint. Those that the owners do not cover are among them.
std::vector<layout::Box> SplitBlocks(const layout::TensorSpec& weight, const layout::Box& box,
                                     const OwnerIndex& index);

}  // namespace weightwire::plan
