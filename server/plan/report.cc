// The bounds that the report compares with.
//
// Egress. The holders of a part of a copy are the source ranks with a piece that contains the part
// whole. For a set S of ranks, all parts whose holders lie within S must leave through S, so some
// rank of S sends at least their bytes / |S|. The bound is the greatest such value over the holder
// sets that occur and over the set of all source ranks. It never exceeds the true optimum, and
// equals it when holder sets are nested or disjoint, as those of parallel groups are.
//
// Ingress. A target rank must receive what its pieces cover, in its own dtypes. The bound is the
// largest such figure.
#include <algorithm>
#include <map>
#include <unordered_map>
#include <utility>
#include <vector>

#include "server/plan/fluid.h"
#include "server/plan/locator.h"
#include "server/plan/plan.h"

namespace weightwire::plan {
namespace {

using layout::Box;
using layout::ModelLayout;

bool Inside(const Box& inner, const Box& outer) {
  for (size_t d = 0; d < inner.begin.size(); ++d) {
    if (inner.begin[d] < outer.begin[d] ||
        inner.begin[d] + inner.extent[d] > outer.begin[d] + outer.extent[d]) {
      return false;
    }
  }
  return true;
}

/// Who holds what at the source: per canonical tensor, each distinct box with its ranks.
class Holders {
 public:
  explicit Holders(const ModelLayout& source) : boxes_(source.canonical.tensors.size()) {
    std::vector<std::map<std::pair<std::vector<int64_t>, std::vector<int64_t>>, Ranks>> found(
        boxes_.size());
    for (uint32_t rank = 0; rank < source.ranks.size(); ++rank) {
      for (const auto& tensor : source.ranks[rank].tensors) {
        for (const auto& piece : tensor.pieces) {
          Ranks& ranks = found[piece.tensor][{piece.box.begin, piece.box.extent}];
          if (ranks.empty() || ranks.back() != rank) ranks.push_back(rank);
        }
      }
    }
    for (size_t t = 0; t < found.size(); ++t) {
      for (auto& [box, ranks] : found[t]) {
        boxes_[t].push_back({{box.first, box.second}, std::move(ranks)});
      }
    }
  }

  using Ranks = std::vector<uint32_t>;
  Ranks Of(uint32_t canonical, const Box& part) const {
    Ranks all;
    for (const auto& [box, ranks] : boxes_[canonical]) {
      if (Inside(part, box)) all.insert(all.end(), ranks.begin(), ranks.end());
    }
    std::sort(all.begin(), all.end());
    all.erase(std::unique(all.begin(), all.end()), all.end());
    return all;
  }

 private:
  std::vector<std::vector<std::pair<Box, Ranks>>> boxes_;
};

class EgressBound {
 public:
  EgressBound(const ModelLayout& source, const ModelLayout& target)
      : source_(source), target_(target), holders_(source), locators_(source.ranks.size()) {}

  double Of(const TransferPlan& plan) {
    uint32_t target_rank = 0;
    std::vector<PieceLocator> target_locators;
    for (const Stream& stream : plan.streams) {
      if (target_locators.empty() || stream.target_rank != target_rank) {
        target_rank = stream.target_rank;
        target_locators = LocatorsOf(target_, target_rank);
      }
      for (const CopyOp& op : stream.ops) {
        Add(stream.source_rank, op, target_locators[op.target_tensor]);
      }
    }
    return Greatest(plan.bytes_total);
  }

 private:
  static std::vector<PieceLocator> LocatorsOf(const ModelLayout& layout, uint32_t rank) {
    std::vector<PieceLocator> locators;
    for (const auto& tensor : layout.ranks[rank].tensors) locators.emplace_back(tensor);
    return locators;
  }

  void Add(uint32_t source_rank, const CopyOp& op, const PieceLocator& target) {
    const auto box = TargetBox(target, op);
    const auto canonical = source_.canonical.Find(target_.canonical.tensors[op.canonical].name);
    WW_CHECK(box.has_value() && canonical.has_value());
    auto& locators = locators_[source_rank];
    if (locators.empty()) locators = LocatorsOf(source_, source_rank);
    const auto parts =
        locators[op.source_tensor].Split(*canonical, *box, op.source_offset, op.source_stride);
    WW_CHECK(parts.has_value());
    for (const PiecePart& part : *parts) {
      int64_t bytes = layout::ElementBytes(op.target_dtype);
      for (int64_t extent : part.box.extent) bytes *= extent;
      demand_[holders_.Of(*canonical, part.box)] += bytes;
    }
  }

  double Greatest(int64_t bytes_total) const {
    double bound = static_cast<double>(bytes_total) / static_cast<double>(source_.ranks.size());
    std::unordered_map<uint32_t, std::vector<const Demand::value_type*>> by_first;
    for (const auto& entry : demand_) by_first[entry.first.front()].push_back(&entry);
    for (const auto& [ranks, own] : demand_) {
      int64_t bytes = 0;
      for (uint32_t first : ranks) {
        const auto starting = by_first.find(first);
        if (starting == by_first.end()) continue;
        for (const auto* entry : starting->second) {
          const Holders::Ranks& other = entry->first;
          if (std::includes(ranks.begin(), ranks.end(), other.begin(), other.end())) {
            bytes += entry->second;
          }
        }
      }
      bound = std::max(bound, static_cast<double>(bytes) / static_cast<double>(ranks.size()));
    }
    return bound;
  }

  using Demand = std::map<Holders::Ranks, int64_t>;
  const ModelLayout& source_;
  const ModelLayout& target_;
  Holders holders_;
  std::vector<std::vector<PieceLocator>> locators_;  ///< of the source; made when used
  Demand demand_;                                    ///< bytes by holder set
};

int64_t LargestTarget(const ModelLayout& target) {
  int64_t largest = 0;
  for (const auto& rank : target.ranks) {
    int64_t bytes = 0;
    for (const auto& tensor : rank.tensors) {
      for (const auto& piece : tensor.pieces) {
        bytes += layout::ElementCount(piece.box) * layout::ElementBytes(tensor.dtype);
      }
    }
    largest = std::max(largest, bytes);
  }
  return largest;
}

}  // namespace

PlanReport Report(const TransferPlan& plan, const ModelLayout& source, const ModelLayout& target) {
  PlanReport report;
  report.bytes_total = plan.bytes_total;
  report.copies = plan.copies_total;
  report.streams = static_cast<uint32_t>(plan.streams.size());
  report.egress.assign(plan.source_ranks, 0);
  report.ingress.assign(plan.target_ranks, 0);
  for (const Stream& stream : plan.streams) {
    report.egress[stream.source_rank] += stream.bytes;
    report.ingress[stream.target_rank] += stream.bytes;
  }
  for (int64_t bytes : report.egress) report.egress_max = std::max(report.egress_max, bytes);
  for (int64_t bytes : report.ingress) report.ingress_max = std::max(report.ingress_max, bytes);
  if (plan.bytes_total == 0) {
    report.egress_over_bound = report.ingress_over_bound = report.simulated_over_bound = 1.0;
    return report;
  }
  const double egress_bound = EgressBound(source, target).Of(plan);
  const auto ingress_bound = static_cast<double>(LargestTarget(target));
  report.egress_over_bound = static_cast<double>(report.egress_max) / egress_bound;
  report.ingress_over_bound = static_cast<double>(report.ingress_max) / ingress_bound;
  report.simulated_over_bound = FluidTime(plan.streams, plan.source_ranks, plan.target_ranks) /
                                std::max(egress_bound, ingress_bound);
  return report;
}

}  // namespace weightwire::plan
