#include "client/cli/drain.h"

#include <algorithm>
#include <chrono>
#include <thread>

#include "client/cli/table.h"

namespace weightwire::cli {
namespace {

/// "engine-a: epoch 7 (version 3): transferring", the first of what they are busy with.
std::string BusyOf(const v1::StatusResponse& status, const v1::DrainResponse& drained) {
  for (const auto& engine : status.engines()) {
    const auto& names = drained.engines();
    if (std::find(names.begin(), names.end(), engine.name()) == names.end()) continue;
    if (!engine.busy_with().empty()) return engine.name() + ": " + engine.busy_with(0);
  }
  return "";
}

}  // namespace

Result<std::string> RunDrain(Connection connection, const DrainCommand& command) {
  WW_ASSIGN(const v1::DrainResponse drained, connection.Drain(command.name, command.undo));
  const std::string engines =
      drained.engines().empty() ? "no engine is there" : Joined(drained.engines());
  const std::string others = engines == command.name ? "" : " (" + engines + ")";
  if (command.undo) return command.name + " takes part again" + others + "\n";
  const auto end =
      std::chrono::steady_clock::now() + std::chrono::duration<double>(command.wait_seconds);
  while (true) {
    WW_ASSIGN(const v1::StatusResponse status, connection.GetStatus(kEnginesOnly));
    const std::string busy = BusyOf(status, drained);
    if (busy.empty()) return command.name + " is drained; safe to stop" + others + "\n";
    if (std::chrono::steady_clock::now() >= end) {
      return Fail(
          Status(Code::kDeadlineExceeded, Reason::kDeadlineExceeded,
                 command.name + " is drained, but still busy with " + busy)
              .Remedy("wait on with the same command (--wait), or `wwctl abort` the epoch"));
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
}

}  // namespace weightwire::cli
