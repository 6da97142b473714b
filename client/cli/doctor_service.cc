// What the status of a running job shows to be wrong.
#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "client/cli/doctor.h"
#include "client/cli/render.h"
#include "client/cli/table.h"
#include "server/coordinator/waiting_words.h"

namespace weightwire::cli {
namespace {

constexpr double kHeldUpSeconds = 30;     ///< where bytes move, or a person decides
constexpr double kUnansweredSeconds = 2;  ///< where one process is asked and should answer
constexpr double kClockSeconds = 5;
constexpr int kAbortsInARow = 3;

using Participant = v1::StatusResponse::Participant;

std::string NameOf(const Participant& p) { return p.group() + "/" + std::to_string(p.rank()); }

/// "0, 2, 5-9"; `present` are below `world_size`.
/// "rank 0 is missing (1 rank expected)", "ranks 1-3, 7 are missing (8 ranks expected)".
std::string MissingText(const std::set<uint32_t>& present, uint32_t world_size) {
  std::vector<std::string> runs;
  for (uint32_t rank = 0; rank < world_size; ++rank) {
    if (present.contains(rank)) continue;
    const uint32_t first = rank;
    while (rank + 1 < world_size && !present.contains(rank + 1)) ++rank;
    runs.push_back(first == rank ? std::to_string(first)
                                 : std::to_string(first) + "-" + std::to_string(rank));
  }
  const size_t missing = world_size - std::min<size_t>(world_size, present.size());
  return (missing == 1 ? "rank " : "ranks ") + FirstOf(runs, 20) +
         (missing == 1 ? " is missing (" : " are missing (") + CountText(world_size, "rank") +
         " expected)";
}

/// Agents that have not been heard of for a while: each with the ranks that are behind it.
void CheckSilence(const v1::StatusResponse& status, Findings& out) {
  std::map<std::string, std::vector<const Participant*>> silent;
  for (const Participant& p : status.participants()) {
    if (p.silent_seconds() > 0) silent[p.agent_name()].push_back(&p);
  }
  for (const auto& [agent, ranks] : silent) {
    std::vector<std::string> names;
    for (const Participant* p : ranks) names.push_back(NameOf(*p));
    out.push_back({"silent", agent,
                   "this agent has said nothing for " +
                       SecondsText(ranks.front()->silent_seconds()) +
                       "; behind it: " + FirstOf(names),
                   "see whether its process is stopped or starved, or the network between it and "
                   "the coordinator is cut"});
  }
}

/// What agents see of processes of their hosts.
void CheckProcesses(const v1::StatusResponse& status, Findings& out) {
  for (const auto& trouble : status.troubles()) {
    out.push_back({"process", trouble.where(),
                   trouble.what() + " (agent " + trouble.agent_name() + ")", trouble.remedy()});
  }
}

void CheckMembers(const v1::StatusResponse& status, Findings& out) {
  if (status.participants().empty()) {
    out.push_back({"members", "job " + status.job(), "no rank has registered",
                   "start trainer and engines with their agents; an agent's log says why it cannot "
                   "join"});
  }
  std::map<std::string, std::set<uint32_t>> present;
  std::map<std::string, uint32_t> trainers;  // their world sizes
  for (const Participant& p : status.participants()) {
    present[p.group()].insert(p.rank());
    if (p.role() == v1::GROUP_ROLE_TRAINER) trainers[p.group()] = p.world_size();
    if (p.has_layout()) continue;
    out.push_back(
        {"layout", NameOf(p), "has registered, but its layout was not accepted or never came",
         "see the log of pid " + std::to_string(p.pid()) + " at agent " + p.agent_name()});
  }
  for (const auto& [name, world_size] : trainers) {
    if (present[name].size() == world_size) continue;
    out.push_back({"trainer", name, "publishes nothing: " + MissingText(present[name], world_size),
                   "start them with this group's name and world size"});
  }
  for (const auto& engine : status.engines()) {
    if (engine.ranks_present() == engine.world_size()) continue;
    out.push_back(
        {"ranks", engine.name(),
         "serves nothing: " + MissingText(present[engine.name()], engine.world_size()) +
             (engine.last_error().empty() ? "" : "; the last one: " + engine.last_error()),
         "start them with this group's name and world size"});
  }
}

void CheckEngines(const v1::StatusResponse& status, Findings& out) {
  for (const auto& engine : status.engines()) {
    if (engine.drained()) {
      out.push_back({"drained", engine.name(),
                     engine.busy_with().empty()
                         ? "takes no part in new versions: it is drained; safe to stop"
                         : "is drained, and still busy with " + engine.busy_with(0),
                     "stop it, or `wwctl drain --undo " + engine.name() + "`"});
      continue;
    }
    if (engine.ready() || engine.ranks_present() != engine.world_size()) continue;
    if (engine.last_error().empty() && engine.lag_versions() < 2) continue;
    out.push_back({"engine", engine.name(),
                   "is " + std::to_string(engine.lag_versions()) + " versions behind" +
                       (engine.last_error().empty() ? "" : ": " + engine.last_error()),
                   "fix what the error names, then `wwctl evict " + engine.name() +
                       "`: it rejoins and is brought up to date by a peer"});
  }
}

/// A version that no epoch has begun for yet: its trainer ranks have not all published it.
void CheckPublish(const v1::StatusResponse& status, Findings& out) {
  const bool runs = std::ranges::any_of(status.epochs(), [](const auto& e) { return !Ended(e); });
  if (runs || status.waiting_for().empty() || status.waiting_seconds() < kUnansweredSeconds) return;
  out.push_back({"held_up", "job " + status.job(),
                 "has waited for " + SecondsText(status.waiting_seconds()) + " for " +
                     coordinator::WaitingInWords(status.waiting_for()),
                 "look at that process: is it stopped, or does it publish another version?"});
}

void CheckEpochs(const v1::StatusResponse& status, Findings& out) {
  int aborts = 0;
  for (const auto& epoch : status.epochs()) {
    if (!Ended(epoch)) {
      const bool flips = epoch.phase() == v1::EPOCH_PHASE_COMMITTING;
      const double before = epoch.phase() == v1::EPOCH_PHASE_TRANSFERRING ? epoch.prepare_seconds()
                            : flips ? epoch.total_seconds() - epoch.commit_seconds()
                                    : 0;
      const double seconds = epoch.total_seconds() - before;
      if (epoch.waiting_for_size() == 0 || seconds < (flips ? kUnansweredSeconds : kHeldUpSeconds))
        continue;
      out.push_back(
          {flips ? "flip" : "held_up", "epoch " + std::to_string(epoch.epoch()),
           "has waited for " + SecondsText(seconds) + " for " +
               coordinator::WaitingInWords(
                   FirstOf(epoch.waiting_for(), 3, epoch.waiting_for_left())),
           flips ? "those engines were offered version " + std::to_string(epoch.version()) +
                       " and have not acknowledged it: look at their processes; `wwctl evict "
                       "GROUP` leaves an engine out"
                 : "look at that process; `wwctl abort " + std::to_string(epoch.epoch()) +
                       "` ends the attempt, `wwctl evict GROUP` leaves an engine out"});
    } else if (aborts >= 0 && aborts < kAbortsInARow) {
      const bool aborted = epoch.phase() == v1::EPOCH_PHASE_ABORTED;
      aborts = aborted ? aborts + 1 : -1;
      if (aborts == kAbortsInARow) {
        out.push_back({"aborts", "epoch " + std::to_string(epoch.epoch()) + " and later",
                       "the last " + std::to_string(kAbortsInARow) +
                           " epochs aborted: " + epoch.why().message(),
                       epoch.why().detail().remedy().empty() ? "`wwctl epochs` has every reason"
                                                             : epoch.why().detail().remedy()});
      }
    }
  }
}

/// An epoch in progress tells the coordinator's time; a commit in the future is wrong, too.
void CheckClock(const v1::StatusResponse& status, double now, Findings& out) {
  double ahead = std::max(0.0, status.committed_unix_seconds() - now);
  for (const auto& epoch : status.epochs()) {
    if (!Ended(epoch)) ahead = epoch.started_unix_seconds() + epoch.total_seconds() - now;
  }
  if (std::abs(ahead) < kClockSeconds) return;
  out.push_back({"clock", "coordinator",
                 "its clock is " + SecondsText(std::abs(ahead)) +
                     (ahead > 0 ? " ahead of" : " behind") + " this host's",
                 "run a time service (chrony) on both: logs and certificates are compared by it"});
}

}  // namespace

Findings CheckService(const v1::StatusResponse& status, double now_unix_seconds) {
  Findings out;
  if (!status.deciding()) {
    out.push_back({"journal", "coordinator", "decides nothing any more: " + status.waiting_for(),
                   "make its state_dir (or etcd) writable again, then restart it"});
  } else if (!status.journal().empty()) {
    out.push_back({"journal", "coordinator", "its journal " + status.journal(),
                   "give it space again; decisions that were lost are restored from what engines "
                   "serve: find out who put it back or deleted records"});
  }
  CheckSilence(status, out);
  CheckProcesses(status, out);
  CheckMembers(status, out);
  CheckPublish(status, out);
  CheckEngines(status, out);
  CheckEpochs(status, out);
  CheckClock(status, now_unix_seconds, out);
  return out;
}

}  // namespace weightwire::cli
