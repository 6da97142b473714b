#pragma once

#include <cstdint>
#include <vector>

#include "server/layout/types.h"

namespace weightwire::plan {

/// Ranks of one layout that hold exactly the same: equal tensors, dtypes, shapes and pieces in the
/// same order. What one of them has received, it can hand on to the others byte by byte.
struct LayoutClass {
  std::vector<uint32_t> ranks;  ///< ascending; the first one stands for all
};

/// The classes of `layout`, by their first rank.
std::vector<LayoutClass> LayoutClasses(const layout::ModelLayout& layout);

/// A layout with one rank per class, in the classes' order: what must leave the source once when
/// relays feed the other ranks.
layout::ModelLayout OnePerClass(layout::ModelLayout layout,
                                const std::vector<LayoutClass>& classes);

}  // namespace weightwire::plan
