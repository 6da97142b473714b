// What the status of a running job shows to be wrong.
#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include "client/cli/doctor.h"
#include "client/cli/table.h"

namespace weightwire::cli {
namespace {

constexpr double kHeldUpSeconds = 30;
constexpr double kClockSeconds = 5;
constexpr int kAbortsInARow = 3;

bool Ended(const v1::StatusResponse::Epoch& epoch) {
  return epoch.phase() == v1::EPOCH_PHASE_COMMITTED || epoch.phase() == v1::EPOCH_PHASE_ABORTED;
}

void CheckMembers(const v1::StatusResponse& status, Findings& out) {
  if (status.participants_size() == 0) {
    out.push_back({"members", "job " + status.job(), "no rank has registered",
                   "start trainer and engines with their agents; an agent's log says why it cannot "
                   "join"});
  }
  std::map<std::string, std::set<uint32_t>> present;
  for (const auto& p : status.participants()) {
    present[p.group()].insert(p.rank());
    if (p.has_layout()) continue;
    out.push_back(
        {"layout", p.group() + "/" + std::to_string(p.rank()),
         "has registered, but its layout was not accepted or never came",
         "see the log of pid " + std::to_string(p.pid()) + " at agent " + p.agent_name()});
  }
  for (const auto& engine : status.engines()) {
    if (engine.ranks_present() == engine.world_size()) continue;
    std::string missing;
    for (uint32_t rank = 0; rank < engine.world_size(); ++rank) {
      if (present[engine.name()].contains(rank)) continue;
      missing += (missing.empty() ? "" : ", ") + std::to_string(rank);
    }
    out.push_back({"ranks", engine.name(),
                   "serves nothing: of " + std::to_string(engine.world_size()) +
                       " ranks these are missing: " + missing,
                   "start them with this group's name and world size"});
  }
}

void CheckEngines(const v1::StatusResponse& status, Findings& out) {
  for (const auto& engine : status.engines()) {
    if (engine.drained()) {
      out.push_back({"drained", engine.name(),
                     engine.busy_with().empty()
                         ? "takes no part in new versions: it was drained, and may be stopped"
                         : "is drained, and still busy with " + engine.busy_with(0),
                     "stop it, or `wwctl drain --undo " + engine.name() + "`"});
      continue;
    }
    if (engine.ready() || engine.ranks_present() != engine.world_size()) continue;
    if (engine.last_error().empty() && engine.lag_versions() < 2) continue;
    out.push_back({"engine", engine.name(),
                   "is " + std::to_string(engine.lag_versions()) + " versions behind" +
                       (engine.last_error().empty() ? "" : ": " + engine.last_error()),
                   "mend what the error names, then `wwctl evict " + engine.name() +
                       "`: it registers again and is filled"});
  }
}

void CheckEpochs(const v1::StatusResponse& status, Findings& out) {
  int aborts = 0;
  for (const auto& epoch : status.epochs()) {
    if (!Ended(epoch)) {
      const double before = epoch.phase() == v1::EPOCH_PHASE_TRANSFERRING ? epoch.prepare_seconds()
                            : epoch.phase() == v1::EPOCH_PHASE_COMMITTING
                                ? epoch.prepare_seconds() + epoch.transfer_seconds()
                                : 0;
      if (epoch.waiting_for_size() == 0 || epoch.total_seconds() - before < kHeldUpSeconds)
        continue;
      out.push_back({"held_up", "epoch " + std::to_string(epoch.epoch()),
                     "has waited for " + SecondsText(epoch.total_seconds() - before) + " for " +
                         epoch.waiting_for(0) +
                         (epoch.waiting_for_size() == 1
                              ? ""
                              : " and " + std::to_string(epoch.waiting_for_size() - 1) + " more"),
                     "look at that process; `wwctl abort " + std::to_string(epoch.epoch()) +
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
  CheckMembers(status, out);
  CheckEngines(status, out);
  CheckEpochs(status, out);
  CheckClock(status, now_unix_seconds, out);
  return out;
}

}  // namespace weightwire::cli
