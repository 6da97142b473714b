#pragma once

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "server/control/control.h"
#include "server/coordinator/command_queue.h"
#include "server/coordinator/coordinator.h"
#include "server/coordinator/journal.h"
#include "server/coordinator/work.h"
#include "server/metrics/metrics.h"

namespace weightwire::coordinator {

struct Session {
  AgentId id{};
  control::AgentHello hello;
  PortPtr port;
  Nanos heard{};  ///< last sign of life
  bool drained = false;
  control::Beat beat;  ///< as it said last
};

/// The way to a registered process. A connection that ends takes nothing from a rank: it keeps its
/// place, and what it serves, until somebody else is given the place.
enum class Presence : int {
  kConnected = 1,
  kSuspect = 2,  ///< the connection ended, the lease has not
  kAbsent = 3,   ///< the lease ended: another process may be given the place
};
std::string_view PresenceName(Presence presence);

/// A registered process.
struct Rank {
  epoch::Member member;
  Presence presence = Presence::kConnected;
  AgentId agent{};  ///< of the session that registered it, which is over unless it is connected
  std::string agent_name;
  Incarnation agent_incarnation{};
  Nanos cut_at{};        ///< since when it is not connected
  bool resumed = false;  ///< registered again, as the same incarnation, after it was cut off
  int64_t pid = 0;
  std::string spec;
  std::shared_ptr<const layout::RankLayout> layout;
  std::vector<PlaceInModel> places;  ///< of a rank that names its models
  int64_t bytes = 0;
  Version published{};   ///< highest version that it has published
  epoch::Contents held;  ///< of an engine: what it holds beside what it serves, as its agent says
  /// What it was registered with; nothing once an engine's has been heard
  /// (EpochScheduler::OnComplete).
  std::optional<control::RejoinState> claim;
  /// Of a trainer: what it was told last; told again to a rank that publishes that version again,
  /// for it may have been cut off.
  std::optional<epoch::ReleaseCommand> last_release;
  uint64_t published_number = 0;  ///< of its last accepted call (PublishRequest::number)
};

/// The place of a rank in its group; it outlives the processes that take it.
struct Slot {
  ParticipantId id{};
  std::optional<Rank> live;  ///< who has it, connected or not
  bool connected() const { return live && live->presence == Presence::kConnected; }
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
  Nanos left{};       ///< when Forget first found nobody in it; 0: somebody is
  AgentId founder{};  ///< whose rank came first; counts for what it declares
  Epoch serving{};    ///< engine: content epoch, 0 = none
  Version version{};
  std::shared_ptr<const layout::CanonicalSpace> canonical;
  layout::Fingerprint canonical_fingerprint;
  AgreedLayoutPtr agreed;

  uint32_t world_size() const { return static_cast<uint32_t>(slots.size()); }
  uint32_t present() const;  ///< connected ranks
  uint32_t taken() const;    ///< places that somebody has, connected or not
  /// Every rank is connected and the layout of the whole group is agreed.
  bool Complete() const { return agreed != nullptr && present() == world_size(); }
  std::vector<epoch::Member> Members() const;  ///< the connected ones, by rank
  std::vector<epoch::Member> Holders() const;  ///< who has the places that are taken, by rank
  /// A rank of it is cut off, and keeps its place.
  bool CutOff() const { return present() < taken(); }
  /// What every rank holds beside what it serves; nothing when a rank is missing.
  epoch::Contents Held() const;
  std::string RankName(uint32_t rank) const { return name + "/" + std::to_string(rank); }
};

/// Leases that end in one task of the strand.
inline constexpr size_t kLeasesAtOnce = 256;

/// Who is here: sessions of agents and, through them, the ranks of groups.
///
/// A rank's place belongs to one incarnation at a time. When its agent's connection ends it is
/// SUSPECT, when the lease ends without a new connection it is ABSENT; the same incarnation resumes
/// its place from both, by registering again with a claim of what it holds. Until the lease has
/// ended the place is nobody else's, unless the same process asks for it under a new incarnation
/// (RegisterRequest::previous).
///
/// A rank is lost by what is known or decided, never by silence: its process ended, its agent said
/// goodbye, its place was given to another incarnation, it was evicted. A lost incarnation is
/// fenced: it cannot register again. An engine that loses a rank is DIRTY and all its other ranks
/// are evicted at once, so that it becomes complete again by new registrations only; a trainer's
/// other ranks stay. Strand only; tells `Observer` of every change, in the middle of the call.
class Membership {
 public:
  class Observer {
   public:
    virtual ~Observer() = default;
    /// `member` was registered until now.
    virtual void OnLost(const Group& group, uint32_t rank, const epoch::Member& member,
                        const Status& why) = 0;
    /// `member` cannot be reached; it keeps its place and may come back.
    virtual void OnCutOff(Group& group, uint32_t rank, const epoch::Member& member,
                          const Status& why) = 0;
    /// The group is complete from now on. It may be evicted in the call.
    virtual void OnComplete(Group& group) = 0;
    virtual void OnMembershipChanged() = 0;
  };
  /// `drained`: whom a coordinator before this one has drained; who comes back with the same
  /// incarnation is drained still.
  Membership(const Options& options, JournalId history, std::vector<DrainMark> drained,
             CommandQueue& commands, Observer& observer, metrics::Sink& metrics);

