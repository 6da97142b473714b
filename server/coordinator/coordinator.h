#pragma once

#include <array>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "server/base/clock.h"
#include "server/base/delta_figures.h"
#include "server/base/executor.h"
#include "server/base/note.h"
#include "server/control/control.h"
#include "server/coordinator/commit_policy.h"
#include "server/coordinator/fanout.h"
#include "server/coordinator/integrity_report.h"
#include "server/coordinator/journal.h"
#include "server/coordinator/names.h"
#include "server/coordinator/transfer_edges.h"
#include "server/epoch/coordinator_machine.h"
#include "server/metrics/metrics.h"

/// Membership, negotiation, plan cache; drives the epoch machine. One per job.
namespace weightwire::coordinator {

class Work;

struct Options {
  std::string job = "default";
  Nanos heartbeat = std::chrono::seconds(1);
  Nanos lease = std::chrono::seconds(5);
  Nanos prepare_deadline = std::chrono::seconds(30);
  Nanos transfer_deadline = std::chrono::seconds(120);
  Nanos staged_deadline = std::chrono::seconds(60);  ///< manual commit only
  Nanos commit_deadline = std::chrono::seconds(30);
  Nanos abort_deadline = std::chrono::seconds(10);
  Fanout fanout = Fanout::kAuto;
  int64_t slot_bytes = 8 << 20;  ///< about that of the agents: for kAuto
  CommitPolicy commit_policy;
  /// When an engine refuses a committed version, all go back to the one before.
  bool rollback_refused = true;
  uint32_t min_engines = 1;
  uint32_t attempts_max = 3;
  uint32_t members_max = 16'384;
  uint32_t waiting_versions_max = 2;
  uint32_t epochs_remembered = 256;  ///< for status
  /// Names of engines that the epochs of one status have together; older epochs are left off. About
  /// 10 MB: clients read and show that within a second.
  size_t status_names_max = 400'000;
  uint32_t verify_every = 0;  ///< committed versions between two sweeps; 0: none
  Nanos verify_deadline = std::chrono::seconds(60);  ///< of such a sweep
  /// Secrets (tickets) come from here; 16 random bytes each.
  std::function<Ticket()> random_ticket;
  Notes notes = [](const Note&) {};  ///< for the log: what happens in epochs
  /// What computes layouts and plans; null: Work itself.
  std::shared_ptr<const Work> work;
};

/// Engine states of the status.
enum class EngineState : int {
  kIncomplete = 1,  ///< not all ranks registered with a layout
  kEmpty = 2,       ///< complete, serves nothing
  kFilling = 3,
  kServing = 4,
  kStaged = 5,
  kInstalling = 6,
  kDirty = 7,   ///< lost a rank; never serves
  kCutOff = 8,  ///< a rank cannot be reached; the engine serves on what it served
};
std::string_view EngineStateName(EngineState state);

struct ParticipantStatus {
  epoch::Member member;
  control::GroupRole role = control::GroupRole::kTrainer;
  std::string group;
  uint32_t rank = 0;
  uint32_t world_size = 0;
  AgentId agent{};
  std::string agent_name;
  std::string presence;    ///< connected, suspect or absent
  double cut_seconds = 0;  ///< for so long it has not been connected
  int64_t pid = 0;
  std::string spec;
  bool has_layout = false;
  uint64_t tensors = 0;
  int64_t bytes = 0;
  double silent_seconds = 0;  ///< since its agent's last sign of life
};
struct EngineStatus {
  std::string name;
  EngineState state = EngineState::kIncomplete;
  Epoch serving{};  ///< content epoch; 0 = none
  Version version{};
  uint64_t lineage = 0;  ///< of `version`; 0: not known, of one that is not committed any more
  uint32_t ranks_present = 0;
  uint32_t world_size = 0;
  Version lag{};         ///< versions away from the committed one; 0 only when it serves that
  bool ready = false;    ///< serves what is committed, or is about to change to it
  epoch::Contents held;  ///< whole beside what it serves: what a rollback may go back to
  std::string last_error;
  bool drained = false;                ///< takes no part in anything new
  std::vector<std::string> busy_with;  ///< drained: what it still takes part in
};
struct EpochStatus {
  Epoch epoch{};
  epoch::Kind kind = epoch::Kind::kPublish;
  Version version{};
  uint64_t lineage = 0;  ///< of `version`; 0: not known
  epoch::Phase phase = epoch::Phase::kPreparing;
  uint32_t attempt = 1;
  Status why;
  Names engines;
  std::vector<std::string> left_out;     ///< engines without which this attempt goes on
  std::vector<std::string> waiting_for;  ///< "engine-a/1: staged"
  size_t waiting_for_left = 0;           ///< lines over StatusQuery::lines_max
  double started_wall = 0;               ///< seconds since the Unix epoch
  double prepare_seconds = 0, transfer_seconds = 0, commit_seconds = 0, total_seconds = 0;
  int64_t bytes = 0;
  int64_t bytes_done = 0, bytes_total = 0;            ///< while it runs: v1::StatusResponse::Epoch
  std::map<std::string, int64_t> bytes_by_transport;  ///< those that moved
  int64_t bytes_kept = 0;                             ///< those that the engines had already
  DeltaFigures delta;                                 ///< made of what changed
  double flip_seconds_max = 0;
  std::vector<PlanId> plans;
  std::string content_root;  ///< of what was committed, when it has been verified
  std::array<uint8_t, 16> trace_id{};
};
/// What happened in an epoch. Seconds count from its start, by the coordinator's clock.
struct EpochTrace {
  /// Of the coordinator: its phases, one after another, and within them "plan" and "journal";
  /// before the start "publish", from the first trainer rank to the last one.
  struct Step {
    std::string name;   ///< "phase", or what it did
    std::string about;  ///< the phase
    double begin = 0, seconds = 0;
  };
  struct Event {
    double at = 0;
    std::string who, what;
    Status why;
  };
  struct Span {
    std::string name, about;
    double begin = 0, seconds = 0;
    int64_t bytes = 0;
  };
  struct RankSpans {
    std::string rank, agent;
    double error_seconds = 0;  ///< by so much its times may be off, either way
    std::vector<Span> stretches;
  };
  EpochStatus status;
  std::vector<Step> steps;
  std::vector<Event> events;
  std::vector<RankSpans> tracks;
  uint64_t left_off = 0;  ///< events and stretches over the limit
};
/// A rollback that was committed, or one that need not be: `version` is what is committed.
struct RolledBack {
  Epoch epoch{};  ///< under which the version is served now
  Epoch held{};   ///< under which its bytes were published; 0: nothing was to be done
  Version version{};
  std::vector<std::string> engines;  ///< that held it and serve it now
  std::vector<std::string> filling;  ///< complete ones that did not: they are being filled
  uint64_t lineage = 0;              ///< of `version`; 0: not known
  friend bool operator==(const RolledBack&, const RolledBack&) = default;
};
/// What an agent says of a process of its host (control::Trouble).
struct TroubleStatus {
  std::string where;  ///< the rank, "engine-a/1"; of nobody who has attached: the agent
  std::string agent_name;
  std::string what, remedy;
};
struct StatusSnapshot {
  std::string job;
  Epoch committed{};
  Version committed_version{};
  uint64_t committed_lineage = kFirstLineage;  ///< of that version; 0: not known
  /// The newest one: of what is committed or, where a trainer is about to begin it, published.
  uint64_t lineage = kFirstLineage;
  double committed_wall = 0;
  bool deciding = true;        ///< false after the journal failed
  std::string journal;         ///< what is wrong with it while it decides; empty = nothing
  std::string waiting_for;     ///< one line: what everyone waits for; empty = nothing
  double waiting_seconds = 0;  ///< how long; 0: not known
  std::vector<ParticipantStatus> participants;
  size_t participants_total = 0;  ///< here or not
  size_t trainers_total = 0;      ///< of those, ranks of the trainer
  std::vector<EngineStatus> engines;
  std::vector<EpochStatus> epochs;  ///< newest first
  size_t epochs_left = 0;           ///< older ones that are remembered
  uint32_t agents = 0;
  std::vector<TroubleStatus> troubles;
  uint64_t engines_forgotten = 0;  ///< that have left, and are not among `engines` any more
};

/// What a snapshot is to have.
struct StatusQuery {
  size_t epochs_max = std::numeric_limits<size_t>::max();  ///< the newest ones
  /// Older ones than this, and neither participants nor engines; 0: from the newest on.
  Epoch epochs_before{};
  /// The oldest are left off where all together name more engines (Options::status_names_max).
  bool names_bounded = true;
  size_t lines_max = std::numeric_limits<size_t>::max();  ///< of what an epoch waits for
  /// The first so many, the trainer's first one, and those that `waiting_for` names.
  size_t participants_max = std::numeric_limits<size_t>::max();
};

/// Every method runs on `strand` and never blocks; layout and plan work runs on `workers` and comes
/// back. CoordinatorPort replies run on the strand (ports of other strands re-post).
///
/// Fences: a call or report with an incarnation that is not the registered one changes nothing.
/// An engine that completes while an epoch is committed and no epoch runs is filled from a serving
/// engine's stage; fills are dropped (aborted and drained) before the next epoch prepares.
/// A version whose attempt aborted is tried again while every trainer rank still lives and until
/// its deadline; then it is released with the reason. An attempt that another one is not likely to
/// mend (bytes that differ, memory, a phase's deadline) is a failure, and there are attempts_max of
/// these; one that ended because somebody was lost, left out or could not be reached is none. The
/// next one follows a loss at once, anything else after a pause that grows. Neither a
/// version whose plan cannot be made, nor one that an operator aborted, nor one that was released
/// OK before its abort (a manual commit that never came) is tried again.
///
/// Versions: they must rise above the last one that was committed or given up; a trainer that lost
/// all its ranks and registered anew starts above the committed one. Before the trainer was
/// complete for the first time in its life a rank may publish early and waits for the others; once
/// it has been complete, Publish answers kMissingRank while a rank is missing. When a version is
/// complete, lower ones that are not are released with kStaleVersion. Without a deadline a version
/// gets those of its phases together. After a rollback the committed version is the one that was
/// gone back to: a trainer that registers anew starts above it and may use the numbers of versions
/// that were taken back, while the numbers of a rank's one life only rise.
///
/// Lineages: a trainer that goes back to an earlier step publishes in the next lineage, which
/// begins with the COMMIT of its first version: nothing else changes before. From then on every
/// version of an earlier one is refused with kStaleIncarnation, whatever its number. A rollback to
/// a version of an earlier lineage begins none and ends none.
///
/// Ranks that cannot be reached keep their places and what they serve (membership.h): an epoch that
/// runs goes on without them or is tried again, and they are told its end when they are back.
///
/// Engines: one that loses a rank is DIRTY; its other ranks are evicted. One that has not swapped
/// at commit_deadline is a straggler: it serves on, is not ready, and no later version waits for
/// it; it is filled when it has swapped. An engine whose fill fails is filled again, alone, after
/// pauses that grow; the others do not wait for it. One whose layout fits no plan fails the version
/// that needs it; among fills it is left out, with `last_error`, until it registers anew or a
/// version commits. A trainer's other ranks stay when one is lost.
///
/// After a failed append it decides nothing any more: publishes are refused with kJournalFailed,
/// and status, watch and explain go on. An append that is hindered only (a full disk) is waited
/// for, and what needs it with it.
class Coordinator : public control::CoordinatorPort {
 public:
  /// Reads the journal; epochs go on above everything that was ever handed out.
  static Result<std::unique_ptr<Coordinator>> Make(Options options, Clock& clock, Executor& strand,
                                                   Executor& workers, Journal& journal,
                                                   metrics::Sink& metrics);

