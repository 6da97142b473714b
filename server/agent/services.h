#pragma once

#include <functional>
#include <memory>

#include "server/agent/agent.h"
#include "server/agent/budget.h"
#include "server/agent/slice_cache.h"

namespace weightwire::agent {

/// What local participants share. Shared, because drains may end after the agent is gone; the hooks
/// are emptied then.
struct Services {
  Services(const Options& agent_options, Clock& agent_clock, Executor& agent_strand,
           Executor& agent_workers, control::CoordinatorPort& port, transfer::Engine& engine,
           metrics::Sink& metrics)
      : options(agent_options),
        clock(agent_clock),
        strand(agent_strand),
        workers(agent_workers),
        coordinator(port),
        transfers(engine),
        budget(Budget::Make(options.stage_bytes_max, metrics)),
        slices(port) {}

  const Options options;
  Clock& clock;
  Executor& strand;
  Executor& workers;
  control::CoordinatorPort& coordinator;
  transfer::Engine& transfers;
  std::shared_ptr<Budget> budget;
  SliceCache slices;
  uint64_t imported_regions = 0;  ///< of all participants

  std::function<void(epoch::Report)> report = [](const epoch::Report&) {};
  /// The handle is fenced: calls with it fail from now on.
  std::function<void(Handle)> fenced = [](Handle) {};
  /// The coordinator knows the participant as this member from now on.
  std::function<void(Handle, const epoch::Member&)> registered = [](Handle, const epoch::Member&) {
  };
  /// Nothing of the participant runs any more: its memory may go.
  std::function<void(Handle)> gone = [](Handle) {};
};

inline Status StaleHandle() {
  return Status(Code::kFailedPrecondition, Reason::kStaleIncarnation,
                "this process was detached or fenced")
      .Remedy("attach again with a new incarnation");
}

}  // namespace weightwire::agent