  ///   kProtocolVersion | kInvalidRequest | kLimitExceeded
  Result<control::AgentWelcome> Open(control::AgentHello hello, control::AgentPort* port,
                                     Nanos now);
  /// The agent's connection ended without a goodbye: its ranks are suspect until the lease ends.
  /// Nothing of its port is called any more.
  void Disconnected(AgentId agent, Nanos now);
  /// Ends the session from the coordinator's side and tells the agent; its ranks are suspect.
  void EndSession(AgentId agent, const Status& why, Nanos now);
  /// Ends sessions and leases whose agents were not heard of for a whole lease, kLeasesAtOnce at
  /// most: their ranks are absent. False: there may be more of them.
  bool EndLeases(Nanos now);
  /// Gives every lease a new term.
  void RenewLeases(Nanos now);
  /// When the first lease ends; nothing when nobody has one.
  std::optional<Nanos> NextLeaseEnd() const;
  /// The agent said goodbye: its ranks are lost. Nothing of its port is called any more.
  void AgentLeft(AgentId agent);
  /// Whether it says other things than before of what its ranks receive.
  bool Heard(AgentId agent, Nanos now, control::Beat beat);
  const std::map<AgentId, Session>& sessions() const { return sessions_; }

  /// Errors: CoordinatorPort::Register's.
  Result<control::RegisterReply> Register(const control::RegisterRequest& request);
  /// The place is a suspect's: whose it is, is known when that one resumes or its lease ends.
  bool AwaitsLease(const control::RegisterRequest& request) const;
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
  /// Where a registered incarnation is, connected or not. kStaleIncarnation | kNotRegistered
  Result<Place> Find(const epoch::Member& member);
  /// It has its place still, connected or not.
  bool HasPlace(const epoch::Member& member) { return Find(member).has_value(); }
  /// Null when it is not connected.
  const Session* SessionOf(const epoch::Member& member);
  /// Drops the command when the member is not connected (any more).
  void Send(const epoch::Member& member, epoch::Command command);
  /// Who cannot be reached now is told when it publishes the version again.
  void Release(const epoch::ReleaseCommand& release);

  /// Groups that everybody has left are remembered, for status, for an hour and up to 64 of them.
  /// Called after changes, in a task of its own.
  void Forget(Nanos now);
  uint64_t forgotten() const { return forgotten_; }

  Group* FindGroup(const std::string& name);
  /// The group that publishes; null before any trainer rank has registered.
  Group* Trainer();
  std::map<std::string, Group>& groups() { return groups_; }
  const std::map<std::string, Group>& groups() const { return groups_; }

 private:
  Status CheckRegister(const control::RegisterRequest& request);
  Status CheckGroup(const control::RegisterRequest& request);
  /// Whether one more rank may come, of a group that is known (`fits`) or declared by it.
  Status CheckRoom(const control::RegisterRequest& request, bool fits) const;
  /// Forgets groups in which nobody is, if places have become scarce.
  void MakeRoom();
  Result<control::RegisterReply> TakePlace(const control::RegisterRequest& request);
  /// Nothing when the place is free now for the request's incarnation.
  std::optional<Result<control::RegisterReply>> MakeWay(Group& group,
                                                        const control::RegisterRequest& request);
  Group& GroupFor(const control::RegisterRequest& request);
  void ForgetDeadGroups();
  void SetFounder(Group& group, AgentId founder);
  std::map<std::string, Group>::iterator Forget(std::map<std::string, Group>::iterator group);
  void FreePlaces(Group& group);
  /// Somebody has a place of it that no other process may be given now.
  static bool Occupied(const Group& group);
  void CountTaken(AgentId agent, int change);
  static bool HasRankAt(const Group& group, const std::string& agent);
  bool TakeAwaited(const DrainMark& mark) { return awaited_.erase(mark) > 0; }
  /// `told`: an EvictCommand goes out.
  void Vacate(Group& group, uint32_t rank, const Status& why, bool told);
  void AfterLoss(Group& group, const Status& why);
  void LoseAgent(AgentId agent, const Status& why);
  /// Nothing more is told to the agent. False: it has no session, or not any more.
  bool ForgetPorts(AgentId agent);
  /// Forgets the session; its ranks keep their places.
  void Cut(AgentId agent, const Status& why, Presence presence, Nanos now);
  void SetPresence(AgentId agent, const Status& why, Presence presence, Nanos now);

  const Options& options_;
  const JournalId history_;
  CommandQueue& commands_;
  Observer& observer_;
  metrics::Sink& metrics_;
  /// Starts at random, so that a call that was sent to a coordinator before a restart does not name
  /// somebody else's session afterwards.
  uint32_t next_agent_;
  uint32_t next_participant_ = 1;
  std::map<AgentId, Session> sessions_;
  std::map<AgentId, Nanos> suspects_;  ///< sessions that ended before their lease: last heard
  /// Ids of places that were registered in a session, while it or its lease lives.
  std::map<AgentId, std::set<ParticipantId>> registered_;
  std::map<Incarnation, AgentId> session_of_;  ///< by the agent's incarnation
  std::string trainer_;                        ///< the group that registered as a trainer last
  std::map<std::string, Group> groups_;
  std::unordered_map<ParticipantId, std::pair<Group*, uint32_t>> places_;
  std::map<AgentId, uint32_t> taken_of_;              ///< places with a live rank
  uint32_t taken_ = 0;                                ///< of all agents
  std::map<AgentId, std::set<std::string>> founded_;  ///< groups, by Group::founder
  size_t places_room_ = 0;       ///< with so many places MakeRoom looks at the groups again
  std::set<DrainMark> awaited_;  ///< of the journal, whose bearers have not come back
  bool marks_left_ = false;
  uint64_t forgotten_ = 0;  ///< engines, by Forget(now)
};

}  // namespace weightwire::coordinator
