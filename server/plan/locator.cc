#include "server/plan/locator.h"

#include <algorithm>
#include <numeric>

#include "server/plan/bounded_sum.h"

namespace weightwire::plan {
namespace {

using layout::Box;
using layout::Piece;

bool Contains(const Box& box, std::span<const int64_t> element) {
  for (size_t d = 0; d < element.size(); ++d) {
    if (element[d] < box.begin[d] || element[d] >= box.begin[d] + box.extent[d]) return false;
  }
  return true;
}

/// Whether `box`, whose first element the piece stores, lies in it and runs along its strides.
bool IsBlockOf(const Piece& piece, const Box& box, std::span<const int64_t> stride) {
  for (size_t d = 0; d < stride.size(); ++d) {
    if (box.begin[d] + box.extent[d] > piece.box.begin[d] + piece.box.extent[d]) return false;
    if (box.extent[d] > 1 && stride[d] != piece.local_stride[d]) return false;
  }
  return true;
}

/// The element of `piece` at `offset`, when each stride steps over all that the smaller ones reach,
/// as in slices and transpositions: division finds it.
std::optional<std::vector<int64_t>> DecodeNested(const Piece& piece, const NestedStrides& nested,
                                                 int64_t offset) {
  int64_t rest = offset - piece.local_offset;
  if (rest < 0) return std::nullopt;
  std::vector<int64_t> element = piece.box.begin;
  for (size_t i = 0; i < element.size(); ++i) {
    const size_t d = nested.order[i];
    const int64_t steps = std::min(rest / piece.local_stride[d], piece.box.extent[d] - 1);
    element[d] += steps;
    rest -= steps * piece.local_stride[d];
  }
  if (rest != 0) return std::nullopt;
  return element;
}

/// The element of `piece` at `offset`. Pieces do not repeat storage, so there is at most one.
std::optional<std::vector<int64_t>> Decode(const Piece& piece, int64_t offset) {
  if (const auto nested = NestedStridesOf(piece)) return DecodeNested(piece, *nested, offset);
  std::vector<SumTerm> terms;
  for (size_t d = 0; d < piece.box.extent.size(); ++d) {
    terms.push_back({piece.local_stride[d], 0, piece.box.extent[d] - 1});
  }
  BoundedSum sum(std::move(terms));
  if (sum.Count(offset - piece.local_offset) != BoundedSum::Answer::kOne) return std::nullopt;
  std::vector<int64_t> element = sum.solution();
  for (size_t d = 0; d < element.size(); ++d) element[d] += piece.box.begin[d];
  return element;
}

}  // namespace

std::optional<NestedStrides> NestedStridesOf(const Piece& piece) {
  const size_t ndim = piece.local_stride.size();
  NestedStrides nested;
  if (ndim > nested.order.size()) return std::nullopt;
  for (size_t d = 0; d < ndim; ++d) {
    size_t place = d;
    for (; place > 0 && piece.local_stride[nested.order[place - 1]] < piece.local_stride[d];
         --place) {
      nested.order[place] = nested.order[place - 1];
    }
    nested.order[place] = static_cast<uint8_t>(d);
  }
  int64_t reach = 0;
  for (size_t i = ndim; i-- > 0;) {
    const size_t d = nested.order[i];
    if (piece.box.extent[d] == 1) continue;
    if (piece.local_stride[d] <= reach) return std::nullopt;
    reach += (piece.box.extent[d] - 1) * piece.local_stride[d];
  }
  return nested;
}

int64_t LastElement(const Piece& piece) {
  int64_t last = piece.local_offset;
  for (size_t d = 0; d < piece.box.extent.size(); ++d) {
    last += (piece.box.extent[d] - 1) * piece.local_stride[d];
  }
  return last;
}

PieceLocator::PieceLocator(const layout::LocalTensor& tensor)
    : tensor_(tensor), by_start_(tensor.pieces.size()) {
  std::iota(by_start_.begin(), by_start_.end(), 0u);
  std::stable_sort(by_start_.begin(), by_start_.end(), [&](uint32_t a, uint32_t b) {
    return tensor.pieces[a].local_offset < tensor.pieces[b].local_offset;
  });
  int64_t reach = 0;
  for (uint32_t piece : by_start_) {
    reach = std::max(reach, LastElement(tensor.pieces[piece]));
    reach_.push_back(reach);
  }
}

std::pair<size_t, size_t> PieceLocator::Candidates(int64_t offset) const {
  const auto first = std::lower_bound(reach_.begin(), reach_.end(), offset) - reach_.begin();
  const auto last = std::partition_point(by_start_.begin(), by_start_.end(),
                                         [&](uint32_t piece) {
                                           return tensor_.pieces[piece].local_offset <= offset;
                                         }) -
                    by_start_.begin();
  return {static_cast<size_t>(first), static_cast<size_t>(last)};
}

std::optional<std::vector<int64_t>> PieceLocator::ElementAt(uint32_t canonical,
                                                            int64_t offset) const {
  const auto [first, last] = Candidates(offset);
  for (size_t i = first; i < last; ++i) {
    const Piece& piece = tensor_.pieces[by_start_[i]];
    if (piece.tensor != canonical) continue;
    if (auto element = Decode(piece, offset)) return element;
  }
  return std::nullopt;
}

std::optional<uint32_t> PieceLocator::PieceAt(uint32_t canonical, std::span<const int64_t> element,
                                              int64_t offset) const {
  const auto [first, last] = Candidates(offset);
  for (size_t i = first; i < last; ++i) {
    const Piece& piece = tensor_.pieces[by_start_[i]];
    if (piece.tensor != canonical || !Contains(piece.box, element)) continue;
    int64_t at = piece.local_offset;
    for (size_t d = 0; d < element.size(); ++d) {
      at += (element[d] - piece.box.begin[d]) * piece.local_stride[d];
    }
    if (at == offset) return by_start_[i];
  }
  return std::nullopt;
}

std::optional<std::vector<PiecePart>> PieceLocator::Split(uint32_t canonical, const Box& box,
                                                          int64_t offset,
                                                          std::span<const int64_t> stride) const {
  struct Block {
    Box box;
    int64_t offset = 0;
  };
  const size_t ndim = box.begin.size();
  if (stride.size() != ndim) return std::nullopt;
  // Most blocks lie in one piece.
  const auto first = PieceAt(canonical, box.begin, offset);
  if (!first) return std::nullopt;
  if (IsBlockOf(tensor_.pieces[*first], box, stride)) return {{{*first, box}}};

  std::vector<PiecePart> parts;
  std::vector<Block> open = {{box, offset}};
  while (!open.empty()) {
    Block block = std::move(open.back());
    open.pop_back();
    const auto index = PieceAt(canonical, block.box.begin, block.offset);
    if (!index) return std::nullopt;
    const Piece& piece = tensor_.pieces[*index];
    for (size_t d = 0; d < ndim; ++d) {
      const int64_t inside = piece.box.begin[d] + piece.box.extent[d] - block.box.begin[d];
      if (inside < block.box.extent[d]) {
        Block rest = block;
        rest.box.begin[d] += inside;
        rest.box.extent[d] -= inside;
        rest.offset += inside * stride[d];
        open.push_back(std::move(rest));
        block.box.extent[d] = inside;
      }
      if (block.box.extent[d] > 1 && stride[d] != piece.local_stride[d]) return std::nullopt;
    }
    parts.push_back({*index, std::move(block.box)});
  }
  return parts;
}

std::optional<Box> TargetBox(const PieceLocator& target, const CopyOp& op) {
  auto element = target.ElementAt(op.canonical, op.target_offset);
  if (!element || element->size() != op.extent.size()) return std::nullopt;
  return Box{std::move(*element), op.extent};
}

}  // namespace weightwire::plan
