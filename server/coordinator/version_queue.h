#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "server/base/clock.h"
#include "server/control/control.h"
#include "server/coordinator/absent_models.h"
#include "server/coordinator/journal.h"

namespace weightwire::coordinator {

/// A version that the trainer's ranks have published, or some of them so far.
struct PendingVersion {
  Version version{};
  uint64_t lineage = kFirstLineage;
  std::map<uint32_t, epoch::Member> ranks;  ///< who holds its bytes
  std::map<uint32_t, Nanos> published;      ///< when, by rank
  std::map<uint32_t, uint64_t> numbers;     ///< of the ranks' calls (PublishRequest::number)
  bool manual_commit = false;
  Nanos deadline{};  ///< the earliest of the ranks', on the clock
  std::array<uint8_t, 16> trace_id{};
  uint64_t generation = 0;  ///< of the trainer group
  uint32_t attempts = 0;
  uint32_t failures = 0;  ///< attempts that another one is not likely to mend
  uint32_t losses = 0;    ///< attempts that ended because an engine was lost
  uint32_t pauses = 0;    ///< since an attempt ended for another reason than a loss
  Nanos not_before{};     ///< no attempt begins earlier
  bool running = false;   ///< an attempt is planned or runs
  bool expired = false;   ///< the deadline passed while it ran
  Epoch last_epoch{};     ///< of the last attempt
  Status last_error;
  /// Engines that failed to read from another engine: they read from the trainer from now on.
  std::set<std::string> direct;
  /// Engines that were late for an attempt or failed it, where the policy goes on without them.
  std::set<std::string> without;
  AwaitedModel awaited;

  VersionId id() const { return {lineage, version}; }
};

/// Versions that wait for their ranks, their engines or their turn. A plain value: no calls out.
///
/// They are moved in rising order. A version that became complete supersedes lower ones that are
/// not: no rank that went on would publish them any more.
class VersionQueue {
 public:
  explicit VersionQueue(uint32_t waiting_max) : waiting_max_(waiting_max) {}

  /// Nothing up to `id` is accepted any more.
  void SetFloor(const VersionId& id) { floor_ = id; }
  const VersionId& floor() const { return floor_; }

  /// `published`: highest version that this rank has published so far.
  ///   kStaleVersion   not above the floor, or not above `published`
  ///   kNotReady       the version of a trainer that is gone is still being aborted
  ///   kInvalidRequest manual_commit or the lineage differs from the other ranks'
  ///   kLimitExceeded  `waiting_max` versions wait already
  ///   kAbortRequested withdrawn (Withdraw)
  /// Repeating an accepted one is OK and changes nothing.
  Status Add(const control::PublishRequest& request, uint32_t rank, Version published,
             uint64_t generation, Nanos now);
  /// The rank holds the version no more, unless it has published it again under a higher number: it
  /// is awaited anew. What it published up to that number is refused from now on. False: it was not
  /// waited for.
  bool Withdraw(const control::WithdrawRequest& request, uint32_t rank);

  /// The lowest version that all of `world_size` ranks have published; null when there is none.
  PendingVersion* Head(uint32_t world_size);
  PendingVersion* Find(Version version);
  /// Takes out the versions below `id` that are not running.
  std::vector<PendingVersion> TakeBelow(const VersionId& id);
  /// Takes out the versions up to `id` that are not running.
  std::vector<PendingVersion> TakeUpTo(const VersionId& id);
  /// Takes out every version that is not running.
  std::vector<PendingVersion> TakeWaiting();
  /// Takes out those that are not running and past their deadline.
  std::vector<PendingVersion> TakeExpired(Nanos now);
  /// Takes out those that are not running and that a rank has let go. `released`: the highest
  /// version that a rank will not publish again, by rank.
  std::vector<PendingVersion> TakeLetGo(const std::map<uint32_t, Version>& released);
  std::optional<PendingVersion> Take(Version version);
  /// A running version past its deadline that is not marked `expired`; null when there is none.
  PendingVersion* RunningExpired(Nanos now);
  /// The next deadline that nobody has acted on.
  std::optional<Nanos> NextDeadline() const;
  const std::map<Version, PendingVersion>& versions() const { return versions_; }

 private:
  void DropDeserted();
  template <typename Wanted>
  std::vector<PendingVersion> TakeIf(const Wanted& wanted);

  uint32_t waiting_max_;
  VersionId floor_;
  /// The last call of a trainer's rank that was withdrawn, by rank.
  std::map<uint32_t, std::pair<epoch::Member, uint64_t>> withdrawn_;
  std::map<Version, PendingVersion> versions_;
};

}  // namespace weightwire::coordinator
