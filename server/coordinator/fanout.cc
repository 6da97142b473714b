#include "server/coordinator/fanout.h"

#include <algorithm>
#include <bit>

#include "server/coordinator/prepare.h"

namespace weightwire::coordinator {
namespace {

constexpr size_t kRelaysFrom = 3;

/// Indices of engines, those of each host together.
using Hosts = std::vector<std::vector<int>>;

/// Every rank of the engine maps the memory of every source that it reads from.
bool MapsSources(const PrepareInput& input, const epoch::EngineMembers& engine) {
  for (const plan::Stream& stream : input.plans.at(engine.name)->plan->streams) {
    const auto& source = input.addresses.at(input.spec.sources[stream.source_rank]);
    const auto& target = input.addresses.at(engine.ranks[stream.target_rank]);
    if (source.host.empty() || source.host != target.host) return false;
    const auto both = [&](const char* transport) {
      return source.addresses.contains(transport) && target.addresses.contains(transport);
    };
    if (!both("shm") && !both("cuda_ipc")) return false;
  }
  return true;
}

Hosts ByHost(const PrepareInput& input, const std::vector<const epoch::EngineMembers*>& engines,
             std::vector<int> some) {
  const auto host = [&](int i) -> const std::string& {
    return input.addresses.at(engines[static_cast<size_t>(i)]->ranks.front()).host;
  };
  std::ranges::stable_sort(some, {}, host);
  Hosts hosts;
  for (int i : some) {
    const bool known = !hosts.empty() && !host(i).empty() && host(i) == host(hosts.back().front());
    if (!known) hosts.emplace_back();
    hosts.back().push_back(i);
  }
  return hosts;
}

/// Both in bytes that pass one link: all of a rank's, or twice that, and a slot for each engine on
/// the longest way.
bool TreeIsFaster(const PrepareInput& input, const plan::TransferPlan& plan, const Hosts& hosts) {
  std::map<uint32_t, int64_t> ranks;
  for (const plan::Stream& stream : plan.streams) ranks[stream.target_rank] += stream.bytes;
  const int64_t bytes =
      std::ranges::max_element(ranks, {}, [](auto& r) { return r.second; })->second;
  size_t engines = 0;
  size_t most = 0;  // on one host
  for (const auto& host : hosts) {
    engines += host.size();
    most = std::max(most, host.size());
  }
  // Behind each relay's two readers a slot waits for the other's.
  const size_t levels = static_cast<size_t>(std::bit_width(hosts.size())) - 1;
  const auto passed = [&](size_t slots) { return static_cast<int64_t>(slots) * input.slot_bytes; };
  return 2 * bytes + passed(2 * levels + most - 1) < bytes + passed(engines - 1);
}

}  // namespace

std::vector<int> ParentsOf(const PrepareInput& input,
                           const std::vector<const epoch::EngineMembers*>& engines) {
  std::vector<int> parents(engines.size(), -1);
  if (input.fanout == Fanout::kStar) return parents;
  const bool chosen = input.fanout != Fanout::kAuto;
  std::vector<int> relays;
  for (size_t i = 0; i < engines.size(); ++i) {
    if (chosen || !MapsSources(input, *engines[i])) relays.push_back(static_cast<int>(i));
  }
  if (!chosen && relays.size() < kRelaysFrom) return parents;
  const Hosts hosts = ByHost(input, engines, relays);
  const plan::TransferPlan& plan = *input.plans.at(engines.front()->name)->plan;
  const bool tree = chosen ? input.fanout == Fanout::kTree : TreeIsFaster(input, plan, hosts);
  int before = -1;
  for (size_t h = 0; h < hosts.size(); ++h) {
    if (tree && h > 0) before = hosts[(h - 1) / 2].front();
    for (int i : hosts[h]) {
      const auto at = static_cast<size_t>(i);
      if (!input.direct.contains(engines[at]->name)) parents[at] = before;
      before = i;
    }
  }
  return parents;
}

}  // namespace weightwire::coordinator
