#pragma once

#include <memory>
#include <string>
#include <vector>

#include "server/agent/agent.h"
#include "server/coordinator/coordinator.h"
#include "server/transport/transport.h"

namespace weightwire::daemon {

/// The status page as text: what everyone waits for first, then engines and epochs.
std::string CoordinatorPage(const coordinator::StatusSnapshot& snapshot);
std::string AgentPage(const Status& session,
                      const std::vector<std::unique_ptr<transport::Transport>>& transports,
                      const std::vector<agent::LocalStatus>& locals);

}  // namespace weightwire::daemon
