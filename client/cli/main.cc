#include <sys/ioctl.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <functional>
#include <optional>
#include <string>

#include "client/cli/checkpoint_commands.h"
#include "client/cli/consent.h"
#include "client/cli/exit_codes.h"
#include "client/cli/global_options.h"
#include "client/cli/offline_commands.h"
#include "client/cli/operator_commands.h"
#include "client/cli/render.h"
#include "client/cli/suggestion.h"
#include "client/cli/token_command.h"
#include "server/tls/credentials.h"

// wwctl: what a person or a script asks of a running weightwired, and plans without one.
namespace weightwire::cli {
namespace {

constexpr const char* kFooter =
    "Every command takes the options above, before or after its name. A flag beats the "
    "environment.\n"
    "Exit codes: 0 done; 1 `doctor` found something; 2 wrong usage; 3 not confirmed at the "
    "terminal; 64 + N the service refused or "
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

using Render = std::string (*)(const v1::StatusResponse&, const View&);
using RenderJson = std::string (*)(v1::StatusResponse);

constexpr uint32_t kEpochsOfStatus = 5;
constexpr uint32_t kEpochsOfList = 16;  ///< and of JSON

/// Columns of the terminal; 0 where standard output is none.
size_t TerminalColumns() {
  winsize size{};
  return ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 ? size.ws_col : 0;
}

class Program {
 public:
  Program() : app_("Asks a running weightwired, and plans offline.", "wwctl") {
    app_.require_subcommand(1);
    app_.set_version_flag("--version", "wwctl " WEIGHTWIRE_VERSION " (protocol 1)");
    AddEpochs(AddView("status", "What everyone waits for, engines and the newest epochs",
                      StatusText, StatusJson, [this] { return AskOfStatus(); }));
    AddView("participants", "Every rank, its agent and its layout", ParticipantsText,
            ParticipantsJson, [] { return StatusAsk{.epochs_max = 1}; });
    AddView("engines", "Every engine, what it serves and how far behind it is", EnginesText,
            EnginesJson, [] { return kEnginesOnly; });
    AddEpochs(AddView("epochs", "Epochs, newest first", EpochsPageText, EpochsJson, [this] {
      return StatusAsk{.epochs_max = epochs_max_.value_or(kEpochsOfList), .participants = false};
    }));
    AddWatch();
    AddExplain();
    AddVerify();
    AddControls();
    app_.footer(kFooter);  // last: commands inherit it
  }

  int Run(int argc, char** argv) {
    if (argc == 1) {
      std::fputs(app_.help().c_str(), stderr);
      return kExitUsage;
    }
    std::vector<char*> words = WithoutHelpWord(argc, argv);
    try {
      app_.parse(checkpoints_.TakeArguments(static_cast<int>(words.size()), words.data()),
                 words.data());
    } catch (const CLI::ParseError& error) {
      const std::string unknown = error.get_exit_code() == 0 ? "" : UnknownWord(app_);
      if (unknown.empty()) return app_.exit(error) == 0 ? 0 : kExitUsage;
      std::fprintf(stderr, "wwctl: %s\n", unknown.c_str());
      return kExitUsage;
    }
    if (const Status usage = globals_.Settle(); !usage.ok()) {
      std::fprintf(stderr, "wwctl: %s\n", usage.message().c_str());
      return kExitUsage;
    }
    const Answer answer = run_();
    return Print(answer, done_code_);
  }

 private:
  /// `wwctl help COMMAND` is `wwctl COMMAND --help`, and `wwctl version` is `wwctl --version`.
  std::vector<char*> WithoutHelpWord(int argc, char** argv) const {
    static char help[] = "--help", version[] = "--version";
    std::vector<char*> words(argv, argv + argc);
    const std::string_view first = argv[1];
    if (first == "version" && argc == 2) words[1] = version;
    if (first == "help") {
      words.erase(words.begin() + 1);
      // Of a word that is no command the parser says which one was meant.
      const auto named = [&](const CLI::App* command) {
        return argc > 2 && command->get_name() == words[1];
      };
      if (argc == 2 || !app_.get_subcommands(named).empty()) words.push_back(help);
    }
    return words;
  }

  CLI::App* Online(const std::string& name, const std::string& about, unsigned traits,
                   std::function<Answer()> run) {
    CLI::App* command = app_.add_subcommand(name, about);
    command->callback([this, run = std::move(run)] { run_ = run; });
    globals_.Allow(*command, GlobalOptions::kOnline | traits);
    return command;
  }

  View ViewOf() const {
    const bool wide = globals_.output() == Output::kWide;
    return {.wide = wide, .columns = wide ? 0 : TerminalColumns()};
  }

  CLI::App* AddView(const std::string& name, const std::string& about, Render text, RenderJson json,
                    std::function<StatusAsk()> ask) {
    return Online(name, about, GlobalOptions::kJson | GlobalOptions::kWide,
                  [this, text, json, ask = std::move(ask)]() -> Answer {
                    WW_ASSIGN(v1::StatusResponse status, Connect().GetStatus(ask()));
                    return globals_.json() ? json(std::move(status)) : text(status, ViewOf());
                  });
  }

  void AddEpochs(CLI::App* command) {
    command
        ->add_option("--epochs,--limit", epochs_max_,
                     "The newest so many epochs, 0: all that the coordinator remembers; without: " +
                         std::to_string(kEpochsOfList) + ", as text after a status " +
                         std::to_string(kEpochsOfStatus))
        ->transform(Whole(0, UINT32_MAX));
  }

  StatusAsk AskOfStatus() const {
    const bool json = globals_.json();
    return {.epochs_max = epochs_max_.value_or(json ? kEpochsOfList : kEpochsOfStatus),
            .participants = json};
  }

