#include "server/plan/disjoint.h"

#include <algorithm>
#include <vector>

#include "server/plan/bounded_sum.h"

namespace weightwire::plan {

using layout::Box;
using layout::LocalTensor;
using layout::Piece;

namespace {

bool Meet(const Box& a, const Box& b) {
  for (size_t d = 0; d < a.begin.size(); ++d) {
    if (a.begin[d] >= b.begin[d] + b.extent[d] || b.begin[d] >= a.begin[d] + a.extent[d]) {
      return false;
    }
  }
  return true;
}

size_t SweepDim(std::span<const Written> blocks) {
  size_t best = 0;
  size_t best_cuts = 0;
  for (size_t d = 0; d < blocks[0].part.box.begin.size(); ++d) {
    std::vector<int64_t> cuts;
    for (const Written& block : blocks) cuts.push_back(block.part.box.begin[d]);
    std::sort(cuts.begin(), cuts.end());
    const auto distinct = static_cast<size_t>(std::unique(cuts.begin(), cuts.end()) - cuts.begin());
    if (distinct > best_cuts) {
      best = d;
      best_cuts = distinct;
    }
  }
  return best;
}

}  // namespace

std::optional<std::string> StorageDefect(const LocalTensor& tensor, const PieceLocator& locator) {
  const auto name = [&](uint32_t piece) { return "piece " + std::to_string(piece); };
  for (uint32_t p = 0; p < tensor.pieces.size(); ++p) {
    if (NestedStridesOf(tensor.pieces[p])) continue;
    std::vector<SumTerm> differences;
    for (size_t d = 0; d < tensor.pieces[p].box.extent.size(); ++d) {
      const int64_t reach = tensor.pieces[p].box.extent[d] - 1;
      differences.push_back({tensor.pieces[p].local_stride[d], -reach, reach});
    }
    // The only way for two elements of the piece to coincide must be that they are the same.
    if (BoundedSum(std::move(differences)).Count(0) != BoundedSum::Answer::kOne) {
      return name(p) + " stores two elements in one place";
    }
  }
  std::vector<uint32_t> active;
  for (uint32_t p : locator.ByStart()) {
    const Piece& piece = tensor.pieces[p];
    std::erase_if(active, [&](uint32_t other) {
      return LastElement(tensor.pieces[other]) < piece.local_offset;
    });
    for (uint32_t q : active) {
      const Piece& other = tensor.pieces[q];
      std::vector<SumTerm> terms;
      for (size_t d = 0; d < piece.box.extent.size(); ++d) {
        terms.push_back({piece.local_stride[d], 0, piece.box.extent[d] - 1});
      }
      // other's elements count backwards; terms of equal stride combine into one range.
      for (size_t d = 0; d < other.box.extent.size(); ++d) {
        const int64_t stride = other.local_stride[d];
        const auto same = std::find_if(terms.begin(), terms.end(),
                                       [&](const SumTerm& t) { return t.stride == stride; });
        if (same == terms.end()) {
          terms.push_back({stride, 1 - other.box.extent[d], 0});
        } else {
          same->low += 1 - other.box.extent[d];
        }
      }
      if (BoundedSum(std::move(terms)).Count(other.local_offset - piece.local_offset) !=
          BoundedSum::Answer::kNone) {
        return name(q) + " and " + name(p) + " share storage";
      }
    }
    active.push_back(p);
  }
  return std::nullopt;
}

std::optional<std::pair<Box, Box>> FindOverlap(std::span<Written> blocks) {
  if (blocks.size() < 2) return std::nullopt;
  if (blocks[0].part.box.begin.empty()) return {{blocks[0].part.box, blocks[1].part.box}};
  const size_t d = SweepDim(blocks);
  std::sort(blocks.begin(), blocks.end(), [d](const Written& a, const Written& b) {
    return a.part.box.begin[d] < b.part.box.begin[d];
  });
  std::vector<const Box*> active;
  for (const Written& block : blocks) {
    const Box& box = block.part.box;
    std::erase_if(active, [&](const Box* other) {
      return other->begin[d] + other->extent[d] <= box.begin[d];
    });
    for (const Box* other : active) {
      if (Meet(*other, box)) return {{*other, box}};
    }
    active.push_back(&box);
  }
  return std::nullopt;
}

}  // namespace weightwire::plan
