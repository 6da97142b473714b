#include "server/transfer/rate_limiter.h"

#include <algorithm>

namespace weightwire::transfer {
namespace {

constexpr Nanos kKeptUnused = std::chrono::milliseconds(5);

}  // namespace

Nanos RateLimiter::Reserve(Nanos now, uint64_t bytes) {
  const Nanos start = std::max(next_, now - kKeptUnused);
  const std::chrono::duration<double> seconds(static_cast<double>(bytes) /
                                              static_cast<double>(rate_));
  next_ = start + std::chrono::duration_cast<Nanos>(seconds);
  return start;
}

RateLimits::RateLimits(uint64_t own, uint64_t per_peer)
    : own_(own == 0 ? nullptr : std::make_shared<RateLimiter>(own)), per_peer_(per_peer) {}

RateLimitedBytes RateLimits::For(const std::vector<Incarnation>& peers, uint64_t bytes) {
  RateLimitedBytes out;
  if (per_peer_ != 0) {
    for (const Incarnation& peer : peers) {
      auto& limiter = peers_[peer];
      if (!limiter) limiter = std::make_shared<RateLimiter>(per_peer_);
      out.emplace_back(limiter, bytes);
    }
  }
  if (own_ && !peers.empty()) out.emplace_back(own_, bytes * peers.size());
  return out;
}

bool RateLimitedTurn::Enter(RateLimitedBytes bytes, Resume resume) {
  bytes_ = std::move(bytes);
  passed_ = 0;
  entered_ = clock_.Now();
  if (PassAll()) return true;
  resume_ = std::move(resume);
  return false;
}

bool RateLimitedTurn::PassAll() {
  while (passed_ < bytes_.size()) {
    const auto& [limiter, bytes] = bytes_[passed_++];
    const Nanos now = clock_.Now();
    const Nanos start = limiter->Reserve(now, bytes);
    if (start <= now) continue;
    timer_ = strand_.PostAfter(start - now, [this] {
      timer_ = 0;
      if (PassAll()) std::exchange(resume_, {})(clock_.Now() - entered_);
    });
    return false;
  }
  return true;
}

void RateLimitedTurn::Cancel() {
  if (timer_ == 0) return;
  strand_.Cancel(std::exchange(timer_, 0));
  resume_ = {};
}

}  // namespace weightwire::transfer
