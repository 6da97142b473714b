#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "server/layout/types.h"
#include "server/plan/plan.h"

namespace weightwire::plan {

/// A block of a canonical tensor inside one piece.
struct PiecePart {
  uint32_t piece = 0;  ///< index into LocalTensor::pieces
  layout::Box box;     ///< canonical
};

/// Translates between the storage of one local tensor and canonical elements. The proof, the report
/// and the explanation read plans with it; the planner does not use it.
///
/// The tensor must be valid (layout::ValidateRank) and outlive the locator.
class PieceLocator {
 public:
  explicit PieceLocator(const layout::LocalTensor& tensor);

  /// Which element of canonical tensor `canonical` is stored at element `offset`; nullopt if none.
  std::optional<std::vector<int64_t>> ElementAt(uint32_t canonical, int64_t offset) const;

  /// Cuts the strided block at `offset` into parts that each lie in one piece. nullopt when some
  /// element of the block is not, in this storage, the element of `box` in the same place.
  std::optional<std::vector<PiecePart>> Split(uint32_t canonical, const layout::Box& box,
                                              int64_t offset,
                                              std::span<const int64_t> stride) const;

  /// Pieces by their first element in storage.
  std::span<const uint32_t> ByStart() const { return by_start_; }

 private:
  /// Indices into by_start_ whose storage span may include `offset`.
  std::pair<size_t, size_t> Candidates(int64_t offset) const;
  std::optional<uint32_t> PieceAt(uint32_t canonical, std::span<const int64_t> element,
                                  int64_t offset) const;

  const layout::LocalTensor& tensor_;
  std::vector<uint32_t> by_start_;
  std::vector<int64_t> reach_;  ///< greatest last element among by_start_[0..i]
};

/// Dimensions by falling stride, of a piece of which each stride is greater than all that the
/// smaller ones reach together (dimensions of extent 1 do not count).
struct NestedStrides {
  std::array<uint8_t, layout::kMaxDims> order{};
};
/// nullopt for a piece that is not like this. One that is stores no two elements in one place.
std::optional<NestedStrides> NestedStridesOf(const layout::Piece& piece);

/// Last element of the piece in storage.
int64_t LastElement(const layout::Piece& piece);

/// The canonical block that `op` writes, judged by the target tensor; nullopt if its first element
/// is not one of the canonical tensor's or the dimensions do not agree.
std::optional<layout::Box> TargetBox(const PieceLocator& target, const CopyOp& op);

}  // namespace weightwire::plan
