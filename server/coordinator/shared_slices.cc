#include "server/coordinator/shared_slices.h"

#include <map>
#include <utility>
#include <vector>

namespace weightwire::coordinator {

struct SharedSlices::State {
  std::map<Key, std::weak_ptr<const plan::RankSlice>> alive;
  std::map<Key, std::vector<control::Reply<Slice>>> making;

  void Made(const Key& key, const Slice& slice) {
    std::erase_if(alive, [](const auto& entry) { return entry.second.expired(); });
    alive[key] = slice;
    const auto waiting = making.extract(key);
    for (const auto& reply : waiting.mapped()) reply(slice);
  }
};

SharedSlices::SharedSlices(Executor& strand, Executor& workers)
    : strand_(strand), workers_(workers), state_(std::make_shared<State>()) {}

void SharedSlices::Get(const Key& key, std::function<Slice()> make, control::Reply<Slice> reply) {
  if (const auto known = state_->alive.find(key); known != state_->alive.end()) {
    if (Slice slice = known->second.lock()) {
      return strand_.Post([slice = std::move(slice), reply = std::move(reply)] { reply(slice); });
    }
  }
  auto& waiting = state_->making[key];
  waiting.push_back(std::move(reply));
  if (waiting.size() > 1) return;
  workers_.Post([key, make = std::move(make), state = state_, &strand = strand_]() mutable {
    strand.Post([key, slice = make(), state = std::move(state)] { state->Made(key, slice); });
  });
}

}  // namespace weightwire::coordinator
