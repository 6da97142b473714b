#pragma once

#include <CLI/CLI.hpp>
#include <functional>
#include <string>

#include "client/cli/global_options.h"
#include "client/cli/layout_tool.h"
#include "client/cli/offline_plan.h"
#include "client/cli/simulate_tool.h"

namespace weightwire::cli {

/// The commands that need no running service: plan, simulate, layout show | diff | lint.
class OfflineCommands {
 public:
  using Command = std::function<Result<std::string>()>;
  /// `chosen` is given what to run when `app` parses one of the commands. All outlive this object.
  OfflineCommands(CLI::App& app, GlobalOptions& globals, Command& chosen);

 private:
  void AddPlan(CLI::App& app);
  void AddSimulate(CLI::App& app);
  void AddLayout(CLI::App& app);
  CLI::App* AddLayoutCommand(CLI::App& layout, const std::string& name, const std::string& about,
                             Result<std::string> (*run)(const LayoutRequest&));

  GlobalOptions& globals_;
  Command& chosen_;
  OfflinePlan plan_;
  std::string per_ = "class";
  SimulateRequest simulate_;
  LayoutRequest layout_;
};

}  // namespace weightwire::cli