  /// The connection of an agent ended without a goodbye: its ranks are suspect, and resume when it
  /// is back. Nothing of its port is called any more.
  virtual void Disconnected(AgentId agent) = 0;

  /// For operators and manual commits. kNotFound / kNotRegistered: no such epoch in progress.
  /// kFailedPrecondition / kStaleEpoch: too late (COMMIT was submitted), or not staged yet.
  virtual Status Commit(Epoch epoch) = 0;
  virtual Status Abort(Epoch epoch, std::string why) = 0;
  /// Fences an engine or the trainer group; its processes must register again.
  virtual Status Evict(const std::string& group, std::string why) = 0;

  /// Lets the engine, or every engine that has a rank at the agent, of this name (`which` leaves it
  /// to agents) finish what it does and take no part in anything new; `undo` takes that back.
  /// Replies with the engines when it is in the journal, so that the next coordinator knows it,
  /// too. It is forgotten when an engine leaves.
  ///   kNotFound / kNotRegistered        neither an engine nor an agent of that name is here
  ///   kFailedPrecondition / kNotReady   a rank of the trainer is at that agent
  ///   kUnavailable / kJournalFailed     done here, but the next coordinator may not know
  enum class Draining { kDrain, kUndo };
  enum class DrainOf { kEngineOrAgent, kAgent };
  virtual void Drain(const std::string& name, Draining what, DrainOf which,
                     control::Reply<std::vector<std::string>> reply) = 0;

