#include "server/coordinator/scheme_cache.h"

namespace weightwire::coordinator {
namespace {

constexpr size_t kEntriesMax = 16;

}  // namespace

void SchemeCache::Get(const std::string& config_json, const std::string& spec, Ready ready) {
  const Key key{config_json, spec};
  Entry& entry = entries_[key];
  if (entry.result != nullptr) {
    strand_.Post([result = entry.result, ready = std::move(ready)] { ready(*result); });
    return;
  }
  entry.waiting.push_back(std::move(ready));
  if (entry.waiting.size() > 1) return;
  auto finish = cancel_.Bind(
      [this, key](const std::shared_ptr<const Result<SchemeLayout>>& r) { Finish(key, r); });
  workers_.Post([key, work = work_, finish = std::move(finish), &strand = strand_]() mutable {
    auto result = std::make_shared<const Result<SchemeLayout>>(work->Scheme(key.first, key.second));
    strand.Post([finish = std::move(finish), result]() mutable { finish(result); });
  });
}

void SchemeCache::Finish(const Key& key, std::shared_ptr<const Result<SchemeLayout>> result) {
  std::vector<Ready> waiting = std::move(entries_[key].waiting);
  if (!result->has_value()) {
    entries_.erase(key);
  } else {
    entries_[key] = Entry{{}, result};
    order_.push_back(key);
    if (order_.size() > kEntriesMax) {
      entries_.erase(order_.front());
      order_.pop_front();
    }
  }
  for (const Ready& ready : waiting) ready(*result);
}

}  // namespace weightwire::coordinator
