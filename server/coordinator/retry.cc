#include "server/coordinator/retry.h"

#include <algorithm>

namespace weightwire::coordinator {
namespace {

constexpr Nanos kFirst = std::chrono::milliseconds(100);
constexpr Nanos kMost = std::chrono::seconds(5);
constexpr Nanos kFirstOfFill = std::chrono::milliseconds(200);
constexpr Nanos kMostOfFill = std::chrono::seconds(30);

/// Anything up to a limit that doubles with every pause before this one. When it has passed
/// whatever can start is started. Returns its end, on the clock.
Nanos Pause(uint32_t pauses, Nanos first, Nanos most, Shared& shared) {
  const Nanos limit = std::min(most, first * (int64_t{1} << std::min(pauses, 20U)));
  const auto span = static_cast<uint64_t>(limit.count()) + 1;
  const Nanos pause(static_cast<int64_t>(shared.random() % span));
  shared.s.strand.PostAfter(pause, shared.cancel.Bind([&shared] { shared.try_start(); }));
  return shared.s.clock.Now() + pause;
}

}  // namespace

bool IsPassing(const epoch::State& aborted) {
  if (!aborted.stragglers.empty() || !aborted.lost.empty()) return true;
  if (aborted.cause == epoch::AbortCause::kDeadline) return false;
  switch (aborted.why.reason()) {
    case Reason::kMemberLost:
    case Reason::kLeaseExpired:
    case Reason::kTransportFailed:
    case Reason::kTicketRejected:
    case Reason::kDeadlineExceeded:
    case Reason::kAbortRequested:
    case Reason::kNotReady:
      return true;
    default:
      return false;
  }
}

bool MayRetry(const epoch::State& aborted, const PendingVersion& pending, bool holds,
              const Shared& shared) {
  return shared.decisions.Check().ok() && holds && !aborted.released &&
         aborted.cause != epoch::AbortCause::kAsked && !pending.expired &&
         pending.failures < shared.s.options.attempts_max &&
         pending.deadline > shared.s.clock.Now();
}

void PauseAfter(const epoch::State& aborted, PendingVersion& pending, Shared& shared) {
  if (!aborted.lost.empty()) {
    ++pending.losses;
    return;
  }
  if (!aborted.stragglers.empty() && pending.pauses == 0) return;
  pending.not_before = Pause(pending.pauses++, kFirst, kMost, shared);
}

Nanos PauseOfFill(uint32_t failures, Shared& shared) {
  return Pause(failures, kFirstOfFill, kMostOfFill, shared);
}

}  // namespace weightwire::coordinator
