// Equal boxes are grouped first. Most often the groups are disjoint already, which one sweep along
// the most cut dimension shows, and each is an owner. Otherwise boxes are laid down one after the
// other: where a box meets a part that is there already, the part is cut at the box's faces and
// what lies inside gains the box's holders; what meets nothing is a new part.
#include "server/plan/owners.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace weightwire::plan {
namespace {

using layout::Box;
using layout::ModelLayout;

constexpr size_t kPartsPerBoxMax = 32;

template <typename Visit>
void ForEachPiece(const ModelLayout& layout, Visit visit) {
  for (uint32_t rank = 0; rank < layout.ranks.size(); ++rank) {
    const auto& tensors = layout.ranks[rank].tensors;
    for (uint32_t tensor = 0; tensor < tensors.size(); ++tensor) {
      const auto& pieces = tensors[tensor].pieces;
      for (uint32_t piece = 0; piece < pieces.size(); ++piece) {
        visit(PieceRef{rank, tensor, piece}, pieces[piece].tensor);
      }
    }
  }
}

bool BoxLess(const Box& a, const Box& b) {
  if (a.begin != b.begin) return a.begin < b.begin;
  return a.extent < b.extent;
}

bool Meet(const Box& a, const Box& b) {
  for (size_t d = 0; d < a.begin.size(); ++d) {
    if (a.begin[d] >= b.begin[d] + b.extent[d] || b.begin[d] >= a.begin[d] + a.extent[d]) {
      return false;
    }
  }
  return true;
}

bool Disjoint(std::vector<const Box*> boxes) {
  if (boxes.size() < 2) return true;
  const std::optional<size_t> dim = MostCutDim(boxes);
  if (!dim) return false;
  std::sort(boxes.begin(), boxes.end(),
            [d = *dim](const Box* a, const Box* b) { return a->begin[d] < b->begin[d]; });
  std::vector<const Box*> active;
  for (const Box* box : boxes) {
    std::erase_if(active, [&](const Box* other) {
      return other->begin[*dim] + other->extent[*dim] <= box->begin[*dim];
    });
    for (const Box* other : active) {
      if (Meet(*other, *box)) return false;
    }
    active.push_back(box);
  }
  return true;
}

}  // namespace

const layout::LocalTensor& TensorOf(const ModelLayout& layout, const PieceRef& ref) {
  return layout.ranks[ref.rank].tensors[ref.tensor];
}
const layout::Piece& PieceOf(const ModelLayout& layout, const PieceRef& ref) {
  return TensorOf(layout, ref).pieces[ref.piece];
}

PiecesByCanonical::PiecesByCanonical(const ModelLayout& layout)
    : first_(layout.canonical.tensors.size() + 1, 0) {
  ForEachPiece(layout, [this](const PieceRef&, uint32_t canonical) { ++first_[canonical + 1]; });
  std::partial_sum(first_.begin(), first_.end(), first_.begin());
  refs_.resize(first_.back());
  std::vector<size_t> next(first_.begin(), first_.end() - 1);
  ForEachPiece(layout,
               [&](const PieceRef& ref, uint32_t canonical) { refs_[next[canonical]++] = ref; });
}

std::optional<size_t> MostCutDim(std::span<const Box* const> boxes) {
  std::optional<size_t> best;
  size_t best_cuts = 0;
  std::vector<int64_t> cuts;
  const size_t ndim = boxes.empty() ? 0 : boxes[0]->begin.size();
  for (size_t d = 0; d < ndim; ++d) {
    cuts.clear();
    for (const Box* box : boxes) cuts.push_back(box->begin[d]);
    std::sort(cuts.begin(), cuts.end());
    const auto distinct = static_cast<size_t>(std::unique(cuts.begin(), cuts.end()) - cuts.begin());
    if (distinct <= best_cuts) continue;
    best = d;
    best_cuts = distinct;
  }
  return best;
}

void AppendRest(const Box& whole, const Box& part, std::vector<Box>& out) {
  Box core = whole;
  for (size_t d = 0; d < whole.begin.size(); ++d) {
    const int64_t before = part.begin[d] - core.begin[d];
    const int64_t after = core.begin[d] + core.extent[d] - part.begin[d] - part.extent[d];
    if (before > 0) {
      out.push_back(core);
      out.back().extent[d] = before;
    }
    if (after > 0) {
      out.push_back(core);
      out.back().begin[d] = part.begin[d] + part.extent[d];
      out.back().extent[d] = after;
    }
    core.begin[d] = part.begin[d];
    core.extent[d] = part.extent[d];
  }
}

