#pragma once

#include <optional>
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
  kDone = 5,        ///< source: sums reported; target: staged and verified
  kCommitting = 6,  ///< target: told to swap, not yet installed everywhere
  kDraining = 7,
};

struct MemberState {
  Member self;
  Role role = Role::kTarget;
  MemberPhase phase = MemberPhase::kIdle;
  /// Highest epoch ever accepted: older ones are fenced.
  Epoch fence{};
  std::optional<PrepareCommand> current;
  Epoch serving{};  ///< target: content epoch that the engine serves, 0 = none
  bool evicted = false;
  friend bool operator==(const MemberState&, const MemberState&) = default;
};

// ---- events: a command, or something that happened here ----
struct LocalPrepared { Epoch epoch; Status why; };
struct LocalTransferred { Epoch epoch; Status why; };
struct LocalApplied { Epoch epoch; };  ///< the leader says that all ranks swapped
struct LocalDrained { Epoch epoch; };
struct LocalLost { Status why; };      ///< the application's process ended
using MemberEvent = std::variant<Command, LocalPrepared, LocalTransferred, LocalApplied,
                                 LocalDrained, LocalLost>;

// ---- actions ----
struct DoPrepare {};                 ///< fetch slices, bind memory, admit tickets
struct DoTransfer {};
struct DoDrain { Epoch epoch; };     ///< stop, then LocalDrained
struct OfferSwap { bool leader; };   ///< tell the application that `current` is committed
struct DoInstall {};                 ///< flip the buffers' roles
struct TellReleased { Epoch epoch; Status why; };  ///< source: the publisher may go on
struct TellEvicted { Status why; };
struct SendPrepared {};
/// The driver adds digests and figures of the transfer.
struct SendTransferred {};
struct SendApplied {};
struct SendDrained { Epoch epoch; };
struct SendFailed { Epoch epoch; Status why; };
struct SendLost { Status why; };
using MemberAction = std::variant<DoPrepare, DoTransfer, DoDrain, OfferSwap, DoInstall, TellReleased,
                                  TellEvicted, SendPrepared, SendTransferred, SendApplied,
                                  SendDrained, SendFailed, SendLost>;

struct MemberOutcome {
  MemberState state;
  std::vector<MemberAction> actions;
};

/// One step. Total; commands for another incarnation, an older epoch or another plan change nothing
/// but are answered with SendFailed (kStaleIncarnation, kStaleEpoch) where the sender waits.
///
/// Rules that tests prove: a PrepareCommand with a higher epoch while an older one is not finished
/// first drains the older; COMMIT is acted on only when this epoch is kDone; ABORT of an epoch that
/// is committing is refused; after TellEvicted nothing but a new incarnation is accepted; a repeated
/// command repeats its answer and has no other effect.
MemberOutcome MemberStep(MemberState state, const MemberEvent& event);

}  // namespace weightwire::epoch
