#include "server/daemon/pages.h"

#include <spdlog/fmt/fmt.h>

#include <algorithm>
#include <iterator>

#include "server/base/bytes_text.h"
#include "server/coordinator/waiting_words.h"

namespace weightwire::daemon {
namespace {

template <typename... Arguments>
void Line(std::string& out, fmt::format_string<Arguments...> format, Arguments&&... arguments) {
  fmt::format_to(std::back_inserter(out), format, std::forward<Arguments>(arguments)...);
  out.push_back('\n');
}

std::string Count(uint64_t count, std::string_view noun) {
  return fmt::format("{} {}{}", count, noun, count == 1 ? "" : "s");
}

/// What `wwctl status` begins with, without names.
std::string WaitingLine(const coordinator::StatusSnapshot& snapshot) {
  if (!snapshot.waiting_for.empty()) {
    return "waiting for: " + coordinator::WaitingInWords(snapshot.waiting_for);
  }
  if (snapshot.engines.empty()) return "idle: no engine is registered";
  const uint64_t version = snapshot.committed_version.value;
  if (version == 0) return "idle: nothing was published yet";
  const auto without = std::ranges::count_if(
      snapshot.engines, [](const auto& engine) { return !engine.ready && !engine.drained; });
  if (without == 0) return fmt::format("idle: all engines serve version {}", version);
  return fmt::format("idle, but {} of {} not ready for version {}",
                     Count(static_cast<uint64_t>(without), "engine"), snapshot.engines.size(),
                     version);
}

}  // namespace

std::string CoordinatorPage(const coordinator::StatusSnapshot& snapshot) {
  std::string out;
  Line(out, "{}", WaitingLine(snapshot));
  const bool none = snapshot.committed_version.value == 0;
  Line(out, "job {}: {}; {}, {}", snapshot.job,
       none ? "nothing committed yet"
            : fmt::format("version {} committed in epoch {}", snapshot.committed_version.value,
                          snapshot.committed.value),
       Count(snapshot.agents, "agent"), Count(snapshot.participants_total, "rank"));
  if (!snapshot.journal.empty()) Line(out, "JOURNAL: it {}", snapshot.journal);
  if (!snapshot.deciding) Line(out, "NOT DECIDING: the journal failed; restart this process");
  Line(out, "\n{:<24} {:<25} {:>8} {:>8} {:>6} {:<5} {:>7}  {}", "ENGINE", "STATE", "VERSION",
       "EPOCH", "LAG", "READY", "RANKS", "LAST ERROR");
  for (const auto& engine : snapshot.engines) {
    Line(out, "{:<24} {:<25} {:>8} {:>8} {:>6} {:<5} {:>3}/{:<3}  {}", engine.name,
         std::string(coordinator::StateInWords(coordinator::EngineStateName(engine.state))) +
             (engine.drained ? ", drained" : ""),
         engine.version.value, engine.serving.value, engine.lag.value, engine.ready ? "yes" : "no",
         engine.ranks_present, engine.world_size, engine.last_error);
  }
  Line(out, "\n{:>8} {:<8} {:>8} {:<12} {:>7} {:>10} {:>10}  {}", "EPOCH", "KIND", "VERSION",
       "PHASE", "ATTEMPT", "BYTES", "SECONDS", "WHY");
  for (const auto& epoch : snapshot.epochs) {
    Line(out, "{:>8} {:<8} {:>8} {:<12} {:>7} {:>10} {:>10.3f}  {}", epoch.epoch.value,
         coordinator::KindInWords(epoch.kind), epoch.version.value, epoch::PhaseName(epoch.phase),
         epoch.attempt, BytesText(epoch.bytes), epoch.total_seconds,
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
  Line(out, "\n{:<24} {:>5} {:<14} {:>8} {:>8} {:>14} {:>14}", "GROUP", "RANK", "PHASE", "EPOCH",
       "SERVING", "BYTES DONE", "OF");
  for (const auto& local : locals) {
    Line(out, "{:<24} {:>5} {:<14} {:>8} {:>8} {:>14} {:>14}", local.group, local.rank, local.phase,
         local.epoch.value, local.serving.value, local.bytes_done, local.bytes_total);
  }
  return out;
}

}  // namespace weightwire::daemon
