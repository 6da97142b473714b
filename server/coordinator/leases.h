#pragma once

#include <functional>
#include <vector>

#include "server/base/clock.h"
#include "server/base/executor.h"
#include "server/coordinator/cancel_token.h"
#include "server/coordinator/membership.h"

namespace weightwire::coordinator {

/// Ends the sessions of agents that were silent for a lease. One timer for all of them, set for the
/// earliest end of a lease but never sooner than a heartbeat from now, so an expiry is seen at most
/// lease + heartbeat after the last sign of life. Of many that end together kLeasesAtOnce are seen
/// to in one task, so that the strand has time for others in between. When the timer itself comes
/// late (the coordinator was stopped or starved, so heartbeats wait unread) everyone gets a new
/// lease instead. Strand only.
class Leases {
 public:
  Leases(const Options& options, Clock& clock, Executor& strand, Membership& membership)
      : options_(options), clock_(clock), strand_(strand), membership_(membership) {}
  ~Leases();
  /// A session was opened: makes sure that the timer runs.
  void Watch();

 private:
  void Check();

  const Options& options_;
  Clock& clock_;
  Executor& strand_;
  Membership& membership_;
  Executor::TimerId timer_ = 0;
  Nanos due_{};
  CancelToken cancel_;
};

}  // namespace weightwire::coordinator
