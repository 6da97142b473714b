#pragma once

#include <chrono>

namespace weightwire {

using Nanos = std::chrono::nanoseconds;

/// Monotonic time since an arbitrary start. Wall time decides about job tokens only.
class Clock {
 public:
  virtual ~Clock() = default;
  virtual Nanos Now() const = 0;
  /// Seconds since the Unix epoch; for display, logs and the ends of job tokens.
  virtual double WallSeconds() const = 0;
};

/// The process's steady clock.
Clock& SystemClock();

}  // namespace weightwire
