#pragma once

#include <chrono>

namespace weightwire {

using Nanos = std::chrono::nanoseconds;

/// Monotonic time since an arbitrary start. Wall time never enters a decision.
class Clock {
 public:
  virtual ~Clock() = default;
  virtual Nanos Now() const = 0;
  /// Seconds since the Unix epoch; for display and logs only.
  virtual double WallSeconds() const = 0;
};

/// The process's steady clock.
Clock& SystemClock();

}  // namespace weightwire
