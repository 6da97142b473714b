// Relays are senders of their own: senders are the source ranks, then the target ranks. The fluid
// simulation tells when each link has done its work; a rank that is fed by a relay ends no sooner
// than the relay, plus the lag of one segment.
#include "server/plan/simulate.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "server/plan/text.h"

namespace weightwire::plan {
namespace {

/// Place in the class of the member that feeds member `place`; nullopt: the sources do.
std::optional<size_t> FeederOf(size_t place, Topology topology) {
  if (place == 0 || topology == Topology::kStar) return std::nullopt;
  return topology == Topology::kChain ? place - 1 : (place - 1) / 2;
}

std::vector<Flow> FlowsOf(const TransferPlan& plan, const std::vector<LayoutClass>& classes,
                          Topology topology) {
  std::vector<Flow> flows;
  std::vector<int64_t> class_bytes(classes.size(), 0);
  for (const Stream& stream : plan.streams) {
    class_bytes[stream.target_rank] += stream.bytes;
    const auto& members = classes[stream.target_rank].ranks;
    for (size_t m = 0; m < members.size(); ++m) {
      if (FeederOf(m, topology)) continue;
      flows.push_back({stream.source_rank, members[m], stream.bytes});
    }
  }
  for (size_t c = 0; c < classes.size(); ++c) {
    const auto& members = classes[c].ranks;
    for (size_t m = 0; m < members.size(); ++m) {
      const auto feeder = FeederOf(m, topology);
      if (!feeder || class_bytes[c] == 0) continue;
      flows.push_back({plan.source_ranks + members[*feeder], members[m], class_bytes[c]});
    }
  }
  return flows;
}

void FindBottleneck(const LinkModel& model, Simulation& result) {
  int64_t most = 0;
  const auto look = [&](const std::vector<int64_t>& bytes, Side side, const char* direction) {
    for (uint32_t rank = 0; rank < bytes.size(); ++rank) {
      if (bytes[rank] <= most) continue;
      most = bytes[rank];
      result.bottleneck = RankText(side, rank) + direction;
    }
  };
  look(result.source_egress, Side::kSource, " egress");
  look(result.target_ingress, Side::kTarget, " ingress");
  look(result.target_egress, Side::kTarget, " egress (relay)");
  result.bottleneck_seconds = static_cast<double>(most) / model.bytes_per_second;
}

}  // namespace

Simulation Simulate(const TransferPlan& plan, const std::vector<LayoutClass>& classes,
                    const LinkModel& model) {
  uint32_t targets = 0;
  for (const LayoutClass& entry : classes) targets += static_cast<uint32_t>(entry.ranks.size());
  const std::vector<Flow> flows = FlowsOf(plan, classes, model.topology);
  Simulation result;
  result.source_egress.assign(plan.source_ranks, 0);
  result.target_egress.assign(targets, 0);
  result.target_ingress.assign(targets, 0);
  for (const Flow& flow : flows) {
    result.target_ingress[flow.receiver] += flow.bytes;
    if (flow.sender < plan.source_ranks) {
      result.source_egress[flow.sender] += flow.bytes;
    } else {
      result.target_egress[flow.sender - plan.source_ranks] += flow.bytes;
    }
  }
  FindBottleneck(model, result);

  const FluidTimes times = RunFluid(flows, plan.source_ranks + targets, targets, model.sharing);
  const auto seconds = [&](double units) {
    return units > 0 ? units / model.bytes_per_second + model.latency_seconds : 0;
  };
  for (uint32_t s = 0; s < plan.source_ranks; ++s) {
    result.source_end.push_back(seconds(times.sender_end[s]));
  }
  for (double end : times.receiver_end) result.target_end.push_back(seconds(end));
  const double lag =
      static_cast<double>(model.segment_bytes) / model.bytes_per_second + model.latency_seconds;
  for (const LayoutClass& entry : classes) {
    for (size_t m = 0; m < entry.ranks.size(); ++m) {
      const auto feeder = FeederOf(m, model.topology);
      double& end = result.target_end[entry.ranks[m]];
      if (!feeder || end == 0) continue;
      end = std::max(end, result.target_end[entry.ranks[*feeder]] + lag);
    }
  }
  for (double end : result.source_end) result.seconds = std::max(result.seconds, end);
  for (double end : result.target_end) result.seconds = std::max(result.seconds, end);
  return result;
}

}  // namespace weightwire::plan
