#include "server/agent/slice_cache.h"

#include <utility>

namespace weightwire::agent {
namespace {

/// What a slice costs: its copies, and one for itself so that empty slices are bounded too.
uint64_t Weight(const plan::RankSlice& slice) {
  uint64_t weight = 1;
  for (const plan::Stream& stream : slice.streams) weight += stream.ops.size();
  return weight;
}

}  // namespace

void SliceCache::Get(PlanId plan, plan::Side side, uint32_t rank, control::Reply<Slice> reply) {
  const Key key{plan, side, rank};
  if (auto found = entries_.find(key); found != entries_.end()) {
    uses_.splice(uses_.begin(), uses_, found->second.use);
    reply(found->second.slice);
    return;
  }
  auto& waiting = fetching_[key];
  waiting.push_back(std::move(reply));
  if (waiting.size() > 1) return;
  coordinator_.FetchSlice(plan, side, rank,
                          [weak = std::weak_ptr(self_), key](const Result<Slice>& result) {
                            if (auto self = weak.lock()) (*self)->Fetched(key, result);
                          });
}

void SliceCache::Fetched(const Key& key, const Result<Slice>& result) {
  auto node = fetching_.extract(key);
  if (node.empty()) return;
  if (result && *result) Keep(key, *result);
  for (auto& reply : node.mapped()) reply(result);
}

void SliceCache::Keep(const Key& key, Slice slice) {
  const uint64_t weight = Weight(*slice);
  uses_.push_front(key);
  entries_[key] = {std::move(slice), weight, uses_.begin()};
  ops_held_ += weight;
  while (ops_held_ > ops_max_ && uses_.size() > 1) {
    auto oldest = entries_.find(uses_.back());
    ops_held_ -= oldest->second.weight;
    entries_.erase(oldest);
    uses_.pop_back();
  }
}

}  // namespace weightwire::agent
