#include "client/collective/collective_state.h"

#include <string>
#include <utility>

namespace weightwire::collective {

const char* StateName(State state) {
  switch (state) {
    case State::kUnformed:
      return "unformed";
    case State::kForming:
      return "forming";
    case State::kReady:
      return "ready";
    case State::kRunning:
      return "running";
    case State::kAborting:
      return "aborting";
    case State::kStuck:
      return "stuck";
    case State::kClosed:
      return "closed";
  }
  return "unknown";
}

Status CollectiveState::Refuse(const char* what) const {
  std::string text = std::string("cannot ") + what + ": the collective is " + StateName(state_);
  if (state_ == State::kStuck) {
    return Status(Code::kFailedPrecondition, Reason::kNotReady, std::move(text))
        .Remedy("NCCL did not let go of the communicator; end this process");
  }
  const bool lost = state_ == State::kUnformed && !why_.ok();
  if (lost) text += ", since epoch " + std::to_string(epoch_) + " was aborted: " + why_.message();
  return Status(Code::kFailedPrecondition, Reason::kNotReady, std::move(text))
      .Remedy(state_ == State::kUnformed ? "form a communicator under a new epoch first"
                                         : "one operation at a time; open a new one after close");
}

Status CollectiveState::BeginForm(uint64_t epoch) {
  if (state_ != State::kUnformed) return Refuse("form");
  if (epoch <= epoch_) {
    return Status(Code::kFailedPrecondition, Reason::kStaleEpoch,
                  "communicator epoch " + std::to_string(epoch) + " is not above " +
                      std::to_string(epoch_) + ", which this member has been in")
        .Remedy("ask the coordinator for a new one");
  }
  epoch_ = epoch;
  why_ = OkStatus();
  state_ = State::kForming;
  return OkStatus();
}

Status CollectiveState::BeginOperation() {
  if (state_ != State::kReady) return Refuse("run an operation");
  state_ = State::kRunning;
  return OkStatus();
}

bool CollectiveState::Done() {
  if (state_ != State::kForming && state_ != State::kRunning) return false;
  state_ = State::kReady;
  return true;
}

bool CollectiveState::Fail(Status why) {
  if (state_ != State::kForming && state_ != State::kReady && state_ != State::kRunning) {
    return false;
  }
  why_ = std::move(why);
  state_ = State::kAborting;
  return true;
}

void CollectiveState::Released(bool in_time) {
  WW_CHECK(state_ == State::kAborting);
  state_ = in_time ? State::kUnformed : State::kStuck;
}

bool CollectiveState::Close() {
  if (state_ == State::kUnformed || state_ == State::kStuck) state_ = State::kClosed;
  return state_ == State::kClosed;
}

}  // namespace weightwire::collective
