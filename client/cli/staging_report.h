#pragma once

#include <cstdint>
#include <vector>

#include "server/layout/types.h"
#include "server/plan/classes.h"
#include "server/plan/plan.h"

namespace weightwire::cli {

/// Memory that agents need beyond what trainers and engines hold, with the default tuning.
struct StagingReport {
  uint64_t slots_bytes = 0;    ///< the pool that sources pack into, once for each agent
  uint64_t scratch_bytes = 0;  ///< the pool that targets unpack from, once for each agent
  /// Of every GPU's slab, where a transport reaches GPU memory: both pools once more.
  uint64_t gpu_bytes = 0;
  /// Of an agent that serves one rank alone: both pools, and of a target the two buffers of its
  /// stage and what it gathers.
  std::vector<uint64_t> source;  ///< by rank
  std::vector<uint64_t> target;  ///< by planned rank
  double target_mean = 0;        ///< over all ranks of all classes
};
/// `target` has one rank for each of `classes`, or all ranks; `plan` is to it.
///   kInvalidArgument / kShapeOverflow  a stage's size does not fit
Result<StagingReport> StagingOf(const layout::ModelLayout& source,
                                const layout::ModelLayout& target, const plan::TransferPlan& plan,
                                const std::vector<plan::LayoutClass>& classes);

}  // namespace weightwire::cli
