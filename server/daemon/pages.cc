#include "server/daemon/pages.h"

#include <spdlog/fmt/fmt.h>

#include <algorithm>
#include <iterator>

namespace weightwire::daemon {
namespace {

template <typename... Arguments>
void Line(std::string& out, fmt::format_string<Arguments...> format, Arguments&&... arguments) {
  fmt::format_to(std::back_inserter(out), format, std::forward<Arguments>(arguments)...);
  out.push_back('\n');
}

}  // namespace

std::string CoordinatorPage(const coordinator::StatusSnapshot& snapshot) {
  std::string out;
  Line(out, "job {}: epoch {} committed (version {}), {} agents, {} participants", snapshot.job,
       snapshot.committed.value, snapshot.committed_version.value, snapshot.agents,
       snapshot.participants_total);
  if (snapshot.waiting_for.empty()) {
    Line(out, "idle: nothing is waited for");
  } else {
    Line(out, "waiting for: {}", snapshot.waiting_for);
  }
  if (!snapshot.journal.empty()) Line(out, "JOURNAL: it {}", snapshot.journal);
  if (!snapshot.deciding) Line(out, "NOT DECIDING: the journal failed; restart this process");
  Line(out, "\n{:<24} {:<12} {:>8} {:>8} {:>6} {:>7}  {}", "engine", "state", "epoch", "version",
       "lag", "ranks", "last error");
  for (const auto& engine : snapshot.engines) {
    Line(out, "{:<24} {:<12} {:>8} {:>8} {:>6} {:>3}/{:<3}  {}", engine.name,
         std::string(coordinator::EngineStateName(engine.state)) +
             (engine.drained ? " (drained)" : ""),
         engine.serving.value, engine.version.value, engine.lag.value, engine.ranks_present,
         engine.world_size, engine.last_error);
  }
  Line(out, "\n{:>8} {:>8} {:<12} {:>10} {:>14}  {}", "epoch", "version", "phase", "seconds",
       "bytes", "why");
  for (const auto& epoch : snapshot.epochs) {
    Line(out, "{:>8} {:>8} {:<12} {:>10.3f} {:>14}  {}", epoch.epoch.value, epoch.version.value,
         epoch::PhaseName(epoch.phase), epoch.total_seconds, epoch.bytes,
         epoch.why.ok() ? "" : epoch.why.ToString());
  }
  return out;
}

std::string AgentPage(const Status& session,
                      const std::vector<std::unique_ptr<transport::Transport>>& transports,
                      const std::vector<agent::LocalStatus>& locals) {
  std::string out;
  Line(out, "session with the coordinator: {}", session.ToString());
  for (const auto& transport : transports) {
    const std::string choices = transport->choices();
    Line(out, "transport {} at {}{}{}", transport->name(), transport->address(),
         choices.empty() ? "" : ": ", choices);
  }
  Line(out, "\n{:<24} {:>5} {:<14} {:>8} {:>8} {:>14} {:>14}", "group", "rank", "phase", "epoch",
       "serving", "bytes done", "of");
  for (const auto& local : locals) {
    Line(out, "{:<24} {:>5} {:<14} {:>8} {:>8} {:>14} {:>14}", local.group, local.rank, local.phase,
         local.epoch.value, local.serving.value, local.bytes_done, local.bytes_total);
  }
  return out;
}

}  // namespace weightwire::daemon
