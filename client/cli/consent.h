#pragma once

#include <CLI/CLI.hpp>
#include <functional>
#include <string>

#include "client/cli/global_options.h"

namespace weightwire::cli {

constexpr const char* kNothingDone = "nothing was done\n";

/// --yes and --dry-run of the commands that change a running job. Each says on stderr which job it
/// changes, at which address, and how. At a terminal it asks first; a script is not asked.
class Consent {
 public:
  enum class Answer { kGo, kDryRun, kDeclined };
  void AddTo(CLI::App& command);
  /// `effect`: what the command will do, given the job's status. Errors: GetStatus's; who may not
  /// read the status is told the address alone.
  Result<Answer> Ask(Connection& connection, const std::string& address,
                     const std::function<std::string(const v1::StatusResponse&)>& effect) const;

 private:
  bool yes_ = false;
  bool dry_run_ = false;
};

// What a command will do to a job, in one line.
std::string RollbackEffect(const v1::StatusResponse& status, uint64_t version);
std::string AbortEffect(const v1::StatusResponse& status, uint64_t epoch);
std::string CommitEffect(const v1::StatusResponse& status, uint64_t epoch);
std::string EvictEffect(const v1::StatusResponse& status, const std::string& group);
std::string DrainEffect(const v1::StatusResponse& status, const std::string& name, bool undo);

}  // namespace weightwire::cli
