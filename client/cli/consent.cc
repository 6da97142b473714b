#include "client/cli/consent.h"

#include <unistd.h>

#include <cstdio>
#include <iostream>
#include <vector>

#include "client/cli/epoch_engines.h"
#include "client/cli/render.h"
#include "client/cli/table.h"

namespace weightwire::cli {
namespace {

std::string Version(uint64_t version) { return "version " + std::to_string(version); }

/// "epoch 7 (version 3, transferring; engine-a, engine-b)" and `effect`, which one that has ended
/// is spared.
std::string EpochText(const v1::StatusResponse& status, uint64_t number,
                      const std::string& effect) {
  const std::string text = "epoch " + std::to_string(number);
  for (const auto& epoch : status.epochs()) {
    if (epoch.epoch() != number) continue;
    const auto engines = EpochEngines(status).Of(epoch);
    return text + " (" + Version(epoch.version()) + ", " +
           Word(v1::EpochPhase_Name(epoch.phase()), "EPOCH_PHASE_") + "; " +
           (engines.empty() ? "no engine" : FirstOf(engines)) + ") " +
           (Ended(epoch) ? "has ended: it stays as it is" : effect);
  }
  return text + ", which the coordinator does not list, " + effect;
}

}  // namespace

void Consent::AddTo(CLI::App& command) {
  command.add_flag("-y,--yes", yes_, "Do not ask; a terminal is asked otherwise");
  command.add_flag("--dry-run", dry_run_, "Say what would be done, and do nothing");
}

Result<Consent::Answer> Consent::Ask(
    Connection& connection, const std::string& address,
    const std::function<std::string(const v1::StatusResponse&)>& effect) const {
  auto status = connection.GetStatus();
  if (!status && status.error().code() != Code::kPermissionDenied) return Fail(status.error());
  const std::string job = status ? "job " + status->job() : "the job";
  std::fprintf(stderr, "wwctl: %s at %s: %s\n", job.c_str(), address.c_str(),
               effect(status ? *status : v1::StatusResponse()).c_str());
  if (dry_run_) return Answer::kDryRun;
  if (yes_ || isatty(STDIN_FILENO) == 0 || isatty(STDERR_FILENO) == 0) return Answer::kGo;
  std::fputs("Go on? [y/N] ", stderr);
  std::string word;
  std::getline(std::cin, word);
  return word == "y" || word == "Y" || word == "yes" ? Answer::kGo : Answer::kDeclined;
}

std::string RollbackEffect(const v1::StatusResponse& status, uint64_t version) {
  uint64_t serving = 0;
  for (const auto& engine : status.engines()) serving += engine.serving_epoch() != 0 ? 1 : 0;
  const std::string from = CountText(serving, "engine") + (serving == 1 ? " goes" : " go") +
                           " from " + Version(status.committed_version());
  if (status.lineage() <= 1) return from + " back to " + Version(version);
  // Of two versions of one number the one of the later lineage.
  return from + " of lineage " + std::to_string(status.committed_lineage()) + " back to " +
         Version(version) + ", the newest of that number that they hold";
}

std::string AbortEffect(const v1::StatusResponse& status, uint64_t epoch) {
  return EpochText(status, epoch, "is aborted; its version may be tried again");
}

std::string CommitEffect(const v1::StatusResponse& status, uint64_t epoch) {
  return EpochText(status, epoch, "is committed: its engines flip");
}

std::string EvictEffect(const v1::StatusResponse& status, const std::string& group) {
  uint64_t ranks = 0;
  for (const auto& p : status.participants()) ranks += p.group() == group ? 1 : 0;
  std::string text =
      CountText(ranks, "rank") + " of " + group + (ranks == 1 ? " is" : " are") + " fenced";
  for (const auto& engine : status.engines()) {
    if (engine.name() != group || engine.serving_epoch() == 0) continue;
    text += ", which serves " + Version(engine.version()) + ": it serves nothing";
  }
  return text + " until its processes register again";
}

std::string DrainEffect(const v1::StatusResponse& status, const std::string& name, bool undo) {
  std::vector<std::string> engines;
  for (const auto& p : status.participants()) {
    if (p.role() != v1::GROUP_ROLE_ENGINE || (p.group() != name && p.agent_name() != name))
      continue;
    if (engines.empty() || engines.back() != p.group()) engines.push_back(p.group());
  }
  return (engines.empty() ? "no engine is " + name + " or at it; it" : FirstOf(engines)) +
         (undo ? " takes part in new versions again"
               : " takes no part in new versions, and serves on");
}

}  // namespace weightwire::cli
