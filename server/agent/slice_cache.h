#pragma once

#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <tuple>
#include <vector>

#include "server/control/control.h"
#include "server/plan/plan.h"

namespace weightwire::agent {

/// Slices of plans by (plan, side, rank), fetched from the coordinator once: layouts change rarely,
/// versions come all the time. Callers that ask while a fetch is under way share it; a failure is
/// not kept. The least recently used slices go when more than `bytes_max` are held.
///
/// Belongs to the agent's strand; callbacks run on it, perhaps inside Get.
class SliceCache {
 public:
  using Slice = std::shared_ptr<const plan::RankSlice>;

  explicit SliceCache(control::CoordinatorPort& coordinator, uint64_t bytes_max = uint64_t{1} << 30)
      : coordinator_(coordinator), bytes_max_(bytes_max) {}
  SliceCache(const SliceCache&) = delete;
  SliceCache& operator=(const SliceCache&) = delete;

  /// Errors: CoordinatorPort::FetchSlice's.
  void Get(PlanId plan, plan::Side side, uint32_t rank, control::Reply<Slice> reply);

 private:
  using Key = std::tuple<PlanId, plan::Side, uint32_t>;
  struct Entry {
    Slice slice;
    uint64_t bytes = 0;
    std::list<Key>::iterator use;
  };

  void Fetched(const Key& key, const Result<Slice>& result);
  void Keep(const Key& key, Slice slice);

  control::CoordinatorPort& coordinator_;
  const uint64_t bytes_max_;
  uint64_t bytes_held_ = 0;
  std::map<Key, Entry> entries_;
  std::list<Key> uses_;  ///< most recent first
  std::map<Key, std::vector<control::Reply<Slice>>> fetching_;
  /// Late replies find out by it that the cache is gone.
  std::shared_ptr<SliceCache*> self_ = std::make_shared<SliceCache*>(this);
};

}  // namespace weightwire::agent
