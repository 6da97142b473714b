// Progressive filling: the link with the least capacity per weight of its open flows is the
// bottleneck; its flows get that rate times their weight and are settled, and the links at their
// other ends give it up. A heap with stale entries finds the next bottleneck.
#include "server/plan/fluid.h"

#include <algorithm>
#include <functional>
#include <queue>
#include <utility>

namespace weightwire::plan {
namespace {

/// Shared by bytes, the flows of a link end together, and rounds are few.
constexpr double kStepsBudgetByBytes = 5e6;
constexpr double kStepsBudgetEqual = 5e7;
/// Flows that end within this fraction of a step of each other end together.
constexpr double kTogether = 1e-9;

struct Moving {
  uint32_t sender_link = 0;
  uint32_t receiver_link = 0;
  double weight = 1;
  double left = 0;
  double rate = 0;
};

/// Links are senders, then receivers.
class Network {
 public:
  Network(std::span<const Flow> flows, uint32_t senders, uint32_t receivers, Sharing sharing)
      : senders_(senders),
        steps_budget_(sharing == Sharing::kByBytes ? kStepsBudgetByBytes : kStepsBudgetEqual),
        ends_(senders + receivers, 0),
        links_(senders + receivers) {
    for (const Flow& flow : flows) {
      const auto bytes = static_cast<double>(flow.bytes);
      flows_.push_back({flow.sender, senders + flow.receiver,
                        sharing == Sharing::kByBytes ? bytes : 1.0, bytes, 0});
    }
  }

  FluidTimes Run() {
    const double rounds = std::max(32.0, steps_budget_ / static_cast<double>(flows_.size() + 1));
    const auto ends_per_round =
        static_cast<size_t>(static_cast<double>(flows_.size()) / rounds) + 1;
    while (!flows_.empty()) {
      SetRates();
      Advance(std::min(ends_per_round, flows_.size()));
    }
    const auto middle = ends_.begin() + senders_;
    return {time_, {ends_.begin(), middle}, {middle, ends_.end()}};
  }

 private:
  struct Link {
    std::vector<uint32_t> flows;
    double capacity = 1;
    double weight = 0;  ///< of the open flows
    size_t open = 0;
    double Share() const { return capacity / weight; }
  };

  void SetRates() {
    for (Link& link : links_) {
      link.flows.clear();
      link.capacity = 1;
      link.weight = 0;
    }
    for (uint32_t f = 0; f < flows_.size(); ++f) {
      flows_[f].rate = 0;
      for (uint32_t link : {flows_[f].sender_link, flows_[f].receiver_link}) {
        links_[link].flows.push_back(f);
        links_[link].weight += flows_[f].weight;
      }
    }
    using Entry = std::pair<double, uint32_t>;
    std::priority_queue<Entry, std::vector<Entry>, std::greater<>> bottlenecks;
    for (uint32_t l = 0; l < links_.size(); ++l) {
      links_[l].open = links_[l].flows.size();
      if (links_[l].open > 0) bottlenecks.emplace(links_[l].Share(), l);
    }
    std::vector<uint32_t> touched;
    while (!bottlenecks.empty()) {
      const auto [share, l] = bottlenecks.top();
      bottlenecks.pop();
      if (links_[l].open == 0 || share != links_[l].Share()) continue;
      touched.clear();
      for (uint32_t f : links_[l].flows) {
        if (flows_[f].rate > 0) continue;
        Settle(f, l, share, touched);
      }
      links_[l].open = 0;
      for (uint32_t other : touched) {
        Link& link = links_[other];
        if (link.open == 0) continue;
        // Rounding must not leave an open link with less than what is fair for all its flows.
        link.capacity = std::max(link.capacity, share * link.weight);
        bottlenecks.emplace(link.Share(), other);
      }
    }
  }

  void Settle(uint32_t f, uint32_t bottleneck, double share, std::vector<uint32_t>& touched) {
    Moving& flow = flows_[f];
    flow.rate = flow.weight * share;
    const uint32_t other = flow.sender_link == bottleneck ? flow.receiver_link : flow.sender_link;
    Link& link = links_[other];
    link.capacity = std::max(0.0, link.capacity - flow.rate);
    link.weight = std::max(0.0, link.weight - flow.weight);
    if (--link.open > 0 && (touched.empty() || touched.back() != other)) touched.push_back(other);
  }

  /// Runs until `count` flows have ended.
  void Advance(size_t count) {
    std::vector<double> ends;
    ends.reserve(flows_.size());
    for (const Moving& flow : flows_) ends.push_back(flow.left / flow.rate);
    const auto nth = ends.begin() + static_cast<ptrdiff_t>(count - 1);
    std::nth_element(ends.begin(), nth, ends.end());
    const double step = *nth;
    time_ += step;
    std::erase_if(flows_, [&](Moving& flow) {
      flow.left -= flow.rate * step;
      if (flow.left > flow.rate * step * kTogether) return false;
      ends_[flow.sender_link] = ends_[flow.receiver_link] = time_;
      return true;
    });
  }

  const uint32_t senders_;
  const double steps_budget_;
  double time_ = 0;
  std::vector<Moving> flows_;
  std::vector<double> ends_;  ///< by link
  std::vector<Link> links_;
};

}  // namespace

FluidTimes RunFluid(std::span<const Flow> flows, uint32_t senders, uint32_t receivers,
                    Sharing sharing) {
  return Network(flows, senders, receivers, sharing).Run();
}

FluidTimes RunFluid(const TransferPlan& plan, Sharing sharing) {
  std::vector<Flow> flows;
  flows.reserve(plan.streams.size());
  for (const Stream& stream : plan.streams) {
    flows.push_back({stream.source_rank, stream.target_rank, stream.bytes});
  }
  return RunFluid(flows, plan.source_ranks, plan.target_ranks, sharing);
}

}  // namespace weightwire::plan
