#pragma once

#include <functional>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "server/base/clock.h"
#include "server/base/executor.h"
#include "server/coordinator/lifeline.h"
#include "server/coordinator/work.h"
#include "server/metrics/metrics.h"

namespace weightwire::coordinator {

/// Plans by (source, target) fingerprint, built and proved (Work::Plan) on the workers before
/// anyone sees them. One that is being built is built once; the least recently used is dropped
/// beyond the bound (who still holds it keeps it). Failures are not kept. Strand only.
class PlanCache {
 public:
  using Ready = std::function<void(const Result<PlannedPairPtr>&)>;
  PlanCache(Clock& clock, Executor& strand, Executor& workers, std::shared_ptr<const Work> work,
            metrics::Sink& metrics)
      : clock_(clock),
        strand_(strand),
        workers_(workers),
        work_(std::move(work)),
        metrics_(metrics) {}

  /// `ready` runs later, on the strand. Errors: Work::Plan's.
  void Get(const AgreedLayoutPtr& source, const AgreedLayoutPtr& target, Ready ready);
  /// Null when the plan is not known (any more).
  PlannedPairPtr Find(PlanId plan) const;

 private:
  using Key = std::pair<layout::Fingerprint, layout::Fingerprint>;
  struct Entry {
    std::vector<Ready> waiting;
    PlannedPairPtr pair;
    uint64_t used = 0;
  };
  struct Built {
    Result<PlannedPairPtr> pair;
    double seconds = 0;
  };
  void Build(const Key& key, const AgreedLayoutPtr& source, const AgreedLayoutPtr& target);
  void Finish(const Key& key, const Built& built);
  void DropLeastUsed();

  Clock& clock_;
  Executor& strand_;
  Executor& workers_;
  const std::shared_ptr<const Work> work_;
  metrics::Sink& metrics_;
  std::map<Key, Entry> entries_;
  std::map<PlanId, PlannedPairPtr> by_id_;
  uint64_t uses_ = 0;
  Lifeline lifeline_;
};

}  // namespace weightwire::coordinator
