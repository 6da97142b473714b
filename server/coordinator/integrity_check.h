#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "server/base/clock.h"
#include "server/base/executor.h"
#include "server/coordinator/cancel_token.h"
#include "server/coordinator/integrity_report.h"
#include "server/coordinator/membership.h"
#include "server/metrics/metrics.h"

namespace weightwire::coordinator {

/// Asks the engines what they serve and compares the answers. Part of no epoch: it waits for none
/// and none waits for it. One verification runs at a time, and ends within its deadline. Strand
/// only; readings are made and sums compared on the workers.
class IntegrityCheck {
 public:
  IntegrityCheck(Clock& clock, Executor& strand, Executor& workers, Membership& membership,
                 metrics::Sink& metrics)
      : clock_(clock),
        strand_(strand),
        workers_(workers),
        membership_(membership),
        metrics_(metrics) {}

  /// As Coordinator::Verify; `reply` runs on the strand, in the middle of a change.
  void Verify(const std::string& engine, Nanos deadline, control::Reply<IntegrityReport> reply);
  /// Null when there is no such reading (any more).
  std::shared_ptr<const content::HashPlan> Find(PlanId hash_plan) const;
  /// The member is registered and the sender is its agent. False: nobody asked.
  bool OnAttested(const epoch::HashedReport& report);
  void OnLost(const Group& group, uint32_t rank, const epoch::Member& member, const Status& why);
  /// Root of a committed epoch's content; empty when it is not known, or is another one in each of
  /// several classes.
  std::string RootOf(Epoch epoch) const;
  /// Answers what waits, and everything that comes.
  void Shutdown(const Status& why);

 private:
  using HashPlanPtr = std::shared_ptr<const content::HashPlan>;
  struct Asked {
    EngineAnswer answer;
    AgreedLayoutPtr layout;
    std::vector<epoch::Member> members;
    std::vector<bool> answered;
    size_t awaited = 0;
    bool done = false;
  };
  struct Run {
    uint64_t number = 0;
    std::string engine;  ///< asked for by name; empty: all
    std::vector<Asked> engines;
    size_t open = 0;
    Nanos started{};
    Executor::TimerId timer = 0;
    bool judging = false;
    std::vector<control::Reply<IntegrityReport>> replies;
  };
  Status Choose(const std::string& engine, Run& run);
  /// For every engine of the run that has the layout.
  void MakeHashPlan(const AgreedLayoutPtr& layout);
  void HashPlanMade(uint64_t number, const layout::Fingerprint& layout,
                    const Result<HashPlanPtr>& made);
  void Ask(Asked& asked);
  void Fail(Asked& asked, Status why);
  void Close(Asked& asked);
  void OnDeadline(uint64_t number);
  void Judged(uint64_t number, const IntegrityReport& result,
              const std::map<Epoch, KnownContent>& found);
  void Learn(const IntegrityReport& result, const std::map<Epoch, KnownContent>& found);
  void Keep(const layout::Fingerprint& layout, const HashPlanPtr& hash_plan);

  Clock& clock_;
  Executor& strand_;
  Executor& workers_;
  Membership& membership_;
  metrics::Sink& metrics_;
  std::unique_ptr<Run> run_;
  uint64_t last_number_ = 0;
  std::map<layout::Fingerprint, HashPlanPtr> hash_plans_;
  std::map<Epoch, KnownContent> known_;  ///< of the newest epochs
  std::map<Epoch, std::string> roots_;   ///< of more of them
  Status stopped_;
  CancelToken cancel_;
};

}  // namespace weightwire::coordinator
