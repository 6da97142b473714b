#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "server/base/clock.h"
#include "server/base/executor.h"
#include "server/base/ids.h"

namespace weightwire::transfer {

/// One limit of a rate: says when the next bytes may go. What was not used is lost, except for
/// a few milliseconds, so that late timers do not slow it down. Strand-only.
class RateLimiter {
 public:
  explicit RateLimiter(uint64_t bytes_per_second) : rate_(bytes_per_second) {}

  /// The moment at which `bytes` may go (at once where it has passed); who asks next goes after
  /// them.
  Nanos Reserve(Nanos now, uint64_t bytes);

 private:
  const uint64_t rate_;
  Nanos next_{};
};

/// Bytes that have to pass limits, in this order: a narrow one that comes first keeps nothing of
/// the wide ones after it busy.
using RateLimitedBytes = std::vector<std::pair<std::shared_ptr<RateLimiter>, uint64_t>>;

/// The limits of an agent for one direction: its own, and the one that each peer agent has. A rate
/// of 0 is no limit. Strand-only.
class RateLimits {
 public:
  RateLimits(uint64_t own, uint64_t per_peer);

  /// What `bytes` for each of `peers` have to pass: the peers' limits, then our own for all.
  RateLimitedBytes For(const std::vector<Incarnation>& peers, uint64_t bytes);
  /// The peer is gone.
  void Forget(Incarnation peer) { peers_.erase(peer); }

 private:
  const std::shared_ptr<RateLimiter> own_;  ///< null: no limit
  const uint64_t per_peer_;
  std::map<Incarnation, std::shared_ptr<RateLimiter>> peers_;
};

/// Waits for limits, one wait at a time. Strand-only.
class RateLimitedTurn {
 public:
  using Resume = std::function<void(Nanos waited)>;
  RateLimitedTurn(Executor& strand, Clock& clock) : strand_(strand), clock_(clock) {}

  /// True: the bytes may go now. False: `resume` is called when they may, unless Cancel comes
  /// first.
  bool Enter(RateLimitedBytes bytes, Resume resume);
  bool waiting() const { return timer_ != 0; }
  /// What was reserved stays so.
  void Cancel();

 private:
  /// False when a timer was armed for the next limit.
  bool PassAll();

  Executor& strand_;
  Clock& clock_;
  RateLimitedBytes bytes_;
  size_t passed_ = 0;
  Nanos entered_{};
  Resume resume_;
  Executor::TimerId timer_ = 0;
};

}  // namespace weightwire::transfer
