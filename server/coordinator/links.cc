#include "server/coordinator/links.h"

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

void LinkSums::Add(const std::string& source, const std::string& target,
                   const std::string& transport, int64_t begin_us, int64_t duration_us,
                   int64_t bytes) {
  Reads& reads = reads_[{source, target}][transport];
  reads.link.source = source;
  reads.link.target = target;
  reads.link.transport = transport;
  reads.link.bytes += bytes;
  reads.spans_us.emplace_back(begin_us, begin_us + duration_us);
}

EpochLinks LinkSums::Take() {
  EpochLinks out;
  for (auto& [agents, by_transport] : reads_) {
    for (auto& [transport, reads] : by_transport) {
      reads.link.seconds = SecondsOf(std::move(reads.spans_us));
      out.links.push_back(std::move(reads.link));
    }
  }
  reads_.clear();
  std::ranges::stable_sort(out.links, std::greater<>(), &Link::bytes);
  if (out.links.size() > EpochLinks::kLinksMax) {
    out.left_off = out.links.size() - EpochLinks::kLinksMax;
    out.links.resize(EpochLinks::kLinksMax);
  }
  return out;
}

}  // namespace weightwire::coordinator
