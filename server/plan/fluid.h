#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "server/plan/plan.h"

namespace weightwire::plan {

/// Bytes on their way from one sender's link to one receiver's.
struct Flow {
  uint32_t sender = 0;
  uint32_t receiver = 0;
  int64_t bytes = 0;
};

/// How flows share a link that is too narrow for them. Rates are max-min fair in either case: no
/// flow can get more without taking from one that has no more than its due.
enum class Sharing : int {
  /// All flows count the same, whatever they have to move.
  kEqual = 1,
  /// A flow counts by its bytes, as the transfer engine has it (transfer.h; proved in
  /// tests/unit/transfer/sharing_test.cc). The flows of a full link then end together, and none is
  /// left to trickle in alone when the others have ended.
  kByBytes = 2,
};

struct FluidTimes {
  double end = 0;                  ///< of the last flow
  std::vector<double> sender_end;  ///< of the sender's last flow; 0 when it has none
  std::vector<double> receiver_end;
};

/// When flows end that start together at 0, if every sender sends and every receiver receives at
/// most one byte per unit of time (full duplex; sending and receiving are apart).
///
/// Rates are set anew whenever flows end; where this would cost more than some ten million steps,
/// only after several have ended, which can only lengthen the answer.
FluidTimes RunFluid(std::span<const Flow> flows, uint32_t senders, uint32_t receivers,
                    Sharing sharing);

/// RunFluid of a plan's streams.
FluidTimes RunFluid(const TransferPlan& plan, Sharing sharing);

}  // namespace weightwire::plan