std::vector<OwnerTable::Group> OwnerTable::GroupByBox(std::span<PieceRef> refs) const {
  std::stable_sort(refs.begin(), refs.end(), [&](const PieceRef& a, const PieceRef& b) {
    return BoxLess(PieceOf(source_, a).box, PieceOf(source_, b).box);
  });
  std::vector<Group> groups;
  for (size_t first = 0; first < refs.size();) {
    const Box& box = PieceOf(source_, refs[first]).box;
    size_t last = first;
    while (last < refs.size() && PieceOf(source_, refs[last]).box == box) ++last;
    groups.push_back({&box, refs.subspan(first, last - first)});
    first = last;
  }
  return groups;
}

Owner OwnerTable::Enter(Box box, std::span<const PieceRef> refs) {
  Owner owner{std::move(box), holders_.size(), 0, 0};
  ranks_.clear();
  for (const PieceRef& ref : refs) {
    owner.dtypes |= 1u << static_cast<int>(TensorOf(source_, ref).dtype);
    if (!ranks_.empty() && ranks_.back() == ref.rank) continue;  // the rank holds it twice
    ranks_.push_back(ref.rank);
    holders_.push_back(ref);
  }
  const auto [found, is_new] = set_of_.try_emplace(ranks_, static_cast<uint32_t>(sets_.size()));
  if (is_new) sets_.push_back(&found->first);
  owner.set = found->second;
  return owner;
}

std::vector<Owner> OwnerTable::Cut(std::span<PieceRef> refs) {
  const std::vector<Group> groups = GroupByBox(refs);
  std::vector<const Box*> boxes;
  for (const Group& group : groups) boxes.push_back(group.box);
  if (!Disjoint(std::move(boxes))) return CutOverlapping(groups);
  std::vector<Owner> owners;
  owners.reserve(groups.size());
  for (const Group& group : groups) owners.push_back(Enter(*group.box, group.refs));
  return owners;
}

std::vector<Owner> OwnerTable::CutOverlapping(std::span<const Group> groups) {
  struct Part {
    Box box;
    std::vector<uint32_t> groups;
  };
  std::vector<Part> parts;
  std::vector<Part> added;
  std::vector<Box> open;
  std::vector<Box> next;
  for (uint32_t g = 0; g < groups.size(); ++g) {
    const bool cut = parts.size() <= kPartsPerBoxMax * groups.size();
    added.clear();
    open.assign(1, *groups[g].box);  // what of the box no part covers
    for (Part& part : parts) {
      const std::optional<Box> common = layout::Intersect(part.box, *groups[g].box);
      if (!common) continue;
      next.clear();
      for (const Box& box : open) {
        if (const auto covered = layout::Intersect(box, *common)) {
          AppendRest(box, *covered, next);
        } else {
          next.push_back(box);
        }
      }
      open.swap(next);
      if (!cut) continue;
      next.clear();
      AppendRest(part.box, *common, next);
      for (Box& rest : next) added.push_back({std::move(rest), part.groups});
      part.box = *common;
      part.groups.push_back(g);
    }
    for (Box& box : open) added.push_back({std::move(box), {g}});
    std::move(added.begin(), added.end(), std::back_inserter(parts));
  }
  std::vector<Owner> owners;
  std::vector<PieceRef> refs;
  for (Part& part : parts) {
    refs.clear();
    for (uint32_t g : part.groups) {
      refs.insert(refs.end(), groups[g].refs.begin(), groups[g].refs.end());
    }
    std::stable_sort(refs.begin(), refs.end(),
                     [](const PieceRef& a, const PieceRef& b) { return a.rank < b.rank; });
    owners.push_back(Enter(std::move(part.box), refs));
  }
  return owners;
}

OwnerIndex::OwnerIndex(std::vector<Owner> owners) : owners_(std::move(owners)) {
  std::vector<const Box*> boxes;
  for (const Owner& owner : owners_) boxes.push_back(&owner.box);
  dim_ = MostCutDim(boxes);
  if (!dim_) return;
  std::stable_sort(owners_.begin(), owners_.end(), [d = *dim_](const Owner& a, const Owner& b) {
    return a.box.begin[d] < b.box.begin[d];
  });
  int64_t reach = 0;
  for (const Owner& owner : owners_) {
    reach = std::max(reach, owner.box.begin[*dim_] + owner.box.extent[*dim_]);
    reach_.push_back(reach);
  }
}

std::span<const Owner> OwnerIndex::Candidates(const Box& box) const {
  if (!dim_) return owners_;
  const size_t d = *dim_;
  const auto first = std::upper_bound(reach_.begin(), reach_.end(), box.begin[d]);
  const auto last = std::partition_point(owners_.begin(), owners_.end(), [&](const Owner& owner) {
    return owner.box.begin[d] < box.begin[d] + box.extent[d];
  });
  const auto from = static_cast<size_t>(first - reach_.begin());
  const auto to = static_cast<size_t>(last - owners_.begin());
  return from < to ? std::span(owners_).subspan(from, to - from) : std::span<const Owner>();
}

}  // namespace weightwire::plan
