#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "server/base/status.h"
#include "server/content/identity.h"
#include "server/plan/plan.h"

namespace weightwire::content {

/// How all ranks of a group sum what they hold, from the group's layout alone.
///
/// A *part* is a block of a canonical tensor whose every element the same ranks hold, so parts are
/// disjoint and each is summed whole by all its holders: replicas are compared with one another and
/// count once. Padding belongs to no part.
struct HashPlan {
  /// One block that a rank sums: where it lies in the rank's storage, and, as target offset and
  /// strides, in the canonical tensor. `target_dtype` is what it is summed as.
  struct RankOps {
    std::vector<plan::CopyOp> ops;
    std::vector<uint32_t> parts;  ///< of each op, an index into HashPlan::parts
  };
  struct Part {
    uint32_t tensor = 0;
    uint32_t holders = 0;  ///< ops of all ranks that sum it
  };
  PlanId id;
  std::vector<layout::TensorSpec> tensors;  ///< canonical; dtype as held by the first holder
  std::vector<bool> whole;                  ///< every element of the tensor is held
  std::vector<Part> parts;
  std::vector<RankOps> ranks;
};

/// Pure: equal layouts give an equal reading.
///   kFailedPrecondition / kDtypeMismatch  ranks hold one tensor in dtypes without a known cast
Result<HashPlan> HashPlanOf(const layout::ModelLayout& layout,
                            const layout::Fingerprint& fingerprint);

/// A rank's ops in the form in which plans are handed out: one stream, whose target is the
/// canonical space itself. Sums are reported in the order of its ops.
plan::RankSlice SliceOf(const HashPlan& hash_plan, uint32_t rank);

/// Two holders of one part have other bytes there.
struct Disagreement {
  uint32_t tensor = 0;
  uint32_t part = 0;
  uint32_t rank = 0;  ///< its local tensor's name says which copy is meant
  uint32_t local_tensor = 0;
  uint32_t other_rank = 0;  ///< one that has what most holders have
  bool outvoted = false;    ///< false: as many holders have this as the other
};
struct Content {
  std::vector<Leaf> leaves;              ///< of whole tensors, by name
  std::vector<kernels::KeyedSum> parts;  ///< what most holders have; the lowest rank's in a tie
  std::vector<Disagreement> disagreements;
};
/// `sums[rank][op]`: every rank's, one for each of its ops.
Content Combine(const HashPlan& hash_plan, std::span<const std::vector<kernels::KeyedSum>> sums);

/// Ranks that sum some part of the tensor, ascending.
std::vector<uint32_t> HoldersOf(const HashPlan& hash_plan, uint32_t tensor);

}  // namespace weightwire::content
