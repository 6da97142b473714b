#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <unordered_map>
#include <variant>
#include <vector>

#include "server/base/ids.h"
#include "server/base/status.h"
#include "server/epoch/messages.h"

/// The coordinator's side of one epoch, as a pure function: (state, event) → (state, actions).
namespace weightwire::epoch {

enum class Phase : int {
  kPreparing = 1,
  kTransferring = 2,
  kStaged = 3,      ///< every byte is verified everywhere; waits for Commit when it is manual
  kCommitting = 4,  ///< COMMIT submitted or durable: no abort any more
  kCommitted = 5,
  kAborting = 6,
  kAborted = 7,
};
std::string_view PhaseName(Phase phase);

/// A required engine: all its ranks, frozen when the epoch is prepared.
struct EngineMembers {
  std::string name;
  std::vector<Member> ranks;  ///< by rank; [0] is the leader
  std::string model = {};     ///< of a trainer that publishes several; empty: it has no name
  friend bool operator==(const EngineMembers&, const EngineMembers&) = default;
};

struct Spec {
  Epoch epoch{};
  Kind kind = Kind::kPublish;
  Version version{};
  Epoch content{};
  Epoch held{};  ///< rollback: the committed epoch whose bytes `content` names anew
  std::vector<Member> sources;
  std::string source_group = "source";  ///< what messages call them: the group they are of
  std::vector<EngineMembers> engines;
  bool manual_commit = false;
  /// So many engines are enough to go on without the others, with one of every model among them; 0:
  /// all are required.
  uint32_t quorum = 0;
  /// An engine that is lost is excluded while at least so many are left.
  uint32_t engines_min = 1;
  /// The last engine of a model is not excluded: the epoch is aborted. Nobody but an engine of its
  /// model can fill another one of it.
  bool every_model = true;
  /// Whom an engine reads from, where that is another engine.
  std::map<std::string, std::string> parents;
  /// Every source and relay can drop a reader while bytes move.
  bool drops_readers = false;
  uint64_t lineage = 1;  ///< of `version`; 0: not known
  friend bool operator==(const Spec&, const Spec&) = default;
};

/// Sources first, then the engines' ranks, in the order of the spec.
std::vector<Member> AllMembers(const Spec& spec);

/// Why an epoch was aborted, where that says what may follow.
enum class AbortCause : int {
  kNone = 0,
  kFault = 1,     ///< a member failed or was lost, or bytes differ
  kDeadline = 2,  ///< of the phase
  kAsked = 3,     ///< somebody wants that it is not tried again
  kGaveWay = 4,   ///< for something else: nobody's failure
};

struct State;

/// What follows from the rest of a State, kept so that a report costs neither a walk over the
/// members nor a search for its sender: who is where, and how many of whom have done their part.
class Roster {
 public:
  Roster() = default;
  explicit Roster(const State& state);

  bool made() const { return made_; }
  bool Has(const Member& member) const { return places_.contains(member); }
  bool IsSource(const Member& member) const;
  /// Index in Spec::engines; nothing of sources and strangers.
  std::optional<size_t> EngineOf(const Member& member) const;
  std::optional<size_t> EngineNamed(const std::string& name) const;
  size_t members() const { return places_.size(); }
  size_t sources() const { return sources_; }
  size_t targets() const { return places_.size() - sources_; }
  /// Engines of which every rank is staged.
  size_t engines_staged() const { return engines_staged_; }
  /// One of them at least is of every model.
  bool models_staged() const { return models_unstaged_ == 0; }
  /// Of every model that the epoch has an engine of there is one without these engines, too.
  bool HasEveryModelWithout(const std::set<std::string>& engines) const;
  /// In ABORTING: members that have drained or are lost.
  size_t gone() const { return gone_; }

  void CountStaged(const Member& target);
  void CountGone() { ++gone_; }
  /// Before the machine forgets what the engine has done. It is in Spec::engines still.
  void Exclude(const EngineMembers& engine);
  friend bool operator==(const Roster&, const Roster&) = default;

 private:
  struct HashOf {
    size_t operator()(const Member& member) const { return member.id.value; }
  };
  struct Engine {
    size_t index = 0;    ///< in Spec::engines
    uint32_t model = 0;  ///< in models_
    size_t unstaged = 0;
    friend bool operator==(const Engine&, const Engine&) = default;
  };
  struct Model {
    size_t engines = 0;
    size_t staged = 0;
    friend bool operator==(const Model&, const Model&) = default;
  };
  static constexpr uint32_t kSource = UINT32_MAX;

  void CountEngineStaged(const Engine& engine);

