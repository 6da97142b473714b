#pragma once

#include <functional>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "server/base/clock.h"
#include "server/base/executor.h"
#include "server/coordinator/cancel_token.h"
#include "server/coordinator/work.h"
#include "server/metrics/metrics.h"

namespace weightwire::coordinator {

/// Plans by (source, target) fingerprint, built and proved (Work::Plan) on the workers before
/// anyone sees them. One that is being built is built once. The least recently used ones are given
/// up beyond `bytes_max`; one that somebody holds, as a running epoch does, is still found.
/// Failures are not kept. Strand only.
class PlanCache {
 public:
  using Ready = std::function<void(const Result<PlannedPairPtr>&)>;
  PlanCache(Clock& clock, Executor& strand, Executor& workers, std::shared_ptr<const Work> work,
            metrics::Sink& metrics, uint64_t bytes_max = uint64_t{1} << 30)
      : clock_(clock),
        strand_(strand),
        workers_(workers),
        work_(std::move(work)),
        metrics_(metrics),
        bytes_max_(bytes_max) {}

  /// `ready` runs later, on the strand. Errors: Work::Plan's.
  void Get(const AgreedLayoutPtr& source, const AgreedLayoutPtr& target, Ready ready);
  /// Null when the plan is not known (any more).
  PlannedPairPtr Find(PlanId plan) const;

 private:
  using Key = std::pair<layout::Fingerprint, layout::Fingerprint>;
  struct Entry {
    std::vector<Ready> waiting;
    std::weak_ptr<const PlannedPair> pair;
    PlannedPairPtr kept;  ///< null: given up
    uint64_t bytes = 0;
    uint64_t used = 0;
  };
  struct Built {
    Result<PlannedPairPtr> pair;
    uint64_t bytes = 0;
    double seconds = 0;
  };
  void Build(const Key& key, const AgreedLayoutPtr& source, const AgreedLayoutPtr& target);
  void Finish(const Key& key, const Built& built);
  void Keep(Entry& entry, PlannedPairPtr pair);
  void DropLeastUsed();
  void ForgetGone();

  Clock& clock_;
  Executor& strand_;
  Executor& workers_;
  const std::shared_ptr<const Work> work_;
  metrics::Sink& metrics_;
  const uint64_t bytes_max_;
  uint64_t bytes_kept_ = 0;
  std::map<Key, Entry> entries_;
  std::map<PlanId, std::weak_ptr<const PlannedPair>> by_id_;
  uint64_t uses_ = 0;
  CancelToken cancel_;
};

}  // namespace weightwire::coordinator
