#include "server/epoch/member_machine.h"

#include <algorithm>
#include <string>
#include <utility>

// Commands are sorted first: another incarnation, evicted, or not `current`'s epoch are answered
// without touching the state. What is left belongs to `current` and is a small table by phase.
namespace weightwire::epoch {
namespace {

Status StaleEpoch(Epoch epoch, const char* what) {
  return Status(Code::kFailedPrecondition, Reason::kStaleEpoch, what).AtEpoch(epoch);
}
Status StaleIncarnation(Epoch epoch) {
  return Status(Code::kFailedPrecondition, Reason::kStaleIncarnation,
                "the command names an incarnation that is not, or not any more, this one")
      .AtEpoch(epoch);
}
Status NotReady(Epoch epoch, const char* what) {
  return Status(Code::kFailedPrecondition, Reason::kNotReady, what).AtEpoch(epoch);
}

class Stepper {
 public:
  explicit Stepper(MemberState state) : state_(std::move(state)) {}
  MemberOutcome Finished() && { return {std::move(state_), std::move(actions_)}; }

  void On(const Command& command) {
    std::visit([&](const auto& c) { OnCommand(c); }, command);
  }

  void On(const LocalPrepared& event) {
    if (!Runs(event.epoch) || state_.phase != MemberPhase::kPreparing) return;
    if (!event.why.ok()) return FailHere(event.why);
    state_.phase = MemberPhase::kPrepared;
    Do(SendPrepared{});
  }

  void On(const LocalTransferred& event) {
    if (!Runs(event.epoch) || state_.phase != MemberPhase::kTransferring) return;
    if (!event.why.ok()) return FailHere(event.why);
    state_.phase = MemberPhase::kDone;
    Do(SendTransferred{});
  }

  void On(const LocalSwapped& event) {
    if (!Runs(event.epoch) || state_.phase != MemberPhase::kCommitting || !state_.leader) return;
    state_.applied = true;
    Do(SendSwapped{});
  }

  void On(const LocalDrained& event) {
    if (state_.phase != MemberPhase::kDraining || event.epoch != state_.draining) return;
    if (state_.tell_drained) Do(SendDrained{event.epoch});
    state_.draining = {};
    state_.tell_drained = false;
    if (!state_.current) {
      state_.phase = MemberPhase::kIdle;
      return;
    }
    StartCurrent();
  }

  void On(const LocalEmptied&) { state_.serving = {}; }

  void On(const LocalLost& event) {
    if (state_.evicted) return;
    Do(SendLost{event.why});
    EndEverything();
  }

  void On(const LocalCutOff&) {
    if (state_.evicted) return;
    state_.tell_drained = false;
    if (state_.phase == MemberPhase::kDraining) return Forget();
    const bool staged = state_.role == Role::kTarget && state_.phase == MemberPhase::kDone;
    const bool whole = staged || state_.phase == MemberPhase::kCommitting;
    if (state_.current && !whole) StartDrain(state_.current->epoch);
  }

  void On(const LocalRejoined& event) {
    if (!state_.evicted) state_.self = event.self;
  }

 private:
  void Do(MemberAction action) { actions_.push_back(std::move(action)); }

  bool Names(const Member& member) const { return member == state_.self && !state_.evicted; }
  /// `epoch` is `current`'s; in kDraining it has not begun yet.
  bool IsCurrent(Epoch epoch) const { return state_.current && state_.current->epoch == epoch; }
  bool Runs(Epoch epoch) const {
    return IsCurrent(epoch) && state_.phase != MemberPhase::kDraining;
  }

  void OnCommand(const PrepareCommand& command) {
    const Epoch epoch = command.epoch;
    if (!Names(command.member)) return Fail(epoch, StaleIncarnation(epoch));
    if (IsCurrent(epoch)) return RepeatPrepare(command);
    if (epoch <= state_.fence) {
      return Fail(epoch, StaleEpoch(epoch, "an epoch as new as this one was seen before"));
    }
    if (state_.phase == MemberPhase::kCommitting) {
      return Fail(epoch, NotReady(epoch, "the swap of an older epoch is under way"));
    }
    if (command.role == Role::kTarget && command.content < state_.serving) {
      return Fail(epoch, StaleEpoch(epoch, "the content is older than what is served"));
    }
    Accept(command);
  }

  void Accept(const PrepareCommand& command) {
    const bool busy = state_.current.has_value() && state_.phase != MemberPhase::kDraining;
    if (busy) StartDrain(state_.current->epoch);
    state_.fence = command.epoch;
    Forget();
    state_.current = command;
    if (state_.phase == MemberPhase::kIdle) StartCurrent();
  }

  void RepeatPrepare(const PrepareCommand& command) {
    if (*state_.current != command) {
      return Fail(command.epoch,
                  StaleEpoch(command.epoch, "the epoch was prepared with other content"));
    }
    if (state_.phase != MemberPhase::kDraining && state_.phase != MemberPhase::kPreparing) {
      Do(SendPrepared{});
    }
  }

  void OnCommand(const TransferCommand& command) {
    const Epoch epoch = command.epoch;
    if (!Names(command.member)) return Fail(epoch, StaleIncarnation(epoch));
    if (!IsCurrent(epoch)) return Fail(epoch, StaleEpoch(epoch, "the epoch does not run here"));
    switch (state_.phase) {
      case MemberPhase::kPrepared:
        state_.phase = MemberPhase::kTransferring;
        Do(DoTransfer{});
        for (const ExcludeCommand& who : state_.excluded) Do(DoExclude{who.plan, who.readers});
        return;
      case MemberPhase::kTransferring:
        return;
      case MemberPhase::kDone:
      case MemberPhase::kCommitting:
        return Do(SendTransferred{});
      default:
        return Fail(epoch, NotReady(epoch, "the epoch is not prepared here"));
    }
  }

