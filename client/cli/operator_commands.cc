#include "client/cli/operator_commands.h"

#include "client/cli/completion.h"
#include "client/cli/epoch_story.h"
#include "client/cli/exit_codes.h"
#include "client/cli/top.h"
#include "client/cli/trace_file.h"
#include "server/wire/json.h"

namespace weightwire::cli {

OperatorCommands::OperatorCommands(CLI::App& app, Command& chosen, int& done_code)
    : chosen_(chosen), done_code_(done_code) {
  AddTop(app);
  AddEpoch(app);
  AddDrain(app);
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

void OperatorCommands::AddEpoch(CLI::App& app) {
  CLI::App* command = app.add_subcommand(
      "epoch", "One epoch's story: its phases, who was waited for, who was left out, what failed");
  connection_.AddTo(*command);
  command->callback([this] {
    chosen_ = [this]() -> Result<std::string> {
      Connection connection = connection_.Connect();
      WW_ASSIGN(const v1::DescribeEpochResponse story, connection.DescribeEpoch(epoch_));
      if (!trace_path_.empty()) {
        WW_FAIL_IF_ERROR(WriteTrace(story, trace_path_));
        return "epoch " + std::to_string(story.epoch().epoch()) + " is in " + trace_path_ +
               ": open it at https://ui.perfetto.dev or in chrome://tracing\n";
      }
      if (json_) return wire::JsonText(story) + "\n";
      WW_ASSIGN(const v1::StatusResponse status, connection.GetStatus());
      return EpochStoryText(story, status);
    };
  });
  command->add_option("epoch", epoch_, "Its number; without: the newest");
  CLI::Option* trace = command->add_option(
      "--trace", trace_path_, "Write it to this file as a trace for Perfetto and chrome://tracing");
  command->add_flag("--json", json_, "For machines")->excludes(trace);
}

void OperatorCommands::AddDrain(CLI::App& app) {
  CLI::App* command = app.add_subcommand(
      "drain",
      "Let an engine, or all engines of an agent, finish and take no part in new versions");
  connection_.AddTo(*command);
  command->callback(
      [this] { chosen_ = [this] { return RunDrain(connection_.Connect(), drain_); }; });
  command->add_option("name", drain_.name, "An engine, or an agent")->required();
  command->add_flag("--undo", drain_.undo, "Take part again");
  command
      ->add_option("--wait", drain_.wait_seconds,
                   "Seconds until it must be busy with nothing any more")
      ->check(CLI::NonNegativeNumber)
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
