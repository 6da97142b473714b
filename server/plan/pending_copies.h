#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "server/plan/owners.h"
#include "server/plan/plan.h"

namespace weightwire::plan {

/// Whole blocks of a weight whose floats one target rank gathers: a row-major matrix in the memory
/// that is no tensor (GatherBuffer).
struct Gather {
  uint32_t rank = 0;
  uint32_t canonical = 0;  ///< the weight
  layout::Box box;
  int64_t offset = 0;
  std::vector<int64_t> stride;
};

/// A copy on the way to a plan: what moves is known, who sends it perhaps not yet.
struct PendingCopy {
  uint32_t canonical = 0;
  Transform transform = Transform::kElements;
  PieceRef target;        ///< of what is gathered: the rank and the tensor behind its last one
  uint32_t set = 0;       ///< who could send it, see OwnerTable
  size_t holders_at = 0;  ///< their pieces, see OwnerTable
  size_t box_at = 0;      ///< begins, then extents, in PendingCopies::boxes
  int64_t target_offset = 0;
  int64_t bytes = 0;                              ///< on the wire
  uint32_t holder = 0;                            ///< the one chosen: index into the set
  std::optional<uint32_t> gather = std::nullopt;  ///< into PendingCopies::gathers
};

/// All pending copies of a plan in its global order: canonical tensor, target rank, local tensor,
/// offset.
struct PendingCopies {
  std::vector<PendingCopy> copies;
  std::vector<int64_t> boxes;
  std::vector<Gather> gathers;

  const std::vector<int64_t>& TargetStride(const layout::ModelLayout& target,
                                           const PendingCopy& pending) const {
    return pending.gather ? gathers[*pending.gather].stride
                          : PieceOf(target, pending.target).local_stride;
  }
};

bool InGlobalOrder(const PendingCopy& a, const PendingCopy& b);

/// Chooses `holder` for every pending copy so that the busiest source rank sends at most about 1 %
/// more than the least possible when every byte may come from any rank of its set, and the others
/// are near even. A pending copy that would take a rank beyond that is cut along its outermost
/// dimension with extent > 1 (codes: with several blocks) as long as it has one, and its parts get
/// holders of their own; the list stays in global order. The sum of all bytes must fit int64.
void ChooseHolders(const layout::ModelLayout& target, const OwnerTable& book, uint32_t source_ranks,
                   PendingCopies& list);

}  // namespace weightwire::plan
