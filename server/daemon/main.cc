// weightwired: one binary for the coordinator, the agent, or both.
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "server/daemon/config.h"
#include "server/daemon/daemon.h"
#include "server/daemon/logging.h"
#include "server/daemon/revision.h"
#include "server/tls/credentials.h"

namespace weightwire::daemon {
namespace {

constexpr unsigned kStopSeconds = 5;

struct CommandLine {
  std::string config_path;
  bool print_config = false;
  bool insecure = false;
  std::map<std::string, std::string> flags;
};

constexpr char kFooter[] =
    "Each setting is taken from its flag, else from WEIGHTWIRE_<SETTING> (upper case, '_'), else\n"
    "from the YAML file, else from its default.\n"
    "\n"
    "Exit codes: 0 stopped by SIGTERM or SIGINT; 64 + the number of the Reason (proto\n"
    "weightwire.v1.Reason) otherwise: 96 a listener beyond loopback without --insecure, 97 the\n"
    "journal cannot be opened or another process has it, or etcd refuses or does not answer, 100\n"
    "wrong settings or flags, 101 an address cannot be bound or a directory not made, 90\n"
    "shutting down took longer than 5 s, 88 another coordinator leads; 128 + the signal for a\n"
    "second one.";

std::string FlagOf(std::string name) {
  std::replace(name.begin(), name.end(), '_', '-');
  return "--" + name;
}

int ReportFailure(const Status& status) {
  std::fprintf(stderr, "weightwired: %s\n", status.ToString().c_str());
  return ExitCodeOf(status);
}

std::optional<std::string> Environment(const std::string& name) {
  const char* value = std::getenv(name.c_str());
  return value == nullptr ? std::nullopt : std::optional<std::string>(value);
}

Result<Config> ConfigOf(const CommandLine& line) {
  std::vector<std::pair<std::string, Values>> layers;
  if (!line.config_path.empty()) {
    WW_ASSIGN(Values values, ValuesFromYaml(line.config_path));
    layers.emplace_back("file", std::move(values));
  }
  layers.emplace_back("environment", ValuesFromEnvironment(Environment));
  Values flags;
  for (const auto& [name, value] : line.flags) flags.emplace(name, value);
  if (line.insecure) flags["insecure"] = "true";
  layers.emplace_back("command line", std::move(flags));
  return MakeConfig(layers);
}

void WarnIfInsecure(const Config& config) {
  if (!config.insecure) return;
  spdlog::critical(
      "INSECURE: --insecure is set. Anyone who reaches listen={} http={} data_listen={} "
      "ucx_listen={} nccl_listen={} can read, replace or stop what this process moves. Use it on "
      "trusted networks only.",
      config.listen, config.http, config.data_listen, config.ucx_listen, config.nccl_listen);
}

/// From now on a further signal ends the process, and so does a shutdown that takes too long.
void ArmImpatience() {
  for (int signal : {SIGTERM, SIGINT}) {
    std::signal(signal, [](int number) { _exit(128 + number); });
  }
  std::signal(SIGALRM, [](int) { _exit(64 + static_cast<int>(Reason::kDeadlineExceeded)); });
  alarm(kStopSeconds);
}

int Serve(const Config& config) {
  std::signal(SIGPIPE, SIG_IGN);
  StartLogging(config);
  WarnIfInsecure(config);
  auto daemon = Daemon::Start(config, {WEIGHTWIRE_VERSION, std::string(Revision())});
  if (!daemon) {
    ArmImpatience();
    return ExitCodeOf(daemon.error());  // Start has logged it
  }
  if (*daemon == nullptr) return 0;
  std::printf("%s\n", (*daemon)->ReadyLine().c_str());
  std::fflush(stdout);
  (*daemon)->Run();
  ArmImpatience();
  (*daemon)->Stop();
  return 0;
}

/// OK when `extras` is empty; else names the flag that was probably meant.
Status CheckExtras(const std::vector<std::string>& extras) {
  for (const std::string& extra : extras) {
    if (extra.rfind("--", 0) != 0) continue;
    std::string name = extra.substr(2, extra.find('=') - 2);
    std::replace(name.begin(), name.end(), '-', '_');
    return Status(Code::kInvalidArgument, Reason::kConfigInvalid, "unknown flag " + extra)
        .Remedy("did you mean " + FlagOf(NearestKey(name).name) + "?");
  }
  if (extras.empty()) return OkStatus();
  return Status(Code::kInvalidArgument, Reason::kConfigInvalid,
                "unexpected argument " + extras.front())
      .Remedy("every setting is a flag: --help lists them");
}

int Main(int argc, char** argv) {
  CommandLine line;
  CLI::App app("weightwired moves weights from a trainer fleet to a rollout fleet");
  app.footer(kFooter);
  app.allow_extras();
  app.set_version_flag("--version", WEIGHTWIRE_VERSION " (" + std::string(Revision()) + ")");
  app.add_option("--config", line.config_path, "YAML file of settings")->type_name("FILE");
  app.add_flag("--print-config", line.print_config, "print the settings as YAML and exit");
  app.add_flag("--insecure", line.insecure, "allow plaintext listeners beyond loopback");
  const Config defaults;
  for (const Key& key : Keys()) {
    if (key.name == "insecure") continue;
    const std::string fallback = key.get(defaults);
    app.add_option_function<std::string>(
           FlagOf(key.name),
           [&line, &key](const std::string& value) { line.flags[key.name] = value; },
           key.help + (fallback.empty() ? "" : " [" + fallback + "]"))
        ->type_name(key.value_name);
  }
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return app.exit(error);
    app.exit(error);
    return 64 + static_cast<int>(Reason::kConfigInvalid);
  }
  if (Status extras = CheckExtras(app.remaining()); !extras.ok()) return ReportFailure(extras);
  auto config = ConfigOf(line);
  if (!config) return ReportFailure(config.error());
  if (line.print_config) {
    std::fputs(ToYaml(*config).c_str(), stdout);
    return 0;
  }
  return Serve(*config);
}

}  // namespace
}  // namespace weightwire::daemon

int main(int argc, char** argv) {
  weightwire::tls::UseSystemResolver();
  return weightwire::daemon::Main(argc, argv);
}
