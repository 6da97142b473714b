#pragma once

#include <cstdint>

#include "server/base/status.h"

namespace weightwire::collective {

/// Numbers are part of the C interface (weightwire_nccl.h).
enum class State : int32_t {
  kUnformed = 0,
  kForming = 1,
  kReady = 2,
  kRunning = 3,
  kAborting = 4,
  kStuck = 5,  ///< NCCL did not let go in time; nothing more is possible in this process
  kClosed = 6,
};
const char* StateName(State state);

/// What may happen when to one member of a communicator.
///
///   Unformed → Forming → Ready ⇄ Running
///      ▲          └─────────┴───────┴──→ Aborting → Stuck
///      └──────────────────────────────────┘
///   Unformed, Stuck → Closed
///
/// A communicator epoch is formed at most once, and never after a higher one. Pure; not
/// thread-safe.
class CollectiveState {
 public:
  State state() const { return state_; }
  /// The newest that was formed or tried; 0 = none.
  uint64_t epoch() const { return epoch_; }
  /// Why the last abort began.
  const Status& why() const { return why_; }

  ///   kFailedPrecondition / kNotReady | kStaleEpoch
  Status BeginForm(uint64_t epoch);
  ///   kFailedPrecondition / kNotReady; kAborted: with the reason of the abort
  Status BeginOperation();
  /// Forming or Running went well. False when an abort came first.
  bool Done();
  /// Forming, Ready or Running failed, or are to be given up. False: nothing to abort, or that
  /// began already; its first reason stays.
  bool Fail(Status why);
  /// The communicator is gone and no buffer is touched any more, or not in time.
  void Released(bool in_time);
  /// False: something has to be aborted first.
  bool Close();

 private:
  Status Refuse(const char* what) const;

  State state_ = State::kUnformed;
  uint64_t epoch_ = 0;
  Status why_;
};

}  // namespace weightwire::collective
