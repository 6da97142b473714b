// Each canonical tensor is cut into a grid by the faces of all source boxes. A cell lies inside or
// outside of a box, never across, so that its holders are one set; each target box is measured cell
// by cell. Of a weight that is quantized, cells in whole blocks of a box are codes of those who
// have them; the other ones are floats that the target gathers.
#include "server/plan/demand.h"

#include "server/plan/quantization.h"

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

/// Who sends one tensor.
struct Senders {
  std::vector<Holding> holdings = {};
  /// What is in none of the holdings comes from these, with so many bytes an element; from nobody
  /// where there are none: then the target makes it.
  std::vector<Holding> gathered = {};
  int64_t gathered_element_bytes = 0;
  /// Of a packed tensor: boxes and the grid are of what it is made of, this many in one element.
  int64_t packed = 1;
};

/// Elements of four bits are the smallest.
constexpr int64_t kHalves = 2;

std::vector<std::vector<Holding>> HoldingsByTensor(const ModelLayout& source) {
  std::vector<std::vector<Holding>> holdings(source.canonical.tensors.size());
  for (uint32_t rank = 0; rank < source.ranks.size(); ++rank) {
    for (const auto& tensor : source.ranks[rank].tensors) {
      for (const auto& piece : tensor.pieces) holdings[piece.tensor].push_back({piece.box, rank});
    }
  }
  return holdings;
}

/// What of it is whole blocks of `weight`, counted in blocks, or (`elements`) in elements.
std::vector<Holding> WholeBlocksOf(const std::vector<Holding>& holdings,
                                   const layout::TensorSpec& weight, bool elements) {
  std::vector<Holding> whole;
  for (Holding holding : holdings) {
    bool any = true;
    for (size_t d = 0; d < weight.block.size(); ++d) {
      const int64_t size = weight.block[d];
      const int64_t end = holding.box.begin[d] + holding.box.extent[d];
      const int64_t first = (holding.box.begin[d] + size - 1) / size;
      const int64_t last = end == weight.shape[d] ? (end + size - 1) / size : end / size;
      holding.box.begin[d] = elements ? first * size : first;
      holding.box.extent[d] =
          (elements ? std::min(last * size, weight.shape[d]) : last) - holding.box.begin[d];
      any = any && first < last;
    }
    if (any) whole.push_back(std::move(holding));
  }
  return whole;
}

class Grid {
 public:
  Grid(const Senders& senders, const layout::Shape& shape)
      : faces_(shape.size()),
        gathered_element_bytes_(senders.gathered_element_bytes),
        packed_(senders.packed) {
    for (size_t d = 0; d < shape.size(); ++d) {
      faces_[d] = {0, shape[d] * PackedAlong(d)};
      for (const auto* holdings : {&senders.holdings, &senders.gathered}) {
        for (const Holding& holding : *holdings) {
          faces_[d].push_back(holding.box.begin[d]);
          faces_[d].push_back(holding.box.begin[d] + holding.box.extent[d]);
        }
      }
      std::sort(faces_[d].begin(), faces_[d].end());
      faces_[d].erase(std::unique(faces_[d].begin(), faces_[d].end()), faces_[d].end());
    }
    size_t cells = 1;
    for (const auto& faces : faces_) cells *= faces.size() - 1;
    ranks_.resize(cells);
    halves_.resize(cells, 0);
    Enter(senders.holdings);
    gathers_.resize(cells);
    for (size_t cell = 0; cell < cells; ++cell) gathers_[cell] = ranks_[cell].empty();
    Enter(senders.gathered, &gathers_);
  }

  /// Bytes that `box` receives. `gathered`: its rank gathers the same for another box.
  int64_t Measure(Box box, int64_t element_bytes, bool gathered) {
    for (size_t d = 0; d < box.extent.size(); ++d) {
      box.begin[d] *= PackedAlong(d);
      box.extent[d] *= PackedAlong(d);
    }
    int64_t received = 0;
    ForEachCell(box, [&](size_t cell, int64_t elements) {
      if (gathers_[cell] && gathered) return;
      const int64_t halves = gathers_[cell] ? elements * gathered_element_bytes_ * kHalves
                                            : elements * element_bytes * kHalves / packed_;
      halves_[cell] += halves;
      received += halves;
    });
    return received / kHalves;
  }

  void AddTo(BytesByHolders& demand) const {
    for (size_t cell = 0; cell < halves_.size(); ++cell) {
      if (halves_[cell] == 0) continue;
      WW_CHECK(!ranks_[cell].empty());
      demand[ranks_[cell]] += halves_[cell] / kHalves;
    }
  }

