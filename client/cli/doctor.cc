#include "client/cli/doctor.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <future>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>

#include "client/cli/connection.h"
#include "client/cli/table.h"
#include "server/base/clock.h"

namespace weightwire::cli {
namespace {

std::optional<std::string> Environment(const std::string& name) {
  const char* value = std::getenv(name.c_str());
  return value == nullptr ? std::nullopt : std::optional<std::string>(value);
}

Result<NamedConfig> Load(const std::string& path) {
  WW_ASSIGN(daemon::Values values, daemon::ValuesFromYaml(path));
  WW_ASSIGN(daemon::Config config,
            daemon::MakeConfig({{"file", std::move(values)},
                                {"environment", daemon::ValuesFromEnvironment(Environment)}}));
  return NamedConfig{path, std::move(config)};
}

void Append(Findings& out, Findings more) {
  out.insert(out.end(), std::make_move_iterator(more.begin()), std::make_move_iterator(more.end()));
}

/// Asks each address once, all at the same time, however many configurations name it.
class Coordinators {
 public:
  explicit Coordinators(double seconds) : seconds_(seconds) {}

  /// Begins to ask; the answers come within the time limit of one call.
  void Begin(const std::vector<std::string>& addresses, const tls::TlsFiles& files) {
    for (const std::string& address : addresses) {
      if (answers_.contains(address)) continue;
      answers_[address].coming = std::async(std::launch::async, [this, address, files] {
        return Connection(address, seconds_, files).GetStatus({.epochs_max = kEpochsAround});
      });
    }
  }

  /// The first that answers; what is wrong with its job is found the first time. All of them were
  /// begun.
  const v1::StatusResponse* Ask(const std::string& where, const std::vector<std::string>& addresses,
                                Findings& out) {
    Status why;
    std::string failed;
    for (const std::string& address : addresses) {
      Answer& known = answers_.at(address);
      const bool fresh = !known.come;
      if (fresh) known.come = known.coming.get();
      if (!*known.come) {
        why = known.come->error();
        failed += (failed.empty() ? "" : ", ") + address;
        continue;
      }
      if (fresh) Append(out, CheckService(**known.come, SystemClock().WallSeconds()));
      return &**known.come;
    }
    out.push_back({"coordinator", where, "no answer from " + failed + ": " + why.message(),
                   why.remedy().empty() ? "start it, or correct the address" : why.remedy()});
    return nullptr;
  }

 private:
  struct Answer {
    std::future<Result<v1::StatusResponse>> coming;
    std::optional<Result<v1::StatusResponse>> come;
  };
  const double seconds_;
  std::map<std::string, Answer> answers_;
};

/// What stands in the way of everything comes first.
int Urgency(const Finding& finding) {
  constexpr std::array kFirst = {"journal", "coordinator", "silent", "flip",    "uid",
                                 "trainer", "members",     "ranks",  "held_up", "aborts"};
  return static_cast<int>(std::ranges::find(kFirst, finding.check) - kFirst.begin());
}

std::string TextOf(const Finding& finding) {
  return finding.check + ": " + finding.where + ": " + finding.what + "\n  fix: " + finding.remedy +
         "\n";
}

}  // namespace

Findings Diagnose(const DoctorRequest& request) {
  Findings out;
  std::vector<NamedConfig> configs;
  for (const std::string& path : request.config_paths) {
    auto loaded = Load(path);
    if (loaded) {
      configs.push_back(std::move(*loaded));
      continue;
    }
    const std::string& remedy = loaded.error().remedy();
    out.push_back({"config", path, loaded.error().message(),
                   remedy.empty() ? "weightwired --help lists every setting" : remedy});
  }
  Append(out, CheckConfigs(configs));
  const HostFacts host = ReadHostFacts();
  Coordinators coordinators(request.timeout_seconds);
  const bool ask = request.address_set || request.config_paths.empty();
  if (ask) coordinators.Begin({request.address}, request.files);
  for (const NamedConfig& named : configs) {
    if (named.config.role != daemon::Role::kAgent) continue;
    coordinators.Begin(named.config.coordinator, daemon::TlsFilesOf(named.config));
  }
  const v1::StatusResponse* asked =
      ask ? coordinators.Ask(request.address, {request.address}, out) : nullptr;
  if (configs.empty()) Append(out, CheckAgentSocket(AgentSocketHere()));
  for (const NamedConfig& named : configs) {
    Append(out, CheckHost(named, host));
    Append(out, CheckPlaces(named));
    const v1::StatusResponse* joined =
        named.config.role == daemon::Role::kAgent
            ? coordinators.Ask(named.path, named.config.coordinator, out)
            : asked;
    if (joined != nullptr) Append(out, CheckAgainst(named, *joined));
  }
  std::ranges::stable_sort(out, {}, Urgency);
  return out;
}

std::string FindingsText(const Findings& findings, bool all) {
  constexpr size_t kShownOfOneCheck = 3;
  if (findings.empty()) return "nothing found\n";
  std::map<std::string, std::vector<std::string>> more;  // by check: where the others were found
  std::map<std::string, size_t> seen;
  std::string text;
  for (const Finding& finding : findings) {
    if (all || ++seen[finding.check] <= kShownOfOneCheck) {
      text += TextOf(finding);
    } else {
      more[finding.check].push_back(finding.where);
    }
  }
  for (const auto& [check, places] : more) {
    text += check + ": and " + std::to_string(places.size()) + " more: " + FirstOf(places) +
            "; -o wide shows all\n";
  }
  return text + std::to_string(findings.size()) + " found\n";
}

std::string FindingsJson(const Findings& findings) {
  nlohmann::json list = nlohmann::json::array();
  for (const Finding& finding : findings) {
    list.push_back({{"check", finding.check},
                    {"where", finding.where},
                    {"what", finding.what},
                    {"remedy", finding.remedy}});
  }
  // Names and reasons may come from peers: what is no UTF-8 is replaced, not thrown at.
  return nlohmann::json{{"findings", list}}.dump(-1, ' ', false,
                                                 nlohmann::json::error_handler_t::replace) +
         "\n";
}

}  // namespace weightwire::cli
