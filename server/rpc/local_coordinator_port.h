#pragma once

#include <memory>

#include "server/base/executor.h"
#include "server/control/control.h"

namespace weightwire::rpc {

/// The port of an agent that lives in the coordinator's process: posts each call to the
/// coordinator's strand and each answer and command back to the agent's. Order is kept both ways.
///
/// Both strands and `coordinator` outlive it. Destroy it on the agent's strand, or after both
/// strands have stopped: nothing reaches the agent's port afterwards.
std::unique_ptr<control::CoordinatorPort> MakeLocalCoordinatorPort(
    control::CoordinatorPort& coordinator, Executor& coordinator_strand, Executor& agent_strand);

}  // namespace weightwire::rpc
