#pragma once

#include <deque>
#include <vector>

#include "server/coordinator/coordinator.h"
#include "server/coordinator/trace.h"

namespace weightwire::coordinator {

/// Epochs that are over, as far as they are remembered. A plain value.
class EpochHistory {
 public:
  explicit EpochHistory(size_t remembered) : remembered_(remembered) {}
  void Remember(const EpochStatus& status);
  void Keep(Epoch epoch, Traces::Kept kept) { traces_.Keep(epoch, std::move(kept)); }
  /// Newest first.
  const std::deque<EpochStatus>& epochs() const { return epochs_; }
  /// The newest when `asked` is 0. kNotFound / kNotRegistered
  Result<EpochTrace> Describe(Epoch asked) const;
  /// Of the newest versions that were committed.
  std::vector<EpochEdges> Edges() const;

 private:
  size_t remembered_;
  std::deque<EpochStatus> epochs_;
  Traces traces_;
};

}  // namespace weightwire::coordinator
