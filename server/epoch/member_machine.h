#pragma once

#include <optional>
#include <string_view>
#include <variant>
#include <vector>

#include "server/epoch/messages.h"

/// A member's side (one local rank in an agent), as a pure function.
namespace weightwire::epoch {

enum class MemberPhase : int {
  kIdle = 1,
  kPreparing = 2,
  kPrepared = 3,
  kTransferring = 4,
  kDone = 5,        ///< source: sums reported, still serving readers; target: staged and verified
  kCommitting = 6,  ///< target: told to swap, not yet installed everywhere
  kDraining = 7,    ///< `draining` is being stopped; `current`, when set, begins afterwards
};
std::string_view MemberPhaseName(MemberPhase phase);

struct MemberState {
  Member self;
  Role role = Role::kTarget;
  MemberPhase phase = MemberPhase::kIdle;
  /// Highest epoch ever accepted: older ones are fenced.
  Epoch fence{};
  std::optional<PrepareCommand> current;
  Epoch serving{};  ///< target: content epoch that the engine serves, 0 = none
  Epoch behind{};   ///< target: newest epoch that was committed without its engine
  bool evicted = false;
  Epoch draining{};           ///< kDraining: the epoch that DoDrain named
  bool tell_drained = false;  ///< kDraining: the coordinator waits for SendDrained
  bool leader = false;        ///< kCommitting: CommitCommand's
  bool applied = false;       ///< kCommitting, leader: all ranks swapped; SendSwapped was sent
  Version released{};         ///< highest version for which TellReleased was given
  /// Whom `current` goes on without, for who reads from here.
  std::vector<ExcludeCommand> excluded;
  friend bool operator==(const MemberState&, const MemberState&) = default;
};

// ---- events: a command, or something that happened here ----
struct LocalPrepared {
  Epoch epoch;
  Status why;
};
struct LocalTransferred {
  Epoch epoch;
  Status why;
};
struct LocalSwapped {
  Epoch epoch;
};  ///< the leader says that all ranks swapped
struct LocalDrained {
  Epoch epoch;
};
struct LocalEmptied {};  ///< target with one buffer: what was served was given up for `current`
struct LocalLost {
  Status why;
};                      ///< the application's process ended
struct LocalCutOff {};  ///< the coordinator was lost
struct LocalRejoined {
  Member self;
};  ///< another coordinator (or the same one, restarted) knows this incarnation as `self`
using MemberEvent = std::variant<Command, LocalPrepared, LocalTransferred, LocalSwapped,
                                 LocalDrained, LocalEmptied, LocalLost, LocalCutOff, LocalRejoined>;

// ---- actions ----
struct DoPrepare {};  ///< fetch slices, bind memory, admit tickets
struct DoTransfer {};
/// Source or relay: the job that DoTransfer began waits for these readers no more.
struct DoExclude {
  PlanId plan;
  std::vector<ParticipantId> readers;
};
struct DoDrain {
  Epoch epoch;
};  ///< stop, then LocalDrained
struct OfferSwap {
  bool leader;
};                    ///< tell the application that `current` is committed
struct DoInstall {};  ///< flip the buffers' roles
/// Source: the publisher may go on. For trainer publishes the driver tells the application; for an
/// engine that was the source of a fill nobody waits.
struct TellReleased {
  Epoch epoch;
  Status why;
  Version version{};
};
struct TellEvicted {
  Status why;
};
struct SendPrepared {};
/// The driver adds digests and figures of the transfer.
struct SendTransferred {};
struct SendSwapped {};
struct SendDrained {
  Epoch epoch;
};
struct SendFailed {
  Epoch epoch;
  Status why;
};
struct SendLost {
  Status why;
};
using MemberAction = std::variant<DoPrepare, DoTransfer, DoExclude, DoDrain, OfferSwap, DoInstall,
                                  TellReleased, TellEvicted, SendPrepared, SendTransferred,
                                  SendSwapped, SendDrained, SendFailed, SendLost>;

struct MemberOutcome {
  MemberState state;
  std::vector<MemberAction> actions;
};

/// One step. Total; commands for another incarnation, an older epoch or another plan change nothing
/// but are answered with SendFailed (kStaleIncarnation, kStaleEpoch) where the sender waits.
///
/// Rules that tests prove: a PrepareCommand with a higher epoch while an older one is not finished
/// first drains the older; COMMIT is acted on only when this epoch is kDone; ABORT of an epoch that
/// is committing is refused; after TellEvicted nothing but a new incarnation is accepted; a
/// repeated command repeats its answer and has no other effect.
///
/// Fine print:
///  - One thing at a time: DoPrepare never runs while a drain is outstanding. During kDraining a
///    newer PrepareCommand waits in `current` (a still newer one replaces it).
///  - A PrepareCommand while a swap is under way (kCommitting) is refused with kNotReady: a
///  decision
///    is never dropped. So is a target's PrepareCommand whose content is older than what is served
///    (kStaleEpoch).
///  - A failure here (LocalPrepared, LocalTransferred) is reported and drained at once; the abort
///    that follows is answered when the drain has ended. Repeats of the failed epoch's commands are
///    answered with kStaleEpoch.
///  - AbortCommand is always answered: at once when nothing of the epoch runs here, also for one
///    that was never prepared, which it fences.
///  - ReleaseCommand OK: while the epoch runs here, accepted when it is kDone; TellReleased at
///  once,
///    then a quiet drain (no SendDrained unless an abort comes in). Else, OK or not, accepted when
///    nothing of the epoch runs or drains here, so that the publisher never changes bytes that are
///    still read: of a version that never saw an epoch, and where the member was cut off when it
///    was released. TellReleased is given once for each version.
///  - LocalSwapped counts on the leader only; CommittedEverywhereCommand on the leader only after
///  it.
///  - StaleCommand changes `behind` and nothing else; a target is ready while `serving` ≥
///  `behind`.
///  - ExcludeCommand of `current` is remembered until it moves, and carried out once, after
///    DoTransfer. Of any other epoch it changes nothing.
///  - LocalCutOff keeps what is whole: what is served, an epoch that a target has staged (kDone,
///    kCommitting), the version that a publisher holds. All else is drained quietly. Commands name
///    the member that LocalRejoined brings; nothing is said between the two.
///  - Eviction and LocalLost drain what runs, forget `current` and `serving`, and end everything:
///    later commands get kStaleIncarnation where the sender waits.
MemberOutcome MemberStep(MemberState state, const MemberEvent& event);

}  // namespace weightwire::epoch
