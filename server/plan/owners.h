#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <vector>

#include "server/layout/types.h"

namespace weightwire::plan {

struct PieceRef {
  uint32_t rank = 0;
  uint32_t tensor = 0;
  uint32_t piece = 0;
};
const layout::LocalTensor& TensorOf(const layout::ModelLayout& layout, const PieceRef& ref);
const layout::Piece& PieceOf(const layout::ModelLayout& layout, const PieceRef& ref);

/// All pieces of a layout, grouped by canonical tensor; by rank, tensor and piece within a group.
class PiecesByCanonical {
 public:
  explicit PiecesByCanonical(const layout::ModelLayout& layout);
  std::span<PieceRef> Of(uint32_t canonical) {
    return std::span(refs_).subspan(first_[canonical], first_[canonical + 1] - first_[canonical]);
  }

 private:
  std::vector<size_t> first_;
  std::vector<PieceRef> refs_;
};

/// A block of a canonical tensor whose every element the same source ranks hold.
struct Owner {
  layout::Box box;
  size_t holders_at = 0;  ///< into OwnerTable::holders: one piece per rank, ascending rank
  uint32_t set = 0;       ///< the ranks, as OwnerTable::RanksOf knows them
  uint32_t dtypes = 0;    ///< bit per layout::DType among the holders
};

/// Cuts a source's tensors into owners and keeps who holds them.
///
/// Equal holder sets get one number, in the order in which they are first met, so that all copies
/// which the same ranks could send are one group.
class OwnerTable {
 public:
  explicit OwnerTable(const layout::ModelLayout& source) : source_(source) {}

  /// Disjoint owners that together are what `refs`, all pieces of one canonical tensor, cover.
  /// Reorders `refs`. Boxes that overlap are cut along each other's faces; should that need more
  /// than some dozen parts per box, as only contrived shards do, the rest is not cut further and
  /// some of the ranks that hold an element are not made use of.
  std::vector<Owner> Cut(std::span<PieceRef> refs);

  std::span<const PieceRef> HoldersOf(size_t holders_at, uint32_t set) const {
    return std::span(holders_).subspan(holders_at, RanksOf(set).size());
  }
  const std::vector<uint32_t>& RanksOf(uint32_t set) const { return *sets_[set]; }
  size_t set_count() const { return sets_.size(); }

 private:
  /// The distinct boxes and who holds each.
  struct Group {
    const layout::Box* box = nullptr;
    std::span<const PieceRef> refs;
  };
  std::vector<Group> GroupByBox(std::span<PieceRef> refs) const;
  std::vector<Owner> CutOverlapping(std::span<const Group> groups);
  Owner Enter(layout::Box box, std::span<const PieceRef> refs);

  const layout::ModelLayout& source_;
  std::vector<PieceRef> holders_;
  std::map<std::vector<uint32_t>, uint32_t> set_of_;
  std::vector<const std::vector<uint32_t>*> sets_;  ///< keys of set_of_
  std::vector<uint32_t> ranks_;
};

/// The dimension along which the boxes begin at the most different places; nullopt for scalars.
std::optional<size_t> MostCutDim(std::span<const layout::Box* const> boxes);

/// Appends to `out` what `whole` keeps after losing `part`, which lies inside it.
void AppendRest(const layout::Box& whole, const layout::Box& part, std::vector<layout::Box>& out);

/// Finds the owners that may share elements with a box. Owners are ordered along their most cut
/// dimension beside the running maximum of their ends: two binary searches give a short range.
class OwnerIndex {
 public:
  explicit OwnerIndex(std::vector<Owner> owners);
  std::span<const Owner> Candidates(const layout::Box& box) const;
  /// Candidates come by their first index along it; nullopt for scalars.
  std::optional<size_t> dim() const { return dim_; }

 private:
  std::vector<Owner> owners_;
  std::vector<int64_t> reach_;  ///< greatest end among owners_[0..i] along dim_
  std::optional<size_t> dim_;   ///< nullopt: scalars, every owner is a candidate
};

}  // namespace weightwire::plan
