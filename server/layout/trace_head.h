#pragma once

#include <string_view>
#include <vector>

#include "server/layout/trace.h"

namespace weightwire::layout {

/// Of a model that no family describes: whether it is known if its head is the embedding. A loader
/// that leaves the head of the checkpoint alone and takes the embedding has tied them, or is that
/// of another pipeline stage; only config.json tells which, and a trainer's own head would
/// otherwise be left behind in silence. `rows`: of one rank.
///   kInvalidArgument / kInvalidRequest  config.json does not say; or as CanonicalFromCheckpoint
Status CheckHeadIsKnown(std::string_view config_json, const CanonicalSpace& canonical,
                        const std::vector<TraceRow>& rows);

}  // namespace weightwire::layout
