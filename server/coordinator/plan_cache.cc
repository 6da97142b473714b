#include "server/coordinator/plan_cache.h"

#include <algorithm>

namespace weightwire::coordinator {
namespace {

constexpr size_t kPlansMax = 256;

}  // namespace

void PlanCache::Get(const AgreedLayoutPtr& source, const AgreedLayoutPtr& target, Ready ready) {
  const Key key{source->fingerprint, target->fingerprint};
  Entry& entry = entries_[key];
  entry.used = ++uses_;
  if (entry.pair != nullptr) {
    metrics_.Add("plan_cache_hits_total", 1);
    strand_.Post([pair = entry.pair, ready = std::move(ready)] { ready(pair); });
    return;
  }
  entry.waiting.push_back(std::move(ready));
  if (entry.waiting.size() == 1) Build(key, source, target);
}

void PlanCache::Build(const Key& key, const AgreedLayoutPtr& source,
                      const AgreedLayoutPtr& target) {
  auto finish = lifeline_.Bind([this, key](const Built& built) { Finish(key, built); });
  workers_.Post([source, target, work = work_, finish = std::move(finish), &strand = strand_,
                 &clock = clock_]() mutable {
    const Nanos start = clock.Now();
    Built built{work->Plan(source, target), 0};
    built.seconds = std::chrono::duration<double>(clock.Now() - start).count();
    strand.Post(
        [finish = std::move(finish), built = std::move(built)]() mutable { finish(built); });
  });
}

void PlanCache::Finish(const Key& key, const Built& built) {
  metrics_.Observe("plan_seconds", built.seconds);
  std::vector<Ready> waiting = std::move(entries_[key].waiting);
  if (built.pair) {
    const PlannedPairPtr& pair = *built.pair;
    metrics_.Set("plan_copies", static_cast<double>(pair->plan->copies_total));
    metrics_.Set("plan_bytes", static_cast<double>(pair->plan->bytes_total));
    entries_[key].waiting.clear();
    entries_[key].pair = pair;
    by_id_[pair->plan->id] = pair;
    DropLeastUsed();
  } else {
    entries_.erase(key);
  }
  for (const Ready& ready : waiting) ready(built.pair);
}

void PlanCache::DropLeastUsed() {
  if (by_id_.size() <= kPlansMax) return;
  auto least = entries_.end();
  for (auto it = entries_.begin(); it != entries_.end(); ++it) {
    if (it->second.pair == nullptr) continue;
    if (least == entries_.end() || it->second.used < least->second.used) least = it;
  }
  by_id_.erase(least->second.pair->plan->id);
  entries_.erase(least);
}

PlannedPairPtr PlanCache::Find(PlanId plan) const {
  const auto found = by_id_.find(plan);
  return found == by_id_.end() ? nullptr : found->second;
}

}  // namespace weightwire::coordinator
