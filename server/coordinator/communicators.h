#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "server/base/executor.h"
#include "server/base/ids.h"
#include "server/base/status.h"
#include "server/coordinator/cancel_token.h"

namespace weightwire::coordinator {

/// Our attempt at one communicator of a group. Only rises within the group. 0 is none.
using CommunicatorEpoch = StrongId<struct CommunicatorEpochTag, uint64_t>;

struct CommunicatorMember {
  std::string group;
  uint32_t rank = 0;
  Incarnation incarnation{};
  std::string Name() const { return group + "/" + std::to_string(rank); }
};

struct JoinCommunicator {
  CommunicatorMember member;
  uint32_t size = 0;
  std::string participant;         ///< for people
  CommunicatorEpoch last_epoch{};  ///< the newest that the member has been in
  Nanos deadline{};
};

struct FormedCommunicator {
  struct Participant {
    Incarnation incarnation{};
    std::string participant;
  };
  CommunicatorEpoch epoch{};
  std::vector<Participant> participants;  ///< by rank
};

struct CommunicatorLimits {
  uint32_t groups_max = 1'024;
  uint32_t members_max = 16'384;  ///< of one group
  size_t unique_id_bytes_max = 1'024;
  Nanos deadline_max = std::chrono::minutes(10);
};

/// Brings the members of collective groups together. It makes no communicator and knows no NCCL:
/// rank 0 makes the unique id in its own process once everybody is known to be there.
///
///   Join by every rank → epoch and table to all → Offer by rank 0 → Await answered → … → End
///
/// At most one epoch of a group is open. It ends for everybody when any member ends it, joins anew
/// naming it, or is replaced by another incarnation, which fences the old one for good. Nothing is
/// kept on disk, and a group that nobody uses is forgotten when another needs its place: members
/// carry the newest epoch they know, so numbers rise for everyone who could mix them up.
///
/// Every reply runs exactly once, as a task of `strand`, also when time runs out; those that wait
/// at Shutdown get kShuttingDown. Strand only; names no clock, so a test runs it under virtual
/// time.
class Communicators {
 public:
  template <typename T>
  using Reply = std::function<void(Result<T>)>;

  Communicators(Executor& strand, CommunicatorLimits limits = {})
      : strand_(strand), limits_(limits) {}

  ///   kInvalidRequest | kLimitExceeded   the request does not fit
  ///   kDuplicateRank                     another live process waits for the rank
  ///   kStaleIncarnation                  the caller was replaced
  ///   kNotReady                          late: the open epoch has another size
  ///   kMissingRank                       deadline; names who did not ask
  ///   kAborted / kAbortRequested         the same member asked again, which took this one's place
  void Join(JoinCommunicator request, Reply<FormedCommunicator> reply);
  ///   kStaleEpoch | kStaleIncarnation | kInvalidRequest (not rank 0, size of the id, another id)
  Status Offer(const CommunicatorMember& member, CommunicatorEpoch epoch, std::string unique_id);
  ///   kStaleEpoch | kStaleIncarnation | kMemberLost (ended meanwhile) | kDeadlineExceeded
  void Await(const CommunicatorMember& member, CommunicatorEpoch epoch, Nanos deadline,
             Reply<std::string> reply);
  /// OK when the epoch was over before. kStaleIncarnation | kStaleEpoch (never handed out)
  Status End(const CommunicatorMember& member, CommunicatorEpoch epoch, const std::string& why);

  void Shutdown();

 private:
  template <typename T>
  struct Waiter {
    Reply<T> reply;
    Executor::TimerId timer = 0;
  };
  struct Asker {
    JoinCommunicator request;
    Waiter<FormedCommunicator> waiter;
  };
  struct Open {
    FormedCommunicator formed;
    std::string unique_id;  ///< empty until rank 0 has handed it over
    std::map<uint32_t, Waiter<std::string>> waiters;
  };
  struct Group {
    CommunicatorEpoch last_epoch{};
    std::map<uint32_t, Asker> askers;
    std::optional<Open> open;
    std::string ended_why;  ///< of last_epoch, when it is not open
    std::deque<Incarnation> fenced;
    bool Idle() const { return askers.empty() && !open; }
  };

  Status CheckJoin(const JoinCommunicator& request) const;
  Result<Group*> GroupFor(const std::string& name);
  /// The open epoch when `member` belongs to it and it is `epoch`.
  Result<Open*> OpenFor(const CommunicatorMember& member, CommunicatorEpoch epoch);
  Status CheckAsker(const Group& group, const JoinCommunicator& request) const;
  /// True when the caller was answered from the open epoch, or refused.
  bool MeetsOpen(Group& group, const JoinCommunicator& request,
                 const Reply<FormedCommunicator>& reply);
  void Complete(Group& group);
  void EndOpen(Group& group, const std::string& why);
  void JoinExpired(const std::string& name, uint32_t rank);
  void AwaitExpired(const std::string& name, CommunicatorEpoch epoch, uint32_t rank);

  template <typename T>
  void Answer(Reply<T> reply, Result<T> result);
  template <typename T>
  void Finish(Waiter<T>& waiter, Result<T> result);

  Executor& strand_;
  const CommunicatorLimits limits_;
  bool stopping_ = false;
  std::map<std::string, Group> groups_;
  CancelToken cancel_;
};

}  // namespace weightwire::coordinator
