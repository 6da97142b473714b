#include "server/agent/slice_cache.h"

#include <utility>

#include "server/plan/memory_bytes.h"

namespace weightwire::agent {

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
  const uint64_t bytes = plan::MemoryBytes(*slice);
  uses_.push_front(key);
  entries_[key] = {std::move(slice), bytes, uses_.begin()};
  bytes_held_ += bytes;
  while (bytes_held_ > bytes_max_ && uses_.size() > 1) {
    auto oldest = entries_.find(uses_.back());
    bytes_held_ -= oldest->second.bytes;
    entries_.erase(oldest);
    uses_.pop_back();
  }
}

}  // namespace weightwire::agent
