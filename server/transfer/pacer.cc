#include "server/transfer/pacer.h"

#include <algorithm>

namespace weightwire::transfer {
namespace {

constexpr Nanos kKeptUnused = std::chrono::milliseconds(5);

}  // namespace

Nanos Pacer::Reserve(Nanos now, uint64_t bytes) {
  const Nanos start = std::max(next_, now - kKeptUnused);
  const std::chrono::duration<double> seconds(static_cast<double>(bytes) /
                                              static_cast<double>(rate_));
  next_ = start + std::chrono::duration_cast<Nanos>(seconds);
  return start;
}

RateLimits::RateLimits(uint64_t own, uint64_t per_peer)
    : own_(own == 0 ? nullptr : std::make_shared<Pacer>(own)), per_peer_(per_peer) {}

PacedBytes RateLimits::For(const std::vector<Incarnation>& peers, uint64_t bytes) {
  PacedBytes out;
  if (per_peer_ != 0) {
    for (const Incarnation& peer : peers) {
      auto& pacer = peers_[peer];
      if (!pacer) pacer = std::make_shared<Pacer>(per_peer_);
      out.emplace_back(pacer, bytes);
    }
  }
  if (own_ && !peers.empty()) out.emplace_back(own_, bytes * peers.size());
  return out;
}

bool PacedTurn::Enter(PacedBytes bytes, Go go) {
  bytes_ = std::move(bytes);
  passed_ = 0;
  entered_ = clock_.Now();
  if (PassAll()) return true;
  go_ = std::move(go);
  return false;
}

bool PacedTurn::PassAll() {
  while (passed_ < bytes_.size()) {
    const auto& [pacer, bytes] = bytes_[passed_++];
    const Nanos now = clock_.Now();
    const Nanos start = pacer->Reserve(now, bytes);
    if (start <= now) continue;
    timer_ = strand_.PostAfter(start - now, [this] {
      timer_ = 0;
      if (PassAll()) std::exchange(go_, {})(clock_.Now() - entered_);
    });
    return false;
  }
  return true;
}

void PacedTurn::Cancel() {
  if (timer_ == 0) return;
  strand_.Cancel(std::exchange(timer_, 0));
  go_ = {};
}

}  // namespace weightwire::transfer
