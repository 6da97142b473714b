#pragma once

#include <CLI/CLI.hpp>
#include <functional>
#include <string>

#include "client/cli/consent.h"
#include "client/cli/doctor.h"
#include "client/cli/drain.h"
#include "client/cli/global_options.h"

namespace weightwire::cli {

/// What a person at a terminal wants besides views: top, an epoch's trace, drain, doctor,
/// completion.
class OperatorCommands {
 public:
  using Command = std::function<Result<std::string>()>;
  /// `chosen` is given what to run when `app` parses one of the commands; `done_code` is the exit
  /// code of one that did what it was asked. All four outlive this object.
  OperatorCommands(CLI::App& app, GlobalOptions& globals, Command& chosen, int& done_code);

 private:
  void AddTop(CLI::App& app);
  void AddEpoch(CLI::App& app);
  void AddDrain(CLI::App& app);
  void AddDoctor(CLI::App& app);
  void AddCompletion(CLI::App& app);

  GlobalOptions& globals_;
  Command& chosen_;
  int& done_code_;
  Consent consent_;
  uint32_t interval_ms_ = 1000;
  bool once_ = false;
  uint64_t epoch_ = 0;
  std::string trace_path_;
  DrainCommand drain_;
  DoctorRequest doctor_;
  std::string shell_;
};

}  // namespace weightwire::cli
