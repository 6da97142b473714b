#include "client/cli/operator_commands.h"

#include "client/cli/completion.h"
#include "client/cli/exit_codes.h"
#include "client/cli/top.h"

namespace weightwire::cli {

OperatorCommands::OperatorCommands(CLI::App& app, Command& chosen, int& done_code)
    : chosen_(chosen), done_code_(done_code) {
  AddTop(app);
  AddDoctor(app);
  AddCompletion(app);
}

void OperatorCommands::AddTop(CLI::App& app) {
  CLI::App* command = app.add_subcommand(
      "top", "The job, drawn again and again; ends with Ctrl-C. Once where there is no terminal");
  command->callback([this] {
    chosen_ = [this]() -> Result<std::string> {
      WW_FAIL_IF_ERROR(RunTop(connection_.Connect(), interval_ms_, once_));
      return std::string();
    };
  });
  connection_.AddTo(*command);
  command->add_flag("--once", once_, "One picture");
  command->add_option("--interval-ms", interval_ms_, "Time between two pictures")
      ->check(CLI::Range(100, 3'600'000))
      ->capture_default_str();
}

void OperatorCommands::AddDoctor(CLI::App& app) {
  CLI::App* command =
      app.add_subcommand("doctor",
                         "What is wrong with a job, this host or configurations, and how "
                         "to mend it; changes nothing");
  connection_.AddTo(*command);
  command->callback([this, command] {
    doctor_.address_set = command->get_option("--address")->count() > 0;
    chosen_ = [this]() -> Result<std::string> {
      doctor_.address = connection_.address;
      doctor_.timeout_seconds = connection_.timeout_seconds;
      doctor_.files = connection_.files;
      const Findings findings = Diagnose(doctor_);
      if (!findings.empty()) done_code_ = kExitFound;
      return doctor_.json ? FindingsJson(findings) : FindingsText(findings);
    };
  });
  command->add_option("--config", doctor_.config_paths,
                      "Configuration of weightwired, to be checked on this host before its start; "
                      "several are checked against each other, too");
  command->add_flag("--json", doctor_.json, "For machines");
}

void OperatorCommands::AddCompletion(CLI::App& app) {
  CLI::App* command = app.add_subcommand("completion",
                                         "A script that completes wwctl's commands and options: "
                                         "source <(wwctl completion bash)");
  command->callback([this, &app] {
    chosen_ = [this, &app]() -> Result<std::string> { return CompletionScript(app, shell_); };
  });
  command->add_option("shell", shell_)->required()->check(CLI::IsMember({"bash", "zsh"}));
}

}  // namespace weightwire::cli
