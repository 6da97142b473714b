#pragma once

#include <CLI/CLI.hpp>
#include <functional>
#include <string>
#include <vector>

#include "server/base/status.h"

namespace weightwire::cli {

/// convert, load, push, save: what `python -m weightwire.checkpoint` does, under wwctl's name; and
/// store: what `python -m weightwire.store` does.
///
/// The process becomes that Python: signals, terminal and exit code are its own. It is
/// $WEIGHTWIRE_PYTHON, or the python3 on PATH, and plans with this very wwctl unless
/// $WEIGHTWIRE_BIN_DIR names another one's folder.
class CheckpointCommands {
 public:
  using Command = std::function<Result<std::string>()>;
  /// `chosen` is given what to run when `app` parses one of the commands. Both outlive this object.
  CheckpointCommands(CLI::App& app, Command& chosen);

  /// How many of the arguments `app` should parse: what follows one of these commands is not
  /// wwctl's to understand, and is kept, --help included. So are wwctl's own options before it:
  /// Python knows --address as --coordinator.
  int TakeArguments(int argc, char** argv);

 private:
  CLI::App& app_;
  std::vector<std::string> names_;
  std::vector<std::string> arguments_;
};

}  // namespace weightwire::cli
