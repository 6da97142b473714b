// Progressive filling: the link with the least capacity per open stream is the bottleneck; its
// streams get that rate and are settled, and the links at their other ends give it up. A heap with
// stale entries finds the next bottleneck.
#include "server/plan/fluid.h"

#include <algorithm>
#include <functional>
#include <queue>
#include <utility>
#include <vector>

namespace weightwire::plan {
namespace {

constexpr double kStepsBudget = 5e7;
/// Streams that end within this fraction of a step of each other end together.
constexpr double kTogether = 1e-9;

struct Flow {
  uint32_t source_link = 0;
  uint32_t target_link = 0;
  double left = 0;
  double rate = 0;
};

class Network {
 public:
  Network(std::span<const Stream> streams, uint32_t source_ranks, uint32_t target_ranks)
      : link_count_(source_ranks + target_ranks) {
    for (const Stream& stream : streams) {
      flows_.push_back({stream.source_rank, source_ranks + stream.target_rank,
                        static_cast<double>(stream.bytes), 0});
    }
  }

  double Run() {
    const double rounds = std::max(32.0, kStepsBudget / static_cast<double>(flows_.size() + 1));
    const auto ends_per_round =
        static_cast<size_t>(static_cast<double>(flows_.size()) / rounds) + 1;
    double time = 0;
    while (!flows_.empty()) {
      SetRates();
      time += Advance(std::min(ends_per_round, flows_.size()));
    }
    return time;
  }

 private:
  void SetRates() {
    std::vector<std::vector<uint32_t>> flows_of(link_count_);
    for (uint32_t f = 0; f < flows_.size(); ++f) {
      flows_[f].rate = 0;
      flows_of[flows_[f].source_link].push_back(f);
      flows_of[flows_[f].target_link].push_back(f);
    }
    std::vector<double> capacity(link_count_, 1.0);
    std::vector<size_t> open(link_count_);
    using Entry = std::pair<double, uint32_t>;
    std::priority_queue<Entry, std::vector<Entry>, std::greater<>> bottlenecks;
    const auto share = [&](uint32_t link) {
      return capacity[link] / static_cast<double>(open[link]);
    };
    for (uint32_t link = 0; link < link_count_; ++link) {
      open[link] = flows_of[link].size();
      if (open[link] > 0) bottlenecks.emplace(share(link), link);
    }
    while (!bottlenecks.empty()) {
      const auto [rate, link] = bottlenecks.top();
      bottlenecks.pop();
      if (open[link] == 0 || rate != share(link)) continue;
      std::vector<uint32_t> touched;
      for (uint32_t f : flows_of[link]) {
        Flow& flow = flows_[f];
        if (flow.rate > 0) continue;
        flow.rate = rate;
        const uint32_t other = flow.source_link == link ? flow.target_link : flow.source_link;
        capacity[other] = std::max(0.0, capacity[other] - rate);
        if (--open[other] > 0) touched.push_back(other);
      }
      open[link] = 0;
      for (uint32_t other : touched) {
        // Rounding must not leave an open link without any capacity.
        capacity[other] = std::max(capacity[other], rate * static_cast<double>(open[other]));
        bottlenecks.emplace(share(other), other);
      }
    }
  }

  /// Runs until `count` flows have ended; returns how long that took.
  double Advance(size_t count) {
    std::vector<double> ends;
    ends.reserve(flows_.size());
    for (const Flow& flow : flows_) ends.push_back(flow.left / flow.rate);
    const auto nth = ends.begin() + static_cast<ptrdiff_t>(count - 1);
    std::nth_element(ends.begin(), nth, ends.end());
    const double step = *nth;
    std::erase_if(flows_, [&](Flow& flow) {
      flow.left -= flow.rate * step;
      return flow.left <= flow.rate * step * kTogether;
    });
    return step;
  }

  const uint32_t link_count_;
  std::vector<Flow> flows_;
};

}  // namespace

double FluidTime(std::span<const Stream> streams, uint32_t source_ranks, uint32_t target_ranks) {
  return Network(streams, source_ranks, target_ranks).Run();
}

}  // namespace weightwire::plan
