#pragma once

#include <string_view>

#include "server/layout/scheme.h"

namespace weightwire::layout {

/// Whether `glob` matches all of `name`: '*' any characters, dots too, '?' exactly one.
bool GlobMatches(std::string_view glob, std::string_view name);

/// Leaves out the canonical tensors that the spec's `only=GLOB|GLOB` does not name and those that
/// its `skip=GLOB|GLOB` does: their pieces go, the local tensors that held them stay, so that
/// Reconcile knows them and nothing in them is read or written.
///
///   kInvalidArgument / kTensorMissing  a glob matches no canonical tensor (it is named), or the
///                                      two together leave no tensor
Status ApplyFilters(const ParallelSpec& spec, ModelLayout& layout);

}  // namespace weightwire::layout
