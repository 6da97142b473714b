#pragma once

#include <functional>
#include <memory>
#include <tuple>

#include "server/base/executor.h"
#include "server/control/control.h"
#include "server/plan/plan.h"

namespace weightwire::coordinator {

/// Slices by (plan, side, rank). Engines of equal layouts ask for the same ones, all at once when a
/// plan is new: a slice is made once, on a worker, for all who ask before the last of them has let
/// go of it. Nothing is kept beyond that. Strand only; every answer comes, even when this is gone.
class SharedSlices {
 public:
  using Slice = std::shared_ptr<const plan::RankSlice>;
  using Key = std::tuple<PlanId, plan::Side, uint32_t>;

  SharedSlices(Executor& strand, Executor& workers);
  /// `make` runs on a worker, if at all; `reply` later, on the strand.
  void Get(const Key& key, std::function<Slice()> make, control::Reply<Slice> reply);

 private:
  struct State;
  Executor& strand_;
  Executor& workers_;
  const std::shared_ptr<State> state_;
};

}  // namespace weightwire::coordinator