 private:
  int64_t PackedAlong(size_t d) const { return d + 1 == faces_.size() ? packed_ : 1; }
  /// Ranks come in ascending order. `only`: cells that count.
  void Enter(const std::vector<Holding>& holdings, const std::vector<bool>* only = nullptr) {
    for (const Holding& holding : holdings) {
      ForEachCell(holding.box, [&](size_t cell, int64_t) {
        if (only != nullptr && !(*only)[cell]) return;
        auto& ranks = ranks_[cell];
        if (ranks.empty() || ranks.back() != holding.rank) ranks.push_back(holding.rank);
      });
    }
  }
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
  std::vector<bool> gathers_;                 ///< by cell
  std::vector<int64_t> halves_;               ///< of bytes
  int64_t gathered_element_bytes_;
  int64_t packed_;
};

class Senderships {
 public:
  Senderships(const ModelLayout& source, const ModelLayout& target)
      : source_(source), target_(target), holdings_(HoldingsByTensor(source)) {
    std::vector<uint32_t> dtypes(source.canonical.tensors.size(), 0);  // a bit for each
    for (const auto& rank : source.ranks) {
      for (const auto& tensor : rank.tensors) {
        for (const auto& piece : tensor.pieces) {
          dtypes[piece.tensor] |= 1u << static_cast<int>(tensor.dtype);
        }
      }
    }
    uint32_t weights = 0;
    for (const auto& spec : target.canonical.tensors) {
      const auto found = source.canonical.Find(spec.name);
      const uint32_t codes = 1u << static_cast<int>(spec.dtype);
      quantized_.push_back(!spec.block.empty() && found && (dtypes[*found] & codes) == 0);
      const auto read = found ? found : source.canonical.Find(Unpacked(spec).name);
      if (!spec.block.empty() && read) weights |= dtypes[*read];
    }
    const bool halves = weights == kBF16 || weights == kF16;
    gathered_element_bytes_ = halves ? 2 : 4;
  }

  /// Of target tensor `tensor`.
  Senders Of(uint32_t tensor) const {
    const auto& tensors = target_.canonical.tensors;
    const auto same = source_.canonical.Find(tensors[tensor].name);
    if (same && quantized_[tensor]) {
      return {WholeBlocksOf(holdings_[*same], tensors[tensor], /*elements=*/true), holdings_[*same],
              gathered_element_bytes_};
    }
    if (same) return {holdings_[*same]};
    const bool packs = tensors[tensor].packed > 1;
    const auto weight = packs ? tensor : target_.canonical.WeightOf(tensor);
    WW_CHECK(weight.has_value());
    const layout::TensorSpec unpacked = Unpacked(tensors[*weight]);
    const auto found = source_.canonical.Find(unpacked.name);
    WW_CHECK(found.has_value());
    std::vector<Holding> whole = WholeBlocksOf(holdings_[*found], unpacked, /*elements=*/packs);
    if (!packs) return {std::move(whole)};
    return {std::move(whole), holdings_[*found], gathered_element_bytes_, tensors[tensor].packed};
  }

 private:
  static constexpr uint32_t kBF16 = 1u << static_cast<int>(layout::DType::kBF16);
  static constexpr uint32_t kF16 = 1u << static_cast<int>(layout::DType::kF16);

  const ModelLayout& source_;
  const ModelLayout& target_;
  const std::vector<std::vector<Holding>> holdings_;
  std::vector<bool> quantized_;  ///< by target tensor
  int64_t gathered_element_bytes_ = 0;
};

}  // namespace

Demand DemandOf(const ModelLayout& source, const ModelLayout& target) {
  struct Want {
    uint32_t rank = 0;
    const Box* box = nullptr;
    int64_t element_bytes = 0;
  };
  std::vector<std::vector<Want>> wants(target.canonical.tensors.size());
  for (uint32_t rank = 0; rank < target.ranks.size(); ++rank) {
    for (const auto& tensor : target.ranks[rank].tensors) {
      for (const auto& piece : tensor.pieces) {
        wants[piece.tensor].push_back({rank, &piece.box, layout::ElementBytes(tensor.dtype)});
      }
    }
  }
  const Senderships senders(source, target);
  Demand demand;
  demand.ingress.assign(target.ranks.size(), 0);
  for (uint32_t t = 0; t < wants.size(); ++t) {
    if (wants[t].empty()) continue;
    Grid grid(senders.Of(t), target.canonical.tensors[t].shape);
    // By rank, as they were entered.
    for (auto want = wants[t].begin(), first = want; want != wants[t].end(); ++want) {
      if (want->rank != first->rank) first = want;
      const bool gathered = std::any_of(first, want, [&](const Want& before) {
        return layout::Intersect(*before.box, *want->box) == *want->box;
      });
      demand.ingress[want->rank] += grid.Measure(*want->box, want->element_bytes, gathered);
    }
    grid.AddTo(demand.egress);
  }
  return demand;
}

}  // namespace weightwire::plan
