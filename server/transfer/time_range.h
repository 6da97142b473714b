#pragma once

#include <algorithm>
#include <optional>

#include "server/base/clock.h"

namespace weightwire::transfer {

/// From the first moment of something to its last one, of several streams together.
class TimeRange {
 public:
  void Begin(Nanos now) { begin_ = std::min(begin_.value_or(now), now); }
  void End(Nanos now) { end_ = std::max(end_, now); }
  void Add(const TimeRange& other) {
    if (!other.begun()) return;
    Begin(*other.begin_);
    End(other.end_);
  }

  bool begun() const { return begin_.has_value(); }
  Nanos begin() const { return *begin_; }
  Nanos end() const { return std::max(*begin_, end_); }

 private:
  std::optional<Nanos> begin_;
  Nanos end_{Nanos::min()};
};

}  // namespace weightwire::transfer
