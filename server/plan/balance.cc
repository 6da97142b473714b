// 1. Demands are poured over their ranks one after the other, each into the least loaded ones
//    until these are level; small sets first. Pouring each again, given all the others, evens out
//    what the first round could not know.
// 2. Pouring alone is slow where sets form long chains. So, while some rank u is above its fair
//    share, bytes are pushed along chains of sets: u gives bytes of a set to a rank of that set,
//    which gives bytes of another set away, and so on to a rank that has room. Let R be the ranks
//    that can be reached from u in this way. All that R sends can be sent by R only, so no plan has
//    a greatest load below the mean load of R: when u is at most a little above this mean, u's
//    load is proven to be the least possible, and as u is the busiest rank, so is the answer.
#include "server/plan/balance.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace weightwire::plan {
namespace {

constexpr int kRoundsMax = 12;
constexpr int64_t kTolerance = 1024;
/// Ranks looked at by pushes, in all: about a second. Only contrived sets come near it.
constexpr int64_t kStepsMax = 200'000'000;

class Balancer {
 public:
  Balancer(std::span<const Demand> demands, uint32_t rank_count)
      : demands_(demands), load_(rank_count, 0), sets_of_(rank_count), shares_(demands.size()) {
    for (uint32_t s = 0; s < demands.size(); ++s) {
      shares_[s].assign(demands[s].ranks.size(), 0);
      for (uint32_t j = 0; j < demands[s].ranks.size(); ++j) {
        sets_of_[demands[s].ranks[j]].push_back({s, j});
      }
    }
  }

  std::vector<std::vector<int64_t>> Run() {
    std::vector<uint32_t> order(demands_.size());
    std::iota(order.begin(), order.end(), 0u);
    std::stable_sort(order.begin(), order.end(), [this](uint32_t a, uint32_t b) {
      return demands_[a].ranks.size() < demands_[b].ranks.size();
    });
    for (int round = 0; round < kRoundsMax; ++round) {
      bool changed = false;
      for (uint32_t s : order) changed = Pour(s) || changed;
      if (!changed) break;
    }
    while (steps_left_ > 0 && Push()) {
    }
    return std::move(shares_);
  }

 private:
  struct Place {
    uint32_t set = 0;
    uint32_t index = 0;  ///< of the rank in the set
  };

  /// Shares one demand anew; true when a load changed.
  bool Pour(uint32_t s) {
    const Demand& demand = demands_[s];
    std::vector<int64_t>& share = shares_[s];
    const size_t n = share.size();
    level_order_.resize(n);
    std::iota(level_order_.begin(), level_order_.end(), 0u);
    const auto base = [&](uint32_t j) { return load_[demand.ranks[j]] - share[j]; };
    std::sort(level_order_.begin(), level_order_.end(), [&](uint32_t a, uint32_t b) {
      return std::pair(base(a), a) < std::pair(base(b), b);
    });
    // The first `wet` ranks are filled up to one level.
    int64_t volume = demand.bytes;
    size_t wet = 0;
    while (wet < n && (wet == 0 || base(level_order_[wet]) <= volume / static_cast<int64_t>(wet))) {
      volume += base(level_order_[wet++]);
    }
    const int64_t level = volume / static_cast<int64_t>(wet);
    int64_t over = volume % static_cast<int64_t>(wet);
    bool changed = false;
    for (size_t i = 0; i < n; ++i) {
      const uint32_t j = level_order_[i];
      const int64_t old = share[j];
      const int64_t now = i < wet ? level - base(j) + (over-- > 0 ? 1 : 0) : 0;
      load_[demand.ranks[j]] += now - old;
      share[j] = now;
      changed = changed || now != old;
    }
    return changed;
  }

  /// Lowers the busiest rank along one chain; false when it is proven or no chain is left.
  bool Push() {
    const auto busiest = std::max_element(load_.begin(), load_.end());
    const auto top = static_cast<uint32_t>(busiest - load_.begin());
    Reach(top);
    int64_t sum = 0;
    for (uint32_t rank : reached_) sum += load_[rank];
    const int64_t mean = (sum - 1) / std::ssize(reached_) + 1;  // rounded up: bytes are whole
    if (*busiest - mean <= mean / kTolerance) return false;
    const auto sink = std::find_if(reached_.begin(), reached_.end(),
                                   [&](uint32_t rank) { return load_[rank] < mean; });
    if (sink == reached_.end()) return false;
    int64_t bytes = std::min(*busiest - mean, mean - load_[*sink]);
    for (uint32_t rank = *sink; rank != top; rank = from_[rank].rank) {
      bytes = std::min(bytes, shares_[from_[rank].set][from_[rank].giver]);
    }
    for (uint32_t rank = *sink; rank != top; rank = from_[rank].rank) {
      shares_[from_[rank].set][from_[rank].giver] -= bytes;
      shares_[from_[rank].set][from_[rank].taker] += bytes;
    }
    load_[top] -= bytes;
    load_[*sink] += bytes;
    return true;
  }

  /// Fills reached_ in order of distance, and from_ for all but `top`.
  void Reach(uint32_t top) {
    from_.assign(load_.size(), {});
    std::vector<char> rank_seen(load_.size(), 0);
    std::vector<char> set_seen(demands_.size(), 0);
    reached_.assign(1, top);
    steps_left_ -= std::ssize(load_);
    rank_seen[top] = 1;
    for (size_t next = 0; next < reached_.size(); ++next) {
      const uint32_t rank = reached_[next];
      for (const Place& place : sets_of_[rank]) {
        if (set_seen[place.set] || shares_[place.set][place.index] == 0) continue;
        set_seen[place.set] = 1;
        const auto& ranks = demands_[place.set].ranks;
        steps_left_ -= std::ssize(ranks);
        for (uint32_t j = 0; j < ranks.size(); ++j) {
          if (rank_seen[ranks[j]]) continue;
          rank_seen[ranks[j]] = 1;
          from_[ranks[j]] = {rank, place.set, place.index, j};
          reached_.push_back(ranks[j]);
        }
      }
    }
  }

  struct Step {
    uint32_t rank = 0;  ///< who gives
    uint32_t set = 0;
    uint32_t giver = 0;  ///< index in the set
    uint32_t taker = 0;
  };

  std::span<const Demand> demands_;
  std::vector<int64_t> load_;
  std::vector<std::vector<Place>> sets_of_;
  std::vector<std::vector<int64_t>> shares_;
  std::vector<uint32_t> level_order_;
  std::vector<uint32_t> reached_;
  std::vector<Step> from_;
  int64_t steps_left_ = kStepsMax;
};

}  // namespace

std::vector<std::vector<int64_t>> ShareDemands(std::span<const Demand> demands,
                                               uint32_t rank_count) {
  return Balancer(demands, rank_count).Run();
}

}  // namespace weightwire::plan