  bool made_ = false;
  std::unordered_map<Member, uint32_t, HashOf> places_;  ///< a number in engines_, or kSource
  std::unordered_map<std::string, uint32_t> numbers_;    ///< of engines
  std::vector<Engine> engines_;                          ///< excluded ones keep their number
  std::vector<Model> models_;
  size_t models_unstaged_ = 0;  ///< of which there are engines, and none is staged
  size_t sources_ = 0;
  size_t engines_staged_ = 0;
  size_t gone_ = 0;
};

struct State {
  Spec spec;
  Phase phase = Phase::kPreparing;
  std::set<Member> prepared;
  std::map<Member, std::vector<Digest>> sourced;  ///< digests by source
  std::map<Member, std::vector<Digest>> staged;   ///< digests by target rank
  std::set<Member> drained;
  std::set<Member> lost;          ///< members whose process is gone; not of engines excluded
  std::set<std::string> applied;  ///< engines that swapped
  /// Engines that were lost, failed or late after the decision: the epoch does not wait for them.
  std::set<std::string> evicted;
  /// Engines that were lost, failed or late before the decision. They are no part of
  /// `spec.engines` any more.
  std::set<std::string> excluded;
  bool commit_asked = false;  ///< manual commit has been given
  bool commit_durable = false;
  bool grace_armed = false;  ///< a quorum is staged, the others have a grace
  /// Of an abort: the engines that alone stopped the epoch. Without them a quorum is left, with
  /// which the version may be tried again at once.
  std::set<std::string> stragglers;
  AbortCause cause = AbortCause::kNone;
  bool released = false;  ///< the sources may change their bytes: it cannot be tried again
  bool refused = false;   ///< by the leader of an engine, after the decision
  Status why;     ///< of the abort; in kCommitting: the journal failed, and nothing moves any more
  Roster roster;  ///< made by Begin, or by the first step of a state that comes from elsewhere
  friend bool operator==(const State&, const State&) = default;
};

// ---- events ----
struct PreparedEvent {
  Member member;
};
struct SourceDoneEvent {
  Member member;
  std::vector<Digest> digests;
};
struct StagedEvent {
  Member member;
  std::vector<Digest> digests;
};
struct SwappedEvent {
  Member member;
};
struct DrainedEvent {
  Member member;
};
struct FailedEvent {
  Member member;
  Status why;
  bool refused = false;  ///< the process said that it does not want it
};
struct LostEvent {
  Member member;
  Status why;
};
/// The journal's answer to AppendCommit. `why` not OK: its fate is unknown.
struct JournalEvent {
  Status why;
};
struct CommitAskedEvent {};
struct AbortAskedEvent {
  Status why;
  AbortCause cause = AbortCause::kAsked;
};
/// The grace after a quorum was staged passed.
struct GraceEvent {};
/// The deadline of the current phase passed.
struct DeadlineEvent {
  Phase phase;
};
using Event = std::variant<PreparedEvent, SourceDoneEvent, StagedEvent, SwappedEvent, DrainedEvent,
                           FailedEvent, LostEvent, JournalEvent, CommitAskedEvent, AbortAskedEvent,
                           GraceEvent, DeadlineEvent>;

// ---- actions, to be carried out in order ----
struct SendPrepare {};   ///< to every member
struct SendTransfer {};  ///< to every member
struct SendRelease {};   ///< to every source, with an OK status
struct AppendCommit {};  ///< journal: COMMIT(epoch, version, engines)
struct SendCommit {
  std::string engine;
};  ///< to every rank of the engine
struct SendCommittedEverywhere {
  std::string engine;
};
struct SendAbort {
  Member member;
  Status why;
};
struct EvictEngine {
  std::string engine;
  Status why;
};
/// An engine that has not swapped in time: the epoch ends without it. It serves on what it serves,
/// and may still swap later.
struct MarkStale {
  std::string engine;
  Status why;
};
/// A lost engine, or one that failed or is late, is no part of the epoch any more: who it reads
/// from drops it as a reader. Where that is excluded in the same step nobody is to be told.
struct ExcludeEngine {
  EngineMembers engine;
  Status why;
};
/// A source that did not drain in time: its incarnation is fenced.
struct EvictSource {
  Member member;
  Status why;
};
/// The epoch is over: kCommitted or kAborted. Nothing of it runs any more.
struct Finish {
  Phase phase;
  Status why;
};
/// The decision's fate is unknown: stop deciding; only recovery from the journal may go on.
struct Halt {
  Status why;
};
/// A quorum is staged: the others have a grace now.
struct ArmGrace {};
/// (Re)arm the deadline of the phase just entered.
struct ArmDeadline {
  Phase phase;
};
using Action = std::variant<SendPrepare, SendTransfer, SendRelease, AppendCommit, SendCommit,
                            SendCommittedEverywhere, SendAbort, EvictEngine, MarkStale,
                            ExcludeEngine, EvictSource, Finish, Halt, ArmGrace, ArmDeadline>;

struct Outcome {
  State state;
  std::vector<Action> actions;
};

/// First state of an epoch and its first actions (SendPrepare, ArmDeadline).
Outcome Begin(Spec spec);

/// One step. Total: every event in every phase has an answer; one that does not fit (unknown
/// member, stale incarnation, duplicate, too late) changes nothing.
///
/// Rules that tests prove:
///  - TRANSFERRING only when every member prepared; STAGED only when every source is sourced, every
///    rank of every engine staged *and* each stream's digest is equal on both sides (a difference
///    is an abort with kDigestMismatch).
///  - AppendCommit at most once, only from STAGED; from then on no abort. SendCommit only after the
///    durable JournalEvent. A failed or unknown append: Halt.
///  - SendRelease once, on entering STAGED. After an abort the scheduler decides: a new attempt, or
///    a release that says why.
///  - ABORTED only when every member that is alive has drained.
///  - An engine that loses a rank before the append is excluded and the epoch goes on without it,
///    as long as `engines_min` others are left, one of its model among them (`every_model`),
///    readers can be dropped (`drops_readers`) and no engine of the epoch reads from it
///    (`parents`); in STAGED, where the version is released, as long as any other is left, and one
///    of its model. It is taken out of `spec.engines`, so that COMMIT names who holds the version;
///    its ranks that live are told to abort. So is one that fails in STAGED, or while the others
///    are a quorum, and so are those that are late beside a quorum (below). Any other loss before
///    the append aborts the epoch (kMemberLost). After the append the engine is not waited for any
///    more and the epoch commits with the others. Nobody is evicted for a loss: it may be one of
///    the connection only. COMMITTED when every engine applied, or is not waited for.
///  - A fill never appends: its content is committed already; STAGED goes straight to SendCommit.
///  - A rollback is a publish without sources: its engines report no stream, and it appends.
///  - With a quorum the required engines of *this* epoch are still all of `engines`: COMMIT names
///    exactly who held it. What a quorum changes is who may stop it. ArmGrace when `quorum` engines
///    are staged and others are not (an engine counts once, with all its ranks), and again only
///    after a grace that ended below the quorum because a staged engine was lost. When the
///    grace ends, or the deadline of PREPARING or TRANSFERRING, and at least `quorum` engines have
///    done their part, the others are excluded, all at once. Where that cannot be (somebody else
///    reads from one of them, readers cannot be dropped) the epoch aborts and names them as
///    `stragglers`; so it does for a FailedEvent beside a quorum. Sources are never stragglers.
///  - Deadline in PREPARING/TRANSFERRING aborts (kDeadlineExceeded, naming who is missing) unless
///    the late ones are excluded: then what is left of the phase has a deadline again. In
///    STAGED (manual) aborts; in COMMITTING leaves engines behind that have not applied; in
///    ABORTING evicts (as lost) members that have not drained: one EvictEngine for each engine,
///    else EvictSource.
///
/// Fine print:
///  - A manual commit counts only in STAGED; asked for earlier it changes nothing.
///  - The deadline of COMMITTING is armed with SendCommit, not with AppendCommit: a slow journal
///    never evicts an engine that was not asked yet. Until the append is durable it has no effect.
///  - FailedEvent of an engine's rank after the decision evicts the engine unless it has applied;
///    of a source it changes nothing.
///  - Applied counts from the engine's leader only (ranks[0]), and so does a refusal after the
///    decision: whether an engine wants what was committed is for its leader to say, once it was
///    asked and has not answered.
///  - After Halt every event changes nothing.
///  - An abort from STAGED follows a release: sources answer DrainedEvent all the same, but the
///    version is not held any more and cannot be tried again.
///  - Streams are compared by (plan, stream); see digests.h.
///  - A report is taken in time that does not grow with the number of members; no event takes more
///    than a walk over them.
///  - Status::rank names a source as "<source_group>/N", N being its place in Spec::sources.
Outcome Step(State state, const Event& event);

/// Members whose report the phase waits for now: sources first, then engines by rank. Empty in
/// STAGED (it waits for Commit), while the journal works, and when the epoch is over. In COMMITTING
/// these are the leaders of engines that have not swapped.
std::vector<Member> WaitingFor(const State& state);

/// The required engine; null when there is none (any more). The state is Begin's or a Step's.
const EngineMembers* EngineNamed(const State& state, const std::string& name);

}  // namespace weightwire::epoch
