#pragma once

#include <vector>

#include "server/layout/scheme.h"

namespace weightwire::layout {

/// The layers of one pipeline stage: [first, first + count).
struct StageLayers {
  int64_t first = 0;
  int64_t count = 0;
};

/// Megatron's distribution of `layers` over `stages`, by stage: evenly; or with `first=` and
/// `last=` the layers of those stages and the rest evenly over the others; or as `layers=7-7-6`
/// says.
///
///   kInvalidArgument / kUnknownScheme  an option is malformed, or `layers` stands with the others
///   kInvalidArgument / kShapeMismatch  the layers cannot be distributed so; the remedy says how
Result<std::vector<StageLayers>> PipelineStages(const ParallelSpec& spec, int64_t layers,
                                                int64_t stages);

}  // namespace weightwire::layout
