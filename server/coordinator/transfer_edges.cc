#include "server/coordinator/transfer_edges.h"

#include <algorithm>

namespace weightwire::coordinator {
namespace {

/// Of the union of the spans.
double SecondsOf(std::vector<std::pair<int64_t, int64_t>> spans_us) {
  std::ranges::sort(spans_us);
  int64_t sum = 0, counted_to = INT64_MIN;
  for (const auto& [from, to] : spans_us) {
    sum += std::max<int64_t>(0, to - std::max(from, counted_to));
    counted_to = std::max(counted_to, to);
  }
  return static_cast<double>(sum) / 1e6;
}

}  // namespace

void EdgeStats::Add(const std::string& source, const std::string& target,
                    const std::string& transport, int64_t begin_us, int64_t duration_us,
                    int64_t bytes) {
  Reads& reads = reads_[{source, target}][transport];
  reads.edge.source = source;
  reads.edge.target = target;
  reads.edge.transport = transport;
  reads.edge.bytes += bytes;
  reads.spans_us.emplace_back(begin_us, begin_us + duration_us);
}

EpochEdges EdgeStats::Take() {
  EpochEdges out;
  for (auto& [agents, by_transport] : reads_) {
    for (auto& [transport, reads] : by_transport) {
      reads.edge.seconds = SecondsOf(std::move(reads.spans_us));
      out.edges.push_back(std::move(reads.edge));
    }
  }
  reads_.clear();
  std::ranges::stable_sort(out.edges, std::greater<>(), &TransferEdge::bytes);
  if (out.edges.size() > EpochEdges::kEdgesMax) {
    out.left_off = out.edges.size() - EpochEdges::kEdgesMax;
    out.edges.resize(EpochEdges::kEdgesMax);
  }
  return out;
}

}  // namespace weightwire::coordinator
