#pragma once

#include <string>

#include "client/cli/connection.h"

namespace weightwire::cli {

struct DrainCommand {
  std::string name;  ///< an engine's or an agent's
  bool undo = false;
  double wait_seconds = 60;
};

/// Drains, and waits until the engines are busy with nothing any more. What to print, or
/// kDeadlineExceeded with what they are still busy with: they stay drained.
Result<std::string> RunDrain(Connection connection, const DrainCommand& command);

}  // namespace weightwire::cli