  void AddWatch() {
    CLI::App* command = Online(
        "watch", "The status, again after every change; ends with Ctrl-C. As JSON, one a line",
        GlobalOptions::kJson | GlobalOptions::kWide, [this]() -> Answer {
          const auto print = [this](const v1::StatusResponse& status) {
            const std::string text =
                globals_.json() ? StatusJson(status) : StatusText(status, ViewOf()) + "---\n";
            return std::fputs(text.c_str(), stdout) >= 0 && std::fflush(stdout) == 0;
          };
          WW_FAIL_IF_ERROR(Connect().Watch(interval_ms_, AskOfStatus(), print));
          return std::string();
        });
    AddEpochs(command);
    command->add_option("--interval-ms", interval_ms_, "At most one update in this time")
        ->transform(Whole(1, 3'600'000))
        ->capture_default_str();
  }

  void AddExplain() {
    CLI::App* command = Online("explain", "Who sends what to whom in the newest epoch", 0,
                               [this] { return Connect().Explain(name_, tensor_); });
    command->add_option("engine", name_, "Only this engine");
    command->add_option("--tensor", tensor_, "Every copy of this Hugging Face tensor");
  }

  void AddVerify() {
    CLI::App* command =
        Online("verify", "Sum what engines serve, in every rank, and compare", GlobalOptions::kJson,
               [this]() -> Answer {
                 WW_ASSIGN(const v1::VerifyResponse result, Connect().Verify(name_));
                 const std::string text = globals_.json() ? VerifyJson(result) : VerifyText(result);
                 if (std::fputs(text.c_str(), stdout) < 0) {
                   return Fail(Code::kUnavailable, Reason::kIoError, "standard output is closed");
                 }
                 WW_FAIL_IF_ERROR(VerifyOutcome(result));
                 return std::string();
               });
    const char* only = "Only this engine: its replicas, and what was found before";
    CLI::Option* engine = command->add_option("engine", name_, only);
    command->add_option("--group", name_, only)->excludes(engine);
  }

  /// A command that changes a running job.
  CLI::App* Control(const std::string& name, const std::string& about, unsigned traits,
                    std::function<std::string(const v1::StatusResponse&)> effect,
                    std::function<Answer(Connection&)> act) {
    CLI::App* command = Online(
        name, about, traits, [this, effect = std::move(effect), act = std::move(act)]() -> Answer {
          Connection connection = Connect();
          WW_ASSIGN(const Consent::Answer answer,
                    consent_.Ask(connection, globals_.address(), effect));
          if (answer == Consent::Answer::kGo) return act(connection);
          if (answer == Consent::Answer::kDeclined) done_code_ = kExitDeclined;
          return std::string(kNothingDone);
        });
    consent_.AddTo(*command);
    return command;
  }

  void AddControls() {
    CLI::App* abort = Control(
        "abort", "Abort an epoch that is not decided yet", 0,
        [this](const auto& status) { return AbortEffect(status, epoch_); },
        [this](Connection& connection) {
          return Said(connection.Abort(epoch_, why_),
                      "epoch " + std::to_string(epoch_) + " is aborting");
        });
    abort->add_option("epoch", epoch_)->required()->transform(Whole(1, UINT64_MAX));
    abort->add_option("--why", why_, "Reason for the log")->capture_default_str();
    CLI::App* commit = Control(
        "commit", "Commit a staged epoch of a manual publish", 0,
        [this](const auto& status) { return CommitEffect(status, epoch_); },
        [this](Connection& connection) {
          return Said(connection.Commit(epoch_),
                      "epoch " + std::to_string(epoch_) + " is committing");
        });
    commit->add_option("epoch", epoch_)->required()->transform(Whole(1, UINT64_MAX));
    CLI::App* rollback = Control(
        "rollback", "Serve again a version that engines still hold", GlobalOptions::kJson,
        [this](const auto& status) { return RollbackEffect(status, version_); },
        [this](Connection& connection) -> Answer {
          WW_ASSIGN(const v1::RollbackResponse result, connection.Rollback(version_));
          return globals_.json() ? RollbackJson(result) : RollbackText(result);
        });
    rollback->add_option("version", version_)->required()->transform(Whole(1, UINT64_MAX));
    CLI::App* evict = Control(
        "evict", "Fence a group; its processes must register again", 0,
        [this](const auto& status) { return EvictEffect(status, name_); },
        [this](Connection& connection) {
          return Said(connection.Evict(name_, why_), name_ + " is fenced");
        });
    evict->add_option("group", name_)->required();
    evict->add_option("--why", why_, "Reason for the log")->capture_default_str();
  }

  static Answer Said(const Status& status, const std::string& done) {
    WW_FAIL_IF_ERROR(status);
    return done + "\n";
  }

  Connection Connect() const { return globals_.Connect(); }

  CLI::App app_;
  GlobalOptions globals_{app_};
  Consent consent_;
  uint32_t interval_ms_ = 500;
  std::optional<uint32_t> epochs_max_;
  std::string name_;
  std::string tensor_;
  uint64_t epoch_ = 0;
  uint64_t version_ = 0;
  std::string why_ = "asked for by an operator";
  std::function<Answer()> run_;
  int done_code_ = 0;  ///< of a command that did what it was asked
  OperatorCommands operator_{app_, globals_, run_, done_code_};
  OfflineCommands offline_{app_, globals_, run_};
  TokenCommand token_{app_, run_};
  CheckpointCommands checkpoints_{app_, run_};
};

}  // namespace
}  // namespace weightwire::cli

int main(int argc, char** argv) {
  weightwire::tls::UseSystemResolver();
  return weightwire::cli::Program().Run(argc, argv);
}
