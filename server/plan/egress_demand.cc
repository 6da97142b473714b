// Each canonical tensor is cut into a grid by the faces of all source boxes. A cell lies inside or
// outside of a box, never across, so that its holders are one set; each target box is measured cell
// by cell.
#include "server/plan/egress_demand.h"

#include <algorithm>
#include <utility>

namespace weightwire::plan {
namespace {

using layout::Box;
using layout::ModelLayout;

struct Holding {
  Box box;
  uint32_t rank = 0;
};

std::vector<std::vector<Holding>> HoldingsByTensor(const ModelLayout& source) {
  std::vector<std::vector<Holding>> holdings(source.canonical.tensors.size());
  for (uint32_t rank = 0; rank < source.ranks.size(); ++rank) {
    for (const auto& tensor : source.ranks[rank].tensors) {
      for (const auto& piece : tensor.pieces) holdings[piece.tensor].push_back({piece.box, rank});
    }
  }
  return holdings;
}

/// Scales that can be made of what is held: those of its whole blocks.
std::vector<Holding> ScalesIn(const std::vector<Holding>& holdings,
                              const layout::TensorSpec& weight) {
  std::vector<Holding> scales;
  for (Holding holding : holdings) {
    bool any = true;
    for (size_t d = 0; d < weight.block.size(); ++d) {
      const int64_t size = weight.block[d];
      const int64_t end = holding.box.begin[d] + holding.box.extent[d];
      const int64_t first = (holding.box.begin[d] + size - 1) / size;
      const int64_t last = end == weight.shape[d] ? (end + size - 1) / size : end / size;
      holding.box.begin[d] = first;
      holding.box.extent[d] = last - first;
      any = any && first < last;
    }
    if (any) scales.push_back(std::move(holding));
  }
  return scales;
}

class Grid {
 public:
  Grid(const std::vector<Holding>& holdings, const layout::Shape& shape) : faces_(shape.size()) {
    for (size_t d = 0; d < shape.size(); ++d) {
      faces_[d] = {0, shape[d]};
      for (const Holding& holding : holdings) {
        faces_[d].push_back(holding.box.begin[d]);
        faces_[d].push_back(holding.box.begin[d] + holding.box.extent[d]);
      }
      std::sort(faces_[d].begin(), faces_[d].end());
      faces_[d].erase(std::unique(faces_[d].begin(), faces_[d].end()), faces_[d].end());
    }
    size_t cells = 1;
    for (const auto& faces : faces_) cells *= faces.size() - 1;
    ranks_.resize(cells);
    bytes_.resize(cells, 0);
    for (const Holding& holding : holdings) {
      ForEachCell(holding.box, [&](size_t cell, int64_t) {
        // Ranks come in ascending order.
        auto& ranks = ranks_[cell];
        if (ranks.empty() || ranks.back() != holding.rank) ranks.push_back(holding.rank);
      });
    }
  }

  void Measure(const Box& box, int64_t element_bytes) {
    ForEachCell(box,
                [&](size_t cell, int64_t elements) { bytes_[cell] += elements * element_bytes; });
  }

  void AddTo(BytesByHolders& demand) const {
    for (size_t cell = 0; cell < bytes_.size(); ++cell) {
      if (bytes_[cell] == 0) continue;
      WW_CHECK(!ranks_[cell].empty());
      demand[ranks_[cell]] += bytes_[cell];
    }
  }

 private:
  template <typename Visit>
  void ForEachCell(const Box& box, Visit visit) const {
    Walk(box, 0, 0, 1, visit);
  }
  template <typename Visit>
  void Walk(const Box& box, size_t d, size_t cell, int64_t elements, Visit& visit) const {
    if (d == faces_.size()) return visit(cell, elements);
    const std::vector<int64_t>& faces = faces_[d];
    const int64_t end = box.begin[d] + box.extent[d];
    const auto first = std::upper_bound(faces.begin(), faces.end(), box.begin[d]) - faces.begin();
    for (auto i = static_cast<size_t>(first) - 1; faces[i] < end; ++i) {
      const int64_t common = std::min(end, faces[i + 1]) - std::max(box.begin[d], faces[i]);
      Walk(box, d + 1, cell * (faces.size() - 1) + i, elements * common, visit);
    }
  }

  std::vector<std::vector<int64_t>> faces_;   ///< by dimension: where cells begin, and the end
  std::vector<std::vector<uint32_t>> ranks_;  ///< by cell, row-major
  std::vector<int64_t> bytes_;
};

/// Who holds what target tensor `tensor` is copied from or made of.
std::vector<Holding> HoldingsOf(const ModelLayout& source, const ModelLayout& target,
                                uint32_t tensor,
                                const std::vector<std::vector<Holding>>& holdings) {
  const auto& tensors = target.canonical.tensors;
  if (const auto same = source.canonical.Find(tensors[tensor].name)) return holdings[*same];
  const auto weight = target.canonical.WeightOf(tensor);
  WW_CHECK(weight.has_value());
  const auto found = source.canonical.Find(tensors[*weight].name);
  WW_CHECK(found.has_value());
  return ScalesIn(holdings[*found], tensors[*weight]);
}

}  // namespace

BytesByHolders EgressDemand(const ModelLayout& source, const ModelLayout& target) {
  struct Want {
    const Box* box = nullptr;
    int64_t element_bytes = 0;
  };
  std::vector<std::vector<Want>> wants(target.canonical.tensors.size());
  for (const auto& rank : target.ranks) {
    for (const auto& tensor : rank.tensors) {
      for (const auto& piece : tensor.pieces) {
        wants[piece.tensor].push_back({&piece.box, layout::ElementBytes(tensor.dtype)});
      }
    }
  }
  const auto holdings = HoldingsByTensor(source);
  BytesByHolders demand;
  for (uint32_t t = 0; t < wants.size(); ++t) {
    if (wants[t].empty()) continue;
    const auto& spec = target.canonical.tensors[t];
    Grid grid(HoldingsOf(source, target, t, holdings), spec.shape);
    for (const Want& want : wants[t]) grid.Measure(*want.box, want.element_bytes);
    grid.AddTo(demand);
  }
  return demand;
}

}  // namespace weightwire::plan
