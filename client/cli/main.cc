#include <CLI/CLI.hpp>
#include <cstdio>
#include <functional>
#include <string>

#include "client/cli/checkpoint_commands.h"
#include "client/cli/connection_options.h"
#include "client/cli/exit_codes.h"
#include "client/cli/offline_commands.h"
#include "client/cli/operator_commands.h"
#include "client/cli/render.h"
#include "client/cli/token_command.h"
#include "server/tls/credentials.h"

// wwctl: what a person or a script asks of a running weightwired, and plans without one.
namespace weightwire::cli {
namespace {

constexpr const char* kFooter =
    "Exit codes: 0 done; 1 `doctor` found something; 2 wrong usage; 64 + N the service refused or "
    "failed with Reason N (proto/weightwire/v1/types.proto), e.g. 82 stale_version, 92 "
    "digest_mismatch: what engines "
    "serve differs, 93 transport_failed. convert, load, push and save: 1 refused or failed, "
    "130 interrupted.";

/// What a command prints, or why it could not.
using Answer = Result<std::string>;

int Print(const Answer& answer, int done_code) {
  if (answer.has_value()) {
    std::fputs(answer->c_str(), stdout);
    return done_code;
  }
  std::fprintf(stderr, "wwctl: %s\n", answer.error().ToString().c_str());
  return ExitCode(answer.error().reason());
}

using Render = std::string (*)(const v1::StatusResponse&);

class Program {
 public:
  Program() : app_("Asks a running weightwired, and plans offline.", "wwctl") {
    app_.require_subcommand(1);
    app_.footer(kFooter);
    app_.set_version_flag("--version", "wwctl 0.1.0 (protocol 1)");
    AddView("status", "What everyone waits for, engines and the newest epochs", StatusText,
            StatusJson);
    AddView("participants", "Every rank, its agent and its layout", ParticipantsText,
            ParticipantsJson);
    AddView("engines", "Every engine, what it serves and how far behind it is", EnginesText,
            EnginesJson);
    AddView("epochs", "Epochs, newest first", EpochsText, EpochsJson);
    AddWatch();
    AddExplain();
    AddVerify();
    AddControls();
  }

  int Run(int argc, char** argv) {
    try {
      app_.parse(checkpoints_.TakeArguments(argc, argv), argv);
    } catch (const CLI::ParseError& error) {
      return app_.exit(error) == 0 ? 0 : kExitUsage;
    }
    const Answer answer = run_();
    return Print(answer, done_code_);
  }

 private:
  CLI::App* Command(const std::string& name, const std::string& about,
                    std::function<Answer()> run) {
    CLI::App* command = app_.add_subcommand(name, about);
    command->callback([this, run = std::move(run)] { run_ = run; });
    return command;
  }

  CLI::App* Online(const std::string& name, const std::string& about, std::function<Answer()> run) {
    CLI::App* command = Command(name, about, std::move(run));
    connection_.AddTo(*command);
    return command;
  }

  void AddView(const std::string& name, const std::string& about, Render text, Render json) {
    CLI::App* command = Online(name, about, [this, text, json]() -> Answer {
      WW_ASSIGN(const v1::StatusResponse status, Connect().GetStatus());
      return json_ ? json(status) : text(status);
    });
    command->add_flag("--json", json_, "For machines");
  }

  void AddWatch() {
    CLI::App* command = Online(
        "watch", "The status, again after every change; ends with Ctrl-C", [this]() -> Answer {
          WW_FAIL_IF_ERROR(Connect().Watch(interval_ms_, [this](const v1::StatusResponse& status) {
            const std::string text = json_ ? StatusJson(status) : StatusText(status) + "---\n";
            return std::fputs(text.c_str(), stdout) >= 0 && std::fflush(stdout) == 0;
          }));
          return std::string();
        });
    command->add_flag("--json", json_, "One JSON object a line");
    command->add_option("--interval-ms", interval_ms_, "At most one update in this time")
        ->capture_default_str();
  }

  void AddExplain() {
    CLI::App* command = Online("explain", "Who sends what to whom in the newest epoch",
                               [this] { return Connect().Explain(name_, tensor_); });
    command->add_option("engine", name_, "Only this engine");
    command->add_option("--tensor", tensor_, "Every copy of this Hugging Face tensor");
  }

  void AddVerify() {
    CLI::App* command =
        Online("verify", "Sum what engines serve, in every rank, and compare", [this]() -> Answer {
          WW_ASSIGN(const v1::VerifyResponse result, Connect().Verify(name_));
          const std::string text = json_ ? VerifyJson(result) : VerifyText(result);
          if (std::fputs(text.c_str(), stdout) < 0) {
            return Fail(Code::kUnavailable, Reason::kIoError, "standard output is closed");
          }
          WW_FAIL_IF_ERROR(VerifyOutcome(result));
          return std::string();
        });
    command->add_option("--group", name_,
                        "Only this engine: its replicas, and what was found before");
    command->add_flag("--json", json_, "For machines");
  }

  void AddControls() {
    CLI::App* abort = Online("abort", "Abort an epoch that is not decided yet", [this] {
      return Said(Connect().Abort(epoch_, why_),
                  "epoch " + std::to_string(epoch_) + " is aborting");
    });
    abort->add_option("epoch", epoch_)->required();
    abort->add_option("--why", why_, "For the record")->capture_default_str();
    CLI::App* commit = Online("commit", "Commit a staged epoch of a manual publish", [this] {
      return Said(Connect().Commit(epoch_), "epoch " + std::to_string(epoch_) + " is committing");
    });
    commit->add_option("epoch", epoch_)->required();
    CLI::App* rollback =
        Online("rollback", "Serve again a version that engines still hold", [this]() -> Answer {
          WW_ASSIGN(const v1::RollbackResponse result, Connect().Rollback(version_));
          return RollbackText(result);
        });
    rollback->add_option("version", version_)->required();
    CLI::App* evict = Online("evict", "Fence a group; its processes must register again", [this] {
      return Said(Connect().Evict(name_, why_), name_ + " is fenced");
    });
    evict->add_option("group", name_)->required();
    evict->add_option("--why", why_, "For the record")->capture_default_str();
  }

  static Answer Said(const Status& status, const std::string& done) {
    WW_FAIL_IF_ERROR(status);
    return done + "\n";
  }

  Connection Connect() const { return connection_.Connect(); }

  CLI::App app_;
  ConnectionOptions connection_;
  bool json_ = false;
  uint32_t interval_ms_ = 500;
  std::string name_;
  std::string tensor_;
  uint64_t epoch_ = 0;
  uint64_t version_ = 0;
  std::string why_ = "asked for by an operator";
  std::function<Answer()> run_;
  int done_code_ = 0;  ///< of a command that did what it was asked
  OperatorCommands operator_{app_, run_, done_code_};
  OfflineCommands offline_{app_, run_};
  TokenCommand token_{app_, run_};
  CheckpointCommands checkpoints_{app_, run_};
};

}  // namespace
}  // namespace weightwire::cli

int main(int argc, char** argv) {
  weightwire::tls::UseSystemResolver();
  return weightwire::cli::Program().Run(argc, argv);
}
