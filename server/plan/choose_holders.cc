// ShareDemands solves the problem as if bytes were a liquid: how much of each set's bytes each of
// its ranks is to send. Then, set by set and larger pending copies first, each pending copy goes to
// the rank whose share has the most left. What a rank got too much (or too little) of one set is
// taken from (given to) its share of the next, so that errors do not add up. Only a pending copy
// that would lift its rank above the greatest load of the liquid solution, plus one per cent, is
// cut.
#include <algorithm>
#include <optional>
#include <tuple>
#include <utility>

#include "server/plan/balance.h"
#include "server/plan/pending_copies.h"

namespace weightwire::plan {
namespace {

constexpr int64_t kSlack = 100;  ///< the part of the greatest load that may be exceeded: 1 / this

class Chooser {
 public:
  Chooser(const layout::ModelLayout& target, const OwnerTable& book, uint32_t source_ranks,
          PendingCopies& list)
      : target_(target), book_(book), list_(list), load_(source_ranks, 0), debt_(source_ranks, 0) {}

  void Run() {
    const size_t copies = list_.copies.size();
    std::vector<std::vector<uint32_t>> drafts_of(book_.set_count());
    std::vector<Demand> demands(book_.set_count());
    for (uint32_t s = 0; s < demands.size(); ++s) demands[s].ranks = book_.RanksOf(s);
    for (uint32_t i = 0; i < copies; ++i) {
      const PendingCopy& pending = list_.copies[i];
      demands[pending.set].bytes += pending.bytes;
      drafts_of[pending.set].push_back(i);
    }
    const auto shares = ShareDemands(demands, static_cast<uint32_t>(load_.size()));
    for (size_t s = 0; s < demands.size(); ++s) {
      for (size_t j = 0; j < shares[s].size(); ++j) load_[demands[s].ranks[j]] += shares[s][j];
    }
    if (!load_.empty()) cap_ = *std::max_element(load_.begin(), load_.end());
    cap_ += cap_ / kSlack;
    for (size_t s = 0; s < demands.size(); ++s) {
      if (demands[s].ranks.size() > 1) Assign(demands[s].ranks, shares[s], drafts_of[s]);
    }
    // The rest of a pending copy that was cut begins later than the pending copy did.
    if (list_.copies.size() > copies) {
      std::sort(list_.copies.begin(), list_.copies.end(), InGlobalOrder);
    }
  }

 private:
  /// Gives the pending copies `order` of one set, which `shares` divides among `ranks`, to its
  /// ranks.
  void Assign(std::span<const uint32_t> ranks, std::span<const int64_t> shares,
              std::vector<uint32_t>& order) {
    std::sort(order.begin(), order.end(), [this](uint32_t a, uint32_t b) {
      return std::pair(-list_.copies[a].bytes, a) < std::pair(-list_.copies[b].bytes, b);
    });
    left_.assign(shares.begin(), shares.end());
    room_.resize(ranks.size());
    for (size_t j = 0; j < ranks.size(); ++j) {
      left_[j] -= debt_[ranks[j]];
      room_[j] = cap_ - load_[ranks[j]] + shares[j];
    }
    for (uint32_t pending : order) Give(pending);
    for (size_t j = 0; j < ranks.size(); ++j) {
      load_[ranks[j]] = cap_ - room_[j];
      debt_[ranks[j]] = -left_[j];
    }
  }

  void Give(size_t index) {
    while (true) {
      const int64_t bytes = list_.copies[index].bytes;
      auto holder = std::max_element(left_.begin(), left_.end()) - left_.begin();
      if (room_[static_cast<size_t>(holder)] < bytes) {
        holder = std::max_element(room_.begin(), room_.end()) - room_.begin();
      }
      const auto j = static_cast<size_t>(holder);
      const std::optional<size_t> d = CutDim(list_.copies[index]);
      if (room_[j] >= bytes || room_[j] <= 0 || !d) return Take(index, j);
      const int64_t row_bytes = bytes / Extent(list_.copies[index], *d);
      const int64_t step = Step(list_.copies[index], *d);
      const int64_t rows = room_[j] / row_bytes / step * step;
      CutHead(index, *d, std::max(rows, step));
      if (rows > 0) {
        Take(list_.copies.size() - 1, j);
      } else {
        Give(list_.copies.size() - 1);  // one step, which is too large still
      }
    }
  }

  void Take(size_t index, size_t j) {
    PendingCopy& pending = list_.copies[index];
    pending.holder = static_cast<uint32_t>(j);
    left_[j] -= pending.bytes;
    room_[j] -= pending.bytes;
  }

  size_t Dims(const PendingCopy& pending) const {
    return list_.TargetStride(target_, pending).size();
  }
  int64_t& Extent(const PendingCopy& pending, size_t d) {
    return list_.boxes[pending.box_at + Dims(pending) + d];
  }
  /// Elements that a part has a multiple of.
  int64_t Step(const PendingCopy& pending, size_t d) const {
    return pending.transform == Transform::kCodes
               ? target_.canonical.tensors[pending.canonical].block[d]
               : 1;
  }
  /// Outermost dimension with more than one step.
  std::optional<size_t> CutDim(const PendingCopy& pending) {
    for (size_t d = 0; d < Dims(pending); ++d) {
      if (Extent(pending, d) > Step(pending, d)) return d;
    }
    return std::nullopt;
  }

  /// Moves the first `rows` of a pending copy, fewer than it has, to a new pending copy at the
  /// list's end.
  void CutHead(size_t index, size_t d, int64_t rows) {
    PendingCopy head = list_.copies[index];
    const size_t box_size = 2 * Dims(head);
    head.bytes = head.bytes / Extent(head, d) * rows;
    head.box_at = list_.boxes.size();
    PendingCopy& rest = list_.copies[index];
    for (size_t i = 0; i < box_size; ++i) list_.boxes.push_back(list_.boxes[rest.box_at + i]);
    Extent(head, d) = rows;
    list_.boxes[rest.box_at + d] += rows;
    Extent(rest, d) -= rows;
    rest.target_offset += rows * list_.TargetStride(target_, rest)[d];
    rest.bytes -= head.bytes;
    list_.copies.push_back(head);
  }

  const layout::ModelLayout& target_;
  const OwnerTable& book_;
  PendingCopies& list_;
  int64_t cap_ = 0;
  std::vector<int64_t> load_;  ///< by rank: what is given, and the shares of sets still to come
  std::vector<int64_t> debt_;  ///< by rank: given beyond its shares of the sets done
  std::vector<int64_t> left_;  ///< of the set at hand, by holder: share not given yet
  std::vector<int64_t> room_;  ///< of the set at hand, by holder: what it may still get
};

}  // namespace

bool InGlobalOrder(const PendingCopy& a, const PendingCopy& b) {
  return std::tie(a.canonical, a.target.rank, a.target.tensor, a.target_offset) <
         std::tie(b.canonical, b.target.rank, b.target.tensor, b.target_offset);
}

void ChooseHolders(const layout::ModelLayout& target, const OwnerTable& book, uint32_t source_ranks,
                   PendingCopies& list) {
  Chooser(target, book, source_ranks, list).Run();
}

}  // namespace weightwire::plan