  void OnCommand(const ReleaseCommand& command) {
    if (!Names(command.member)) return;
    const bool runs = IsCurrent(command.epoch);
    if (command.why.ok() && runs) {
      if (state_.role != Role::kSource || state_.phase != MemberPhase::kDone) return;
      TellReleasedOnce(command);
      return StartDrain(command.epoch);
    }
    const bool drains = state_.phase == MemberPhase::kDraining && state_.draining == command.epoch;
    if (!runs && !drains) TellReleasedOnce(command);
  }

  void TellReleasedOnce(const ReleaseCommand& command) {
    if (command.version <= state_.released) return;
    state_.released = command.version;
    Do(TellReleased{command.epoch, command.why, command.version});
  }

  void OnCommand(const CommitCommand& command) {
    const Epoch epoch = command.epoch;
    if (!Names(command.member)) return Fail(epoch, StaleIncarnation(epoch));
    if (!IsCurrent(epoch) || state_.role != Role::kTarget) {
      return Fail(epoch, StaleEpoch(epoch, "the epoch is not staged here"));
    }
    if (state_.phase == MemberPhase::kCommitting) {
      if (state_.applied) Do(SendSwapped{});
      return;
    }
    if (state_.phase != MemberPhase::kDone) {
      return Fail(epoch, NotReady(epoch, "the epoch is not staged here yet"));
    }
    state_.phase = MemberPhase::kCommitting;
    state_.leader = command.leader;
    state_.applied = false;
    Do(OfferSwap{command.leader});
  }

  void OnCommand(const CommittedEverywhereCommand& command) {
    if (!Names(command.member) || !IsCurrent(command.epoch)) return;
    if (state_.phase != MemberPhase::kCommitting || (state_.leader && !state_.applied)) return;
    state_.serving = state_.current->content;
    Do(DoInstall{});
    Forget();
    state_.phase = MemberPhase::kIdle;
  }

  void OnCommand(const AbortCommand& command) {
    const Epoch epoch = command.epoch;
    if (!Names(command.member)) return Fail(epoch, StaleIncarnation(epoch));
    if (Runs(epoch) && state_.phase == MemberPhase::kCommitting) {
      return Fail(epoch, StaleEpoch(epoch, "the epoch is committed; it cannot be aborted"));
    }
    if (Runs(epoch)) {
      StartDrain(epoch);
      state_.tell_drained = true;
      return;
    }
    if (state_.phase == MemberPhase::kDraining && state_.draining == epoch) {
      state_.tell_drained = true;
      return;
    }
    if (IsCurrent(epoch)) Forget();
    if (state_.fence < epoch) state_.fence = epoch;
    Do(SendDrained{epoch});
  }

  void OnCommand(const StaleCommand& command) {
    if (Names(command.member)) state_.behind = std::max(state_.behind, command.committed);
  }

  void OnCommand(const ExcludeCommand& command) {
    if (!Names(command.member) || !IsCurrent(command.epoch)) return;
    const auto same = [&](const ExcludeCommand& known) {  // perhaps by another name of this member
      return known.plan == command.plan && known.readers == command.readers;
    };
    if (std::ranges::any_of(state_.excluded, same)) return;
    state_.excluded.push_back(command);
    const bool moves = state_.phase == MemberPhase::kTransferring ||
                       state_.phase == MemberPhase::kDone ||
                       state_.phase == MemberPhase::kCommitting;
    if (moves) Do(DoExclude{command.plan, command.readers});
  }

  void OnCommand(const HashCommand&) {}  // the agent's to answer, whatever runs

  void OnCommand(const EvictCommand& command) {
    if (!Names(command.member)) return;
    Do(TellEvicted{command.why});
    EndEverything();
  }

  void EndEverything() {
    state_.evicted = true;
    state_.serving = {};
    if (state_.current && state_.phase != MemberPhase::kDraining) {
      StartDrain(state_.current->epoch);
    }
    state_.tell_drained = false;
    Forget();
  }

  /// `current` cannot go on; its abort will follow.
  void FailHere(const Status& why) {
    const Epoch epoch = state_.current->epoch;
    Fail(epoch, why);
    StartDrain(epoch);
  }

  void StartDrain(Epoch epoch) {
    state_.phase = MemberPhase::kDraining;
    state_.draining = epoch;
    state_.tell_drained = false;
    Forget();
    Do(DoDrain{epoch});
  }

  void StartCurrent() {
    state_.role = state_.current->role;
    state_.phase = MemberPhase::kPreparing;
    Do(DoPrepare{});
  }

  void Forget() {
    state_.current.reset();
    state_.excluded.clear();
    state_.leader = false;
    state_.applied = false;
  }

  void Fail(Epoch epoch, const Status& why) { Do(SendFailed{epoch, why}); }

  MemberState state_;
  std::vector<MemberAction> actions_;
};

}  // namespace

std::string_view MemberPhaseName(MemberPhase phase) {
  switch (phase) {
    case MemberPhase::kIdle:
      return "idle";
    case MemberPhase::kPreparing:
      return "preparing";
    case MemberPhase::kPrepared:
      return "prepared";
    case MemberPhase::kTransferring:
      return "transferring";
    case MemberPhase::kDone:
      return "done";
    case MemberPhase::kCommitting:
      return "committing";
    case MemberPhase::kDraining:
      return "draining";
  }
  return "unknown";
}

MemberOutcome MemberStep(MemberState state, const MemberEvent& event) {
  Stepper stepper(std::move(state));
  std::visit([&](const auto& e) { stepper.On(e); }, event);
  return std::move(stepper).Finished();
}

}  // namespace weightwire::epoch
