#include "client/cli/operator_commands.h"

#include "client/cli/completion.h"
#include "client/cli/epoch_trace.h"
#include "client/cli/exit_codes.h"
#include "client/cli/top.h"
#include "client/cli/trace_file.h"
#include "server/wire/json.h"

namespace weightwire::cli {

OperatorCommands::OperatorCommands(CLI::App& app, GlobalOptions& globals, Command& chosen,
                                   int& done_code)
    : globals_(globals), chosen_(chosen), done_code_(done_code) {
  AddTop(app);
  AddEpoch(app);
  AddDrain(app);
  AddDoctor(app);
  AddCompletion(app);
}

void OperatorCommands::AddTop(CLI::App& app) {
  CLI::App* command = app.add_subcommand(
      "top", "Live view of the job; ends with Ctrl-C. Once where there is no terminal");
  command->callback([this] {
    chosen_ = [this]() -> Result<std::string> {
      WW_FAIL_IF_ERROR(RunTop(globals_.Connect(), interval_ms_, once_, globals_.output()));
      return std::string();
    };
  });
  globals_.Allow(*command, GlobalOptions::kOnline | GlobalOptions::kWide);
  command->add_flag("--once", once_, "One picture");
  command->add_option("--interval-ms", interval_ms_, "Time between two pictures")
      ->transform(Whole(100, 3'600'000))
      ->capture_default_str();
}

void OperatorCommands::AddEpoch(CLI::App& app) {
  CLI::App* command = app.add_subcommand(
      "epoch", "One epoch's trace: its phases, who was waited for, who was left out, what failed");
  globals_.Allow(*command, GlobalOptions::kOnline | GlobalOptions::kJson);
  command->callback([this] {
    chosen_ = [this]() -> Result<std::string> {
      Connection connection = globals_.Connect();
      WW_ASSIGN(const v1::DescribeEpochResponse trace, connection.DescribeEpoch(epoch_));
      if (!trace_path_.empty()) {
        WW_FAIL_IF_ERROR(WriteTrace(trace, trace_path_));
        return "epoch " + std::to_string(trace.epoch().epoch()) + " is in " + trace_path_ +
               ": open it at https://ui.perfetto.dev or in chrome://tracing\n";
      }
      if (globals_.json()) return wire::JsonText(trace) + "\n";
      WW_ASSIGN(const v1::StatusResponse status, connection.GetStatus({.participants = false}));
      return EpochTraceText(trace, status);
    };
  });
  command->add_option("epoch", epoch_, "Its number; without: the newest")
      ->transform(Whole(1, UINT64_MAX));
  command->add_option("--trace", trace_path_,
                      "Write it to this file as a trace for Perfetto and chrome://tracing");
}

void OperatorCommands::AddDrain(CLI::App& app) {
  CLI::App* command = app.add_subcommand(
      "drain",
      "Let an engine, or all engines of an agent, finish and take no part in new versions");
  globals_.Allow(*command, GlobalOptions::kOnline);
  consent_.AddTo(*command);
  command->callback([this] {
    chosen_ = [this]() -> Result<std::string> {
      Connection connection = globals_.Connect();
      WW_ASSIGN(const Consent::Answer answer,
                consent_.Ask(connection, globals_.address(), [this](const auto& status) {
                  return DrainEffect(status, drain_.name, drain_.undo);
                }));
      if (answer == Consent::Answer::kGo) return RunDrain(std::move(connection), drain_);
      if (answer == Consent::Answer::kDeclined) done_code_ = kExitDeclined;
      return std::string(kNothingDone);
    };
  });
  command->add_option("name", drain_.name, "An engine, or an agent")->required();
  command->add_flag("--undo", drain_.undo, "Take part again");
  command
      ->add_option("--wait", drain_.wait_seconds,
                   "Seconds until it must be busy with nothing any more")
      ->check(Real(0, 604'800))
      ->capture_default_str();
}

void OperatorCommands::AddDoctor(CLI::App& app) {
  CLI::App* command =
      app.add_subcommand("doctor",
                         "What is wrong with a job, this host or configurations, and how "
                         "to fix it; changes nothing");
  globals_.Allow(*command, GlobalOptions::kOnline | GlobalOptions::kJson | GlobalOptions::kWide);
  command->callback([this] {
    chosen_ = [this]() -> Result<std::string> {
      doctor_.address_set = globals_.address_given();
      doctor_.address = globals_.address();
      if (globals_.timeout_given()) doctor_.timeout_seconds = globals_.timeout_seconds();
      doctor_.files = globals_.files();
      const Findings findings = Diagnose(doctor_);
      if (!findings.empty()) done_code_ = kExitFound;
      return globals_.json() ? FindingsJson(findings)
                             : FindingsText(findings, globals_.output() == Output::kWide);
    };
  });
  command->add_option("--config", doctor_.config_paths,
                      "Configuration of weightwired, to be checked on this host before its start; "
                      "several are checked against each other, too");
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
