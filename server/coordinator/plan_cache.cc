#include "server/coordinator/plan_cache.h"

#include <utility>

#include "server/plan/memory_bytes.h"

namespace weightwire::coordinator {

void PlanCache::Get(const AgreedLayoutPtr& source, const AgreedLayoutPtr& target, Ready ready) {
  const Key key{source->fingerprint, target->fingerprint};
  Entry& entry = entries_[key];
  entry.used = ++uses_;
  if (PlannedPairPtr pair = entry.pair.lock()) {
    metrics_.Add("plan_cache_hits_total", 1);
    if (entry.kept == nullptr) Keep(entry, pair);
    strand_.Post([pair = std::move(pair), ready = std::move(ready)] { ready(pair); });
    return;
  }
  entry.waiting.push_back(std::move(ready));
  if (entry.waiting.size() == 1) Build(key, source, target);
}

void PlanCache::Build(const Key& key, const AgreedLayoutPtr& source,
                      const AgreedLayoutPtr& target) {
  auto finish = cancel_.Bind([this, key](const Built& built) { Finish(key, built); });
  workers_.Post([source, target, work = work_, finish = std::move(finish), &strand = strand_,
                 &clock = clock_]() mutable {
    const Nanos start = clock.Now();
    Built built{work->Plan(source, target)};
    if (built.pair) built.bytes = plan::MemoryBytes(*(*built.pair)->plan);
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
    Entry& entry = entries_[key];
    entry.waiting.clear();
    entry.pair = pair;
    entry.bytes = built.bytes;
    by_id_[pair->plan->id] = pair;
    Keep(entry, pair);
    ForgetGone();
  } else {
    entries_.erase(key);
  }
  for (const Ready& ready : waiting) ready(built.pair);
}

void PlanCache::Keep(Entry& entry, PlannedPairPtr pair) {
  entry.kept = std::move(pair);
  bytes_kept_ += entry.bytes;
  while (bytes_kept_ > bytes_max_) DropLeastUsed();
}

/// What is kept is over the bound.
void PlanCache::DropLeastUsed() {
  Entry* least = nullptr;
  for (auto& [key, entry] : entries_) {
    if (entry.kept != nullptr && (least == nullptr || entry.used < least->used)) least = &entry;
  }
  bytes_kept_ -= least->bytes;
  least->kept.reset();
}

void PlanCache::ForgetGone() {
  std::erase_if(entries_, [](const auto& entry) {
    return entry.second.waiting.empty() && entry.second.pair.expired();
  });
  std::erase_if(by_id_, [](const auto& entry) { return entry.second.expired(); });
}

PlannedPairPtr PlanCache::Find(PlanId plan) const {
  const auto found = by_id_.find(plan);
  return found == by_id_.end() ? nullptr : found->second.lock();
}

}  // namespace weightwire::coordinator
