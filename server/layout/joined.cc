#include "server/layout/joined.h"

#include <algorithm>

#include "server/layout/schemes/flat.h"

namespace weightwire::layout {
namespace {

/// Grows each of `pieces`, of which the outer dimensions are done, by a range of one dimension that
/// consists of `inner`; elements of it are `stride` apart in local storage.
std::vector<Piece> Grown(const std::vector<Piece>& pieces, const Shape& inner, int64_t begin,
                         int64_t extent, int64_t stride) {
  const Shape strides = RowMajorStrides(inner);
  const std::vector<FlatRun> runs = FlatRuns(inner, begin, begin + extent);
  std::vector<Piece> grown;
  grown.reserve(pieces.size() * runs.size());
  for (const Piece& outer : pieces) {
    for (const FlatRun& run : runs) {
      Piece piece = outer;
      piece.local_offset += (run.begin - begin) * stride;
      for (size_t d = 0; d < inner.size(); ++d) {
        piece.box.begin.push_back(run.box.begin[d]);
        piece.box.extent.push_back(run.box.extent[d]);
        // Whatever a client said of a dimension with one index, its product need not fit.
        int64_t apart = 1;
        if (__builtin_mul_overflow(stride, strides[d], &apart)) apart = 1;
        piece.local_stride.push_back(apart);
      }
      grown.push_back(std::move(piece));
    }
  }
  return grown;
}

void AppendSplit(const Piece& piece, const SplitTensor& split, std::vector<Piece>& out) {
  std::vector<Piece> pieces{{piece.tensor, {}, piece.local_offset, {}}};
  auto at = split.shape.begin();
  for (size_t d = 0; d < split.parts.size(); ++d) {
    const auto end = at + static_cast<std::ptrdiff_t>(split.parts[d]);
    if (at == end) continue;
    pieces =
        Grown(pieces, {at, end}, piece.box.begin[d], piece.box.extent[d], piece.local_stride[d]);
    at = end;
  }
  std::ranges::move(pieces, std::back_inserter(out));
}

}  // namespace

std::optional<std::vector<size_t>> PartsOf(const Shape& joined, const Shape& split) {
  std::vector<size_t> parts;
  size_t at = 0;
  for (int64_t extent : joined) {
    const size_t first = at;
    int64_t product = 1;
    while (product < extent && at < split.size()) {
      if (split[at] < 1 || split[at] > extent / product) return std::nullopt;
      product *= split[at++];
    }
    if (product != extent) return std::nullopt;
    parts.push_back(at - first);
  }
  for (; at < split.size(); ++at) {
    if (split[at] != 1 || parts.empty()) return std::nullopt;
    ++parts.back();
  }
  return parts;
}

std::pair<std::vector<SplitTensor>, std::vector<SplitTensor>> SplitsBetween(
    const CanonicalSpace& a, const CanonicalSpace& b) {
  std::pair<std::vector<SplitTensor>, std::vector<SplitTensor>> splits;
  const auto try_split = [](const CanonicalSpace& space, size_t tensor, const TensorSpec& to,
                            std::vector<SplitTensor>& out) {
    const TensorSpec& from = space.tensors[tensor];
    auto parts = from.block.empty() ? PartsOf(from.shape, to.shape) : std::nullopt;
    if (!parts) return false;
    out.push_back({static_cast<uint32_t>(tensor), to.shape, *std::move(parts)});
    return true;
  };
  for (size_t i = 0, j = 0; i < a.tensors.size() && j < b.tensors.size();) {
    const int order = a.tensors[i].name.compare(b.tensors[j].name);
    if (order == 0 && a.tensors[i].shape != b.tensors[j].shape &&
        !try_split(a, i, b.tensors[j], splits.first)) {
      try_split(b, j, a.tensors[i], splits.second);
    }
    i += order <= 0;
    j += order >= 0;
  }
  return splits;
}

CanonicalSpace Split(CanonicalSpace canonical, std::span<const SplitTensor> splits) {
  for (const SplitTensor& split : splits) canonical.tensors[split.tensor].shape = split.shape;
  return canonical;
}

Result<RankLayout> Split(const RankLayout& rank, std::span<const SplitTensor> splits) {
  const size_t pieces_max = LayoutLimits{}.pieces_per_rank_max;
  RankLayout out;
  out.tensors.reserve(rank.tensors.size());
  size_t pieces = 0;
  for (const LocalTensor& tensor : rank.tensors) {
    LocalTensor& made =
        out.tensors.emplace_back(LocalTensor{tensor.name, tensor.dtype, tensor.shape, {}});
    for (const Piece& piece : tensor.pieces) {
      const auto split = std::ranges::lower_bound(splits, piece.tensor, {}, &SplitTensor::tensor);
      if (split == splits.end() || split->tensor != piece.tensor) {
        made.pieces.push_back(piece);
      } else {
        AppendSplit(piece, *split, made.pieces);
      }
      if (pieces + made.pieces.size() <= pieces_max) continue;
      return Fail(Status(Code::kResourceExhausted, Reason::kLimitExceeded,
                         "more than " + std::to_string(pieces_max) +
                             " pieces of one rank where joined dimensions come apart")
                      .AtTensor(tensor.name));
    }
    pieces += made.pieces.size();
  }
  return out;
}

Result<ModelLayout> Split(const ModelLayout& layout, std::span<const SplitTensor> splits) {
  ModelLayout out{Split(layout.canonical, splits), {}};
  out.ranks.reserve(layout.ranks.size());
  for (const RankLayout& rank : layout.ranks) {
    WW_ASSIGN(RankLayout made, Split(rank, splits));
    out.ranks.push_back(std::move(made));
  }
  return out;
}

}  // namespace weightwire::layout