  /// Goes back (or forward again) to `version` under a new, higher epoch: engines that still hold
  /// it in their buffers change pointers, the others are filled from them afterwards. Replies
  /// when these engines serve it. What is committed already is OK at once; a repeat while it runs
  /// shares its end. A waiting version below `version` is given up; see "Versions" above.
  ///   kFailedPrecondition / kNotReady   an epoch is in progress, or another rollback
  ///   kFailedPrecondition / kStaleVersion  no holder; names what each engine holds
  ///   and whatever aborted the last attempt
  virtual void Rollback(Version version, control::Reply<RolledBack> reply) = 0;

  /// Sums what engines serve (every one, or the one that is named) and compares; differences are
  /// part of the answer. Changes nothing and waits for no epoch. A repeat while it runs shares its
  /// end.
  ///   kNotFound / kNotRegistered        no such engine
  ///   kFailedPrecondition / kNotReady   nothing is served yet; another verification is in progress
  virtual void Verify(const std::string& engine, Nanos deadline,
                      control::Reply<IntegrityReport> reply) = 0;

  virtual StatusSnapshot Snapshot(const StatusQuery& query) const = 0;
  StatusSnapshot Snapshot() const { return Snapshot(StatusQuery{}); }
  /// 0: the newest. kNotFound / kNotRegistered: none of that number is remembered.
  virtual Result<EpochTrace> Describe(Epoch epoch) const = 0;
  /// Of the newest epochs that were committed and moved bytes, at most 8, newest first.
  virtual std::vector<EpochEdges> Edges() const = 0;
  /// `group` is an engine; empty: every plan of the newest epoch. Text for people.
  virtual Result<std::string> Explain(const std::string& group,
                                      const std::string& tensor) const = 0;
  virtual Result<std::shared_ptr<const plan::TransferPlan>> FindPlan(PlanId plan) const = 0;

  /// Calls `changed` on the strand after every change of membership or of an epoch's phase (several
  /// changes may be one call). Returns an id for Unwatch.
  virtual uint64_t Watch(std::function<void()> changed) = 0;
  virtual void Unwatch(uint64_t id) = 0;
  /// /readyz: decisions can be made durable, and an epoch has been committed or nothing was ever
  /// published.
  ///   kUnavailable / kJournalFailed  no decision is made now, or none any more
  ///   kUnavailable / kNotReady       nothing is committed
  virtual Status Readiness() const = 0;
  bool Ready() const { return Readiness().ok(); }
  /// Aborts what may be aborted, tells every agent, answers everything that waits.
  virtual void Shutdown(control::Done done) = 0;
};

}  // namespace weightwire::coordinator
