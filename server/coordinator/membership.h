#pragma once

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "server/control/control.h"
#include "server/coordinator/coordinator.h"
#include "server/coordinator/journal.h"
#include "server/coordinator/outbox.h"
#include "server/coordinator/work.h"
#include "server/metrics/metrics.h"

namespace weightwire::coordinator {

struct Session {
  AgentId id{};
  control::AgentHello hello;
  PortPtr port;
  Nanos heard{};  ///< last sign of life
  bool drained = false;
};

/// A registered process.
struct Rank {
  epoch::Member member;
  AgentId agent{};
  int64_t pid = 0;
  std::string spec;
  std::shared_ptr<const layout::RankLayout> layout;
  int64_t bytes = 0;
  Version published{};   ///< highest version that it has published
  epoch::Contents held;  ///< of an engine: what it holds beside what it serves, as its agent says
  control::Claim claim;  ///< what it was registered with
};

/// The place of a rank in its group; it outlives the processes that take it.
struct Slot {
  ParticipantId id{};
  std::optional<Rank> live;
  std::deque<Incarnation> fenced;  ///< most recent ones
};

struct Group {
  std::string name;
  control::GroupRole role = control::GroupRole::kTrainer;
  std::vector<Slot> slots;  ///< by rank
  /// Raised whenever all ranks are gone: what was agreed before is void.
  uint64_t generation = 1;
  bool was_complete = false;  ///< in this generation
  bool dirty = false;         ///< engine: lost a rank since it was last complete
  bool drained = false;       ///< engine: takes no part in anything new, until it leaves
  std::string last_error;
  Epoch serving{};  ///< engine: content epoch, 0 = none
  Version version{};
  /// Engine: the epoch that it has staged and whose content is decided; a coordinator that is gone
  /// began it. 0: nothing of that kind.
  Epoch unfinished{};
  epoch::Content unfinished_content;
  std::shared_ptr<const layout::CanonicalSpace> canonical;
  layout::Fingerprint canonical_fingerprint;
  AgreedLayoutPtr agreed;

  uint32_t world_size() const { return static_cast<uint32_t>(slots.size()); }
  uint32_t present() const;
  /// Every rank is registered and the layout of the whole group is agreed.
  bool Complete() const { return agreed != nullptr && present() == world_size(); }
  std::vector<epoch::Member> Members() const;  ///< the live ones, by rank
  /// What every rank holds beside what it serves; nothing when a rank is missing.
  epoch::Contents Held() const;
  std::string RankName(uint32_t rank) const { return name + "/" + std::to_string(rank); }
};

/// Who is here: sessions of agents and, through them, the ranks of groups.
///
/// A rank's place belongs to one live incarnation at a time; another one is refused until the old
/// one is lost (its process ended, its agent's session ended, it was evicted). A lost incarnation
/// is fenced: it cannot register again. An engine that loses a rank is DIRTY and all its other
/// ranks are evicted at once, so that it becomes complete again by new registrations only; a
/// trainer's other ranks stay. Strand only; tells `Observer` of every change, in the middle of the
/// call.
class Membership {
 public:
  class Observer {
   public:
    virtual ~Observer() = default;
    /// `member` was registered until now.
    virtual void OnLost(const Group& group, uint32_t rank, const epoch::Member& member,
                        const Status& why) = 0;
    /// The group is complete from now on. It may be evicted in the call.
    virtual void OnComplete(Group& group) = 0;
    virtual void OnMembershipChanged() = 0;
  };
  /// `drained`: whom a coordinator before this one has drained; who comes back with the same
  /// incarnation is drained still.
  Membership(const Options& options, History history, std::vector<DrainMark> drained,
             Outbox& outbox, Observer& observer, metrics::Sink& metrics);

  ///   kProtocolVersion | kInvalidRequest | kLimitExceeded
  Result<control::AgentWelcome> Open(control::AgentHello hello, control::AgentPort* port,
                                     Nanos now);
  /// Ends the session from the coordinator's side and tells the agent; its ranks are lost.
  void EndSession(AgentId agent, const Status& why);
  /// The agent ended it; nothing of its port is called any more.
  void AgentLeft(AgentId agent);
  void Heard(AgentId agent, Nanos now);
  const std::map<AgentId, Session>& sessions() const { return sessions_; }

  /// Errors: CoordinatorPort::Register's.
  Result<control::RegisterReply> Register(const control::RegisterRequest& request);
  /// The member holds this from now on, beside what it serves. Unknown members are ignored.
  void Hold(const epoch::Member& member, epoch::Contents held);
  /// The member's process is gone. Unknown members are ignored.
  void Lose(const epoch::Member& member, const Status& why);
  /// As Coordinator::Drain. `Marks` has changed when it succeeds.
  Result<std::vector<std::string>> Drain(const std::string& name, Coordinator::Draining what,
                                         Coordinator::DrainOf which);
  /// Who is drained, in order; those who have not come back yet are among them.
  std::vector<DrainMark> Marks() const;
  /// True once after somebody who was drained has left.
  bool TakeMarksLeft() { return std::exchange(marks_left_, false); }
  /// Fences all ranks of the group (a trainer too) and tells them.
  void EvictGroup(const std::string& group, const Status& why);
  /// Fences one member; of an engine all its ranks.
  void Evict(const epoch::Member& member, const Status& why);

  struct Place {
    Group* group = nullptr;
    uint32_t rank = 0;
    Rank* live = nullptr;
    std::string name() const { return group->RankName(rank); }
  };
  /// Where a registered incarnation is. kStaleIncarnation | kNotRegistered
  Result<Place> Find(const epoch::Member& member);
  bool IsLive(const epoch::Member& member) { return Find(member).has_value(); }
  const Session* SessionOf(const epoch::Member& member);
  /// Drops the command when the member is not registered (any more).
  void Send(const epoch::Member& member, epoch::Command command);

  Group* FindGroup(const std::string& name);
  /// The group that publishes; null before any trainer rank has registered.
  Group* Trainer();
  std::map<std::string, Group>& groups() { return groups_; }
  const std::map<std::string, Group>& groups() const { return groups_; }

 private:
  Status CheckRegister(const control::RegisterRequest& request);
  Status CheckGroup(const control::RegisterRequest& request);
  Result<control::RegisterReply> TakePlace(const control::RegisterRequest& request);
  Group& GroupFor(const control::RegisterRequest& request);
  void ForgetDeadGroups();
  size_t SlotCount() const;
  bool HasRankAt(const Group& group, const std::string& agent) const;
  bool TakeAwaited(const DrainMark& mark) { return awaited_.erase(mark) > 0; }
  /// `told`: an EvictCommand goes out.
  void Vacate(Group& group, uint32_t rank, const Status& why, bool told);
  void AfterLoss(Group& group, const Status& why);
  void LoseAgent(AgentId agent, const Status& why);

  const Options& options_;
  const History history_;
  Outbox& outbox_;
  Observer& observer_;
  metrics::Sink& metrics_;
  /// Starts at random, so that a call that was sent to a coordinator before a restart does not name
  /// somebody else's session afterwards.
  uint32_t next_agent_;
  uint32_t next_participant_ = 1;
  std::map<AgentId, Session> sessions_;
  std::map<Incarnation, AgentId> session_of_;  ///< by the agent's incarnation
  std::string trainer_;                        ///< the group that registered as a trainer last
  std::map<std::string, Group> groups_;
  std::map<ParticipantId, std::pair<std::string, uint32_t>> places_;
  std::set<DrainMark> awaited_;  ///< of the journal, whose bearers have not come back
  bool marks_left_ = false;
};

}  // namespace weightwire::coordinator
