#include "server/coordinator/fanout.h"

#include <algorithm>

#include "server/coordinator/prepare.h"

namespace weightwire::coordinator {
namespace {

constexpr size_t kChainFrom = 3;

/// Every rank of the engine maps the memory of every source that it reads from.
bool MapsSources(const PrepareInput& input, const epoch::EngineMembers& engine) {
  for (const plan::Stream& stream : input.plans.at(engine.name)->plan->streams) {
    const auto& source = input.addresses.at(input.spec.sources[stream.source_rank]);
    const auto& target = input.addresses.at(engine.ranks[stream.target_rank]);
    if (source.host.empty() || source.host != target.host) return false;
    if (!source.addresses.contains("shm") || !target.addresses.contains("shm")) return false;
  }
  return true;
}

}  // namespace

std::vector<int> ParentsOf(const PrepareInput& input,
                           const std::vector<const epoch::EngineMembers*>& engines) {
  std::vector<int> parents(engines.size(), -1);
  if (input.fanout == Fanout::kStar) return parents;
  std::vector<int> chain;
  for (size_t i = 0; i < engines.size(); ++i) {
    if (input.fanout == Fanout::kChain || !MapsSources(input, *engines[i])) {
      chain.push_back(static_cast<int>(i));
    }
  }
  if (input.fanout == Fanout::kAuto && chain.size() < kChainFrom) return parents;
  std::ranges::stable_sort(chain, {}, [&](int i) {
    return input.addresses.at(engines[static_cast<size_t>(i)]->ranks.front()).host;
  });
  for (size_t k = 1; k < chain.size(); ++k) {
    const auto i = static_cast<size_t>(chain[k]);
    if (!input.direct.contains(engines[i]->name)) parents[i] = chain[k - 1];
  }
  return parents;
}

}  // namespace weightwire::coordinator
