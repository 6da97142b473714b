#pragma once

#include <string_view>
#include <vector>

#include "server/layout/types.h"

namespace weightwire::layout {

/// Sorts canonical tensors into the order in which torch meets a model's parameters: modules as
/// transformers 4.57 registers them, depth first, a module's own parameters before those of the
/// modules in it. Flat parameters are concatenated so, and a wrong order changes no shape:
/// therefore only families that were compared with transformers are known
/// (tests/data/fsdp/orders.json).
///
///   kInvalidArgument / kUnknownModel  the family's order is not known, or a tensor's (it is named)
Status SortInModuleOrder(std::string_view family, const CanonicalSpace& canonical,
                         std::vector<uint32_t>& tensors);

}  // namespace weightwire::layout
